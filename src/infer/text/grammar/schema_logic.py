"""Rewritten JSON schemas, with their place in the user's schema, and facts about them.

The keywords of a part are those of draft 2020-12 that a grammar library enforces. Negations of parts, and checks that
no value fulfils two of them, are exact, or raise or return False.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

from infer.errors import SchemaError
from infer.text.grammar.patterns import pattern_without

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_LISTS = frozenset({"anyOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties"})
_SINGLE = frozenset({"items", "additionalProperties"})


class SchemaPart(dict[str, Any]):
    """A schema as JSON. `pointer` is its place in the user's schema. `true` is the empty part."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: str, words: Mapping[str, Any]) -> None:
        super().__init__(words)
        self.pointer = pointer

    @property
    def is_false(self) -> bool:
        """True if the part is the schema `false`, which is an empty `enum`."""
        return self.get("enum") == []

    @property
    def types(self) -> list[str]:
        """The names in `type`, or all types."""
        value = self.get("type", TYPES)
        return [value] if isinstance(value, str) else list(value)

    @property
    def constants(self) -> list[Any] | None:
        """The values of `const` or `enum`, or None without either."""
        return [self["const"]] if "const" in self else self.get("enum")

    def written(self, change: Callable[["SchemaPart"], "SchemaPart"]) -> Any:
        """Return the schema, with each part changed, as JSON that every library can read."""
        return False if self.is_false else change(self)._with_parts(lambda part: part.written(change)) or True

    def children(self) -> list["SchemaPart"]:
        found: list[SchemaPart] = []
        self._with_parts(found.append)
        return found

    def _with_parts(self, change: Callable[["SchemaPart"], Any]) -> dict[str, Any]:
        """Return the keywords, with each of the parts directly inside them changed."""
        found = dict(self)
        for word, value in self.items():
            if word in _LISTS:
                found[word] = [*map(change, value)]
            elif word in _MAPS:
                found[word] = {name: change(inner) for name, inner in value.items()}
            elif word in _SINGLE:
                found[word] = change(value)
        return found


def false_part(pointer: str) -> SchemaPart:
    return SchemaPart(pointer, {"enum": []})


def all_of(pointer: str, parts: Iterable[SchemaPart]) -> SchemaPart:
    found = [part for part in parts if part]
    if any(part.is_false for part in found):
        return false_part(pointer)
    return found[0] if len(found) == 1 else SchemaPart(pointer, {"allOf": found} if found else {})


def any_of(pointer: str, parts: Iterable[SchemaPart]) -> SchemaPart:
    found = [part for part in parts if not part.is_false]
    if not found:
        return false_part(pointer)
    if not all(found):
        return SchemaPart(pointer, {})
    return found[0] if len(found) == 1 else SchemaPart(pointer, {"anyOf": found})


def lacks(pointer: str, name: str) -> SchemaPart:
    """Return a schema of all values except objects with this property."""
    return SchemaPart(pointer, {"properties": {name: false_part(pointer)}})


class MalformedSchemaError(SchemaError):
    """A keyword has a value that JSON Schema does not allow. Such a keyword is never left out."""


def refuse_malformed(pointer: str, problem: str) -> NoReturn:
    """Raise MalformedSchemaError for the part at `pointer`."""
    raise MalformedSchemaError(problem, pointer)


def refuse(pointer: str, problem: str) -> NoReturn:
    """Raise SchemaError for the part at `pointer`, which no grammar can enforce."""
    raise SchemaError(problem, pointer)


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Begin the messages of SchemaErrors with the name of the schema and the place in it."""
    try:
        yield
    except SchemaError as error:
        place = f"{where} at {error.pointer or '/'}"
        raise type(error)(f"{place}: {error.problem}", error.pointer, error.problem) from error


STEPS = 300_000  # limit of the work for one schema
_MAX_DEPTH = 20
_KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_KINDS_OF = {name: frozenset({name}) for name in TYPES} | {"number": frozenset({"integer", "fraction"})}


@final
class Logic:
    """Facts about the parts of one schema. `definitions` are the targets of references, by reference."""

    def __init__(self, definitions: Mapping[str, SchemaPart], *, are_exact: bool) -> None:
        """Begin with the definitions. `are_exact` is False if some of them allow more than the user's schema does."""
        self._definitions, self._are_exact = definitions, are_exact
        self._steps_left = STEPS

    def negated(self, part: SchemaPart, pointer: str, depth: int = 0) -> SchemaPart:
        """Return a schema for exactly the values that do not fulfil `part`.

        Raises SchemaError at `pointer` if the keywords that a grammar library enforces cannot express it.
        """
        self._steps_left -= 1
        if depth > _MAX_DEPTH or self._steps_left < 0:
            refuse(pointer, "the negation of a large schema cannot be enforced")
        found: list[SchemaPart] = []
        for word, value in part.items():
            if word == "type":
                found.append(self._other_types(part.types, pointer))
            elif word in ("const", "enum"):
                found += self._other_values([value] if word == "const" else value, pointer)
            elif word == "required":
                found += [
                    all_of(pointer, [SchemaPart(pointer, {"type": "object"}), lacks(pointer, name)]) for name in value
                ]
            elif word == "properties":
                inner = {name: self.negated(item, pointer, depth + 1) for name, item in value.items()}
                found += [
                    SchemaPart(pointer, {"type": "object", "properties": {name: item}, "required": [name]})
                    for name, item in inner.items()
                    if not item.is_false
                ]
            elif word == "allOf":
                found += [self.negated(inner, pointer, depth + 1) for inner in value]
            elif word == "anyOf":
                found.append(all_of(pointer, [self.negated(inner, pointer, depth + 1) for inner in value]))
            elif word == "$ref" and self._are_exact and value in self._definitions:
                found.append(self.negated(self._definitions[value], pointer, depth + 1))
            else:
                refuse(pointer, f"the negation of {word!r} cannot be enforced here")
        return any_of(pointer, found)

    def _other_types(self, types: Sequence[str], pointer: str) -> SchemaPart:
        if "integer" in types and "number" not in types:
            refuse(pointer, "the negation of the type 'integer' cannot be enforced here")
        names = [name for name in TYPES if name not in types and name != "integer"]
        return SchemaPart(pointer, {"type": names}) if names else false_part(pointer)

    def _other_values(self, values: Sequence[Any], pointer: str) -> Iterator[SchemaPart]:
        kinds = set(map(_kind_of, values))
        if kinds & {"array", "object"}:
            refuse(pointer, "the negation of an 'enum' of lists and objects cannot be enforced here")
        if "fraction" in kinds or "integer" in kinds:
            kinds |= {"number", "integer"}
        yield SchemaPart(pointer, {"type": [name for name in TYPES if name not in kinds and name != "integer"]})
        known = set(map(key_of, values))
        if "boolean" in kinds and (others := [each for each in (True, False) if key_of(each) not in known]):
            yield SchemaPart(pointer, {"enum": others})
        if "string" in kinds:
            pattern = pattern_without([value for value in values if isinstance(value, str)])
            if pattern is None:
                refuse(pointer, "too many or too long strings are excluded")
            yield SchemaPart(pointer, {"type": "string", "pattern": pattern})
        if "number" in kinds:
            numbers = sorted({value for value in values if _kind_of(value) in ("integer", "fraction")})
            for low, high in zip([None, *numbers], [*numbers, None], strict=True):
                bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
                yield SchemaPart(
                    pointer, {"type": "number"} | {word: at for word, at in bounds.items() if at is not None}
                )

    def are_apart(self, a: Sequence[SchemaPart], b: Sequence[SchemaPart], depth: int = 0) -> bool:
        """Return True if it is easy to see that no value fulfils all of `a` and all of `b`.

        It follows from types, from constants, or from a required property for which it is easy to see.
        """
        if depth > _MAX_DEPTH:
            return False
        a, b = self._flat(a), self._flat(b)
        self._steps_left -= 1 + len(a) + len(b)
        if self._steps_left < 0:
            return False
        kinds = self._kinds(a) & self._kinds(b)
        if not kinds:
            return True
        known = [frozenset(map(key_of, part.constants)) for part in (*a, *b) if part.constants is not None]
        if len(known) > 1 and not frozenset.intersection(*known):
            return True
        if kinds == {"object"}:
            for name in {name: None for part in (*a, *b) for name in part.get("required", ())}:
                if self.are_apart(_of_property(a, name), _of_property(b, name), depth + 2):
                    return True
        for own, others in ((a, b), (b, a)):
            for branches in [part["anyOf"] for part in own if "anyOf" in part]:
                rest = [SchemaPart("", {word: each for word, each in part.items() if word != "anyOf"}) for part in own]
                if all(self.are_apart([branch, *rest], others, depth + 4) for branch in branches):
                    return True
        return False

    def _flat(self, parts: Sequence[SchemaPart]) -> list[SchemaPart]:
        """Return the parts that must hold, with those of their `allOf` and the targets of their references."""
        found: dict[int, SchemaPart] = {}
        pending = list(parts)
        while pending:
            part = pending.pop()
            if id(part) not in found:
                found[id(part)] = part
                pending += part.get("allOf", ())
                pending += [self._definitions[part["$ref"]]] if part.get("$ref") in self._definitions else []
        return list(found.values())

    def _kinds(self, parts: Sequence[SchemaPart]) -> frozenset[str]:
        found = _KINDS
        for part in parts:
            if "type" in part:
                found &= frozenset().union(*(_KINDS_OF[name] for name in part.types))
            if part.constants is not None:
                found &= frozenset(map(_kind_of, part.constants))
        return found


def key_of(value: Any) -> str:
    """Return a key that is equal for equal values: 1 and 1.0 are equal, and objects are equal in any order."""
    if isinstance(value, float) and value == math.floor(value):
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(key_of, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{json.dumps(name)}:{key_of(item)}" for name, item in value.items())) + "}"
    return json.dumps(value)


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == math.floor(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _of_property(parts: Sequence[SchemaPart], name: str) -> list[SchemaPart]:
    """Return the schemas that a property of this name must fulfil, as far as they are known."""
    found = [part["properties"][name] for part in parts if name in part.get("properties", ())]
    return found + [
        part["additionalProperties"]
        for part in parts
        if "additionalProperties" in part
        and name not in part.get("properties", ())
        and not part.get("patternProperties")
    ]
