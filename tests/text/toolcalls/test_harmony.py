"""Harmony: messages with headers. An answer shows their text, reasoning and calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import VOCAB_SIZE
from cases import cases
from infer import InvalidRequestError, Tokenizer
from infer.serving.protocols.bodies import effort_variables
from infer.text.grammar.grammar import Grammar
from infer.text.toolcalls.answer_format import reasoning_of
from infer.text.toolcalls.messages import _with_single_calls
from test_tool_formats import Found, allows, conversation, form_of, make_tokenizer, marked, parsed, parsed_anyhow
from tool_templates import TEMPLATES

ENDS = ("<|return|>", "<|call|>")
CONTROLS = (*ENDS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
ASKED = [{"role": "user", "content": "weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "parameters": PARAMETERS}, {"name": "weather_now"}]
NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm <b> to=x.<|end|>" + NEXT
FINAL = "<|channel|>final<|message|>"
CALLS = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather json<|message|>",
    "<|channel|>commentary to=functions.weather<|message|>",
    "<|channel|>analysis to=functions.weather <|constrain|>json<|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>",
    " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
)
WRITTEN = '{"city": "Paris <|end|>"}'
SAID = "<|channel|>commentary<|message|>I look.<|end|>" + NEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    end_id = VOCAB_SIZE + CONTROLS.index("<|end|>")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{end_id}]}}')
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return make_tokenizer(folder, CONTROLS, TEMPLATES["harmony"])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of an answer, in which an argument only spells a control token."""
    before, spelt, after = text.partition(WRITTEN)
    first, last = (tokenizer.encode(each, add_special_tokens=False) for each in (before, after))
    return [*first, *tokenizer.encode(spelt, add_special_tokens=False, parse_special=False), *last]


def read(tokenizer: Tokenizer, text: str, **options: Any) -> Found:
    form = form_of(tokenizer, **options)
    return parsed_anyhow(form, marked(form, tokenizer, ids_of(tokenizer, text)))


def accepts(tokenizer: Tokenizer, text: str, answer: Grammar | None = None, **options: Any) -> bool:
    return allows(tokenizer, form_of(tokenizer, **options), ids_of(tokenizer, text), answer, ends=True)


def test_return_and_call_end_an_answer_and_end_does_not_whatever_the_files_say(tokenizer: Tokenizer) -> None:
    ends = {tokenizer.backend.token_to_id(text) for text in ENDS}
    assert ends < tokenizer.eos_token_ids
    assert tokenizer.backend.token_to_id("<|end|>") not in tokenizer.eos_token_ids


@cases(
    "text expected",
    (THOUGHT + FINAL + "Hi.", ("Hi.", "Hm <b> to=x.", ())),
    (THOUGHT * 2 + FINAL + " Hi\n", (" Hi\n", "Hm <b> to=x.\n\nHm <b> to=x.", ())),
    (THOUGHT + SAID + FINAL + "So.", ("I look.\n\nSo.", "Hm <b> to=x.", ())),
    ("Hi there", ("Hi there", None, ())),
    (" to", (" to", None, ())),
    ("to be", ("to be", None, ())),
    ("<|message|>Hi", ("Hi", None, ())),
    ("<|channel|>comment<|message|>Hi", ("Hi", None, ())),
    ("<|channel|>final <|constrain|>JSON<|message|>{}", ("{}", None, ())),
    ("<|channel|>analysis<|message|>a" + FINAL + "b", ("b", "a", ())),
    ("<|channel|>analysis<|message|>a<|end|>" + FINAL + "b<|message|>", ("b", "a", ())),
    ("<|channel|>analysis<|message|>a<|end|>" + NEXT, ("", "a", ())),
    ("<|channel|>fin", ("", None, ())),
    (CALLS[0] + WRITTEN, ("", WRITTEN, ())),
)
def test_an_answer_has_its_text_its_reasoning_and_no_header(text: str, expected: Found, tokenizer: Tokenizer) -> None:
    assert read(tokenizer, text) == expected
    pieces = marked(form_of(tokenizer), tokenizer, ids_of(tokenizer, text))
    assert parsed(form_of(tokenizer, reasoning_format="none"), pieces)[1] is None


@pytest.mark.parametrize("before", ["", THOUGHT, SAID])
@pytest.mark.parametrize("header", CALLS)
def test_a_call_is_allowed_and_read_in_every_form_of_its_header(header: str, before: str, tokenizer: Tokenizer) -> None:
    assert accepts(tokenizer, before + header + WRITTEN, tools=TOOLS)
    text, _, (call,) = read(tokenizer, before + header + WRITTEN + "<|call|>", tools=TOOLS)
    assert (text, call.name, call.arguments) == ("I look." if "I look" in before else "", "weather", WRITTEN)


def test_a_call_that_is_cut_shows_a_beginning_and_no_part_of_its_header(tokenizer: Tokenizer) -> None:
    form = form_of(tokenizer, tools=TOOLS)
    pieces = list(marked(form, tokenizer, ids_of(tokenizer, CALLS[5] + WRITTEN)))
    for length in range(len(" to="), len(pieces)):
        text, reasoning, calls = parsed(form, pieces[:length])
        assert (text, reasoning) == ("", None)
        assert all(WRITTEN.startswith(call.arguments) for call in calls)


@cases(
    "choice text is_allowed",
    ("auto", THOUGHT + FINAL + "Hi", True),
    ("auto", "Hi", False),
    ("auto", CALLS[0] + "{}", False),
    ("auto", CALLS[0].replace("weather", "other") + "{}", False),
    ("auto", CALLS[0].replace("weather", "weather_now") + "{}", True),
    ("none", THOUGHT + FINAL + "Hi", True),
    ("none", CALLS[0] + WRITTEN, False),
    ("required", THOUGHT * 2 + CALLS[0] + WRITTEN, True),
    ("required", FINAL + "Hi", False),
    ("weather", CALLS[0].replace("weather", "weather_now") + "{}", False),
    ("weather", CALLS[5] + WRITTEN, True),
)
def test_grammars_allow_what_the_choice_allows(choice: str, text: str, is_allowed: bool, tokenizer: Tokenizer) -> None:
    assert accepts(tokenizer, text, tools=TOOLS, tool_choice=choice) == is_allowed


def test_a_schema_holds_the_final_text_after_free_reasoning(tokenizer: Tokenizer) -> None:
    answer = Grammar("json_schema", '{"type": "boolean"}')
    for options in ({}, {"tools": TOOLS}, {"reasoning_budget": 30}):
        for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
            assert accepts(tokenizer, THOUGHT + header + "true", answer, **options)
        for refused in (FINAL + "Hi", SAID + FINAL + "true"):
            assert not accepts(tokenizer, refused, answer, **options)
    assert not accepts(tokenizer, THOUGHT * 2 + FINAL + "Hi", reasoning_budget=30)
    assert accepts(tokenizer, THOUGHT + CALLS[0] + WRITTEN, answer, tools=TOOLS)


def test_a_prompt_that_ends_in_a_text_is_continued_as_text(tokenizer: Tokenizer) -> None:
    def read_after(prompt: str, text: str) -> Found | None:
        form = conversation(tokenizer).answer_format(tokenizer.encode(prompt, add_special_tokens=False))
        return form and parsed(form, marked(form, tokenizer, ids_of(tokenizer, text)))

    assert read_after(NEXT + FINAL + "So", "b") is None
    assert read_after(NEXT + FINAL + "So<|end|>", NEXT + FINAL + "b") == ("b", None, ())
    opened = NEXT + "<|channel|>analysis<|message|>"
    assert read_after(opened, "a<|end|>" + NEXT + FINAL + "b") == ("b", "a", ())


def rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    shown, variables = conversation(tokenizer, tools=TOOLS, **options).shown(list(messages))
    return tokenizer.render_chat_template(shown, **variables)


def call(number: int, name: str = "weather") -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": '{"city": "Paris"}'}}


def test_reasoning_stays_in_the_prompt_while_its_call_is_unanswered(tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call(1)]}
    heard = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    under_way = rendered(tokenizer, [*ASKED, turn, heard])
    written = 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    assert under_way.endswith(
        f"{NEXT}<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>{NEXT} {written}"
        f'<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>{NEXT}'
    )
    answer = {"role": "assistant", "content": "Rain.", "reasoning_content": "Well."}
    answered = rendered(tokenizer, [*ASKED, turn, heard, answer, *ASKED])
    assert [part in answered for part in (written, "Rain.", "Hm.", "Well.")] == [True, True, False, False]


def test_several_calls_of_one_message_are_shown_one_by_one_each_with_its_result(tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call(1), call(2, "weather_now"), call(3)]}
    heard = [{"role": "tool", "tool_call_id": f"call_{number}", "content": f"r{number}"} for number in (1, 2, 3)]
    text = rendered(tokenizer, [*ASKED, turn, *heard])
    places = [text.index(part) for part in ("to=functions.weather<", "r1", "to=functions.weather_now<", "r2", "r3")]
    assert places == sorted(places)
    assert '<|start|>functions.weather_now to=assistant<|channel|>commentary<|message|>"r2"' in text


def test_the_template_is_shown_an_effort_that_the_model_knows() -> None:
    for effort, shown in {"none": "low", "minimal": "low", "medium": "medium", "xhigh": "high", "max": "high"}.items():
        assert effort_variables(effort, TEMPLATES["harmony"])["reasoning_effort"] == shown
        assert effort_variables(effort, "<think></think>")["reasoning_effort"] == effort.replace("max", "xhigh")


def test_harmony_is_known_by_its_channels_and_takes_no_other_tool_format(tokenizer: Tokenizer) -> None:
    assert reasoning_of("{{ message.content }}<|end|>") is None
    assert reasoning_of(TEMPLATES["harmony"]).closing == "<|end|>"  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="tool_format must be harmony with this chat template"):
        form_of(tokenizer, tools=TOOLS, tool_format="hermes")


@pytest.mark.slow
@pytest.mark.parametrize("effort", [None, "low", "high"])
def test_a_history_with_calls_is_rendered_as_transformers_does(effort: Any, folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    arguments = {"city": "Paris", "ä": [1, "<b>"]}
    function = {"name": "weather", "arguments": arguments}
    turn = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"id": "1", "function": function}]}
    heard = {"role": "tool", "tool_call_id": "1", "content": 'it is "rain"'}
    system = {"role": "system", "content": "Be kind."}
    given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    for messages in (ASKED, [system, *ASKED, turn, heard], [*ASKED, turn, heard, {**ASKED[0], "role": "assistant"}]):
        asked = conversation(tokenizer, given, tools=TOOLS)
        shown, variables = asked.shown(list(messages))
        variables |= {"chat_template": TEMPLATES["harmony"]}
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        assert tokenizer.render_chat_template(shown, **variables) == expected
        assert f"Reasoning: {effort or 'medium'}<|end|>" in expected  # there are no built-in tools


def test_results_of_unknown_calls_move_no_call() -> None:
    calls = [{"id": name, "function": {}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": ""} for name in ("nobody", "a", "c", 7)]
    found = _with_single_calls([{"role": "assistant", "tool_calls": calls}, *results])
    ids = [message["tool_calls"][0]["id"] if "tool_calls" in message else message["tool_call_id"] for message in found]
    assert ids == ["a", "nobody", "a", "b", "c", "c", 7]
