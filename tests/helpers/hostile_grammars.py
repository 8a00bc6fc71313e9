"""Schemas, patterns, grammars and choices made to hang, crash or confuse a compiler: (kind, name) → text."""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infer import InvalidRequestError, Tokenizer
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler

Hostile = tuple[str, str, Any]
STORED = Path(__file__).parents[1] / "data" / "hostile-grammars.json"


def _nested_object(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Return definitions that each use the one before twice, so that the text has 2 ** depth parts."""
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(depth):
        twice = [{"$ref": f"#/$defs/d{i}"}, {"$ref": f"#/$defs/d{i}"}]
        both = {"type": "object", "properties": dict(zip("lr", twice, strict=True)), "required": ["l", "r"]}
        definitions[f"d{i + 1}"] = {keyword: twice} if keyword else both
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth}"}


def _wide_objects(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {f"k{i}": schema for i in range(width)}}
    return schema


def _string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def _stored() -> Iterator[Hostile]:
    """Yield the grammars of a file. A schema is a JSON object, or a text that is not JSON."""
    for kind, texts in json.loads(STORED.read_text(encoding="utf-8")).items():
        for name, text in texts.items():
            yield kind, name, text if isinstance(text, str) else json.dumps(text)


def schemas() -> Iterator[Hostile]:
    texts = _schema_texts() | {name: json.dumps(schema) for name, schema in _explosive().items()}
    yield from (("json_schema", name, text) for name, text in texts.items())


def _schema_texts() -> dict[str, str]:
    return {
        "65 deep": _nested_object(65),
        "1,000 deep": _nested_object(1000),
        "30,000 brackets": "[" * 30_000,
        "30,000 closed brackets": '{"enum":' + "[" * 30_000 + "]" * 30_000 + "}",
        "30,000 braces": '{"not":' * 30_000,
        "a megabyte": '{"description":"' + "x" * 1_000_000 + '"}',
        "a huge integer": '{"minimum": ' + "9" * 5000 + "}",
    }


def _explosive() -> dict[str, Any]:
    return {
        "allOf doubled 30 times": _doubling("allOf", 30),
        "anyOf doubled 30 times": _doubling("anyOf", 30),
        "oneOf doubled 12 times": _doubling("oneOf", 12),
        "objects doubled 30 times": _doubling("", 30),
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
        "maxLength 10**12": _string(maxLength=10**12),
        "minLength 10**9": _string(minLength=10**9),
        "minItems 10**9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        "maxItems 10**9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        "allOf of 40 anyOf": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]},
        "multipleOf of primes": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]},
        "40 patternProperties": {"type": "object", "patternProperties": {f"^{i}x*": {} for i in range(40)}},
    }


def patterns() -> Iterator[Hostile]:
    texts = {"30,000 parentheses": "(" * 30_000 + ")" * 30_000, "1,000 parentheses": "(" * 1000 + ")" * 1000}
    texts |= {"2,049 characters": "a" * 2049, "a repetition of 10**30": "a{" + "9" * 30 + "}"}
    texts |= {"stars in stars": "(" * 40 + "a" + ")*" * 40, "an exponential alternation": "(a|a)*" * 100}
    yield from (("regex", name, text) for name, text in texts.items())


def grammars() -> Iterator[Hostile]:
    def doubled(rule: str) -> str:
        rules = (f"{rule}{i}: {rule}{i + 1} {rule}{i + 1}\n" for i in range(40))
        return f'start: {rule}0\n{"".join(rules)}{rule}40: "a"'

    texts = {
        "30,000 parentheses": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "65 parentheses": "start: " + "(" * 65 + '"a"' + ")" * 65,
        "100,000 characters": 'start: "' + "a" * 100_000 + '"',
        "5,000 rules": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"',
        "doubled 40 times": doubled("r"),
        "terminals doubled 40 times": doubled("T"),
        "a huge pattern": "start: /" + "(a|b)" * 1000 + "/",
        "a pattern of parentheses": "start: /" + "(" * 20_000 + ")" * 20_000 + "/",
        "a deep %json": "start: %json " + "[" * 5000 + "]" * 5000,
        "negations": "start: A\nA: " + "~(" * 30 + "/a/" + ")" * 30,
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
    return [*_stored(), *schemas(), *patterns(), *grammars(), *choices()]


def main(backend: str, folder: str) -> None:
    """Print the result of each grammar as a line of JSON, then the memory used in MiB. Tests run it as a program."""
    tokenizer = Tokenizer.from_folder(Path(folder))
    compiler = Compiler(tokenizer, backend=backend)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    compiler.compile(Grammar("regex", "a"))  # the memory of the libraries themselves is not counted
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
