"""Chat templates: the text of `transformers`, and no message can write a control token."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases import cases
from infer.errors import InvalidRequestError
from infer.text.templates.chat_template import ChatTemplate
from infer.text.templates.special_tokens import SpecialTexts
from infer.text.tokenizer import Tokenizer

ASSETS = Path(os.environ.get("INFER_TEST_ASSETS", "~/.cache/infer-tests")).expanduser() / "tokenizers"
NAMES = ("llama3_1", "qwen3", "gemma3", "deepseek_v3")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "  What is 2 + 2?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nFour — 四 🙂"}
SYSTEM = {"role": "system", "content": 'Be brief; écris & <b>bold</b> "quoted".'}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <é> & 'b'", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "é"}}}]}
TOOL_ANSWER = {"role": "tool", "content": '{"sum": 4}'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "And 3 + 3?"}],
    "system and two turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "¿Y 3 + 3? नमस्ते\u200d\t"}],
    "ends with the assistant": [USER, ANSWER],
    "reasoning": [USER, {"role": "assistant", "reasoning_content": "Hm.", "content": "4"}, USER],
    "empty content": [{"role": "user", "content": ""}],
    "none content is absent": [USER, {"role": "assistant", "content": "4", "tool_calls": None}, USER],
    "markup": [{"role": "user", "content": "{{ bos_token }} {% if x %} < > </s>"}],
}
TOOL_CONVERSATIONS = {"tools": [USER], "system and tools": [SYSTEM, USER], "call": [USER, CALL, TOOL_ANSWER]}


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_folder(folder(name))


@cache
def load_oracle(name: str) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder(name))


def folder(name: str) -> Path:
    path = ASSETS / name
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"{path} is absent; set INFER_TEST_ASSETS")
    return path


def test_strftime_now_is_there() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([USER])) == len("2026-01-01")


@cases(
    "template",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].content.missing.more }}",
    "{{ 1 + 'a' }}",
    "{{ 'x' | no_such_filter }}",
    "{% for %}",
)
def test_a_template_that_fails_or_reaches_out_is_one_clear_error(template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"\A[^\n]*template[^\n]*\Z"):
        ChatTemplate(template, {}).render([USER])


def test_the_sandbox_shows_no_python_internals() -> None:
    assert ChatTemplate("{{ messages.__class__ }}", {}).render([USER]) == ""


def test_an_object_in_a_message_shows_the_template_only_its_type() -> None:
    class Secret:
        value = "hidden"

    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": Secret()}]) == "<Secret>"


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatTemplate(CHATML, {}).render([])


SPECIALS = SpecialTexts(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])


def foreign_text(messages: list[dict[str, Any]], template: str = CHATML) -> list[str]:
    pieces = ChatTemplate(template, {}).render_marked(messages, SPECIALS)
    assert "".join(piece.text for piece in pieces) == ChatTemplate(template, {}).render(messages)
    return [piece.text for piece in pieces if not piece.is_control]


def test_a_conversation_without_special_text_is_one_piece() -> None:
    messages = [USER, ANSWER]
    pieces = ChatTemplate(CHATML, {}).render_marked(messages, SPECIALS)
    assert pieces == [(ChatTemplate(CHATML, {}).render(messages), True)]


def test_special_text_in_a_message_is_cut_out_with_its_surroundings_only() -> None:
    messages = [USER, {"role": "user", "content": "a <|im_end|> b"}, USER]
    assert foreign_text(messages) == ["user\na <|im_end|> b"]


def test_special_text_that_two_messages_write_together_is_found() -> None:
    template = "{% for message in messages %}{{ message.content | trim }}{% endfor %}<|im_end|>"
    messages = [{"role": "user", "content": " x <|im_"}, {"role": "user", "content": "end|> y"}]
    assert foreign_text(messages, template) == ["x <|im_end|> y"]


def test_special_text_whose_origin_the_template_hides_is_refused() -> None:
    for template in (
        "{{ messages[0].content[:9] }}",
        "{{ messages[0].content | tojson(ensure_ascii=True) }}",
        "{% if messages[0].content.endswith('<|im_end|>') %}yes{% endif %}",
        "{{ messages[0].content | length }}",
    ):
        with pytest.raises(InvalidRequestError, match="special token"):
            foreign_text([{"role": "user", "content": "a<|im_end|>"}], template)


def test_a_key_is_no_way_in() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools | tojson }}<|im_end|>", {})
    pieces = template.render_marked([USER], SPECIALS, tools=[{"name": "f", "parameters": {"<|im_end|>": 1}}])
    assert [piece.is_control for piece in pieces] == [False, True]


PIECES = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|im", "_end|>", "|>", "</", "s>", "<", "a", " ", "\n"]
fragments = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(st.lists(fragments, min_size=1, max_size=4))
def test_only_the_templates_own_special_tokens_are_left_in_control_pieces(contents: list[str]) -> None:
    template = "{% for message in messages %}<s>{{ message.content | trim }}</s>{% endfor %}<|im_start|>"
    pieces = ChatTemplate(template, {}).render_marked([{"content": content} for content in contents], SPECIALS)
    control = "".join(piece.text for piece in pieces if piece.is_control)
    count = len(contents)
    assert (control.count("<s>"), control.count("</s>"), control.count("<|im_start|>")) == (count, count, 1)
    assert "<|im_end|>" not in control


def test_private_use_characters_in_a_message_survive() -> None:
    content = "".join(map(chr, range(0xE000, 0xE010))) + "<|im_end|>"
    assert foreign_text([{"role": "user", "content": content}]) == [f"user\n{content}"]


@given(st.lists(st.text(alphabet="<ab|", min_size=2, max_size=5), min_size=1), st.text(alphabet="<ab|"))
def test_special_texts_are_found_longest_first(texts: list[str], text: str) -> None:
    longest_first = sorted(set(texts), key=len, reverse=True)
    expected = [found.span() for found in re.finditer("|".join(map(re.escape, longest_first)), text)]
    assert [found.span() for found in SpecialTexts(texts)._whole.finditer(text)] == expected


def test_a_string_that_ends_in_all_but_the_last_character_of_a_special_text_is_hinted() -> None:
    texts = ["<s>", "</s>", "<|im_start|>", "<|the_longest_of_all|>"]
    specials = SpecialTexts(texts)
    for text in texts:
        for length in range(2, len(text)):
            assert specials.are_hinted_in("hello " + text[:length]), text[:length]
            assert specials.are_hinted_in(text[-length:] + " hello"), text[-length:]
    assert not specials.are_hinted_in("hello")


def test_a_megabyte_of_angle_brackets_is_searched_in_linear_time() -> None:
    texts = SpecialTexts([f"<unused{index}>" for index in range(6000)])
    assert not texts.are_hinted_in("<unused" * 150_000 + "x")


def test_ten_thousand_forged_tokens_cost_linear_time() -> None:
    content = "<|im_end|><" * 10_000
    assert foreign_text([{"role": "user", "content": content}] * 3) == [f"user\n{content}"] * 3


def test_no_template_says_what_to_do() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with pytest.raises(InvalidRequestError, match=r"no chat template.*generate\(\)"):
        Tokenizer(Backend(models.BPE({"a": 0}, [])), named_tokens={}).encode_chat([USER])


@pytest.mark.slow(cases=1, rest=3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_real_templates_render_and_encode_as_transformers(name: str, add_generation_prompt: bool) -> None:
    tokenizer, oracle = load(name), load_oracle(name)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    cases = [(messages, options) for messages in CONVERSATIONS.values()]
    if name in ("qwen3", "llama3_1"):
        cases += [(messages, {**options, "tools": [TOOL]}) for messages in TOOL_CONVERSATIONS.values()]
    if name == "qwen3":
        cases += [(messages, {**options, "enable_thinking": False}) for messages in CONVERSATIONS.values()]
    for messages, variables in cases:
        text = oracle.apply_chat_template(messages, tokenize=False, **variables)
        assert tokenizer.render_chat_template(messages, **variables) == text
        expected = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **variables)
        if not any(each in json.dumps(messages) for each in ("<b>", "</s>")):  # control for Gemma's own tokenizer
            assert tokenizer.encode_chat(messages, **variables) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(content=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_benign_conversations_are_token_equal_to_transformers(name: str, content: str) -> None:
    tokenizer, oracle = load(name), load_oracle(name)
    assume(not tokenizer._special_texts.found_in(content))
    messages = [{"role": "user", "content": content}]
    expected = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == expected


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("name", NAMES)
def test_no_special_token_in_a_message_becomes_control(name: str) -> None:
    tokenizer = load(name)
    harmless = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    num_control = sum(token_id in tokenizer.special_token_ids for token_id in harmless)
    for special_id in sorted(tokenizer.special_token_ids):
        text = tokenizer.decode([special_id], skip_special_tokens=False)
        ids = tokenizer.encode_chat([{"role": "user", "content": f"a {text} b{text}"}])
        assert sum(token_id in tokenizer.special_token_ids for token_id in ids) == num_control
        assert f"a {text} b{text}" in tokenizer.decode(ids, skip_special_tokens=False)
