"""Walks through a constraint: random choices from its masks, and schemas to walk through."""

import json
import random
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.text.grammar.constraint import Constraint
from infer.text.tokenizer import Tokenizer

_CLOSERS = (b'"', b"}", b"]")


def allowed_bits(constraint: Constraint, vocab_size: int) -> npt.NDArray[np.uint8]:
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    constraint.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    assert bits.any(), "a mask allows something"
    return bits


def allowed_ids(constraint: Constraint, vocab_size: int) -> list[int]:
    return np.flatnonzero(allowed_bits(constraint, vocab_size)).tolist()


def closers_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens that end a text, a string, an object and a list."""
    return [sorted(tokenizer.eos_token_ids), *([tokenizer.token_bytes.index(closer)] for closer in _CLOSERS)]


def choose(bits: npt.NDArray[np.uint8], closers: list[list[int]], written: int, rng: random.Random) -> int:
    """Return an allowed token. The longer the text, the more often it is one that closes something."""
    if rng.random() < 0.2 + written / 100:
        for ids in closers:
            if wanted := [i for i in ids if bits[i]]:
                return rng.choice(wanted)
    allowed = np.flatnonzero(bits)
    return int(allowed[rng.randrange(len(allowed))])


def walk(constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, rng: random.Random, most: int = 1000) -> bytes:
    """Return the text of random choices. Sometimes some tokens are undone, and the same or other ones follow."""
    written: list[int] = []
    closers = closers_of(tokenizer)
    for _ in range(most):
        if constraint.done:
            break
        bits = allowed_bits(constraint, vocab_size)
        if written and rng.random() < 0.1:
            goes_elsewhere = rng.random() < 0.2
            back = rng.randint(1, min(len(written), 4) if goes_elsewhere else len(written))
            constraint.rollback(back)
            again = [] if goes_elsewhere else written[-back:]
            assert constraint.accept(again) == len(again)
            del written[len(written) - back + len(again) :]
            if again:
                assert (allowed_bits(constraint, vocab_size) == bits).all()
            continue
        token_id = choose(bits, closers, len(written), rng)
        assert constraint.accept([token_id]) == 1
        if token_id in tokenizer.eos_token_ids:
            break
        written.append(token_id)
    assert constraint.done, b"".join(tokenizer.token_bytes[i] for i in written[-100:])
    return b"".join(tokenizer.token_bytes[i] for i in written)


def random_schema(rng: random.Random, depth: int, *, wide: bool) -> dict[str, Any]:
    """Return a random schema. `wide` uses every keyword that llguidance enforces, not only those of all backends."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "literal string"]
    if depth:
        kinds += ["object", "array", "anyOf", "tuple"] * 2 + (["oneOf", "allOf", "ref"] if wide else [])
    kind = rng.choice(kinds)
    match kind:
        case "string":
            return _random_string(rng, wide)
        case "integer" | "number":
            return _random_number(rng, kind, wide)
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, 2.5, "é\n", {"a": 1}, [1, 2], "", "two words"], 3)}
        case "const":
            return {"const": rng.choice(["x", 3, False, {"k": ["v"]}])}
        case "literal string":
            return {"type": "string", "enum": ["red", "green", "blue"]}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth - 1, wide=wide)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "tuple":
            parts = [random_schema(rng, depth - 1, wide=wide) for _ in range(2)]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1, wide=wide) for _ in range(rng.randint(1, 3))]}
        case "oneOf":
            return {"oneOf": [{"type": "boolean"}, _random_number(rng, "integer", wide), _random_string(rng, wide)]}
        case "allOf":
            return {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 5}]}
        case "ref":
            return {"$ref": "#/$defs/tree"}
    return _random_object(rng, depth, wide)


def _random_string(rng: random.Random, wide: bool) -> dict[str, Any]:
    least = rng.randint(0, 3)
    options: list[dict[str, Any]] = [{}]
    if wide:
        options += [{"minLength": least}, {"minLength": least, "maxLength": least + 4}]
        options += [{"pattern": "^[a-z]{2,5}$"}, {"pattern": "^[0-9]{1,3}x?$"}, {"format": "date"}, {"format": "uuid"}]
    return {"type": "string", **rng.choice(options)}


def _random_number(rng: random.Random, kind: str, wide: bool) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    options: list[dict[str, Any]] = [{}]
    if wide:
        options += [{"minimum": least, "maximum": least + rng.randint(0, 200)}, {"exclusiveMinimum": least}]
        options += [{"multipleOf": rng.randint(2, 12)}] if kind == "integer" else []
    return {"type": kind, **rng.choice(options)}


def _random_object(rng: random.Random, depth: int, wide: bool) -> dict[str, Any]:
    names = rng.sample(["id", "name", "a b", "tags", "ü", "size", "x\\y", 'q"'], rng.randint(0, 4))
    properties = {name: random_schema(rng, depth - 1, wide=wide) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    more = False if rng.random() < 0.7 else {"type": "boolean"}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def schema_text(seed: int, *, wide: bool) -> str:
    schema = random_schema(random.Random(seed), 3, wide=wide)
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}}}
    definitions = {"tree": {**tree, "required": ["n"], "additionalProperties": False}}
    return json.dumps({**schema, "$defs": definitions})
