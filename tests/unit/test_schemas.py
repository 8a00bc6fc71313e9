"""JSON schemas as people write them, of every draft: what is valid is accepted, what is not is refused."""

import json
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from byte_tokenizer import write_byte_tokenizer
from constraint_walks import walk
from infer.errors import InvalidRequestError, SchemaWarning
from infer.grammar.compiler import Compiler, make_compiler
from infer.grammar.grammar import Grammar
from infer.grammar.schema import build_schema
from infer.grammar.schema_excluded import pattern_without
from infer.grammar.schema_formats import FORMAT_PATTERNS
from infer.grammar.schema_logic import Logic
from infer.grammar.schema_node import Node
from infer.grammar.schema_pattern import translated
from infer.tokenizer import Tokenizer

D3, D4, D7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 7))
CAT = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"properties": {"kind": {"const": "dog"}, "breed": {"type": "string"}}, "required": ["kind"]}
CONDITION = {"if": {"properties": {"k": {"const": "x"}}, "required": ["k"]}, "then": {"required": ["v"]}}
OBJECT = {"type": "object"}
KV = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": {"type": "integer"}}}
ARRAYS = [{"type": "array", "items": {"type": kind}} for kind in ("string", "integer")]
MAPS = [{"type": "object", "additionalProperties": {"type": kind}} for kind in ("string", "integer")]
NAMED_MAPS = [
    {"type": "object", "patternProperties": {"^x": {"type": kind}}, "additionalProperties": False}
    for kind in ("string", "integer")
]
LISTS = {
    name: {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}, name: {"type": "integer"}}}
    for name in ("a", "b")
}
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "oneOf, by type": ({"oneOf": [{"type": "null"}, {"type": "string"}]}, [None, "a"], [1, []]),
    "oneOf, by a constant": ({**OBJECT, "oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}], [{"kind": "cow"}, {}]),
    "oneOf, by required names": (
        {**KV, "oneOf": [{"required": ["k"]}, {"required": ["v"]}]},
        [{"k": "x"}, {"v": 1}],
        [{}, {"k": "x", "v": 1}],
    ),
    "oneOf, one inside the other": (
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string"}]},
        ["abc"],
        ["ab", 3],
    ),
    "oneOf, closed objects": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}, {"c": 1}],
    ),
    "oneOf, by ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"minimum": 7, "type": "integer"}]},
        [3, 7],
        [5],
    ),
    "oneOf, arrays of other items": ({"oneOf": ARRAYS}, [["a"], [1, 2]], [[], ["a", 1], "a"]),
    "oneOf, maps of other values": ({"oneOf": MAPS}, [{"a": "x"}, {"a": 1, "b": 2}], [{}, {"a": "x", "b": 1}]),
    "oneOf, maps by pattern": ({"oneOf": NAMED_MAPS}, [{"xa": "x"}, {"x": 1}], [{}, {"a": 1}, {"x": None}]),
    "not, of what holds anyway": (
        {
            **OBJECT,
            "properties": {"k": {"type": "string", "pattern": "^x.*y$"}, "v": {"enum": [1, 2]}},
            "required": ["k", "v"],
            "not": {"properties": {"k": {"pattern": "^x.*y$"}, "v": {"const": 1}}},
        },
        [{"k": "xy", "v": 2}],
        [{"k": "xy", "v": 1}, {"k": "x", "v": 2}],
    ),
    "not, of constants": ({"type": "string", "not": {"enum": ["ab", "a", 'q"']}}, ["", "b", "abc"], ["ab", "a", 'q"']),
    "not, of names": ({**OBJECT, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"c": 1}], [{"a": 1, "b": 2}]),
    "not, of types": ({"not": {"type": ["object", "string"]}}, [1, [], None], [{}, ""]),
    "not, of a number": ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
    "not, of not": ({"not": {"not": {"type": "boolean"}}}, [True], [1]),
    "if, then": ({**KV, **CONDITION}, [{"k": "x", "v": 1}, {"k": "y"}, {}], [{"k": "x"}]),
    "if, then, else": (
        {**KV, **CONDITION, "else": {"properties": {"v": False}}},
        [{"k": "x", "v": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "v": 1}],
    ),
    "several ifs": (
        {
            **KV,
            "required": ["k"],
            "allOf": [
                {"if": {"properties": {"k": {"const": name}}}, "then": {"properties": {"v": {"minimum": least}}}}
                for name, least in (("x", 5), ("y", 9))
            ],
        },
        [{"k": "x", "v": 5}, {"k": "y", "v": 9}, {"k": "y"}],
        [{"k": "x", "v": 4}, {"k": "y", "v": 8}, {"v": 9}],
    ),
    "dependentRequired": (
        {**KV, "dependentRequired": {"k": ["v"]}},
        [{}, {"v": 1}, {"k": "x", "v": 1}],
        [{"k": "x"}],
    ),
    "dependentSchemas": (
        {**KV, "dependentSchemas": {"k": {"properties": {"v": {"minimum": 3}}}}},
        [{"v": 1}, {"k": "x", "v": 3}],
        [{"k": "x", "v": 1}],
    ),
    "dependencies": ({"$schema": D7, **KV, "dependencies": {"k": ["v"]}}, [{"v": 1}, {}], [{"k": "x"}]),
    "unique constants": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["b"], ["c", "a", "b"]],
        [["a", "a"], ["d"]],
    ),
    "contains, few": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}, "maxItems": 3},
        [[7], [1, 7], [1, 2, 7]],
        [[], [1, 2, 3]],
    ),
    "contains, counted": (
        {"type": "array", "contains": {"type": "null"}, "minContains": 1, "maxContains": 1, "maxItems": 2},
        [[None], [None, 1], [1, None]],
        [[], [None, None], [1, 1]],
    ),
    "contains and unique": (
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "contains": {"const": 2}},
        [[2], [1, 2], [2, 1]],
        [[], [1], [2, 2]],
    ),
    "propertyNames, a pattern": ({**OBJECT, "propertyNames": {"pattern": "^x"}}, [{}, {"xa": 1}], [{"a": 1}]),
    "propertyNames, constants": ({**OBJECT, "propertyNames": {"enum": ["a", "b"]}}, [{"b": 1}], [{"c": 1}]),
    "propertyNames, lengths": ({**OBJECT, "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "additionalItems": (
        {"$schema": D7, "type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}},
        [[], [None], [None, 1, 2]],
        [[1], [None, "a"]],
    ),
    "no additionalItems": (
        {"$schema": D4, "type": "array", "items": [{}, {}], "additionalItems": False},
        [[], [1, 2]],
        [[1, 2, 3]],
    ),
    "exclusive bounds of draft 4": (
        {"$schema": D4, "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        [4],
        [3, 2],
    ),
    "draft 3": (
        {
            "$schema": D3,
            "type": "object",
            "properties": {"a": {"type": "integer", "divisibleBy": 3, "required": True}, "b": {"disallow": "string"}},
            "extends": {"properties": {"b": {"type": "any"}}},
        },
        [{"a": 3}, {"a": 6, "b": 1}],
        [{}, {"a": 4}, {"a": 3, "b": ""}],
    ),
    "a pattern for all names": (
        {**OBJECT, "patternProperties": {".*": {"type": "integer"}, "^x": {"minimum": 5}}},
        [{"a": 1}, {"x": 5}],
        [{"x": 1}, {"a": ""}],
    ),
    "minProperties beside optional ones": (
        {**KV, "minProperties": 1},
        [{"k": "x"}, {"v": 1}, {"other": 1}],
        [{}],
    ),
    "maxProperties beside optional ones": ({**KV, "maxProperties": 1}, [{}, {"v": 1}, {"z": 1}], [{"k": "x", "v": 1}]),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"b": {"type": "null"}}}], **KV, "unevaluatedProperties": False},
        [{"b": None, "k": "x"}],
        [{"c": 1}],
    ),
    "references with siblings": (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "maximum": 3},
        [3],
        [4, "a"],
    ),
    "references hide siblings in draft 7": (
        {
            "$schema": D7,
            "definitions": {"n": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/definitions/n", "maximum": 3}},
        },
        [{"a": 4}],
        [{"a": ""}],
    ),
    "identifiers and anchors": (
        {
            "$id": "https://example.com/root",
            "$defs": {"a": {"$id": "part", "$defs": {"b": {"$anchor": "here", "type": "null"}}}},
            "type": "array",
            "items": {"$ref": "part#here"},
            "prefixItems": [{"$ref": "#/$defs/a/$defs/b"}],
        },
        [[None, None]],
        [[1]],
    ),
    "recursion": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "references to anywhere": (
        {"components": {"x": {"type": "null"}}, "anyOf": [{"$ref": "#/components/x"}]},
        [None],
        [1],
    ),
    "a false definition": (
        {"$defs": {"no": {"enum": []}, "f": False}, **OBJECT, "properties": {"a": {"$ref": "#/$defs/f"}}},
        [{}, {"b": 1}],
        [{"a": 1}],
    ),
    "classes without a backslash": ({"type": "string", "pattern": '^[^\\\\"]+$'}, ["a/b"], ["a\\b", 'a"b']),
    "classes of another notation": ({"type": "string", "pattern": "^[[&&x{\\u0061\\-]+$"}, ["[&a-{x"], ["b"]),
    "classes of Unicode": ({"type": "string", "pattern": "^\\p{Lu}\\d$"}, ["É3"], ["é3"]),
    "references that must hold together": (
        {"$defs": LISTS, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        [{"next": {"next": {}}}, {"next": {"a": 1, "b": 2}}],
        [{"next": {"a": ""}}, {"next": {"b": ""}}, {"next": 1}],
    ),
    "a map beside a map of patterns": (
        {
            "$defs": {
                **LISTS,
                "map": {**OBJECT, "additionalProperties": {}, "patternProperties": {"^x": {"$ref": "#/$defs/a"}}},
            },
            "allOf": [{"$ref": "#/$defs/map"}, {"additionalProperties": {"$ref": "#/$defs/b"}}],
        },
        [{}, {"x": {"a": 1, "b": 1}}, {"y": {"b": 1, "a": ""}}],
        [{"x": {"a": ""}}, {"x": {"b": ""}}, {"y": {"b": ""}}, {"y": 1}],
    ),
    "a type beside choices that have it": (
        {
            "$defs": {**LISTS, "b": {"type": "object", "required": ["in"], "properties": {"in": {"$ref": "#"}}}},
            "type": ["object", "null"],
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        [{"a": 1}, {"a": "", "in": {"a": 1}}],
        [{"a": ""}, None, 1],
    ),
    "a bound that no float exceeds": ({"type": "integer", "minimum": -1.7976931348623157e308}, [5, -5], [""]),
    "words within a length": (
        {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500},
        ["word after word " * 12 + "and so on"],
        ["word " * 50 + "word", " word"],
    ),
    "a long bound": ({"type": "integer", "maximum": 9223372036854775807, "minimum": 0}, [5, 10**17], [-1]),
    "an unbounded length": ({"type": "string", "maxLength": 10**18}, ["a"], [1]),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return make_compiler(tokenizer, 300)


def orders_of(value: Any) -> Iterator[str]:
    """The texts of a value with its outermost properties in every order."""
    if isinstance(value, dict) and 1 < len(value) < 4:
        for names in (list(value), list(value)[::-1]):
            yield json.dumps({name: value[name] for name in names}, ensure_ascii=False)
    else:
        yield json.dumps(value, ensure_ascii=False)


def accepts(compiler: Compiler, tokenizer: Tokenizer, schema: Any, value: Any) -> bool:
    for text in orders_of(value):
        constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
        ids = [*text.encode(), min(tokenizer.eos_token_ids)]
        if constraint.accept(ids) == len(ids):
            return True
    return False


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.filterwarnings("ignore:json_schema. ignored")
def test_what_is_valid_is_written_and_nothing_else(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    oracle = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for value, is_valid in [*((value, True) for value in valid), *((value, False) for value in invalid)]:
        if "\\p{" not in json.dumps(schema).replace("\\\\", "\\") and "classes of another" not in name:
            assert oracle.is_valid(value) == is_valid, (value, "by jsonschema")
        assert accepts(compiler, tokenizer, schema, value) == is_valid, value


REFUSED = {
    '{"type": "array", "items": {"type": "array", "uniqueItems": true}}': "at /items: 'uniqueItems'",
    '{"properties": {"a": {"contains": {"type": "null"}}}}': "at /properties/a: 'contains'",
    "[1]": r"at /: a schema must be an object, true or false, got \[1\]",
    '{"not": {"pattern": "a.*b"}}': "at /not: what 'pattern' excludes",
    '{"not": {"items": {"type": "string"}}}': "at /not: what 'items' excludes",
    '{"items": {"not": {"multipleOf": 3}}}': "at /items/not: what 'multipleOf' excludes",
    '{"items": {"not": {"format": "email"}}}': "at /items/not: what 'format' excludes",
    '{"oneOf": [{"pattern": "^.a"}, {"pattern": "^.b"}]}': "at /oneOf: branches 0 and 1 can both hold",
    '{"items": {"pattern": "a(?=b)"}}': "at /items: pattern, column 2: look-around",
    '{"items": {"pattern": "(a)\\\\1"}}': "at /items: pattern, column 4: back references",
    '{"items": {"pattern": "[z-a]"}}': "at /items: regex parse error",
    '{"items": {"patternProperties": {"a": {}, "b": {"type": "null"}}}}': "at /items: patternProperty regexes",
    '{"items": {"const": 9007199254740993}}': "at /items: the number 9007199254740993",
    '{"properties": {"a": {"$ref": "http://example.com/a"}}}': "at /properties/a: '\\$ref' must stay in the schema",
    '{"type": "string", "minLength": 200000}': "at /: nothing shorter than 100000 bytes",
    '{"required": ["a"], "type": "object", "properties": {"a": {"pattern": "^a", "const": "b"}}}': "at /",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_begins_with_its_place(compiler: Compiler, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"\Ajson_schema {REFUSED[text]}[^\n]*\Z"):
        compiler.compile(Grammar("json_schema", text))


def test_words_that_assert_nothing_are_named_once_in_one_warning(compiler: Compiler) -> None:
    words = {"x-order": 1, "javaType": "a.B", "links": [], "example": 3, "version": "1", "self": {}, "maxLenght": 3}
    words |= {"contentEncoding": "base64", "contentMediaType": "application/json"}
    schema = json.dumps({"type": "string", "format": "mongo-id", "title": "t", "$comment": "c", **words})
    with pytest.warns(SchemaWarning, match="json_schema: ignored") as caught:
        compiler.compile(Grammar("json_schema", schema))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "\n" not in message
    assert all(word in message for word in [*words, "format 'mongo-id'", "did you mean 'maxLength'?"])
    assert "title" not in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.compile(Grammar("json_schema", schema))


def test_a_schema_of_a_megabyte_is_read(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"enum": [f"{index:090}" for index in range(10_000)]}
    assert 900_000 < len(json.dumps(schema)) < 1 << 20
    assert accepts(compiler, tokenizer, schema, f"{9_999:090}")


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
    st.builds(
        lambda least, most: {"minProperties": least, "maxProperties": most}, st.integers(0, 2), st.integers(2, 3)
    ),
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
def test_words_that_are_written_out_mean_what_they_meant(
    compiler: Compiler, tokenizer: Tokenizer, schema: Any, tried: list[Any], seed: int
) -> None:
    """Texts of random choices are valid, unless a free name comes twice, and valid values are accepted."""
    oracle = jsonschema.Draft202012Validator(schema)
    try:
        constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequestError as error:
        problem = str(error)
        constraint = None
    if constraint is None:
        assert problem.startswith("json_schema at /")
        if re.search("can fulfil|nsatisfiable", problem):
            assert not any(map(oracle.is_valid, tried))
        return
    written = walk(constraint, tokenizer, 300, random.Random(seed))
    if not has_a_name_twice(written):
        oracle.validate(json.loads(written))
    for value in tried:
        if accepts(compiler, tokenizer, schema, value):
            assert oracle.is_valid(value), value
        elif not (isinstance(value, dict) and len(value) > 2):  # whose order may be another
            assert not oracle.is_valid(value), value


@given(texts=st.lists(st.text('ab"\\ é', max_size=4), max_size=6), tried=st.text('ab"\\ é', max_size=5))
def test_a_pattern_lets_through_all_but_what_is_excluded(texts: list[str], tried: str) -> None:
    pattern = pattern_without(texts)
    assert pattern is not None
    python = re.sub(r"\\x\{(\w+)\}", lambda match: re.escape(chr(int(match[1], 16))), pattern)
    assert bool(re.fullmatch(python, tried)) == (tried not in texts)


FORMATTED = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31"]),
    "ipv4": (["0.0.0.0", "255.10.1.99"], ["256.1.1.1", "1.1.1", "01.1.1.1", "1.1.1.1.1"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4"],
        ["1:2:3:4:5:6:7", ":1", "1::2::3", "1:2:3:4:5:6:7:1.2.3.4", "::12345", "1:2:3:4:5:6:7:8::", "::1.2.3.04"],
    ),
    "color": (["#fff", "#00Ff00", "olive"], ["#ffff", "puce", "#ggg"]),
    "iri": (
        ["http://ƒøø.ßår/?∂éœ=πîx#πîüx", "urn:a", "http://[::1]:80/"],
        ["/abc", "a b:c", "http://2001:db8::1", "âππ"],
    ),
    "uri-template": (["a/{b}{?c,d*,e:30}", "{+x}", ""], ["{", "a}", "{}", "{a,}", "{v:0}", "{v:10000}", "a b"]),
    "idn-hostname": (["실례.테스트", "a-b.c", "straße"], ["", "-a", "a..b", "〮한국", "a b"]),
    "idn-email": (["실례@실례.테스트", "a.b@c.d"], ["2962", "a@", "@b", "user＠example.com", "a b@c"]),
    "time": (["23:59:60Z", "23:59:60+00:00", "12:00:00.5+01:00"], ["12:00:60Z", "24:00:00Z", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29"]),
    "hostname": (["a-b.example", "x", "a1"], ["-a", "a-", "a..b", "ab--c", "a_b"]),
    "json-pointer": (["", "/a~0b/~1"], ["a", "/~2", "/~"]),
    "uri-reference": (["a/b", "//h/p?q#f", "http://x", ""], ["://", "a b", "\\x"]),
    "regex": (
        ["^[a-z]+$", "a|b{2}", "(ab)*", "a{3,16}", "a{0,3}b{12,34}"],
        ["[", "(", "a**", "{1", "a{16,3}", "a{5,4}"],
    ),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_a_format_lets_through_valid_texts_only(name: str) -> None:
    valid, invalid = FORMATTED[name]
    for text in [*valid, *invalid]:
        assert bool(re.search(FORMAT_PATTERNS[name], text)) == (text in valid), text


def test_a_color_is_a_format_of_draft_3_only() -> None:
    for draft, is_known in ((D3, True), (D4, False)):
        built = build_schema(json.dumps({"$schema": draft, "type": "string", "format": "color"}))
        assert ("format 'color'" in built.ignored, "olive" in built.text) == (not is_known, is_known)


def test_equal_references_in_maps_are_one_reference() -> None:
    """jreleaser's schema has 52 such places, one inside the other: intersecting them took a compiler two seconds."""
    parts = {"map": {**OBJECT, "additionalProperties": {"$ref": "#/$defs/a"}}, "a": LISTS["a"]}
    both = {
        "allOf": [{"$ref": "#/$defs/map"}, {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/a"}}]
    }
    built = build_schema(json.dumps({"$defs": parts, **both}))
    assert "allOf" not in built.text


def test_choices_that_lead_to_the_same_parts_in_another_order_are_compared_once() -> None:
    choices = [
        Node("", {"anyOf": [Node("", {"properties": {name: Node("", {"const": value})}}) for value in (0, 1)]})
        for name in "abcdefg"
    ]
    logic = Logic({}, 30_000)
    one = Node("", {"allOf": [Node("", {"type": ["object"], "required": ["a"]}), *choices]})
    assert not logic.are_disjoint([one], [Node("", {"type": ["object"]})])
    assert logic.steps_left > 20_000  # below 0 where each order is tried


def test_building_leaves_patterns_readable() -> None:
    assert translated("^a.b/c$") == "^a.b/c$"
    assert json.loads(build_schema('{"type": "string", "pattern": "^a$"}').text) == {"type": "string", "pattern": "^a$"}


def test_the_depth_of_a_schema_costs_no_stack() -> None:
    for depth in (30, 63, 64, 65, 10_000):
        for opening, closing in (('{"not":', "}"), ('{"anyOf":[', "]}"), ('{"items":', "}"), ('{"if":', "}")):
            with suppress(InvalidRequestError):
                build_schema(opening * depth + "{}" + closing * depth)


def test_equal_parts_are_written_once() -> None:
    address = {"type": "object", "properties": {"street": {"type": "string", "pattern": "^[a-z]+$"}}}
    schema = {"type": "object", "properties": {"a": address, "b": address, "c": {"type": "array", "items": address}}}
    built = build_schema(json.dumps(schema))
    assert (built.text.count("street"), built.short_text.count("street")) == (3, 1)


def test_a_part_that_leads_back_is_not_shared() -> None:
    part = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    built = build_schema(json.dumps({"type": "object", "properties": {"a": part, "b": part}}))
    assert "shared" not in built.short_text


def test_equal_optional_parts_that_nothing_fulfils_are_left_out(compiler: Compiler) -> None:
    part = {"type": "string", "pattern": "^a$", "minLength": 2}
    schema = {"type": "object", "properties": {"a": part, "b": part}, "additionalProperties": False}
    constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert constraint.forced() == list(b"{}")


OVERLAPPING = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}


def test_a_one_of_that_is_refused_names_the_word_that_takes_it_as_any_of(compiler: Compiler) -> None:
    with pytest.raises(InvalidRequestError, match=r'can both hold.*"x-oneOf": "anyOf" at the top'):
        compiler.compile(Grammar("json_schema", json.dumps(OVERLAPPING)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.compile(Grammar("json_schema", json.dumps({"x-oneOf": "anyOf", **OVERLAPPING})))


def test_one_of_is_taken_as_any_of_in_one_way_only() -> None:
    with pytest.raises(InvalidRequestError, match="at /x-oneOf: must be 'anyOf', got 'any'"):
        build_schema(json.dumps({"x-oneOf": "any", **OVERLAPPING}))


def test_an_id_inside_a_word_of_nobody_hides_no_other(compiler: Compiler) -> None:
    for names in (("a", "b", "c"), ("c", "b", "a")):
        inside = {"words": [{"$id": "https://schemas/own", "type": "null"}]}
        parts = {
            names[0]: inside,
            names[1]: {"$id": "https://schemas/own", "type": "string"},
            names[2]: {"not": inside},
        }
        text = json.dumps({"$defs": parts, "$ref": "https://schemas/own"})
        assert compiler.compile(Grammar("json_schema", text)).forced() == list(b'"')


def test_an_authority_has_one_at_sign() -> None:
    pattern = re.compile(FORMAT_PATTERNS["uri-reference"])
    assert pattern.fullmatch("//a@b.c/@")
    assert not pattern.fullmatch("//a@b@c/")
