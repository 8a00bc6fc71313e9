"""Tools of real clients: one call of a named tool, schemas that no grammar can enforce, cut calls sent back."""

import json
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator

from extent import usual_or_all
from infer import LLM, InvalidRequestError
from infer.errors import MessageWarning, SchemaWarning
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.json_schema import BuiltSchema, SchemaSearch, build_schema
from infer.text.grammar.libraries import llguidance_follow, llguidance_limits, schema_source
from infer.text.grammar.schema_rewriter import LeftOut, Omissions
from infer.text.toolcalls.formats import FORMATS
from infer.text.toolcalls.tools import past_arguments
from test_session import make_model

BYTES = llguidance.LLTokenizer("byte")
ASKED = [{"role": "user", "content": "weather?"}]
SAMPLED: dict[str, Any] = {"max_new_tokens": 200, "temperature": 1.5}
SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
NAMES_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
TEXT = {"type": "string"}
LIST = {"type": "array", "items": TEXT}
BAD: dict[str, tuple[Any, str, str]] = {
    "look-around": ({"properties": {"a": {**TEXT, "pattern": "(?=x)y"}}}, "/properties/a/pattern ", "look-around"),
    "word boundary": ({"properties": {"a": {**TEXT, "pattern": r"\bx"}}}, "/properties/a/pattern ", "boundaries"),
    "uniqueItems": ({"properties": {"a": {**LIST, "uniqueItems": True}}}, "/properties/a/uniqueItems ", "uniqueItems"),
    "reference": ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "/properties/a/$ref ", "leads to no schema"),
    "type": ({"properties": {"a": {"type": "strange"}}}, "/properties/a/type ", "must be one of"),
    "length": ({"properties": {"a": {**TEXT, "minLength": "3"}}}, "/properties/a/minLength ", "integer"),
    "no schema": ({"properties": {"a": 3}}, "/properties/a ", "a schema must be an object"),
    "properties": ({"properties": [1]}, "/properties ", "must be an object"),
    "required": ({"properties": {"a": TEXT}, "required": "a"}, "/required ", "must be a list"),
    "root type": ({"type": "string"}, "/type ", "arguments must be an object"),
    "true": (True, "left out", "must be a schema"),
    "list": ([1], "left out", "must be a schema"),
    "contains": ({"properties": {"a": {"type": "array", "contains": TEXT}}}, "/properties/a/contains ", "contains"),
    "nothing": ({"properties": {"a": {"type": "integer", "minimum": 4, "maximum": 2}}, "required": ["a"]}, "/a/", "4"),
    "many values": ({"properties": {"a": {"enum": [*range(20_000)]}}}, "/properties/a/enum ", "10000 values"),
    "a pattern in not": ({"properties": {"a": {**TEXT, "not": {"pattern": "(?!x)"}}}}, "/properties/a/not ", "look"),
    "depth": (json.loads('{"properties": {"a": ' + '{"items": ' * 70 + "{}" + "}" * 72), "/properties/a ", "deep"),
    "size": ({"properties": {"a": {**TEXT, "pattern": "(?=x)" + "x" * (1 << 20)}}}, "whole schema", "bytes"),
    "$defs": ({"$defs": {"d": {"minItems": ""}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, "/$defs/d/m", "integer"),
    "no value": ({"properties": {"a": {"enum": []}, "b": TEXT}, "required": ["a"]}, "/properties/a/enum ", "no value"),
    "bad $id": ({"$id": "http://[", "properties": {"a": {"$ref": "http://[/b"}}}, "/properties/a/$ref ", "stay in"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(make_model(tmp_path_factory.mktemp("model"), context=4_000)) as llm:
        yield llm


def tool(parameters: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters, **fields}}


@pytest.mark.slow(cases=7)
@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once(llm: LLM, name: str) -> None:
    tools = [tool({"properties": {"on": {"type": "boolean"}}, "required": ["on"]}), tool({}, "g")]
    choice = {"type": "function", "function": {"name": "f"}}
    for seed in range(4):
        asked: dict[str, Any] = {"tools": tools, "tool_choice": choice, "tool_format": name, "seed": seed, **SAMPLED}
        result = llm.chat(ASKED, **asked)
        assert ([call.name for call in result.tool_calls], set(result.tool_calls[0].parsed())) == (["f"], {"on"})
        assert result.finish_reason == "stop"
        assert llm.chat(ASKED, parallel_tool_calls=False, **asked).token_ids == result.token_ids


def test_several_calls_of_a_named_tool_are_made_when_they_are_asked_for(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": [tool({})], "tool_format": "hermes", **SAMPLED}
    named = [llm.chat(ASKED, tool_choice="f", parallel_tool_calls=True, seed=seed, **asked) for seed in range(4)]
    assert max(len(result.tool_calls) for result in named) > 1
    required = [llm.chat(ASKED, tool_choice="required", seed=seed, **asked) for seed in range(4)]
    assert [result.token_ids for result in required] == [result.token_ids for result in named]


@pytest.mark.slow(cases=38)
@pytest.mark.parametrize("form", ["hermes", "qwen3-coder", "pythonic", "gemma-4"])
@pytest.mark.parametrize("name", BAD)
def test_a_part_of_a_schema_that_cannot_be_built_is_dropped_with_a_warning(llm: LLM, name: str, form: str) -> None:
    parameters, place, reason = BAD[name]
    asked: dict[str, Any] = {"tool_choice": "f", "tool_format": form, "chat_template": NAMES_TOOLS, "seed": 1}
    llm.host.requests._warned.clear()
    with pytest.warns(SchemaWarning, match="tool 'f'"):
        result = llm.chat(ASKED, tools=[tool(parameters)], **asked, **SAMPLED)
    assert [call.name for call in result.tool_calls] == ["f"]
    assert any(place in said and reason in said and "tool 'f'" in said for said in result.warnings)
    with warnings.catch_warnings(action="error"):  # the warning appears once
        assert llm.chat(ASKED, tools=[tool(parameters)], **asked, **SAMPLED).warnings == result.warnings


@pytest.mark.parametrize("name", [name for name in BAD if name not in ("depth", "size")])
def test_a_strict_tool_is_refused_for_the_same_part(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]"):
        llm.chat(ASKED, tools=[tool(BAD[name][0], strict=True)], tool_format="hermes", chat_template=NAMES_TOOLS)


def test_the_other_parts_of_the_schema_and_other_tools_are_enforced(llm: LLM) -> None:
    digit = {"enum": [1, 2]}
    held = {"properties": {"a": {**TEXT, "pattern": "(?=x)y", "maxLength": 3}, "b": digit}, "required": ["a", "b"]}
    other = {"properties": {"c": digit}, "required": ["c"]}
    seen = set[str]()
    for form in ("hermes", "qwen3-coder", "pythonic", "gemma-4"):
        for seed in range(6):
            asked: dict[str, Any] = {"tools": [tool(held), tool(other, "g")], "tool_format": form, "seed": seed}
            with warnings.catch_warnings(action="ignore"):
                result = llm.chat(ASKED, tool_choice="required", parallel_tool_calls=False, **asked, **SAMPLED)
            (call,) = result.tool_calls
            seen.add(call.name)
            loose = {**held, "properties": {"a": {**TEXT, "maxLength": 3}, "b": digit}}
            Draft202012Validator(loose if call.name == "f" else other).validate(call.parsed())
    assert seen == {"f", "g"}


def test_a_tool_that_is_never_called_refuses_nothing(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": [tool(BAD["uniqueItems"][0])], "tool_format": "hermes", "max_new_tokens": 4}
    for choice, num_said in (("auto", 1), ("none", 0)):
        with warnings.catch_warnings(action="ignore"):
            result = llm.chat(ASKED, tool_choice=choice, allowed_token_ids=[*range(97, 123)], **asked)
        assert (result.tool_calls, len(result.warnings)) == ((), num_said)


def test_the_template_is_shown_the_schema_as_it_was_given(llm: LLM) -> None:
    llm.host.requests._warned.clear()
    with llm.session(tools=[tool(BAD["look-around"][0])], chat_template=SHOWS_TOOLS) as session:
        with pytest.warns(SchemaWarning, match="look-around"):
            session.send("weather?", max_new_tokens=1, tool_format="hermes")
        shown = llm.tokenizer.decode(session.token_ids, skip_special_tokens=False)
    assert '"pattern": "(?=x)y"' in shown.encode().decode("unicode_escape")


def test_a_session_keeps_that_a_tool_is_strict(llm: LLM) -> None:
    session = llm.session(tools=[tool(BAD["look-around"][0], strict=True)])
    with session, pytest.raises(InvalidRequestError, match="look-around"):
        session.send("weather?", max_new_tokens=1)


def test_a_schema_that_takes_too_long_costs_a_bounded_number_of_trials(llm: LLM) -> None:
    slow = {"type": "integer", "allOf": [{"multipleOf": number} for number in (99991, 99989, 99971)]}
    tools = [tool({"properties": {"a": slow, "b": {"type": "boolean"}}, "required": ["b"]})]
    tools += [tool({"properties": {f"a{index}": slow}}, f"g{index}") for index in range(20)]
    asked: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "chat_template": NAMES_TOOLS}
    with pytest.warns(SchemaWarning):
        result = llm.chat(ASKED, tools=tools, tool_format="hermes", seed=1, **asked, **SAMPLED)
    assert result.tool_calls
    assert {said.split("'")[1] for said in result.warnings} == {"f", *(f"g{index}" for index in range(20))}
    assert sum("other tools used up the time" in said for said in result.warnings) > 15


def test_equal_tools_of_one_name_count_once_and_others_are_refused(llm: LLM) -> None:
    first, second = tool({"properties": {"a": TEXT}}), tool({"properties": {"a": {"type": "boolean"}}})
    asked: dict[str, Any] = {"tool_choice": "f", "tool_format": "hermes", "seed": 1, **SAMPLED}
    once = llm.chat(ASKED, tools=[first], **asked)
    twice = llm.chat(ASKED, tools=[first, {**first}], **asked)
    assert (twice.prompt_tokens, twice.token_ids) == (once.prompt_tokens, once.token_ids)
    with pytest.raises(InvalidRequestError, match="'f' twice with different parameters"):
        llm.chat(ASKED, tools=[first, second], **asked)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": [1]}', {"a": [1]}), *((text, {}) for text in ("", " \n", None, "{}", "null", "[]", '"[]"', '""')),
        *((text, {"INVALID_JSON": text}) for text in ('{"a": "Pa', "[1]", '"a"', "{'a': 1}", '{"a": NaN}', "0",
                                                      '{"a": 1e400}', "[" * 100_000, '{"a": ' * 80 + "1" + "}" * 80,
                                                      '{"a": "\\ud800"}', "1" * 5_000)),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_past_arguments_are_an_object(text: str | None, values: dict[str, Any]) -> None:
    found, warning = past_arguments(text)
    assert found == values
    assert (warning is None) == ("INVALID_JSON" not in values)


def past(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "on"}]  # fmt: skip


@pytest.mark.parametrize("call", ["f", {"id": "x"}, {"function": "f"}, {"function": {"name": 3}}, {"name": None}])
def test_a_past_call_without_a_name_is_refused(llm: LLM, call: Any) -> None:
    said = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\].tool_calls\[0\] must have a function with a name"):
        llm.chat(said, max_new_tokens=1)


def test_a_past_call_may_lack_its_function(llm: LLM) -> None:
    *said, called, result = past({"a": 1})
    short = {**called, "tool_calls": [{"id": "abcdefghi", "type": "function", "name": "f", "arguments": {"a": 1}}]}
    expected = llm.chat([*said, called, result], max_new_tokens=1, temperature=0)
    assert llm.chat([*said, short, result], max_new_tokens=1, temperature=0).prompt_tokens == expected.prompt_tokens


@pytest.mark.slow(cases=7)
@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_was_cut_can_be_sent_back(llm: LLM, form: str) -> None:
    asked: dict[str, Any] = {"tools": [tool({"properties": {"a": TEXT}})], "tool_format": form, "seed": 1}
    asked["max_new_tokens"] = 1
    llm.host.requests._warned.clear()
    with pytest.warns(MessageWarning, match=r"messages\[1\].tool_calls\[0\].*INVALID_JSON"):
        result = llm.chat(past('{"a": "Pa'), **asked)
    assert len(result.warnings) == 1
    expected = llm.chat(past({"INVALID_JSON": '{"a": "Pa'}), **asked)
    assert (result.prompt_tokens, result.token_ids) == (expected.prompt_tokens, expected.token_ids)
    for empty in ("", " ", None, "{}"):
        found = llm.chat(past(empty), **asked)
        assert (found.prompt_tokens, found.warnings) == (llm.chat(past({}), **asked).prompt_tokens, ())


def test_the_documentation_names_every_tool_format() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "tools.md").read_text()
    assert [name for name in FORMATS if f"`{name}`" not in text] == []


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a schema of small values with keywords that forbid more if another keyword is removed."""
    if depth == 0:
        return rng.choice([True, {"type": "integer"}, {"const": 1}, {"type": "string"}, {"enum": [1, "a"]}])

    def inner() -> Any:
        return random_schema(rng, depth - 1)

    words: dict[str, Any] = {
        "not": inner(), "if": inner(), "then": inner(), "else": inner(), "oneOf": [inner(), inner()],
        "anyOf": [inner(), inner()], "allOf": [inner()], "properties": {"a": inner(), "not": inner()},
        "patternProperties": {"^b": inner()}, "additionalProperties": rng.choice([False, inner()]),
        "unevaluatedProperties": False, "items": inner(), "prefixItems": [inner()], "unevaluatedItems": False,
        "contains": inner(), "minContains": 0, "maxContains": 1, "$ref": "#/$defs/d", "required": ["a"],
    }  # fmt: skip
    return {word: words[word] for word in rng.sample(sorted(words), rng.randint(1, 4))}


def places_in(value: Any, pointer: str) -> list[str]:
    """Return the pointers of all keywords and schemas, and of the names and indices between them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in (f"{pointer}/{key}", *places_in(each, f"{pointer}/{key}"))]


VALUES: list[Any] = [1, "a", None, [], [1], ["a", 1], [1, 1], {}, {"a": 1}, {"a": "a"}, {"b": 1}, {"not": 1, "b": "a"},
                     {"c": None}, {"a": {"a": 1}}, {"a": [1]}, {"a": 1, "c": 2}]  # fmt: skip


def accepted(schema: BuiltSchema) -> list[Any]:
    """Return the values that the compiled schema allows."""
    source, values = schema_source(llguidance, schema.text).text, list[Any]()
    matcher = llguidance.LLMatcher(BYTES, source, log_level=0, limits=llguidance_limits(llguidance, source))
    for value in VALUES:
        each, text = matcher.deep_copy(), json.dumps({"a": value}).encode()
        if each.try_consume_tokens([*text]) == len(text) and each.is_accepting():
            values.append(value)
    return values


@pytest.mark.slow(cases=10, rest=8)
@pytest.mark.parametrize("seed", range(usual_or_all(40, 1_000)))
def test_a_tool_s_schema_names_what_it_does_not_enforce_and_never_forbids_more(seed: int) -> None:
    """Parts are left out because no grammar enforces them, then also each part for another reason."""
    rng, follow = random.Random(seed), llguidance_follow(llguidance)
    definition = {word: value for word, value in random_schema(rng, 1).items() if word != "$ref"}
    given = {"$defs": {"d": definition}, "properties": {"a": random_schema(rng, 2)}}
    text, is_valid = json.dumps({"type": "object", **given}), Draft202012Validator(given).is_valid
    searches = [
        SchemaSearch(Grammar(kind, text), None, lambda each: follow(schema_source(llguidance, each)), math.inf)
        for kind in ("tool_schema", "json_schema")
    ]
    schema, valid = searches[0].run(), [value for value in VALUES if is_valid({"a": value})]
    left_out, allowed = schema.omissions.noted, accepted(schema)
    with pytest.raises(InvalidRequestError) if left_out else nullcontext():
        searches[1].run()
    assert [value for value in allowed if value in valid or not left_out] == valid
    for place in places_in(given, "")[1:]:
        omissions = Omissions(is_of_tool=True, wanted=schema.omissions.wanted | {place: LeftOut("")})
        allowed = accepted(build_schema(text, omissions=omissions))
        assert all(value in allowed for value in valid), place


def test_a_batch_takes_such_tools_and_such_calls(llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": [tool(BAD["uniqueItems"][0])], "tool_choice": "f", "tool_format": "hermes"}
    with warnings.catch_warnings(action="ignore"):
        first, second = llm.generate_all([ASKED, past('{"a": ')], [asked | {"seed": 1, **SAMPLED}] * 2)
    assert (len(first.tool_calls), len(second.tool_calls)) == (1, 1)
    assert ["uniqueItems" in said for said in first.warnings] == [True]
    assert ["INVALID_JSON" in said for said in second.warnings] == [False, True]
    assert json.loads(json.dumps(second.to_json()))["warnings"] == list(second.warnings)
