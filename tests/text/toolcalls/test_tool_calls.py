"""Tools and reasoning in `LLM.chat`, streams and sessions, on a tiny random model: its calls are right nevertheless."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from jsonschema import Draft202012Validator

from infer import LLM, AsyncLLM, InvalidRequestError, RequestOptions
from infer.engine.requests.ask import Ask
from infer.engine.step.sequence import Sequence
from infer.outputs import GenerationResult, Piece, ToolCallDelta, assembled
from infer.text.toolcalls.formats import FORMATS
from infer.text.toolcalls.tools import read_tools
from refusals import check_refused
from test_session import TEXT_IDS, make_model

ASKED = [{"role": "user", "content": "weather?"}]
THINKING = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}[assistant]{{ '<think>' if open else '' }}"
)
SAMPLED: dict[str, Any] = {"seed": 3, "max_new_tokens": 150, "temperature": 1.5}


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(TypedDict):
    name: str
    country: str


@dataclass
class Span:
    first: int
    last: int = 3


def forecast(
    place: Place,
    unit: Unit | None = None,
    hours: "list[int]" = [],  # noqa: B006
    *,
    span: Span | None = None,
    level: Literal["low", "high"] = "low",
    scale: Annotated[float, "how much"] = 1.0,
    extra: dict[str, bool] | None = None,
) -> str:
    """Forecast the weather.

    It is a guess.

    Args:
        place: Where,
            in words.
        hours (list): Which.

    Returns:
        A text.
    """
    return f"{place} {unit} {hours} {span} {level} {scale} {extra}"


def is_on(flag: bool) -> bool:
    return flag


TOOLS = [is_on, {"name": "now", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), context=1_000)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


def check_calls(result: GenerationResult, names: tuple[str, ...] = ("is_on", "now")) -> None:
    """Check all calls, except for one that was cut."""
    schemas = {tool.name: tool.parameters for tool in read_tools(TOOLS)}
    whole = result.tool_calls if result.finish_reason != "length" else result.tool_calls[:-1]
    for call in whole:
        assert call.name in names
        Draft202012Validator(dict(schemas[call.name])).validate(call.parsed())
    ids = [call.id for call in result.tool_calls]
    assert len(set(ids)) == len(ids)


def test_a_function_becomes_its_schema() -> None:
    (tool,) = read_tools([forecast])
    nullable = {"anyOf": [{"type": "string", "enum": ["celsius", "fahrenheit"]}, {"type": "null"}]}

    def held(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
        named = {"type": "object", "properties": properties, "required": list(required)}
        return named | {"additionalProperties": False} | others

    text, integer, null = ({"type": name} for name in ("string", "integer", "null"))
    place = held({"name": text, "country": text}, "country", "name", description="Where, in words.")
    assert (tool.name, tool.description) == ("forecast", "Forecast the weather. It is a guess.")
    properties = {
        "place": place,
        "unit": nullable,
        "hours": {"type": "array", "items": integer, "description": "Which."},
        "span": {"anyOf": [held({"first": integer, "last": integer}, "first"), null]},
        "level": {"type": "string", "enum": ["low", "high"]},
        "scale": {"type": "number", "description": "how much"},
        "extra": {"anyOf": [{"type": "object", "additionalProperties": {"type": "boolean"}}, null]},
    }
    assert tool.parameters == held(properties, "place")


@pytest.mark.parametrize("function", [lambda *a: 0, lambda a, /: 0, len, print])
def test_a_function_without_names_for_its_arguments_is_refused(function: Any) -> None:
    check_refused(lambda: read_tools([function]), "tool")


def test_a_type_without_a_schema_names_the_argument() -> None:
    def odd(a: complex) -> None: ...

    check_refused(lambda: read_tools([odd]), r"the tool odd: a is .*complex")


@pytest.mark.slow(cases=7, rest=12)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_required_call_is_made_streamed_and_the_same_in_a_batch(llm: LLM, name: str, is_parallel: bool) -> None:
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "tool_format": name}
    forced["parallel_tool_calls"] = is_parallel
    result = llm.chat(ASKED, **forced, **SAMPLED)
    check_calls(result)
    assert result.tool_calls
    assert not result.text
    assert is_parallel or len(result.tool_calls) == 1
    pieces = list(llm.stream_chat(ASKED, **forced, **SAMPLED))
    assert assembled(delta for piece in pieces for delta in piece.deltas) == (None, result.tool_calls)
    first = next(delta for piece in pieces for delta in piece.deltas)
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.id, first.arguments) == (0, result.tool_calls[0].id, "")
    if name.startswith("mistral"):
        assert all(len(call.id) == 9 and call.id.isalnum() for call in result.tool_calls)
    options = RequestOptions(**forced, prefill_chunk=3)
    for each in llm.generate_all([ASKED, "other", ASKED][::2], SAMPLED, options=options):
        assert (each.token_ids, each.tool_calls) == (result.token_ids, result.tool_calls)


def test_prompts_of_a_batch_may_have_tools_of_their_own(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": [is_on], "tool_choice": "required", "parallel_tool_calls": False} | SAMPLED
    first, second = llm.generate_all([ASKED, ASKED], [asked, SAMPLED])
    assert (first.tool_calls, second.tool_calls) == (llm.chat(ASKED, **asked).tool_calls, ())


def test_ids_differ_with_the_prompt_the_seed_and_the_call(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "now", "max_new_tokens": 60, "parallel_tool_calls": False}
    prompts = [ASKED, [*ASKED, {"role": "assistant", "content": "a"}, *ASKED]]
    ids = [llm.chat(prompt, seed=seed, **asked).tool_calls[0].id for prompt in prompts for seed in (1, 2)]
    assert (len(set(ids)), llm.chat(ASKED, seed=1, **asked).tool_calls[0].id) == (4, ids[0])


def test_auto_leaves_text_alone_and_none_makes_no_call(llm: LLM) -> None:
    for choice in ("auto", "none"):
        result = llm.chat(ASKED, tools=TOOLS, tool_choice=choice, allowed_token_ids=TEXT_IDS, **SAMPLED)
        assert (bool(result.text), result.tool_calls, result.grammar_complete) == (True, (), None)


def test_a_call_may_follow_text_and_stop_strings_hold_for_the_text_alone(llm: LLM) -> None:
    spelt = [llm.tokenizer.encode(text)[0] for text in ("H", "i", " ")]
    begun = [*spelt, *llm.tokenizer.encode("<tool_call>")]
    asked: dict[str, Any] = {"tools": [is_on], "tool_format": "hermes", "parallel_tool_calls": False} | SAMPLED
    result = llm.chat(ASKED, answer_prefix=begun, stop=["flag", "name"], **asked)
    check_calls(result)
    assert (result.text, result.finish_reason, result.stop_reason) == ("Hi", "stop", "grammar")
    assert len(result.tool_calls) == 1
    result = llm.chat(ASKED, answer_prefix=spelt[:1], stop=["i"], logit_bias={spelt[1]: 100}, **asked)
    assert (result.text, result.stop_reason, result.tool_calls) == ("H", "i", ())


def test_an_answer_that_is_cut_has_the_beginning_of_its_call(llm: LLM) -> None:
    tools = [{"name": "say", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}]
    asked = {"tools": tools, "tool_choice": "say", "tool_format": "hermes"} | SAMPLED | {"max_new_tokens": 60}
    result = llm.chat(ASKED, **asked, allowed_token_ids=[i for i in TEXT_IDS if i != ord('"')] + [10])
    assert (result.finish_reason, result.tool_calls[0].name) == ("length", "say")
    assert result.tool_calls[0].arguments.startswith('{"text": "')
    with pytest.raises(ValueError, match="Unterminated"):
        result.tool_calls[0].parsed()
    assert json.loads(json.dumps(result.to_json()))["tool_calls"][0]["name"] == "say"


def test_a_state_made_again_from_the_ids_is_the_same(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "tool_format": "hermes"}
    sequence = llm.host.requests.sequence(Ask([ASKED], (), RequestOptions(**asked), SAMPLED))
    llm.host.loop.stream(sequence).run(None)
    before: list[Piece] = list(sequence.pieces)
    again = Sequence(sequence.request)
    for piece in before:
        again.accept(piece.token_id)
    assert [piece.deltas for piece in again.pieces] == [piece.deltas for piece in before]
    sequence.keep(30)
    assert sequence.pieces == before[:30]


def test_async_answers_are_the_same(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", **SAMPLED}
    answer = asyncio.run(AsyncLLM(llm).chat(ASKED, **asked))
    assert answer.tool_calls == llm.chat(ASKED, **asked).tool_calls


def test_tools_belong_to_conversations(llm: LLM) -> None:
    check_refused(lambda: llm.generate("Once", options=RequestOptions(tools=TOOLS)), "tools needs a conversation")
    check_refused(lambda: llm.session().generate(tools=TOOLS), "tools needs a conversation")
    check_refused(lambda: llm.chat(ASKED, tools=TOOLS, tool_format="x"), "tool_format must be")
    check_refused(lambda: llm.chat(ASKED, reasoning_budget=3), "has no reasoning")
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] \(f\)"):
        llm.chat(ASKED, tools=[{"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "x"}}}}])


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_is_separated_counted_and_closed_by_its_budget(llm: LLM, is_open: bool, budget: int) -> None:
    asked: dict[str, Any] = {"chat_template": THINKING, "open": is_open, "reasoning_budget": budget, **SAMPLED}
    letters = {"allowed_token_ids": [*range(97, 123), 256, *b"<>/think", 10]}
    begun = [] if is_open else list(b"<think>")
    result = llm.chat(ASKED, answer_prefix=begun, **asked, **letters)
    raw = llm.chat(ASKED, answer_prefix=begun, reasoning_format="none", **asked, **letters)
    assert raw.token_ids == result.token_ids
    assert (raw.reasoning, raw.reasoning_tokens) == (None, result.reasoning_tokens)
    thought = raw.text.removeprefix("<think>").partition("</think>")[0]
    assert (len(thought), result.reasoning or "") == (budget, thought.strip())
    assert result.reasoning_tokens == budget + len("</think>") + (not is_open)
    assert result.text == raw.text.partition("</think>")[2].lstrip()


def test_a_session_keeps_an_answer_that_was_cancelled_while_it_reasoned(llm: LLM) -> None:
    letters = {"allowed_token_ids": [*range(97, 123)], "ignore_eos": True, "max_new_tokens": 50}
    with llm.session(chat_template=THINKING, open=True) as session:
        stream = session.stream("weather?", temperature=0, **letters)
        assert len(list(islice(stream, 5))) == 5
        stream.close()
        result = stream.result
        assert (result.finish_reason, result.text, len(result.reasoning or "")) == ("abort", "", 5)
        assert session.messages[1:] == [result.to_message()]
        assert session.messages[1]["reasoning_content"] == result.reasoning


def test_a_schema_and_a_forced_call_hold_after_the_reasoning(llm: LLM) -> None:
    asked: dict[str, Any] = {"chat_template": THINKING, "open": True, "reasoning_budget": 9, **SAMPLED}
    result = llm.chat(ASKED, json_schema={"type": "boolean"}, **asked)
    assert (result.text in ("true", "false"), result.grammar_complete) == (True, True)
    result = llm.chat(ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **asked)
    check_calls(result)
    assert (result.text, len(result.tool_calls)) == ("", 1)
    assert result.reasoning_tokens >= 9


def test_a_session_calls_reads_the_result_and_keeps_its_answer(folder: Path, llm: LLM, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, **SAMPLED}
    with llm.session(tools=TOOLS) as session:
        result = session.send("weather?", **asked)
        (call,) = result.tool_calls
        assert session.messages[-1] == result.to_message()
        assert session.messages[-1]["tool_calls"][0]["id"] == call.id
        heard = {"role": "tool", "tool_call_id": call.id, "content": "it is on"}
        after = session.send(heard, allowed_token_ids=TEXT_IDS, seed=1, max_new_tokens=5)
        assert after.reused_tokens > len(result.token_ids)
        assert after.dropped_tokens <= 1
        prompt = llm.tokenizer.decode(session.token_ids, skip_special_tokens=False)
        assert f"Result of {call.name}: it is on" in prompt
        session.save(tmp_path / "session")
    with llm.load_session(tmp_path / "session") as session:
        assert session.send("again", **asked).tool_calls
        check_refused(lambda: session.send("again", tool_choice="other"), "is not a tool")
