"""A rewritten JSON schema: keywords that a grammar library enforces, with their place in the user's schema.

All keywords are of draft 2020-12.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from infer.errors import SchemaError

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

    def written(self) -> Any:
        """Return the schema as JSON that every library can read."""
        if self.is_false:
            return False
        found = dict(self)
        for word in _LISTS & self.keys():
            found[word] = [inner.written() for inner in self[word]]
        for word in _MAPS & self.keys():
            found[word] = {name: inner.written() for name, inner in self[word].items()}
        for word in _SINGLE & self.keys():
            found[word] = self[word].written()
        return found or True

    def children(self) -> list["SchemaPart"]:
        found: list[SchemaPart] = []
        for word, value in self.items():
            if word in _LISTS:
                found += value
            elif word in _MAPS:
                found += value.values()
            elif word in _SINGLE:
                found.append(value)
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


def refuse_malformed(where: str, pointer: str, problem: str) -> NoReturn:
    """Raise MalformedSchemaError for the part at `pointer`."""
    raise MalformedSchemaError(f"{where} at {pointer or '/'}: {problem}", pointer, problem)


def refuse(where: str, pointer: str, problem: str) -> NoReturn:
    """Raise SchemaError for the part at `pointer`, which no grammar can enforce."""
    raise SchemaError(f"{where} at {pointer or '/'}: {problem}", pointer, problem)
