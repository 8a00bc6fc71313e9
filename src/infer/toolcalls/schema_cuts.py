"""Remove words from a JSON schema so that it allows at least everything that it allowed before.

A word cannot simply be deleted everywhere: `not` with less in it forbids more, two branches of `oneOf` that lose a word
may both hold, and `additionalProperties: false` forbids whatever `properties` no longer names.
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
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_OTHER_ITEMS = ("items", "additionalItems", "unevaluatedItems")
# Words that forbid more once a word beside them is gone.
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
        *("$ref", "$dynamicRef", "$recursiveRef", "additionalProperties"),
    }
)


class Step(NamedTuple):
    """One step into a schema: `holder[key]` is a word of a schema, or a schema in a word's object or list."""

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


def steps_to(schema: Schema, pointer: str) -> list[Step]:
    """Return the steps to a place, or to the deepest place on the way that exists."""
    found, word = list[Step](), ""
    value: Any = schema
    for token in pointer.split("/")[1:]:
        key: str | int = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and word and token.isdecimal() and int(token[:9]) < len(value):
            key = int(token)
        elif not isinstance(value, dict) or key not in value:
            break
        is_word = not word
        found.append(Step(value, key, word or str(key), is_word))
        value = found[-1].value
        opens = is_word and ((key in _MAPS and isinstance(value, dict)) or (key in _LISTS and isinstance(value, list)))
        word = str(key) if opens else ""
    return found


def pointer_of(steps: Sequence[Step]) -> str:
    return "".join("/" + str(step.key).replace("~", "~0").replace("/", "~1") for step in steps)


def schemas_in(schema: Any) -> Iterator[Schema]:
    """Yield a schema and the schemas inside it."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for word, value in node.items():
            if word in _MAPS and isinstance(value, dict):
                pending += value.values()
            elif word in _LISTS and isinstance(value, list):
                pending += value
            elif word in _SINGLE:
                pending.append(value)


def cut(schema: Schema, pointers: Sequence[str], value: Schema | None = None) -> list[str]:
    """Remove words in place, and make schemas `value`, or `{}`, which allows anything. Return the pointer of each cut.

    A pointer that leads nowhere removes the deepest place on its way, but never the root.
    """
    ways = [steps_to(schema, pointer) for pointer in pointers]
    found = list[str]()
    for steps in ways:
        negative = next((index for index, step in enumerate(steps) if step.is_negative), None)
        cut_steps = steps if negative is None else steps[: negative + 1]
        found.append(pointer_of(cut_steps))
        if cut_steps:
            _cut_at(schema, cut_steps, value if negative is None else None)
    for steps in ways:
        for step in steps[:-1]:
            if step.is_word and step.word == "oneOf":
                _take_any(step.holder)
    if any(steps and steps[0].word in ("$defs", "definitions") for steps in ways):
        _loosen_references(schema)
    return found


def drop_property(schema: Schema, pointer: str) -> None:
    """Remove a property, its name among the required ones too."""
    steps = steps_to(schema, pointer)
    steps[-1].holder.pop(steps[-1].key)
    owner = steps[-2].holder
    if isinstance(owner.get("required"), list):
        owner["required"] = [name for name in owner["required"] if name != steps[-1].key]


def _cut_at(schema: Schema, steps: Sequence[Step], value: Schema | None) -> None:
    step = steps[-1]
    if step.is_word and value is None:
        step.holder.pop(step.key, None)
        _remove(step.holder, _COMPANIONS.get(step.word, ()))
        if step.word in _APPLICATORS:
            _forget_unevaluated(schema)
        if step.holder is schema and step.word not in ("required", "type"):
            schema.setdefault("additionalProperties", True)  # else it is closed where tools are held
    elif not step.is_word and step.word == "patternProperties":
        step.holder.pop(step.key, None)
        _remove(steps[-2].holder, _OTHERS)
        if steps[-2].holder is schema:
            schema["additionalProperties"] = True
    else:
        step.holder[step.key] = value or {}
        _forget_unevaluated(schema)


def _remove(holder: Schema, words: Sequence[str]) -> None:
    for word in words:
        holder.pop(word, None)


def _forget_unevaluated(schema: Schema) -> None:
    for node in list(schemas_in(schema)):
        _remove(node, _UNEVALUATED)


def _take_any(holder: Schema) -> None:
    """Turn `oneOf` into `anyOf`."""
    branches = holder.pop("oneOf", None)
    if branches is None:
        return
    if "anyOf" not in holder:
        holder["anyOf"] = branches
    else:
        holder.setdefault("allOf", []).append({"anyOf": branches})


def _loosen_references(schema: Schema) -> None:
    """Loosen what may forbid more now that a definition asserts less."""
    for node in list(schemas_in(schema)):
        for word in ("not", "if", "contains"):
            if word in node and Step(node, word, word, True).is_negative and '"$ref"' in json.dumps(node[word]):
                node.pop(word)
        if '"$ref"' in json.dumps(node.get("oneOf")):
            _take_any(node)
