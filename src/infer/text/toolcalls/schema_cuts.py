"""Remove keywords from a JSON schema so that it allows at least everything that it allowed before.

A keyword cannot simply be deleted everywhere. `not` with fewer keywords forbids more. Two branches of `oneOf` that lose
a keyword may both hold. `additionalProperties: false` forbids every name that is no longer in `properties`.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Schema = dict[str, Any]
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset(
    {
        *("not", "if", "then", "else", "contains", "propertyNames", "items", "additionalItems"),
        *("additionalProperties", "unevaluatedProperties", "unevaluatedItems"),
    }
)
_DEFINITIONS = ("$defs", "definitions")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_OTHER_ITEMS = ("items", "additionalItems", "unevaluatedItems")
# Keywords that forbid more after a keyword next to them was removed.
_COMPANIONS: dict[str, tuple[str, ...]] = {
    "properties": _OTHERS,
    "patternProperties": _OTHERS,
    "prefixItems": _OTHER_ITEMS,
    "items": _OTHER_ITEMS,
    "minContains": ("contains",),
}
_APPLICATORS = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains", "dependentSchemas", "dependencies"),
        *("$ref", "$dynamicRef", "$recursiveRef", "properties", "patternProperties", "additionalProperties"),
        *("items", "prefixItems", "additionalItems", "minContains"),
    }
)


class SchemaStep(NamedTuple):
    """One step into a schema: `holder[key]` is a keyword of a schema, or a schema in a keyword's object or list."""

    holder: Any
    key: str | int
    word: str
    is_word: bool

    @property
    def value(self) -> Any:
        return self.holder[self.key]

    @property
    def is_negative(self) -> bool:
        """True if the value forbids more when it asserts less."""
        return self.is_word and (
            self.word in ("not", "if") or (self.word == "contains" and "maxContains" in self.holder)
        )


def steps_to(schema: Schema, pointer: str) -> list[SchemaStep]:
    """Return the steps to a place, or to the deepest place on the way that exists."""
    found, word = list[SchemaStep](), ""
    value: Any = schema
    for token in pointer.split("/")[1:]:
        key: str | int = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and word and token.isdecimal() and int(token[:9]) < len(value):
            key = int(token)
        elif not isinstance(value, dict) or key not in value:
            break
        is_word = not word
        found.append(SchemaStep(value, key, word or str(key), is_word))
        value = found[-1].value
        opens = is_word and ((key in _MAPS and isinstance(value, dict)) or (key in _LISTS and isinstance(value, list)))
        word = str(key) if opens else ""
    return found


def pointer_of(steps: Sequence[SchemaStep]) -> str:
    return "".join("/" + str(step.key).replace("~", "~0").replace("/", "~1") for step in steps)


def schemas_in(schema: Any) -> Iterator[Schema]:
    """Yield a schema and the schemas inside it."""
    for _, node in _schemas_with_steps(schema):
        yield node


def cut(schema: Schema, pointers: Sequence[str], value: Schema | None = None) -> list[str]:
    """Remove keywords in place, or replace schemas by `value` or by `{}`, which allows anything.

    Return the pointer of each cut. A pointer to a missing place removes the deepest existing place on its path, but
    never the root.
    """
    ways = [_until_negative(steps_to(schema, pointer)) for pointer in pointers]
    found = [pointer_of(steps) for steps in ways]
    others = list[list[SchemaStep]]()
    if any(steps and _may_hide(steps) for steps in ways):
        others += _unevaluated_in(schema)
    if any(steps and steps[0].word in _DEFINITIONS for steps in [*ways, *others]):
        others += _with_references_in(schema)
    for steps in ways:
        if steps:
            _cut_at(schema, steps, None if steps[-1].is_negative else value)
    for steps in map(_until_negative, others):
        _cut_at(schema, steps, None)
    for steps in [*ways, *others]:
        for step in steps[:-1]:
            if step.is_word and step.word == "oneOf":
                _take_any(step.holder)
    return found


def drop_property(schema: Schema, pointer: str) -> None:
    """Remove a property, including its name among the required ones."""
    steps = steps_to(schema, pointer)
    steps[-1].holder.pop(steps[-1].key)
    owner = steps[-2].holder
    if isinstance(owner.get("required"), list):
        owner["required"] = [name for name in owner["required"] if name != steps[-1].key]


def _schemas_with_steps(schema: Any) -> Iterator[tuple[list[SchemaStep], Schema]]:
    pending: list[tuple[list[SchemaStep], Any]] = [([], schema)]
    while pending:
        steps, node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield steps, node
        for word, value in node.items():
            way = [*steps, SchemaStep(node, word, word, True)]
            if word in _MAPS and isinstance(value, dict):
                pending += [([*way, SchemaStep(value, name, word, False)], each) for name, each in value.items()]
            elif word in _LISTS and isinstance(value, list):
                pending += [([*way, SchemaStep(value, index, word, False)], each) for index, each in enumerate(value)]
            elif word in _SINGLE:
                pending.append((way, value))


def _until_negative(steps: list[SchemaStep]) -> list[SchemaStep]:
    """Return the steps to the keyword to remove: the first that forbids more when it asserts less, or the last."""
    negative = next((index for index, step in enumerate(steps) if step.is_negative), len(steps))
    return steps[: negative + 1]


def _may_hide(steps: Sequence[SchemaStep]) -> bool:
    """Return True if fewer properties or items may count as evaluated after this cut."""
    last = steps[-1]
    return not last.is_word or last.word in _APPLICATORS or steps[0].word in _DEFINITIONS


def _unevaluated_in(schema: Schema) -> list[list[SchemaStep]]:
    return [
        [*steps, SchemaStep(node, word, word, True)]
        for steps, node in _schemas_with_steps(schema)
        for word in _UNEVALUATED
        if word in node
    ]


def _with_references_in(schema: Schema) -> list[list[SchemaStep]]:
    """Return the keywords that may forbid more when a definition asserts less, and the branches of such choices."""
    found = list[list[SchemaStep]]()
    for steps, node in _schemas_with_steps(schema):
        for word in ("not", "if", "contains", "oneOf"):
            step = SchemaStep(node, word, word, True)
            if word not in node or not (step.is_negative or word == "oneOf") or '"$ref"' not in json.dumps(node[word]):
                continue
            found.append([*steps, step])
            if word == "oneOf":
                found[-1].append(SchemaStep({"": None}, "", "", True))  # only the choice itself is cut
    return found


def _cut_at(schema: Schema, steps: Sequence[SchemaStep], value: Schema | None) -> None:
    step = steps[-1]
    if step.is_word and step.word == "oneOf":
        _take_any(step.holder)
    elif step.is_word and value is None:
        step.holder.pop(step.key, None)
        _remove(step.holder, _COMPANIONS.get(step.word, ()))
        if step.holder is schema and step.word not in ("required", "type"):
            schema.setdefault("additionalProperties", True)  # otherwise it is closed in constrained tools
    elif not step.is_word and step.word == "patternProperties":
        step.holder.pop(step.key, None)
        _remove(steps[-2].holder, _OTHERS)
        if steps[-2].holder is schema:
            schema["additionalProperties"] = True
    else:
        step.holder[step.key] = value or {}


def _remove(holder: Schema, words: Sequence[str]) -> None:
    for word in words:
        holder.pop(word, None)


def _take_any(holder: Schema) -> None:
    """Turn `oneOf` into `anyOf`."""
    branches = holder.pop("oneOf", None)
    if branches is None:
        return
    if "anyOf" not in holder:
        holder["anyOf"] = branches
    else:
        holder.setdefault("allOf", []).append({"anyOf": branches})
