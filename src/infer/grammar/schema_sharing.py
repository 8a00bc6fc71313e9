"""Replace equal parts of a written schema by one definition, because a compiler's work grows with the written size.

Only parts without references are shared: a reference that is merged with its neighbours may not lead back to itself.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, final

_NAMED = frozenset({"properties", "patternProperties"})
_SINGLE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"prefixItems", "anyOf", "allOf"})


def shared(schema: Any) -> Any:
    """Return the same schema. Its `$defs` has the new definitions after its own."""
    if not isinstance(schema, dict):
        return schema
    return _Sharing().written(schema)


@final
class _Sharing:
    """Numbers of the parts of a schema. Equal parts have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._number_of: dict[int, int] = {}  # by id: the schema outlives this
        self._has_reference: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._definitions: dict[str, Any] = {}

    def written(self, schema: dict[str, Any]) -> dict[str, Any]:
        definitions = schema.get("$defs", {})
        root = {word: value for word, value in schema.items() if word != "$defs"}
        for part in (root, *definitions.values()):
            self._number(part, is_place=False)
        root = self._words(root)
        own = {name: self._rewritten(part, is_place=False) for name, part in definitions.items()}
        if own or self._definitions:
            root["$defs"] = own | self._definitions
        return root

    def _number(self, part: Any, *, is_place: bool) -> int:
        if not isinstance(part, dict):
            return self._numbers.setdefault(("", str(part)), len(self._numbers))
        has_reference = "$ref" in part
        key: list[Any] = []
        for word, value in part.items():
            numbers: list[Any] = [word]
            for name, inner, is_own_place in _inner(part, word):
                numbers += [name, number := self._number(inner, is_place=is_own_place)]
                has_reference = has_reference or number in self._has_reference
            key.append(tuple(numbers) if len(numbers) > 1 else (word, repr(value)))
        number = self._numbers.setdefault(tuple(key), len(self._numbers))
        self._number_of[id(part)] = number
        if has_reference:
            self._has_reference.add(number)
        self._uses[number] += is_place
        return number

    def _rewritten(self, part: Any, *, is_place: bool) -> Any:
        if not isinstance(part, dict):
            return part
        number = self._number_of[id(part)]
        if is_place and self._uses[number] > 1 and number not in self._has_reference:
            name = f"shared{number}"
            if name not in self._definitions:
                self._definitions[name] = self._words(part)
            return {"$ref": f"#/$defs/{name}"}
        return self._words(part)

    def _words(self, part: dict[str, Any]) -> dict[str, Any]:
        return {word: _mapped(part, word, self._rewritten) for word in part}


def _inner(part: dict[str, Any], word: str) -> list[tuple[Any, Any, bool]]:
    """Return the schemas in a word: name, schema, and True if a reference may replace the schema."""
    value = part[word]
    if word in _NAMED:
        return [(name, inner, True) for name, inner in value.items()]
    if word in _SINGLE:
        return [("", value, True)]
    if word in _LISTS:
        return [(index, inner, _is_place(part, word, inner)) for index, inner in enumerate(value)]
    return []


def _is_place(part: dict[str, Any], word: str, inner: Any) -> bool:
    """Return True if a reference may replace the schema.

    Strings and numbers of an `anyOf` are not replaced, because together they are one pattern.
    """
    if word == "anyOf":
        return len(part) == 1 and isinstance(inner, dict) and ("properties" in inner or "items" in inner)
    return word == "prefixItems"


def _mapped(part: dict[str, Any], word: str, write: Callable[..., Any]) -> Any:
    value = part[word]
    inner = [write(each, is_place=is_place) for _, each, is_place in _inner(part, word)]
    if word in _NAMED:
        return dict(zip(value, inner, strict=True))
    if word in _SINGLE:
        return inner[0]
    return inner if word in _LISTS else value
