"""JSON schemas of every draft, as people write them: valid values are accepted, and invalid ones are not."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from byte_tokenizer import EOS, write_byte_tokenizer
from constraint_walks import walk
from infer import InvalidRequestError, Tokenizer
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.json_schema import build_schema
from infer.text.grammar.patterns import pattern_without, translated

NULL, OBJECT = {"type": "null"}, {"type": "object"}
CLOSED = {**OBJECT, "additionalProperties": False}
KV = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": {"type": "integer"}}}
# By name: a schema, valid values, and invalid values.
SCHEMAS = json.loads((Path(__file__).parents[2] / "data" / "json-schemas.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, 300)


def orders_of(value: Any) -> Iterator[str]:
    """Yield the texts of a value with its outermost properties in every order."""
    if isinstance(value, dict) and 1 < len(value) < 4:
        for names in (list(value), list(value)[::-1]):
            yield json.dumps({name: value[name] for name in names}, ensure_ascii=False)
    else:
        yield json.dumps(value, ensure_ascii=False)


def grammar_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def accepts(compiler: Compiler, schema: Any, value: Any) -> bool:
    texts, grammar = map(str.encode, orders_of(value)), grammar_of(schema)
    return any(compiler.compile(grammar).accept([*text, EOS]) > len(text) for text in texts)


def warnings_of(compiler: Compiler, schema: Any) -> tuple[str, ...]:
    compiler.compile(grammar_of(schema))
    return compiler.warnings_of(grammar_of(schema))


@pytest.mark.parametrize("name", SCHEMAS)
def test_only_valid_values_can_be_written(compiler: Compiler, name: str) -> None:
    schema, valid, invalid = SCHEMAS[name].values()
    oracle = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value, is_valid in [*((value, True) for value in valid), *((value, False) for value in invalid)]:
        if "\\p{" not in json.dumps(schema).replace("\\\\", "\\") and "classes of another" not in name:
            assert oracle.is_valid(value) == is_valid, (value, "by jsonschema")
        assert accepts(compiler, schema, value) == is_valid, value


REFUSED = {
    '{"type": "array", "items": {"type": "array", "uniqueItems": true}}': "at /items: 'uniqueItems'",
    '{"properties": {"a": {"contains": {"type": "null"}}}}': "at /properties/a: 'contains'",
    '{"contains": true}': "at /: 'contains'",
    "[1]": r"at /: a schema must be an object, true or false, got \[1\]",
    '{"not": {"pattern": "a.*b"}}': "at /not: the negation of 'pattern'",
    '{"not": {"items": {"type": "string"}}}': "at /not: the negation of 'items'",
    '{"not": {"type": "integer"}}': "at /not: the negation of the type 'integer'",
    '{"not": {"const": [1]}}': "at /not: the negation of an 'enum' of lists and objects",
    '{"items": {"not": {"multipleOf": 3}}}': "at /items/not: the negation of 'multipleOf'",
    '{"if": {"minimum": 3}, "then": {"maximum": 5}}': "at /if: the negation of 'minimum'",
    '{"oneOf": [{"pattern": "^.a"}, {"pattern": "^.b"}]}': "at /: branches 0 and 1 of 'oneOf' may both hold",
    '{"unevaluatedProperties": false}': "at /: 'unevaluatedProperties' cannot be enforced",
    '{"propertyNames": {"format": "email"}}': "at /: 'propertyNames' can be enforced only",
    '{"$schema": "http://json-schema.org/draft-03/schema#"}': "at /\\$schema: draft 3 is not supported",
    '{"items": {"pattern": "a(?=b)"}}': "at /items: pattern, column 2: look-around",
    '{"items": {"pattern": "(a)\\\\1"}}': "at /items: pattern, column 4: back references",
    '{"items": {"pattern": "[z-a]"}}': "at /items: regex parse error",
    '{"items": {"patternProperties": {"a": {}, "b": {"type": "null"}}}}': "at /items: patternProperty regexes",
    '{"items": {"not": {"const": 1e999}}}': "at /items/not: a number is larger",
    '{"items": {"const": 9007199254740993}}': "at /items: the number 9007199254740993",
    '{"properties": {"a": {"$ref": "http://example.com/a"}}}': "at /properties/a: '\\$ref' must stay in the schema",
    '{"type": "string", "minLength": 200000}': "at /: no value shorter than 100000 bytes",
    '{"required": ["a"], "type": "object", "properties": {"a": {"pattern": "^a", "const": "b"}}}': "at /",
    '{"x-strict": 0, "contains": true}': "at /x-strict: must be true or false",
    '{"x-strict": null, "contains": true}': "at /x-strict: must be true or false",
    '{"x-strict": "false", "contains": true}': "at /x-strict: must be true or false",
    '{"x-strict": true, "oneOf": [{"pattern": "a"}, {"pattern": "b"}]}': "at /: .* may both hold: use 'anyOf'",
    # Malformed and unsatisfiable schemas are refused even if they are not strict.
    '{"x-strict": false, "type": "strin"}': ".*must be",
    '{"x-strict": false, "type": "object", "properties": {"a": {"minLength": "3"}}}': ".*must be",
    '{"x-strict": false, "required": "a"}': ".*must be",
    '{"x-strict": false, "anyOf": []}': ".*must not be empty",
    '{"x-strict": false, "properties": {"a": "string"}}': ".*a schema must be an object",
    '{"x-strict": false, "$ref": "#/$defs/a"}': ".*leads to no schema",
    '{"x-strict": false, "enum": []}': ".*(no value can fulfil it|nsatisfiable)",
    '{"x-strict": false, "type": "string", "minLength": 5, "maxLength": 2}': ".*(can fulfil it|nsatisfiable)",
    r'{"type": "string", "pattern": "^\\ud83dx$"}': ".*column 2: half of a surrogate pair is no character",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_begins_with_its_place(compiler: Compiler, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"\Ajson_schema {REFUSED[text]}[^\n]*\Z"):
        compiler.compile(Grammar("json_schema", text))


def test_words_that_assert_nothing_are_named_in_one_warning(compiler: Compiler) -> None:
    words = {"x-order": 1, "javaType": "a.B", "links": [], "example": 3, "version": "1", "self": {}, "maxLenght": 3}
    words |= {"contentEncoding": "base64", "contentMediaType": "application/json"}
    schema = {"type": "string", "format": "mongo-id", "title": "t", "$comment": "c", **words}
    (message,) = warnings_of(compiler, schema)
    assert message.startswith("json_schema: ignored")
    assert "\n" not in message
    assert all(word in message for word in [*words, "format 'mongo-id'", "did you mean 'maxLength'?"])
    assert "title" not in message
    assert warnings_of(compiler, {"type": "string"}) == ()


def test_a_schema_of_a_megabyte_is_read(compiler: Compiler) -> None:
    schema = {"enum": [f"{index:090}" for index in range(10_000)]}
    assert 900_000 < len(json.dumps(schema)) < 1 << 20
    assert accepts(compiler, schema, f"{9_999:090}")


names = st.sampled_from(["a", "b", "c"])
leaves = st.sampled_from(
    [
        *({"type": "string"}, {"type": "integer"}, {"const": "x"}, {"enum": ["x", "y"]}, {"enum": [1, None]}, {}),
        *({"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}, {"type": ["boolean", "null"]}),
    ]
)
objects = st.builds(
    lambda properties, required, closed: {
        "type": "object",
        "properties": properties,
        "required": sorted(required),
        **({"additionalProperties": False} if closed else {}),
    },
    st.dictionaries(names, leaves, max_size=3),
    st.sets(names, max_size=2),
    st.booleans(),
)
parts = st.one_of(leaves, objects, st.builds(lambda name: {"required": [name]}, names))
hard = st.one_of(
    st.builds(lambda a, b: {"oneOf": [a, b]}, parts, parts),
    st.builds(lambda a: {"not": a}, parts),
    st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, parts, parts, parts),
    st.builds(lambda a, b: {"dependentRequired": {a: [b]}}, names, names),
    st.builds(lambda a, b: {"dependentSchemas": {a: b}}, names, parts),
    st.builds(lambda a, b: {"minProperties": a, "maxProperties": b}, st.integers(0, 2), st.integers(2, 3)),
    st.builds(lambda names: {"propertyNames": {"enum": sorted(names)}}, st.sets(names, min_size=1)),
)
schemas = st.builds(lambda base, one, two: {**base, "allOf": [one, two]}, st.one_of(objects, leaves), hard, hard)
values = st.one_of(
    st.sampled_from(["", "x", "y", "abc", 1, 3, 0, None, True, [], {}]),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(["x", "zzz", 1, 5, None, True]), max_size=3),
)


def has_a_name_twice(text: str) -> bool:
    found = list[bool]()
    json.loads(text, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)))
    return any(found)


@settings(max_examples=60, deadline=None)
@example(schema={"type": "object", "allOf": [{"minProperties": 2, "maxProperties": 2}]}, tried=[], seed=659010)
@given(schema=schemas, tried=st.lists(values, max_size=6), seed=st.integers(0, 1 << 30))
def test_rewritten_keywords_have_the_same_meaning(
    compiler: Compiler, tokenizer: Tokenizer, schema: Any, tried: list[Any], seed: int
) -> None:
    """Texts of random choices are valid, unless a free name appears twice, and valid values are accepted."""
    oracle = jsonschema.Draft202012Validator(schema)
    try:
        constraint = compiler.compile(grammar_of(schema))
    except InvalidRequestError as error:
        constraint, problem = None, str(error)
    if constraint is None:
        assert problem.startswith("json_schema at /")
        assert not re.search("can fulfil|nsatisfiable", problem) or not any(map(oracle.is_valid, tried))
        return
    written = walk(constraint, tokenizer, 300, random.Random(seed))
    if not has_a_name_twice(written):
        oracle.validate(json.loads(written))
    for value in tried:
        is_accepted = accepts(compiler, schema, value)
        if is_accepted or not (isinstance(value, dict) and len(value) > 2):  # whose order may be another
            assert oracle.is_valid(value) == is_accepted, value


@settings(max_examples=60, deadline=None)
@given(schema=schemas, tried=st.lists(values, max_size=6))
def test_a_schema_that_is_not_strict_never_forbids_more(compiler: Compiler, schema: Any, tried: list[Any]) -> None:
    loose = {"x-strict": False, **schema}
    for value in filter(jsonschema.Draft202012Validator(schema).is_valid, tried):
        if not (isinstance(value, dict) and len(value) > 2):  # whose order may be another
            assert accepts(compiler, loose, value), value


@given(texts=st.lists(st.text('ab"\\ é', max_size=4), max_size=6), tried=st.text('ab"\\ é', max_size=5))
def test_a_pattern_allows_all_except_the_excluded_texts(texts: list[str], tried: str) -> None:
    pattern = pattern_without(texts)
    assert pattern is not None
    python = re.sub(r"\\x\{(\w+)\}", lambda match: re.escape(chr(int(match[1], 16))), pattern)
    assert bool(re.fullmatch(python, tried)) == (tried not in texts)


FORMATTED = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31"]),
    "time": (["23:59:60Z", "23:59:60+00:00", "12:00:00.5+01:00"], ["12:00:60Z", "24:00:00Z", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29"]),
    "ipv4": (["0.0.0.0", "255.10.1.99"], ["256.1.1.1", "1.1.1", "01.1.1.1", "1.1.1.1.1"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8"],
        ["1:2:3:4:5:6:7", ":1", "1::2::3", "::12345", "1:2:3:4:5:6:7:8::"],
    ),
    "hostname": (["a-b.example", "x", "a1"], ["-a", "a-", "a..b", "a_b", "xn--x", ".".join(["a" * 63] * 4)]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8-aa08-aa98-11ea-b4aa73b44-1d16380", "x"]),
    "email": (["a.b@c.d"], ["2962", "a@", "@b", "a b@c"]),
    "duration": (["P4DT12H30M5S", "P4W"], ["P", "P1YT", "P1D2H", "P1Y2W"]),
    "uri": (["http://x/?a#b", "urn:a"], ["/abc", "a b:c", "\\x"]),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_a_format_lets_through_valid_texts_only(compiler: Compiler, name: str) -> None:
    valid, invalid = FORMATTED[name]
    for text in [*valid, *invalid]:
        assert accepts(compiler, {"type": "string", "format": name}, text) == (text in valid), text


# Texts that each pattern matches and does not match, as Node.js says.
ECMA = {
    "^.$": ("a\u00a0\u0085\U0001f600", "\n\r\u2028\u2029"),
    r"^\s$": (" \t\n\v\f\r\u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff", "a\u0085\u200b\u180e"),
    r"^\S$": ("a\u0085\u200b", " \n\u2028\ufeff"),
    r"^[\s]$": (" \u2028\ufeff", "a\u0085"),
    r"^[\s-]$": (" -\ufeff", "a\u0085"),
    r"^[^\s]$": ("a\u0085", " \u2028\ufeff"),
    r"^[\S\n]$": ("a\u0085\n", " \ufeff"),
    r"^[^\S]$": (" \u2028\ufeff", "a\u0085"),
    r"^[\s\S]$": ("a \n\u0085\ufeff", ""),
    r"^[\w.]$": ("a_0.", "\u00e9\u017f-"),
    r"^[^\w]$": ("\u00e9\u212a-", "aZ_"),
    r"^\d$": ("7", "\u0663a"),
    r"^\D$": ("\u0663a", "7"),
    r"^[.]$": (".", "a"),
    r"^\ud83d\ude00$": ("\U0001f600", "a\U0001f601"),
    r"^[\ud83d\ude00-\uD83D\uDE4F]$": ("\U0001f600\U0001f64f", "a\U0001f650"),
    r"^[^\u{1f600}]$": ("a\U0001f601", "\U0001f600"),
    r"^\cJ$": ("\n", "J"),
}


@pytest.mark.parametrize("pattern", ECMA)
def test_classes_of_a_pattern_are_those_of_ecma_262(compiler: Compiler, pattern: str) -> None:
    inside, outside = ECMA[pattern]
    for text in inside + outside:
        found = accepts(compiler, {"type": "string", "pattern": pattern}, text)
        assert found == (text in inside), ascii(text)


@pytest.mark.parametrize("bound", [{"minimum": 1e18}, {"exclusiveMinimum": 10**30}, {"maximum": -(10**18)}])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_a_bound_that_leaves_no_enforceable_number_is_refused_in_our_words(bound: dict[str, Any], kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="leaves only numbers beyond 10\\^18, which no grammar can enforce"):
        build_schema(json.dumps({"type": kind, **bound}))


def test_the_first_items_of_an_array_have_lengths_of_their_own() -> None:
    array = {"type": "array", "prefixItems": [NULL], "items": {"type": "string", "minLength": 60_000}}
    build_schema(json.dumps(array | {"minItems": 2}))
    with pytest.raises(InvalidRequestError, match="no value shorter than 100000 bytes"):
        build_schema(json.dumps(array | {"minItems": 3}))


def test_building_leaves_patterns_readable() -> None:
    assert translated("^a,b/c$") == "^a,b/c$"
    assert json.loads(build_schema('{"type": "string", "pattern": "^a$"}').text) == {"type": "string", "pattern": "^a$"}


def test_the_depth_of_a_schema_costs_no_stack() -> None:
    for depth in (30, 63, 64, 65, 10_000):
        for opening, closing in (('{"not":', "}"), ('{"anyOf":[', "]}"), ('{"items":', "}"), ('{"if":', "}")):
            with suppress(InvalidRequestError):
                build_schema(opening * depth + "{}" + closing * depth)


BEYOND: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "/oneOf": ({"oneOf": [{"type": "string", "pattern": letter} for letter in "ab"]}, ["a", "b", "ab"], ["c"]),
    "/uniqueItems": ({"type": "array", "items": NULL, "uniqueItems": True}, [[None, None]], [[1]]),
    "/contains": ({"type": "array", "contains": {"const": 1}}, [[], [2]], [1]),
    "/not": ({"type": "string", "not": {"pattern": "a"}}, ["a"], [1]),
    "/if": ({"if": {"pattern": "a"}, "then": {"maxLength": 1}, "type": "string"}, ["ab"], [1]),
    "/pattern": ({"type": "string", "pattern": "(?=a)b", "maxLength": 1}, ["a"], ["ab"]),
    "/patternProperties/(?=a)": ({"patternProperties": {"(?=a)": NULL}, **CLOSED}, [{"a": 1}, {"b": 1}], [[]]),
    "/propertyNames": ({**OBJECT, "propertyNames": {"format": "email"}}, [{"a": 1}], [1]),
    "/items/$ref": ({"items": {"$ref": "http://example.com", "type": "null"}, "type": "array"}, [[None]], [[1]]),
    "/unevaluatedProperties": ({**KV, "unevaluatedProperties": False}, [{"a": 1}], [{"v": ""}]),
    "/properties": ({**OBJECT, "properties": {str(i): {"type": "null"} for i in range(257)}}, [{"1": 1}], [1]),
    "/minProperties": ({**KV, "minProperties": 2}, [{}], [{"k": 1}]),
    "/patternProperties": ({"patternProperties": {"a": NULL, "b": {}}, **CLOSED}, [{"ab": 1}, {"c": 1}], [1]),
}


@pytest.mark.parametrize("place", BEYOND)
def test_a_schema_that_is_not_strict_drops_unenforceable_keywords(compiler: Compiler, place: str) -> None:
    schema, allowed, forbidden = BEYOND[place]
    with pytest.raises(InvalidRequestError):
        compiler.compile(grammar_of(schema))
    loose = {"x-strict": False, **schema}
    (message,) = warnings_of(compiler, loose)
    assert place in message
    assert re.fullmatch(".*left out: .*", message)
    assert all(accepts(compiler, loose, value) for value in allowed)
    assert not any(accepts(compiler, loose, value) for value in forbidden)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"patternProperties": {r"^\u0061": NULL}}, [r"\u0061", r"\u0061b"]),
        ({"patternProperties": {r"^\u0061": NULL}, "properties": {"b": NULL}}, [r"\u0061", r"\u0062"]),
        ({"properties": {"b": NULL}, "additionalProperties": {"anyOf": [{"const": 1}, {"const": 2}]}}, [r"\u0062"]),
    ],
)
def test_an_escape_spells_no_name_that_has_a_schema_of_its_own(
    compiler: Compiler, schema: dict[str, Any], names: list[str]
) -> None:
    def is_whole(text: str) -> bool:
        return compiler.compile(grammar_of({**OBJECT, **schema})).accept([*text.encode(), EOS]) > len(text)

    for name in names:
        assert not is_whole(f'{{"{name}": 1}}'), name
    assert is_whole('{"c": 1}')
    assert is_whole('{"\\n": 1}')


def test_a_name_of_two_places_is_refused(compiler: Compiler) -> None:
    parts = {"a": {"$anchor": "x", **NULL}, "b": {"$anchor": "x"}, "c": {"$anchor": "y", **NULL}}
    with pytest.raises(InvalidRequestError, match="'\\$ref' must stay in the schema"):
        compiler.compile(grammar_of({"$defs": parts, "$ref": "#x"}))
    assert compiler.compile(grammar_of({"$defs": parts, "$ref": "#y"})).forced()
