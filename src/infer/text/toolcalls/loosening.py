"""Leave out the smallest parts of a tool's schema that no grammar can enforce.

Clients bring tools that their users cannot change, so one keyword of a schema must not refuse a request. Keywords that
cannot be read are removed in one pass. Parts that the compiler refuses are removed by trial: first the keyword that it
names, then other keywords at that place, then the schema around it. The number of trials and their time are limited.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError, PropertyNameError, SchemaError, problem_of
from infer.system.processor_limit import processor_seconds
from infer.text.toolcalls.schema_cuts import Schema, cut, drop_property, pointer_of, schemas_in, steps_to
from infer.text.toolcalls.schema_words import ASSERTIONS, DEFINITIONS, NOTES, OBJECT_KEYS, words_of

MAX_TRIALS = 48
MAX_BYTES = 1 << 20
SECONDS = 4.0  # processor seconds for failed trials of all tools of a request
_MAX_NAMES = 256
_MAX_PASSES = 4
_MAX_WORDS = 8  # most keywords that are tried at one place
_MAX_WARNINGS = 10
_STRUCTURE = frozenset({"type", "properties", "required", "items", "additionalProperties"})
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANYTHING: Schema = {"type": "object", "additionalProperties": True}

Check = Callable[[Mapping[str, Any]], None]  # raises InvalidRequestError
Unreadable = Callable[[Mapping[str, Any]], list[tuple[str, str]]]


@dataclass
class Allowance:
    """Processor seconds that are left for failed trials."""

    seconds: float = SECONDS


class Loosened(NamedTuple):
    """A schema that can be enforced, and warnings for the parts that were left out."""

    parameters: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


class _Cut(NamedTuple):
    """Removal of a keyword, or a simpler schema at a place. A small cut is undone if it does not help."""

    pointer: str
    value: Schema | None = None
    is_small: bool = False
    drops_property: bool = False


def anything_for(parameters: Mapping[str, Any], *, is_json: bool) -> Schema:
    """Return a schema of objects that allows anything. Formats other than JSON can only write named arguments."""
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if is_json or not names or len(names) > _MAX_NAMES:
        return dict(ANYTHING)
    return {**ANYTHING, "properties": {str(name): {} for name in names}}


@final
class Loosening:
    """Loosening of one tool's schema. `check` tries a schema; `unreadable` finds keywords that cannot be read."""

    def __init__(self, check: Check, unreadable: Unreadable, allowance: Allowance, *, is_json: bool) -> None:
        self._check, self._unreadable, self._allowance, self._is_json = check, unreadable, allowance, is_json
        self._schema: Schema = {}
        self._notes: list[tuple[str, str]] = []  # pointer and reason of each removed part
        self._num_trials = 0

    def run(self, name: str, parameters: Mapping[str, Any]) -> Loosened:
        """Return the loosened schema and warnings.

        Raises InvalidRequestError if not even a schema that allows anything can be enforced.
        """
        text = json.dumps(parameters)
        self._schema = json.loads(text)
        problem = f"it has more than {MAX_BYTES} bytes" if len(text) > MAX_BYTES else self._loosen()
        if problem is not None:
            return self._give_up(name, parameters, problem)
        if not self._notes and self._is_json:
            return Loosened(parameters)
        return Loosened(self._schema, tuple(_said(name, self._notes)))

    def _loosen(self) -> str | None:
        """Return the reason of a failure, or None."""
        self._make_object()
        self._remove_unreadable()
        if not self._is_json:
            self._remove_notes()
        error = self._tried(self._schema)
        if error is not None and self._tried(ANYTHING) is not None:
            raise error  # the error is not about a schema
        while error is not None and self._num_trials < MAX_TRIALS and self._allowance.seconds > 0:
            found = self._step(error)
            if found is error:
                break
            error = found
        if isinstance(error, SchemaError):
            error = self._simplify_property(error)
        return None if error is None else problem_of(error)

    def _simplify_property(self, error: SchemaError) -> InvalidRequestError | None:
        """Reduce the last error's property to its type, because no time or trials are left for smaller cuts."""
        steps = steps_to(self._schema, error.pointer or "")[:2]
        if len(steps) < 2 or steps[0].word != "properties":
            return error
        kind = steps[1].value.get("type") if isinstance(steps[1].value, dict) else None
        cut(self._schema, [pointer_of(steps)], {"type": kind} if kind in _TYPES else {})
        self._notes.append((pointer_of(steps), error.problem))
        return self._tried(self._schema)

    def _make_object(self) -> None:
        kind = self._schema.get("type")
        if kind != "object":
            self._schema["type"] = "object"
            if not self._schema.get("properties"):
                self._schema["additionalProperties"] = True
            self._notes.append(("/type", f"arguments must be an object, got {kind!r:.40}"))

    def _remove_unreadable(self) -> None:
        for _ in range(_MAX_PASSES):
            found = self._unreadable(self._schema)
            if not found:
                return
            pointers = cut(self._schema, [pointer for pointer, _ in found])
            self._notes += [(pointer, problem) for pointer, (_, problem) in zip(pointers, found, strict=True)]
            self._schema["type"] = "object"

    def _remove_notes(self) -> None:
        """Remove keywords that assert nothing, because formats other than JSON do not ignore them."""
        known = ASSERTIONS | DEFINITIONS | NOTES | {"$id", "id", "$anchor", "$dynamicAnchor"}
        for node in schemas_in(self._schema):
            for word in set(node) - known:
                del node[word]
        for word in set(self._schema) & {"$id", "id", "$anchor", "$dynamicAnchor"}:
            del self._schema[word]

    def _tried(self, schema: Mapping[str, Any]) -> InvalidRequestError | None:
        self._num_trials += 1
        begin = processor_seconds()
        try:
            self._check(schema)
        except InvalidRequestError as error:
            self._allowance.seconds -= processor_seconds() - begin
            return error
        return None

    def _step(self, error: InvalidRequestError) -> InvalidRequestError | None:
        """Remove the part that this error is about.

        Returns the next error, None if none is left, or the same error if nothing helps.
        """
        if not isinstance(error, SchemaError) or error.pointer is None:
            return self._remove_properties(error)
        for each in self._cuts(error):
            before = json.dumps(self._schema)
            pointer = self._apply(each)
            if json.dumps(self._schema) == before:
                continue
            found = self._tried(self._schema)
            if found is None or not each.is_small or _place_of(found) != _place_of(error):
                self._notes.append((pointer, error.problem))
                return found
            self._schema = json.loads(before)
            if self._num_trials >= MAX_TRIALS or self._allowance.seconds <= 0:
                break
        return error

    def _apply(self, asked: _Cut) -> str:
        """Cut a place, and return the pointer of the part that was cut."""
        pointer = asked.pointer
        if asked.drops_property:
            drop_property(self._schema, pointer)
        else:
            (pointer,) = cut(self._schema, [pointer], asked.value)
        self._schema["type"] = "object"
        return pointer

    def _cuts(self, error: SchemaError) -> Iterator[_Cut]:
        """Yield the cuts that may help, smaller ones first."""
        steps = steps_to(self._schema, error.pointer or "")
        if isinstance(error, PropertyNameError) and len(steps) > 1:
            yield _Cut(pointer_of(steps), drops_property=True)
            return
        node = steps[-1].value if steps else self._schema
        at = pointer_of(steps)
        if isinstance(node, dict):
            named = [word for word in words_of(error.problem) if word in node and word in ASSERTIONS]
            others = [word for word in node if word in ASSERTIONS - _STRUCTURE and word not in named]
            for word in [*named, *others][:_MAX_WORDS]:
                yield _Cut(f"{at}/{word}", is_small=True)
        for number in range(len(steps), 0, -1):
            step, place = steps[number - 1], pointer_of(steps[:number])
            if step.is_word and number < len(steps):
                yield _Cut(place)
            elif isinstance(step.value, dict) and step.value.get("type") in _TYPES:
                yield _Cut(place, {"type": step.value["type"]})
            yield _Cut(place, None if step.is_word else {})

    def _remove_properties(self, error: InvalidRequestError) -> InvalidRequestError | None:
        """Simplify each property that is refused separately, then the keywords around the properties."""
        found = self._schema.get("properties")
        properties: Schema = found if isinstance(found, dict) else {}
        shared = {word: self._schema[word] for word in DEFINITIONS & self._schema.keys()}
        changed = False
        for name, schema in list(properties.items()):
            if self._num_trials >= MAX_TRIALS or self._allowance.seconds <= 0:
                break
            alone = self._tried({"type": "object", "properties": {name: schema}, **shared})
            if alone is None:
                continue
            kind = schema.get("type") if isinstance(schema, dict) else None
            properties[name] = {"type": kind} if kind in _TYPES and schema != {"type": kind} else {}
            self._notes.append((f"/properties/{name}", problem_of(alone)))
            changed = True
        others = self._schema.keys() - OBJECT_KEYS
        if not changed and others:
            self._notes += [(f"/{word}", problem_of(error)) for word in sorted(others)]
            cut(self._schema, [f"/{word}" for word in others])
            changed = True
        return self._tried(self._schema) if changed else error

    def _give_up(self, name: str, parameters: Mapping[str, Any], problem: str) -> Loosened:
        warning = f"tool {name!r}: its whole schema is left out, so its arguments may be any object: {problem:.200}"
        loosest = anything_for(parameters, is_json=self._is_json)
        for _ in range(len(loosest.get("properties", {})) + 1):
            error = self._tried(loosest)
            if error is None:
                return Loosened(loosest, (warning,))
            if not isinstance(error, PropertyNameError) or error.pointer is None:
                break
            drop_property(loosest, error.pointer)
        return Loosened(dict(ANYTHING), (warning,))


def _place_of(error: InvalidRequestError) -> tuple[str | None, str]:
    return (error.pointer, error.problem) if isinstance(error, SchemaError) else (None, str(error))


def _said(name: str, notes: list[tuple[str, str]]) -> Iterator[str]:
    for pointer, problem in notes[:_MAX_WARNINGS]:
        yield f"tool {name!r}: {pointer:.200} is left out: {problem.removeprefix('json_schema: '):.200}"
    if len(notes) > _MAX_WARNINGS:
        yield f"tool {name!r}: {len(notes) - _MAX_WARNINGS} more parts are left out"
