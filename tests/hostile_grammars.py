"""Schemas, patterns, grammars and choices made to hang, crash or confuse whoever compiles them: (kind, name) → text."""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infer.errors import InvalidRequestError
from infer.grammar.grammar import Grammar
from infer.grammar.grammar_compiler import make_compiler
from infer.tokenizer import Tokenizer

Hostile = tuple[str, str, Any]


def _nested_object(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Each definition names the one before twice: 2 ** depth when written out."""
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(depth):
        definitions[f"d{i + 1}"] = {keyword: [{"$ref": f"#/$defs/d{i}"}, {"$ref": f"#/$defs/d{i}"}]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth}"}


def _wide_objects(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {f"k{i}": schema for i in range(width)}}
    return schema


def _string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def _recursive(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False, **keywords}


def schemas() -> Iterator[Hostile]:
    yield from (("json_schema", name, text) for name, text in _schema_texts().items())
    for name, schema in {**_unsatisfiable(), **_cycles(), **_explosive(), **_unsupported()}.items():
        yield "json_schema", name, json.dumps(schema)


def _schema_texts() -> dict[str, str]:
    return {
        "no JSON": "{",
        "a number": "3",
        "a list": "[]",
        "NaN": '{"minimum": NaN}',
        "infinity": '{"type": "number", "maximum": 1e999}',
        "duplicate keys": '{"type":"string","type":"integer"}',
        "65 deep": _nested_object(65),
        "1,000 deep": _nested_object(1000),
        "30,000 brackets": "[" * 30_000,
        "30,000 closed brackets": '{"enum":' + "[" * 30_000 + "]" * 30_000 + "}",
        "30,000 braces": '{"not":' * 30_000,
        "a megabyte": '{"description":"' + "x" * 1_000_000 + '"}',
        "a lone surrogate": '{"const": "\\ud800"}',
        "a raw lone surrogate": '{"const": "\ud800"}',
        "NUL": '{"const": "\\u0000"}',
        "a huge integer": '{"minimum": ' + "9" * 5000 + "}",
        "a huge exponent": '{"type":"integer","multipleOf": 1e308}',
        "a byte order mark": "\ufeff{}",
        "trailing text": "{} {}",
        "the empty object": "{}",
        "true": "true",
        "false": "false",
    }


def _unsatisfiable() -> dict[str, Any]:
    return {
        "minLength over maxLength": _string(minLength=5, maxLength=2),
        "minimum over maximum": {"type": "integer", "minimum": 5, "maximum": 4},
        "nothing between": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        "no multiple": {"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7},
        "minItems over maxItems": {"type": "array", "minItems": 3, "maxItems": 1},
        "contradictory allOf": {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "contradictory const": {"allOf": [{"const": 1}, {"const": 2}]},
        "const of another type": {"type": "integer", "const": "text"},
        "an empty enum": {"enum": []},
        "an empty anyOf": {"anyOf": []},
        "an empty type": {"type": []},
        "required and false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "required and closed": {"type": "object", "required": ["a"], "additionalProperties": False},
        "items false, minItems 1": {"type": "array", "items": False, "minItems": 1},
        "pattern against maxLength": _string(pattern="^aaaaaaaa$", maxLength=3),
        "an anyOf of nothing": {"anyOf": [False, {"enum": []}]},
        "a false deep down": {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"allOf": [{"const": 1}, {"const": 2}]}, "minItems": 1}},
            "required": ["a"],
        },
        "minProperties over maxProperties": {"type": "object", "minProperties": 2, "maxProperties": 1},
        "a negative minLength": _string(minLength=-1),
        "a fractional minItems": {"type": "array", "minItems": 1.5},
        "multipleOf 0": {"type": "integer", "multipleOf": 0},
    }


def _cycles() -> dict[str, Any]:
    return {
        "$ref to itself": {"$ref": "#"},
        "$ref in a ring": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "an anyOf of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        "an allOf of itself": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        "an object without end": _recursive(required=["a"]),
        "an object that may end": _recursive(),
        "a list of lists": {"type": "array", "items": {"$ref": "#"}},
        "lists without end": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "a tree": {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value", "children"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        "a $ref to nothing": {"$ref": "#/$defs/nowhere"},
        "a $ref to the network": {"$ref": "https://example.com/schema.json"},
        "a $ref to a file": {"$ref": "file:///etc/passwd"},
        "a $ref that is no text": {"$ref": 3},
        "two mutual objects": {
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
            },
            "$ref": "#/$defs/a",
        },
        "allOf doubled 30 times": _doubling("allOf", 30),
        "anyOf doubled 30 times": _doubling("anyOf", 30),
        "oneOf doubled 12 times": _doubling("oneOf", 12),
        "objects doubled 30 times": {
            "$defs": {
                "d0": {"type": "integer"},
                **{
                    f"d{i + 1}": {
                        "type": "object",
                        "properties": {"l": {"$ref": f"#/$defs/d{i}"}, "r": {"$ref": f"#/$defs/d{i}"}},
                        "required": ["l", "r"],
                    }
                    for i in range(30)
                },
            },
            "$ref": "#/$defs/d30",
        },
    }


def _explosive() -> dict[str, Any]:
    return {
        "an enum of 10,001": {"enum": list(range(10_001))},
        "an enum of 5,000 texts": {"enum": [f"v{i}" for i in range(5000)]},
        "an enum of one long text": {"enum": ["x" * 60_000]},
        "257 optional properties": _optional(257),
        "256 optional properties": _optional(256),
        "600 properties in all": {"allOf": [_optional(200), _optional(256)]},
        "4 deep, 12 wide": _wide_objects(3, 12),
        "a pattern of 3,000": _string(pattern="a" * 3000),
        "30,000 parentheses": _string(pattern="(" * 30_000 + ")" * 30_000),
        "parentheses in 2 KiB": _string(pattern="(" * 1000 + ")" * 1000),
        "repetition of repetition": _string(pattern="(a{1000}){1000}"),
        "stars in stars": _string(pattern="((((((((a*)*)*)*)*)*)*)*)*"),
        "an exponential pattern": _string(pattern="(a|b|ab)*(a|aa){50}.*(x|xx){200}y"),
        "the n-th from the end": _string(pattern="^(a|b)*a(a|b){28}$"),
        "an unclosed pattern": _string(pattern="(a"),
        "a pattern looking back": _string(pattern="(?<=a)b"),
        "a back reference": _string(pattern=r"(a)\1"),
        "maxLength 10**12": _string(maxLength=10**12),
        "minLength 10**9": _string(minLength=10**9),
        "pattern and length": _string(pattern="^(a|b)*c$", minLength=5000, maxLength=9000),
        "minItems 10**9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        "maxItems 10**9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        "nested minItems": {
            "type": "array",
            "minItems": 1000,
            "maxItems": 1000,
            "items": {"type": "array", "minItems": 1000, "maxItems": 1000, "items": {"type": "integer"}},
        },
        "allOf of 40 anyOf": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]},
        "multipleOf of primes": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]},
        "a tiny multipleOf": {"type": "number", "multipleOf": 1e-300},
        "40 patternProperties": {"type": "object", "patternProperties": {f"^{i}x*": {} for i in range(40)}},
    }


def _unsupported() -> dict[str, Any]:
    return {
        "not": {"not": {"type": "string"}},
        "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
        "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "contains": {"type": "array", "contains": {"type": "string"}},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
        "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
        "an unknown keyword": {"type": "string", "maxLenght": 3},
        "an unknown type": {"type": "strnig"},
        "an unknown format": _string(format="my-format"),
        "x-guidance": {"x-guidance": {"whitespace_pattern": "\\s*"}, "type": "array"},
        "$dynamicRef": {"$dynamicRef": "#meta"},
    }


def patterns() -> Iterator[Hostile]:
    texts = {
        "unclosed group": "(abc",
        "unopened group": "abc)",
        "unclosed class": "[a-",
        "nothing to repeat": "*a",
        "reversed range": "[z-a]",
        "reversed count": "a{5,2}",
        "30,000 parentheses": "(" * 30_000 + ")" * 30_000,
        "1,000 parentheses": "(" * 1000 + ")" * 1000,
        "2,049 characters": "a" * 2049,
        "repetition of repetition": "(a{1000}){1000}",
        "a repetition of 10**9": "a{1000000000}",
        "a repetition of 10**30": "a{" + "9" * 30 + "}",
        "four repetitions": "(((a{50}){50}){50}){50}",
        "stars in stars": "(" * 40 + "a" + ")*" * 40,
        "an exponential alternation": "(a|a)*" * 100,
        "the n-th from the end": "(a|b)*a(a|b){24}",
        "n-th from the end, twice": "((a|b)*a(a|b){14}|(b|c)*b(b|c){14})",
        "a class of everything": r"[\s\S]{1,2000}",
        "looking ahead": "(?=a)b",
        "looking back": "(?<!a)b",
        "a back reference": r"(a)\1",
        "a named group called": r"(?P<a>b)(?P=a)",
        "an atomic group": "(?>a)b",
        "a possessive star": "a*+b",
        "a lone surrogate": "a\ud800",
        "NUL": "a\x00b",
        "a slash": "a/b",
        "a newline": "a\nb",
        "any two": r"(\p{L}|\p{N}){1,500}",
        "an unknown property": r"\p{Nonsense}",
        "an empty class": r"[^\x00-\U0010ffff]",
        "an impossible end": "a$b",
        "an escape at the end": "a\\",
        "the empty alternative": "|||",
        "an anchor in the middle": "a^b",
        "a flag": "(?i)abc",
        "case folding of everything": r"(?i)\w{1,300}",
        "a bad flag": "(?Q)a",
        "a word boundary": r"\bword\b",
    }
    yield from (("regex", name, text) for name, text in texts.items())


def grammars() -> Iterator[Hostile]:
    texts = {
        "no start": 'a: "x"',
        "nothing": " ",
        "only a comment": "// nothing",
        "an undefined rule": "start: missing",
        "a rule twice": 'start: "a"\nstart: "b"',
        "left recursion": 'start: start "a" | "a"',
        "hidden left recursion": 'start: empty start "a" | "a"\nempty: ""',
        "right recursion": 'start: "a" start | "a"',
        "recursion without end": 'start: "a" start',
        "mutual recursion without end": 'start: a\na: "x" b\nb: "y" a',
        "a rule of itself": "start: start",
        "a cycle of rules": "start: a\na: b\nb: a | start",
        "a recursive terminal": 'start: A\nA: "x" A | "y"',
        "the empty string": 'start: ""',
        "a start of nothing": "start:",
        "highly ambiguous": 'start: start start start | "a" |',
        "ambiguous sums": 'start: e\ne: e "+" e | e "*" e | e "-" e | /[0-9]+/',
        "30,000 parentheses": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "65 parentheses": "start: " + "(" * 65 + '"a"' + ")" * 65,
        "100,000 characters": 'start: "' + "a" * 100_000 + '"',
        "5,000 rules": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"',
        "doubled 40 times": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"',
        "terminals doubled 40 times": "start: T0\n"
        + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
        + '\nT40: "a"',
        "repetition of repetition": "start: (a{1000}){1000}\na: b{1000}\nb: (/x/{1000}){1000}",
        "a terminal repeated": "start: A\nA: (B{1000}){1000}\nB: /[ab]/{1000}",
        "a huge pattern": "start: /" + "(a|b)" * 1000 + "/",
        "a pattern of parentheses": "start: /" + "(" * 20_000 + ")" * 20_000 + "/",
        "an intersection of nothing": "start: A\nA: /a+/ & /b+/",
        "a negation of everything": "start: A\nA: ~/(?s:.*)/ & /(?s:.*)/",
        "an unclosed string": 'start: "abc',
        "an unclosed pattern": "start: /abc",
        "an unclosed group": 'start: ("a" | "b"',
        "an import": "%import common.INT\nstart: INT",
        "an import of nothing": "%import nowhere.THING\nstart: THING",
        "an import of a file": "%import .secrets\nstart: secrets",
        "special tokens": "start: <|im_end|>",
        "a token by number": "start: <[5]>",
        "any token": "start: <[*]>",
        "a deep %json": "start: %json " + "[" * 5000 + "]" * 5000,
        "an unsupported %json": 'start: %json {"not": {}}',
        "an unclosed %json": 'start: %json {"type": "string"',
        "options": '%llguidance {"no_forcing": true}\nstart: "a"',
        "another grammar": "start: @other",
        "a stop": 'start[stop="x"]: /.*/',
        "max_tokens": "start[max_tokens=3]: /.*/",
        "a lone surrogate": 'start: "\ud800"',
        "NUL": 'start: "a\x00"',
        "EBNF": 'root ::= "a" | "b"',
        "an unproductive alternative": 'start: "a" | "b" dead\ndead: "c" dead',
        "unreachable": 'start: "a"\nother: "b" other',
        "negations": "start: A\nA: " + "~(" * 30 + "/a/" + ")" * 30,
        "%ignore everything": '%ignore /(?s:.*)/\nstart: "a" "b"',
        "ignored space": '%ignore / +/\nstart: "a" "b"',
        "substrings": 'start: %regex {"substring_chars": "' + "ab" * 10_000 + '"}',
    }
    yield from (("grammar", name, text) for name, text in texts.items())


def choices() -> Iterator[Hostile]:
    yield from (
        ("choice", "20,000 of them", [f"choice {i}" for i in range(20_000)]),
        ("choice", "one of a megabyte", ["x" * 1_000_000]),
        ("choice", "10,000 short ones", [f"{i}" for i in range(10_000)]),
        ("choice", "a lone surrogate", ["\ud800"]),
        ("choice", "prefixes of each other", ["a" * i for i in range(1, 300)]),
        ("choice", "special characters", ['"\\/\n\x00', "(a|b)*", "é", "<|im_end|>"]),
        ("choice", "the same twice", ["a", "a"]),
    )


def all_hostile() -> list[Hostile]:
    return [*schemas(), *patterns(), *grammars(), *choices()]


def main(backend: str, folder: str) -> None:
    """Prints what became of each, as lines of JSON, and then the memory that it took, in MiB: a program for tests."""
    tokenizer = Tokenizer.from_folder(Path(folder))
    compiler = make_compiler(tokenizer, backend=backend)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    compiler.compile(Grammar("regex", "a"))  # what the libraries themselves need is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, name, text in all_hostile():
        problem = ""
        try:
            constraint = compiler.compile(Grammar(kind, json.dumps(text) if kind == "choice" else text))
            constraint.fill(mask)
            assert mask.any()
        except InvalidRequestError as error:
            problem = str(error)
        print(json.dumps([kind, name, problem]), flush=True)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)


if __name__ == "__main__":
    main(*sys.argv[1:])
