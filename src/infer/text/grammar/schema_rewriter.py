"""Rewrite a JSON schema of draft 4 or later with the keywords that a grammar library enforces.

One pass over the schema checks each keyword at its place. Keywords that a grammar cannot express are rewritten as
choices or refused. Keywords that assert nothing are left out and recorded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError, problem_of
from infer.text.grammar.schema_logic import (
    TYPES,
    Logic,
    MalformedSchemaError,
    SchemaPart,
    all_of,
    any_of,
    false_part,
    lacks,
    refuse,
    refuse_malformed,
)
from infer.text.grammar.schema_values import (
    FORMATS,
    References,
    check_constants,
    check_texts,
    escaped,
    is_required,
    read_count,
    read_names,
    read_number,
    read_pattern,
    read_types,
)

_MAX_EXCLUSIVE = 16  # most branches of a `oneOf`
_SILENT = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"),
        *("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly"),
        *("writeOnly", "then", "else", "minContains", "maxContains"),  # the last four belong to `if` and `contains`
    }
)
# Keywords with the same meaning inside and next to an `allOf`.
_BESIDE = frozenset({"anyOf", "pattern", "format", "maxLength"})
COMPANIONS = {  # keywords that forbid more if another keyword next to them is left out
    **dict.fromkeys(("properties", "patternProperties"), "additionalProperties"),
    **dict.fromkeys(("prefixItems", "items"), "items"),
}


class LeftOut(NamedTuple):
    """The reason to leave out a keyword or a schema. Of a schema, the type may stay."""

    problem: str
    keeps_type: bool = False


@dataclass
class Omissions:
    """The parts of a schema that is not strict that are left out. Places are JSON pointers.

    `wanted` are left out because a compiler refuses them. `noted` are the reasons of all that were left out, in the
    order in which they were seen. `places` are the schemas that were read. Of a tool (`is_of_tool`), malformed parts
    are left out, too. Without `notes_words`, keywords that assert nothing are not reported.
    """

    is_of_tool: bool = False
    notes_words: bool = True
    wanted: dict[str, LeftOut] = field(default_factory=dict)
    noted: dict[str, str] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)

    def note(self, pointer: str, error: InvalidRequestError) -> None:
        """Note the reason for a place. Raises the error if the part is malformed and may not be left out."""
        if isinstance(error, MalformedSchemaError) and not self.is_of_tool:
            raise error
        self.noted.setdefault(pointer, problem_of(error))


class _Place(NamedTuple):
    """An object schema while its keywords are read.

    `more` are schemas that must hold in addition to `part`. `dropped` are keywords that would forbid more without the
    parts that were left out.
    """

    raw: Mapping[str, Any]
    pointer: str
    base: str
    part: SchemaPart
    more: list[SchemaPart]
    dropped: set[str]


@final
class Rewriter:
    """Rewriter of one schema.

    `definitions` are the parts of reference targets, by reference. `ignored` are the keywords that assert nothing. A
    keyword that cannot be enforced raises SchemaError if the schema `is_strict`. Otherwise it is noted in `omissions`
    and left out.
    """

    def __init__(self, root: Any, omissions: Omissions, *, is_strict: bool) -> None:
        self._references = References(root)
        self._omissions, self.is_strict = omissions, is_strict
        self._is_exact = self.is_strict  # True where nothing may be left out
        self.definitions: dict[str, SchemaPart] = {}
        self.ignored: dict[str, None] = {}
        self._names: dict[str, str] = {}  # names of the definitions, by pointer
        self._pending: list[tuple[str, str]] = []  # pointer of a target, pointer of the reference
        # Per `oneOf`: the part next to it, and its branches.
        self._choices: list[tuple[SchemaPart, list[SchemaPart]]] = []
        self._logic = Logic(self.definitions, are_exact=self.is_strict)

    def rewrite(self) -> SchemaPart:
        """Return the root's part. Afterwards every reference leads to one of `definitions`."""
        if self._references.draft == 3:
            problem = "draft 3 is not supported: write the schema in draft 4 or later"
            self._attempt("/$schema", partial(refuse, "/$schema", problem))
        root = self._part(*self._references.at("", ""), "")
        self._finish_definitions()
        for beside, branches in self._choices:
            self._attempt(f"{beside.pointer}/oneOf", partial(self._check_apart, beside, branches))
        return root

    def _finish_definitions(self) -> None:
        while self._pending:
            pointer, asked_at = self._pending.pop()
            name = self._names[pointer]
            if name not in self.definitions:
                raw, base = self._references.at(pointer, asked_at)
                self.definitions[name] = self._part(raw, base, pointer)

    def _attempt(self, pointer: str, run: Callable[[], None]) -> bool:
        """Note an error of `run` and return False, or raise the error if nothing may be left out."""
        num_ignored = len(self.ignored)
        try:
            run()
        except InvalidRequestError as error:
            if self._is_exact:
                raise
            self._omissions.note(pointer, error)
            while len(self.ignored) > num_ignored:  # the part around these keywords is named
                self.ignored.popitem()
            return False
        return True

    def _part(self, raw: Any, base: str, pointer: str) -> SchemaPart:
        self._omissions.places[pointer] = raw
        if (unwanted := self._omissions.wanted.get(pointer)) is not None:
            self._attempt(pointer, partial(refuse, pointer, unwanted.problem))
            kind = raw.get("type") if unwanted.keeps_type and isinstance(raw, dict) else None
            return SchemaPart(pointer, {"type": kind} if kind in TYPES else {})
        if isinstance(raw, bool):
            return SchemaPart(pointer, {}) if raw else false_part(pointer)
        if not isinstance(raw, dict):
            problem = f"a schema must be an object, true or false, got {raw!r:.40}"
            self._attempt(pointer, partial(refuse_malformed, pointer, problem))
            return SchemaPart(pointer, {})
        base = self._references.base_within(raw, pointer, base)
        place = _Place(raw, pointer, base, SchemaPart(pointer, {}), [], set())
        hides = self._references.draft <= 7 and isinstance(raw.get("$ref"), str)
        for word, value in raw.items() if not hides else [("$ref", raw["$ref"])]:
            if word in _RULES:
                is_held = self._attempt(f"{pointer}/{escaped(word)}", partial(self._read, place, word, value))
                if not is_held and word in COMPANIONS:
                    place.dropped.add(COMPANIONS[word])
            elif word not in _SILENT and self._omissions.notes_words:
                self.ignored.setdefault(word)
        for word in place.dropped:
            place.part.pop(word, None)
        for part in filter(None, place.more):
            if part.keys() <= _BESIDE and not part.keys() & place.part.keys():
                place.part.update(part)
            else:
                place.part["allOf"] = [*place.part.get("allOf", ()), part]
        return place.part

    def _read(self, place: _Place, word: str, value: Any) -> None:
        """Add the assertion of a keyword to the place. Raises SchemaError."""
        if self._omissions.wanted:
            unwanted = self._omissions.wanted.get(f"{place.pointer}/{escaped(word)}")
            if unwanted is not None and not unwanted.keeps_type:
                refuse(place.pointer, unwanted.problem)
        shape, name = _SHAPES.get(word, (object, ""))
        if not isinstance(value, shape):
            refuse_malformed(place.pointer, f"{word!r} must be {name}, got {value!r:.40}")
        _RULES[word](self, place, word, value)

    def _check_apart(self, beside: SchemaPart, branches: list[SchemaPart]) -> None:
        """Raise SchemaError unless no value fulfils two of the branches of a `oneOf`."""
        around = SchemaPart(beside.pointer, {word: value for word, value in beside.items() if word != "anyOf"})
        for index, branch in enumerate(branches):
            for other in range(index):
                if not self._logic.are_apart([branch, around], [branches[other]]):
                    problem = f"branches {other} and {index} of 'oneOf' may both hold: use 'anyOf'"
                    refuse(beside.pointer, problem)

    def _inner(self, place: _Place, raw: Any, step: str) -> SchemaPart:
        return self._part(raw, place.base, f"{place.pointer}/{step}")

    def _exact(self, place: _Place, raw: Any, step: str) -> SchemaPart:
        """Return the part of a schema that is negated. Raises SchemaError if a keyword of it cannot be enforced."""
        before, self._is_exact = self._is_exact, True
        try:
            part = self._inner(place, raw, step)
            if self.is_strict:
                self._finish_definitions()
        finally:
            self._is_exact = before
        return part

    def _listed(self, place: _Place, word: str, value: Any) -> list[SchemaPart]:
        if not value and word not in ("prefixItems", "items"):
            refuse_malformed(place.pointer, f"{word!r} must not be empty")
        return [self._inner(place, item, f"{word}/{index}") for index, item in enumerate(value)]

    def _mapped(self, place: _Place, word: str, value: Any) -> dict[str, SchemaPart]:
        check_texts(value, place.pointer)
        return {name: self._inner(place, item, f"{word}/{escaped(name)}") for name, item in value.items()}

    def _schema(self, place: _Place, word: str, value: Any) -> None:
        part = self._inner(place, value, word)
        if part:  # true means the same as no such keyword
            place.part[word] = part

    def _list(self, place: _Place, word: str, value: Any) -> None:
        place.part[word] = self._listed(place, word, value)

    def _one_of(self, place: _Place, word: str, value: Any) -> None:
        """Read `oneOf`. Branches of required names are made to exclude each other; other branches are checked later."""
        branches, at = self._listed(place, word, value), place.pointer
        are_names = all(isinstance(item, dict) and item.keys() & ASSERTIONS == {"required"} for item in value)
        if are_names and len(branches) <= _MAX_EXCLUSIVE and all(branch.keys() == {"required"} for branch in branches):
            others = [self._logic.negated(branch, at) for branch in branches]
            branches = [
                all_of(at, [branch, *others[:index], *others[index + 1 :]]) for index, branch in enumerate(branches)
            ]
        elif self._is_exact and not self.is_strict:  # it is negated, so a later check would be too late
            self._check_apart(place.part, branches)
        else:
            self._choices.append((place.part, branches))
        if "anyOf" in place.raw:
            place.more.append(any_of(at, branches))
        else:
            place.part["anyOf"] = branches

    def _not(self, place: _Place, word: str, value: Any) -> None:
        place.more.append(self._logic.negated(self._exact(place, value, word), f"{place.pointer}/{word}"))

    def _if(self, place: _Place, word: str, value: Any) -> None:
        at, raw = place.pointer, place.raw
        if "then" in raw or "else" in raw:
            condition = self._exact(place, value, word)
            otherwise = self._logic.negated(condition, f"{at}/{word}")
            then, other = (self._inner(place, raw.get(step, True), step) for step in ("then", "else"))
            place.more.append(any_of(at, [all_of(at, [condition, then]), all_of(at, [otherwise, other])]))

    def _reference(self, place: _Place, word: str, value: Any) -> None:
        pointer = self._references.target(value, place.pointer, place.base)
        self._references.at(pointer, place.pointer)
        if pointer not in self._names:
            self._names[pointer] = f"#/$defs/{len(self._names)}"
            self._pending.append((pointer, place.pointer))
        place.part["$ref"] = self._names[pointer]

    def _properties(self, place: _Place, word: str, value: Any) -> None:
        """Read `properties`. Some schemas write `required: true` in a property, as draft 3 did."""
        place.part[word] = self._mapped(place, word, value)
        self._require(place, [name for name, item in value.items() if is_required(item)])

    def _patterns(self, place: _Place, word: str, value: Any) -> None:
        place.part[word] = {}
        for name, part in self._mapped(place, word, value).items():
            if not self._attempt(f"{place.pointer}/{word}/{escaped(name)}", partial(self._add, place, name, part)):
                place.dropped.add("additionalProperties")

    def _add(self, place: _Place, pattern: str, part: SchemaPart) -> None:
        place.part["patternProperties"][read_pattern(pattern, place.pointer)] = part

    def _items(self, place: _Place, word: str, value: Any) -> None:
        is_list = isinstance(place.raw.get("items"), list)
        if word == "prefixItems" or (word == "items" and is_list):
            place.part["prefixItems"] = self._listed(place, word, value)
        elif word == "items" or is_list:
            place.part["items"] = self._inner(place, value, word)

    def _dependencies(self, place: _Place, word: str, value: Any) -> None:
        """Read a map from a property's name to the rule for an object with this property."""
        at = place.pointer
        for name, item in value.items():
            names = [item] if isinstance(item, str) else item
            if isinstance(names, list) or word == "dependentRequired":
                needed = [SchemaPart(at, {"required": read_names(word, names, at)})]
            else:
                needed = [SchemaPart(at, {"required": [name]}), self._inner(place, item, f"{word}/{escaped(name)}")]
            place.more.append(any_of(at, [lacks(at, name), all_of(at, needed)]))

    def _types(self, place: _Place, word: str, value: Any) -> None:
        names = read_types(value, place.pointer)
        place.part.update({word: names[0] if len(names) == 1 else names} if names else false_part(""))

    def _count(self, place: _Place, word: str, value: Any) -> None:
        count = read_count(word, value, place.pointer)
        if count is not None:
            place.part[word] = count

    def _number(self, place: _Place, word: str, value: Any) -> None:
        if word.startswith("exclusive") and isinstance(value, bool):  # draft 4
            value = place.raw.get(word.removeprefix("exclusive").lower()) if value else None
            if value is None:
                return
        place.part[word] = read_number(word, value, place.pointer)

    def _constants(self, place: _Place, word: str, value: Any) -> None:
        check_constants([value] if word == "const" else value, place.pointer)
        place.part[word] = value

    def _required(self, place: _Place, word: str, value: Any) -> None:
        if not isinstance(value, bool):  # the surrounding object reads it
            self._require(place, read_names(word, value, place.pointer))

    @staticmethod
    def _require(place: _Place, names: list[str]) -> None:
        if found := dict.fromkeys([*place.part.get("required", ()), *names]):
            place.part["required"] = list(found)

    def _pattern(self, place: _Place, word: str, value: Any) -> None:
        place.part[word] = read_pattern(value, place.pointer)

    def _format(self, place: _Place, word: str, value: Any) -> None:
        if value in FORMATS:
            place.more.append(SchemaPart(place.pointer, FORMATS[value]))
        else:
            self.ignored.setdefault(f"format {value!r:.40}")

    def _unique(self, place: _Place, word: str, value: Any) -> None:
        most = place.raw.get("maxItems")
        if value and not (isinstance(most, int) and most <= 1):
            refuse(place.pointer, f"{word!r} cannot be enforced by a grammar")

    def _property_names(self, place: _Place, word: str, value: Any) -> None:
        """Read `propertyNames` of constants, of a pattern, or of lengths."""
        part, at = self._exact(place, value, word), place.pointer
        words = {name: each for name, each in part.items() if name != "type" or "string" not in part.types}
        closed = {"additionalProperties": false_part(at)}
        if part.constants is not None and len(words) == 1:
            names = {name: SchemaPart(at, {}) for name in part.constants if isinstance(name, str)}
            place.more.append(SchemaPart(at, {"properties": names, **closed}))
        elif words.keys() == {"pattern"} or (words and words.keys() <= {"minLength", "maxLength"}):
            lengths = f"^(?s:.){{{words.get('minLength', 0)},{words.get('maxLength', '')}}}$"
            names = {words.get("pattern", lengths): SchemaPart(at, {})}
            place.more.append(SchemaPart(at, {"patternProperties": names, **closed}))
        elif words:
            refuse(at, f"{word!r} can be enforced only for constants, a 'pattern' or lengths")

    def _refused(self, place: _Place, word: str, value: Any) -> None:
        if value is not True or word == "contains":  # otherwise they assert nothing
            refuse(place.pointer, f"{word!r} cannot be enforced by a grammar")


_RULES: dict[str, Callable[[Rewriter, _Place, str, Any], None]] = {
    "$ref": Rewriter._reference,
    "$recursiveRef": Rewriter._reference,
    "type": Rewriter._types,
    **dict.fromkeys(("const", "enum"), Rewriter._constants),
    **dict.fromkeys(("anyOf", "allOf"), Rewriter._list),
    "oneOf": Rewriter._one_of,
    "not": Rewriter._not,
    "if": Rewriter._if,
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), Rewriter._dependencies),
    "properties": Rewriter._properties,
    "patternProperties": Rewriter._patterns,
    "additionalProperties": Rewriter._schema,
    "required": Rewriter._required,
    "propertyNames": Rewriter._property_names,
    **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems"), Rewriter._count),
    **dict.fromkeys(("minLength", "maxLength"), Rewriter._count),
    **dict.fromkeys(("items", "additionalItems", "prefixItems"), Rewriter._items),
    "uniqueItems": Rewriter._unique,
    **dict.fromkeys(("$dynamicRef", "contains", "unevaluatedProperties", "unevaluatedItems"), Rewriter._refused),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), Rewriter._number),
    "pattern": Rewriter._pattern,
    "format": Rewriter._format,
}
_SHAPES: dict[str, tuple[type, str]] = {  # types of the values of keywords
    **dict.fromkeys(("$ref", "$recursiveRef", "pattern", "format"), (str, "a string")),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems", "enum"), (list, "a list")),
    **dict.fromkeys(("properties", "patternProperties"), (Mapping, "an object")),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), (Mapping, "an object")),
    "uniqueItems": (bool, "true or false"),
}
ASSERTIONS = frozenset(_RULES)
