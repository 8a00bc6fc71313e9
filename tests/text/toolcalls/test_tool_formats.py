"""Formats of tool calls and reasoning: the grammar allows the calls that the parser reads, for any cut of the text."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from byte_tokenizer import write_byte_tokenizer
from cases import cases
from constraint_walks import random_schema, walk
from extent import usual_or_all
from infer import InvalidRequestError, RequestOptions, Tokenizer
from infer.engine.requests.prompt_encoding import Conversation, TemplateProbes
from infer.engine.requests.request_maker import FormatPreparer
from infer.outputs import ReasoningDelta, ToolCall, assembled
from infer.serving.protocols.events import call_values
from infer.text.grammar.constraint import Budget, BudgetConstraint, Constraint
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.toolcalls import formats
from infer.text.toolcalls.answer_format import AnswerFormat, Calls, written_arguments
from infer.text.toolcalls.formats import FORMATS, REASONING_FORMATS, ToolCallFormat, in_vocabulary
from infer.text.toolcalls.parser import AnswerParser, make_parser
from infer.text.toolcalls.tools import Kind, Tool, read_tool_choice, read_tools

CONTROLS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "[THINK]", "[/THINK]", "<escape>")
THINK, THINK_CONTROL, *_ = REASONING_FORMATS
(TAGGED,) = (form for form in REASONING_FORMATS if form.answer_opening)
NAME = "get_weather"
TYPES = {"city": "string", "days": "integer", "hourly": "boolean", "at": ["number", "null"]}
PROPERTIES: dict[str, Any] = {name: {"type": kind} for name, kind in TYPES.items()}
PROPERTIES["tags"] = {"type": "array", "items": {"enum": ["a", True, None]}}
PROPERTIES["öl"] = {"type": "object", "properties": {"ß": {"type": "integer"}}, "additionalProperties": False}
TOOLS = read_tools([
    {"name": NAME, "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": None}},
])  # fmt: skip
ARGUMENTS: dict[str, Any] = {"city": '  Ä}"{\\</tool_call>\n</parameter> [f(x="1")] \n'}
ARGUMENTS |= {"days": -3, "hourly": True, "at": None, "tags": ["a", True, None], "öl": {"ß": 1}}
Found = tuple[str, str | None, tuple[ToolCall, ...]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CONTROLS)


def make_tokenizer(folder: Path, controls: Sequence[str], template: str = "") -> Tokenizer:
    write_byte_tokenizer(folder, controls=controls)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


@cache
def compiler_of(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer)


def answer_format(
    tokenizer: Tokenizer, form: Any, tools: Any = TOOLS, kind: Kind = "auto", reasoning: Any = None, **options: Any
) -> AnswerFormat:
    ids = tokenizer.special_ids_in([text for each in (form, reasoning) if each for text in formats.literals_of(each)])
    marks = formats.marks_of(ids)
    return AnswerFormat(
        Calls(in_vocabulary(form, marks), tools, kind),
        in_vocabulary(reasoning, marks) if reasoning else None,
        marks={ids[text]: mark for text, mark in marks.items()},
        **options,
    )


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, in which control tokens are parsed."""
    return tokenizer.encode(text, add_special_tokens=False)


def constraint_of(tokenizer: Tokenizer, form: AnswerFormat, answer: Grammar | None = None) -> Constraint:
    compiler = compiler_of(tokenizer)
    _, source = FormatPreparer(compiler).prepare(form, answer)
    assert source is not None
    return compiler.answer_maker(source)()


def allows(tokenizer: Tokenizer, form: AnswerFormat, said: Any, answer: Any = None, *, ends: bool = False) -> bool:
    """Return True if an answer may begin, or with `ends` be complete, with a text or ids."""
    constraint, ids = constraint_of(tokenizer, form, answer), ids_of(tokenizer, said) if isinstance(said, str) else said
    if constraint.accept(ids) < len(ids):
        return False
    return not ends or constraint.done or constraint.accept([min(tokenizer.eos_token_ids)]) == 1


def call_of(form: ToolCallFormat) -> str:
    return form.written([(NAME, written_arguments(form, TOOLS[0], ARGUMENTS))])


def calls_of(form: ToolCallFormat) -> str:
    calls = [(NAME, written_arguments(form, TOOLS[0], ARGUMENTS)), ("now", written_arguments(form, TOOLS[1], {}))]
    return form.written(calls[: 1 + form.is_parallel])


def marked(form: AnswerFormat, tokenizer: Tokenizer, said: str | Iterable[int]) -> Iterator[str]:
    detokenizer = tokenizer.make_detokenizer()
    for token_id in ids_of(tokenizer, said) if isinstance(said, str) else said:
        yield form.marks.get(token_id) or detokenizer.push(token_id)


def parsed(form: AnswerFormat, texts: Iterable[str]) -> Found:
    parser = make_parser(form, str)
    found = [*map(parser.push, texts), parser.flush()]
    reasoning, calls = assembled(delta for each in found for delta in each.deltas)
    return "".join(each.text for each in found), reasoning, calls


def parsed_anyhow(form: AnswerFormat, texts: Iterable[str], every: int = 1) -> Found:
    """Read an answer piece by piece, whole, and cut at each or some places. All give the same result."""
    pieces = list(texts)
    found, whole = parsed(form, pieces), "".join(pieces)
    for cut in range(0, len(whole), every):
        assert parsed(form, [whole[:cut], whole[cut:]]) == found
    return found


def conversation(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None, **options: Any) -> Conversation:
    return Conversation(tokenizer, TemplateProbes(tokenizer), RequestOptions(**options), variables or {})


def form_of(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None, **options: Any) -> AnswerFormat:
    """Return the format of an answer to a question under the tokenizer's template."""
    asked = conversation(tokenizer, variables, **options)
    found = asked.answer_format(asked.encode([{"role": "user", "content": "Weather?"}]))
    assert found is not None
    return found


@pytest.mark.slow(cases=21, rest=30)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["auto", "required"])
@pytest.mark.parametrize("reasoning", [None, THINK, THINK_CONTROL], ids=["", "text", "control"])
def test_calls_are_allowed_and_read_for_any_cut(name: str, kind: Kind, reasoning: Any, tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS[name], kind=kind, reasoning=reasoning)
    thought = 'What <tool_call> [TOOL, {"name": "x"}?' if reasoning else ""
    before = f"{reasoning.opening}\n{thought}\n{reasoning.closing}\n\n" if reasoning else ""
    says = "I will look. " if kind == "auto" and FORMATS[name].trigger else ""
    answer = before + says + calls_of(FORMATS[name])
    assert allows(tokenizer, form, answer, ends=True)
    pieces = list(marked(form, tokenizer, answer))
    text, found_thought, calls = found = parsed_anyhow(form, pieces, usual_or_all(3, 1))
    assert (text, found_thought) == (says.rstrip(), thought or None)
    shown = [(call.name, call.parsed(), "\\u" in call.arguments) for call in calls]
    assert shown == [(NAME, ARGUMENTS, False), ("now", {}, False)][: len(calls)]
    assert len(calls) == 1 + FORMATS[name].is_parallel
    whole, rng = "".join(pieces), random.Random(f"{name} {kind} {reasoning}")
    for _ in range(10):
        cuts = sorted(rng.choices(range(len(whole)), k=rng.randint(1, 20)))
        assert parsed(form, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]) == found


@cases("given sent", *((each, each) for each in ('{"a": 1e400}', '{"a": ' + "9" * 5_000 + "}")), ('{"a": 99', ""))
def test_an_object_of_arguments_is_spelt_as_the_model_wrote_it(given: str, sent: str) -> None:
    assert bytes(call_values(ToolCall("", "f", given))).decode() == sent


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_shows_a_beginning_of_its_call(name: str, tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS[name])
    whole = "".join(marked(form, tokenizer, call_of(FORMATS[name])))
    *_, (expected,) = parsed(form, [whole])
    for length in range(0, len(whole), usual_or_all(2, 1)):
        text, _, calls = parsed(form, [whole[:length]])
        assert not calls or (not text and expected.arguments.startswith(calls[0].arguments))
        assert calls or not text.strip() or any(each.startswith(text) for each in form.calls.beginnings)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.trigger])
def test_an_answer_that_ends_while_it_may_still_begin_a_call_is_text(name: str, tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS[name])
    assert form.calls
    assert form.calls.beginnings
    for begun in (each[:length] for each in form.calls.beginnings for length in range(1, len(each))):
        assert parsed(form, [begun])[0] == begun


@settings(max_examples=usual_or_all(60, 2_000), deadline=None)
@given(st.lists(st.sampled_from([*'<>/tol_ca{}[]"nme:=( \nf', "<tool_call>", '{"name": "', "</think>", "<think>"])))
def test_text_without_a_call_is_shown_to_the_letter(parts: list[str]) -> None:
    text = "".join(parts).replace("<tool_call>", "<tool_cal>")
    form = AnswerFormat(Calls(FORMATS["hermes"], TOOLS))
    assert parsed(form, text) == (text, None, ())
    assert parsed(form, parts) == parsed(form, ["".join(parts)])
    for each in (AnswerFormat(Calls(FORMATS["hermes"], TOOLS), THINK), AnswerFormat(None, THINK, is_open=True)):
        assert parsed(each, "".join(parts)) == parsed(each, ["".join(parts)])


# Faults of other servers: vllm#19056, #21544, #10395, #10398, #32152, #28806, #34101.
HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize("given", ["{}", '{"a": {}}', '{"a": "}"}', '{"a": "</tool_call>"}', '{"a": [1, {"b": 2}]}'])
def test_many_tokens_at_once_lose_no_brace_repeat_no_argument_and_leak_no_tag(given: str) -> None:
    form = AnswerFormat(Calls(FORMATS["hermes"], read_tools([{"name": "f"}])))
    whole = f"Hm.\n{HERMES % given}\n{HERMES % given}"
    for size in range(1, len(whole) + 1):
        text, _, calls = parsed(form, [whole[at : at + size] for at in range(0, len(whole), size)])
        assert (text, [call.arguments for call in calls]) == ("Hm.", [given, given])
        assert [call.id for call in calls] == ["0", "1"]


def test_a_forced_call_may_follow_reasoning_and_no_text_stands_before_it(tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS["hermes"], kind="required", reasoning=THINK)
    for text, is_allowed in [("<think>Hm</think>\n\n<tool_call>", True), ("<tool_call>", True), ("Sure", False)]:
        assert allows(tokenizer, form, text) == is_allowed
    form = answer_format(tokenizer, FORMATS["hermes"], kind="required", reasoning=THINK, is_open=True)
    assert allows(tokenizer, form, "Hm</think>\n\n<tool_call>")


@pytest.mark.parametrize("name", FORMATS)
def test_no_call_is_written_where_none_is_allowed(name: str, tokenizer: Tokenizer) -> None:
    for reasoning, before in ((None, ""), (THINK, "<think>a</think>\n\n")):
        form = answer_format(tokenizer, FORMATS[name], kind="none", reasoning=reasoning)
        assert allows(tokenizer, form, f"{before}Hi <to [ {{")
        assert not allows(tokenizer, form, before + calls_of(FORMATS[name]))


def test_control_text_that_is_spelt_is_no_control_token(tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS["mistral"])
    text = '[TOOL_CALLS][{"name": "x'
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert allows(tokenizer, form, ids)
    assert parsed(form, marked(form, tokenizer, ids)) == (text, None, ())


def test_no_request_names_a_control_token(tokenizer: Tokenizer) -> None:
    control_id = ids_of(tokenizer, "[TOOL_CALLS]")[0]
    for text in (f"start: <[{control_id}]>", "start: <[TOOL_CALLS]>", "start: @answer"):
        with pytest.raises(InvalidRequestError):
            compiler_of(tokenizer).compile(Grammar("grammar", text))
    form = AnswerFormat(None, THINK, is_open=True)
    with pytest.raises(InvalidRequestError):
        constraint_of(tokenizer, form, Grammar("grammar", f"start: <[{control_id}]>"))
    assert not allows(tokenizer, form, [control_id], Grammar("regex", "a+"))


@cases(
    "answer text",
    (Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "null"}}}'), '{"a": null}'),
    (Grammar("regex", "a/b+"), "a/bb"),
    (Grammar("grammar", 'start: "x" y\ny: "yy"'), "xyy"),
    (Grammar("choice", '["yes", "no"]'), "no"),
)
def test_constraints_of_the_text_apply_after_the_reasoning(answer: Grammar, text: str, tokenizer: Tokenizer) -> None:
    for is_open in (True, False):
        form = AnswerFormat(None, THINK, is_open=is_open)
        whole = f"{'' if is_open else '<think>'} Hm {text} </think>\n\n{text}"
        assert allows(tokenizer, form, whole, answer)
        assert not allows(tokenizer, form, whole + "?", answer)
    assert allows(tokenizer, form, text, answer)


@pytest.mark.parametrize("are_control", [False, True], ids=["text", "control"])
def test_tags_around_an_answer_are_allowed_and_never_shown(are_control: bool, tmp_path: Path) -> None:
    """Published tokenizers have them as tokens that are not special; other files as special ones."""
    names = [f"<|{end}_{part}|>" for part in ("THINKING", "RESPONSE", "ACTION") for end in ("START", "END")]
    tokenizer, form = make_tokenizer(tmp_path, names if are_control else ()), FORMATS["command-r7b"]
    thought, rest = "<|START_THINKING|>I plan.<|END_THINKING|>", "<|START_RESPONSE|>Hi <b>\n there<|END_RESPONSE|>"
    call, with_calls = form.written([("now", "{}")]), answer_format(tokenizer, form, reasoning=TAGGED)
    answer = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "null"}}}')
    for each in (with_calls, replace(with_calls, calls=None)):
        for before, reasoning in (("", None), (thought, "I plan.")):
            for text, shown in ((rest, "Hi <b>\n there"), ("Hi", "Hi")):
                assert parsed_anyhow(each, marked(each, tokenizer, before + text)) == (shown, reasoning, ())
            for text in ('{"a": null}', '<|START_RESPONSE|>{"a": null}<|END_RESPONSE|>'):
                assert allows(tokenizer, each, before + text, answer, ends=True)
            assert not allows(tokenizer, each, f"{before}<|START_RESPONSE|>Hi", answer)
    assert all(allows(tokenizer, with_calls, text, ends=True) for text in (f"{thought}\n{rest}", rest, thought + call))
    text, reasoning, (made,) = parsed_anyhow(with_calls, marked(with_calls, tokenizer, thought + call))
    assert (text, reasoning, made.name) == ("", "I plan.", "now")
    raw = AnswerFormat(None, TAGGED, is_apart=False)
    assert parsed(raw, thought + rest) == (thought + rest, None, ())


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_closes_reasoning_after_so_many_tokens(num_tokens: int, is_open: bool, tokenizer: Tokenizer) -> None:
    form = AnswerFormat(None, THINK, is_open=is_open, budget=num_tokens)
    closing = list(b"</think>")
    budget = Budget(num_tokens, b"<think>", b"</think>", tuple(closing), lambda i: bytes([i]), is_open)
    constraint = BudgetConstraint(constraint_of(tokenizer, form), budget)
    opening = [] if is_open else list(b"<think>")
    assert (constraint.accept([*opening, *b"x" * 20]), constraint.forced()) == (len(opening) + num_tokens, closing)
    assert constraint.accept([ord("x")]) == 0
    assert constraint.accept([*closing, *b"\n\nHello </think> <think>"]) == len(closing) + 24
    assert constraint.forced() == []
    constraint.rollback(24 + 3)
    assert constraint.forced() == closing[-3:]
    constraint.rollback(len(closing) - 3 + num_tokens)
    assert constraint.accept([*b"y" * 20]) == num_tokens


def with_short_texts(schema: Any) -> Any:
    """Return a schema of short texts: a random walk never writes the many characters that end one without quotes."""
    if isinstance(schema, list):
        return [with_short_texts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    most = {"maxLength": 3} if schema.get("type") == "string" and "enum" not in schema else {}
    return {key: each if key in ("enum", "const") else with_short_texts(each) for key, each in schema.items()} | most


def random_tool(rng: random.Random, number: int) -> Tool:
    names = rng.sample(["id", "name", "tags", "size_2", "ü", "_x"], rng.randint(0, 4))
    properties = {name: with_short_texts(random_schema(rng, 2, wide=False)) for name in names}
    required = [name for name in names if rng.random() < 0.5]
    return Tool(f"tool-{number}", "", {"type": "object", "properties": properties, "required": required})


@pytest.mark.parametrize("seed", range(usual_or_all(30, 600)))
def test_random_walks_through_random_tools_give_valid_calls(seed: int, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)
    tools = tuple(random_tool(rng, number) for number in range(rng.randint(1, 4)))
    form = FORMATS[list(FORMATS)[seed % len(FORMATS)]]
    found = answer_format(tokenizer, form, tools, "required")
    whole = walk(constraint_of(tokenizer, found), tokenizer, tokenizer.vocab_size, rng, 4_000).decode()
    for text, mark in formats.marks_of(tokenizer.special_ids_in(formats.literals_of(form))).items():
        whole = whole.replace(text, mark)
    content, _, calls = parsed(found, [whole])
    assert not content
    assert calls
    schemas = {tool.name: {**tool.parameters, "additionalProperties": False} for tool in tools}
    for call in calls:
        Draft202012Validator(schemas[call.name]).validate(call.parsed())


def test_a_choice_of_tools_is_checked() -> None:
    assert read_tool_choice("now", TOOLS).names == ("now",)
    function = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function]}}
    assert read_tool_choice(allowed, TOOLS).names == ("now",)
    for wrong, rule in [("later", "is not a tool"), ({"type": "x"}, "tool_choice must be"), (3, "tool_choice must be")]:
        with pytest.raises(InvalidRequestError, match=rule):
            read_tool_choice(wrong, TOOLS)
    with pytest.raises(InvalidRequestError, match="needs tools"):
        read_tool_choice("required", ())


@cases(
    "tools rule",
    ("f", "must be a list"),
    ([3], r"tools\[0\] must be a function or its schema"),
    ([{"name": "a b"}], "letters, digits"),
    ([{"name": "a"}, {"name": "a", "parameters": {"properties": {"b": {}}}}], "must differ"),
    ([{"name": "a", "strict": True, "parameters": {"type": "string"}}], "type object"),
    ([{"name": "a", "strict": True, "parameters": True}], "must be a schema"),
    ([{"type": "web_search"}], "must be 'function'"),
    ([{"name": "a", "description": 3}], "description"),
    ([{"name": str(number)} for number in range(129)], "128"),
)
def test_values_that_are_not_tools_are_refused_in_one_line(tools: Any, rule: str) -> None:
    with pytest.raises(InvalidRequestError, match=rule) as error:
        read_tools(tools)
    assert "\n" not in str(error.value)


def test_a_refusal_of_a_format_names_the_tool(tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("pythonic", {"properties": {"a b": {}}}, "cannot name 'a b'"),
        ("qwen3-coder", {"anyOf": [{}]}, "anyOf cannot be enforced"),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "not": {}}}}, "not of the text a cannot be enforced"),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "look-around"),
        ("hermes", {"properties": {"a": {"type": "strange"}}}, "json_schema"),
        ("functiongemma", {"properties": {"a": {"not": {}}}}, "not of a cannot be enforced"),
        ("functiongemma", {"properties": {"a": {"anyOf": [{}], "minLength": 2}}}, "minLength of a cannot be enforced"),
        ("functiongemma", {"properties": {"a": {"minLength": 2}}}, "a needs a type"),
        ("functiongemma", {"properties": {"a": {"type": "array", "items": False}}}, "no value fulfils a"),
        ("functiongemma", {"properties": {"a": {"anyOf": 3}}}, "json_schema at /properties/a"),
        ("functiongemma", {"properties": {"a": {"type": "object", "required": ["b"]}}}, "b of a is required"),
        ("functiongemma", {"properties": {"a": {"type": "object", "properties": {"b:c": {}}}}}, "cannot name 'b:c'"),
        ("functiongemma", {"properties": {"a": {"type": "array", "prefixItems": [{}]}}}, "prefixItems of a need"),
    ]
    for name, parameters, rule in cases:
        tools = read_tools([{"name": "f", "parameters": parameters, "strict": True}])
        with pytest.raises(InvalidRequestError, match=rf"tools\[0\] \(f\): .*{rule}"):
            constraint_of(tokenizer, answer_format(tokenizer, FORMATS[name], tools))


def only_call(tokenizer: Tokenizer, name: str, tools: tuple[Tool, ...], **arguments: Any) -> tuple[AnswerFormat, str]:
    """Return the format of an answer that must call a tool, and the call with these arguments."""
    written = FORMATS[name].written([("f", written_arguments(FORMATS[name], tools[0], arguments))])
    return answer_format(tokenizer, FORMATS[name], tools, "required"), written


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.syntax == "xml"])
@cases(
    "schema allowed refused",
    ({"pattern": "^[a-z]{2}/\\d+$"}, ["ab/12"], ["ab", "xab/12", "ab/1\n"]),
    ({"pattern": "b+"}, ["b", "abc\n"], ["", "ac"]),
    ({"minLength": 30}, ["x" * 30], ["x", "x{end}" + "x" * 30]),
    ({"pattern": "b$", "maxLength": 3}, ["ab"], ["b{end}b", "aaab"]),
)
def test_a_text_without_quotes_is_held_by_its_pattern_and_its_lengths(
    name: str, schema: dict[str, Any], allowed: list[str], refused: list[str], tokenizer: Tokenizer
) -> None:
    tools = read_tools([{"name": "f", "parameters": {"properties": {"a": {"type": "string", **schema}}}}])
    for text in allowed + refused:
        value = text.replace("{end}", FORMATS[name].around_argument[2])
        assert allows(tokenizer, *only_call(tokenizer, name, tools, a=value)) == (text in allowed), value


TEXTS = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize("name", ["functiongemma", "gemma-4"])
@cases(
    "schema allowed refused",
    ({}, ["a", "", -1.5, None, [], [1, "b", {"c": {}}], {"d": "e", "f": [True]}], []),
    ({"type": "object"}, [{}, {"a": 1}], ["a", 1]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"a": True}], [{"a": 1}]),
    ({"type": "object", "properties": {"a b": {"type": "string"}}}, [{}, {"a b": "c"}], [{"d": 1}]),
    (TEXTS | {"minItems": 1, "maxItems": 2}, [["a"], ["a", "{,:}"]], [[], ["a"] * 3]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2, 3]], [["a"]]),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, ["aa"], ["a", "ab", ""]),
    ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
    ({"type": ["string", "null"]}, ["null", None], [1]),
    ({"type": "integer", "minimum": 3}, [3], [2]),
)
def test_gemma_s_values_are_held_to_their_schema(
    name: str, schema: dict[str, Any], allowed: list[Any], refused: list[Any], tokenizer: Tokenizer
) -> None:
    tools = read_tools([{"name": "f", "parameters": {"properties": {"a": schema}, "required": ["a"]}}])
    for value in allowed:
        form, whole = only_call(tokenizer, name, tools, a=value)
        assert allows(tokenizer, form, whole), value
        (call,) = parsed(form, marked(form, tokenizer, whole))[2]
        assert call.parsed() == {"a": value}
    assert [value for value in refused if allows(tokenizer, *only_call(tokenizer, name, tools, a=value))] == []


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
def test_an_object_in_an_object_has_rules_of_its_own(name: str, tokenizer: Tokenizer) -> None:
    inner = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    outer = {"type": "object", "properties": {"color": {"enum": ["red", None]}, "inner": inner}, "required": ["color"]}
    tools = read_tools([{"name": "f", "parameters": {"properties": {"a": outer, "b": outer}, "required": ["a"]}}])
    values = ({"color": "red", "inner": {"on": True}}, {"color": None, "inner": {"color": "red"}})
    assert [allows(tokenizer, *only_call(tokenizer, name, tools, a=each, b=each)) for each in values] == [True, False]


@pytest.mark.parametrize("name", ["pythonic", "lfm2"])
@cases(
    "written arguments",
    ("city='Paris'", {"city": "Paris"}),
    ("city=''", {"city": ""}),
    ("""city='say "hi" (a), b=[1]'""", {"city": 'say "hi" (a), b=[1]'}),
    (r"city='it\'s \"so\"\n\\', days=2", {"city": 'it\'s "so"\n\\', "days": 2}),
    ("city=\"it's\", tags=['a', True, None]", {"city": "it's", "tags": ["a", True, None]}),
    ("city='Ä', tags=[\"a\", 'a']", {"city": "Ä", "tags": ["a", "a"]}),
)
def test_texts_may_have_single_quotes_in_python(name: str, written: str, arguments: Any, tokenizer: Tokenizer) -> None:
    form, said = answer_format(tokenizer, FORMATS[name], kind="required"), FORMATS[name].written([(NAME, written)])
    assert allows(tokenizer, form, said)
    *_, calls = parsed_anyhow(form, marked(form, tokenizer, said))
    assert [(call.name, call.parsed()) for call in calls] == [(NAME, arguments)]


@pytest.mark.parametrize("text", [r"'a\x'", "'a\nb'", r"'\u0041'"])
def test_a_text_in_single_quotes_is_one_that_json_can_hold(text: str, tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS["pythonic"], kind="required")
    assert not allows(tokenizer, form, f"[get_weather(city={text})]")


CODER = FORMATS["qwen3-coder"]
UNCLOSED = f"Is <tool_call>\n<function=get_weathers>\n right, or <function={NAME}>\n? {CODER.start}now?\n"


@pytest.mark.parametrize("is_open", [True, False], ids=["open", ""])
@pytest.mark.parametrize("kind", ["auto", "required"])
@pytest.mark.parametrize("reasoning", [THINK, THINK_CONTROL], ids=["text", "control"])
def test_a_call_ends_unclosed_reasoning(is_open: bool, kind: Kind, reasoning: Any, tokenizer: Tokenizer) -> None:
    """See vllm#39056."""
    form = answer_format(tokenizer, CODER, kind=kind, reasoning=reasoning, is_open=is_open)
    before = "" if is_open else reasoning.opening
    said = f"{before}\n{UNCLOSED}\n\n{calls_of(CODER)}"
    assert allows(tokenizer, form, said, ends=True)
    text, thought, calls = parsed_anyhow(form, "".join(marked(form, tokenizer, said)), usual_or_all(3, 1))
    assert (text, thought) == ("", UNCLOSED.strip())
    assert [(call.name, call.parsed()) for call in calls] == [(NAME, ARGUMENTS), ("now", {})]
    cut = f"{before}Hm. {call_of(CODER)[:-30]}"
    assert allows(tokenizer, form, cut)
    assert not allows(tokenizer, form, cut, ends=True)  # the call must be completed


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3-coder", {"kind": "none"}), ("qwen3-coder", {"budget": 500}), ("hermes", {})],
    ids=["no call", "a budget", "another format"],
)
def test_a_call_in_reasoning_is_reasoning_if_it_may_not_end_it(name: str, options: Any, tokenizer: Tokenizer) -> None:
    form = answer_format(tokenizer, FORMATS[name], reasoning=THINK, is_open=True, **options)
    thought = f"I could write {call_of(FORMATS[name])} here."
    said = f"{thought}</think>\nNo."
    assert allows(tokenizer, form, said)
    assert parsed(form, marked(form, tokenizer, said)) == ("No.", thought, ())


def test_reasoning_that_is_left_in_the_text_is_all_of_it() -> None:
    whole = "\n<think>\n Hm \n</think>\n\nHi "
    assert parsed(AnswerFormat(None, THINK, is_apart=False), whole) == (whole, None, ())
    assert parsed(AnswerFormat(None, THINK), whole) == ("Hi ", "Hm", ())
    parser = AnswerParser(AnswerFormat(None, THINK), str)
    assert parser.push("<think>a").deltas == (ReasoningDelta("a"),)
