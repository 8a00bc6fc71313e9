"""Read a JSON schema of any draft into nodes.

Older words are converted to today's form, and references are resolved. Words that assert nothing are left out and
recorded.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError, SchemaError
from infer.grammar.schema_formats import FORMATS, FORMATS_OF_DRAFT_3, OLD_FORMATS
from infer.grammar.schema_node import TYPES, Node, all_of, any_of, escaped, false_node, refuse, true_node
from infer.grammar.schema_places import Document
from infer.grammar.schema_values import (
    check_schema_pattern,
    check_texts,
    read_constants,
    read_count,
    read_names,
    read_number,
)

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SILENT = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"),
        *("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly"),
        "writeOnly",
    }
)


OnProblem = Callable[[str, str], None]  # the pointer of a word, or of a schema that is none, and the reason


class Place(NamedTuple):
    """An object schema while its words are read.

    Words are added to `words`. A word that needs a schema of its own is added to `more`.
    """

    raw: Mapping[str, Any]
    pointer: str
    base: str
    words: dict[str, Any]
    more: list[Node]


@final
class Reader:
    """Reader of one schema.

    `definitions` are the nodes of reference targets, by pointer. `ignored` are the words that assert nothing. With
    `on_problem`, a word that cannot be read is reported and left out. Without it, such a word raises SchemaError.
    """

    def __init__(self, root: Any, where: str, on_problem: OnProblem | None = None) -> None:
        self._document = Document(root, where)
        self._draft = self._document.draft
        self._where = where
        self._on_problem = on_problem
        self.definitions: dict[str, Node] = {}
        self.ignored: dict[str, str] = {}
        self._pending: list[tuple[str, str, str]] = []  # target, place and word of each reference

    def read(self) -> Node:
        """Return the root's node. Afterwards every reference leads to one of `definitions`."""
        raw, base = self._document.at("", "")
        root = self._node(raw, "", base)
        while self._pending:
            pointer, asked_at, word = self._pending.pop()
            if pointer in self.definitions:
                continue
            try:
                raw, base = self._document.at(pointer, asked_at)
            except InvalidRequestError as error:
                self._report(f"{asked_at}/{word}", error)
            else:
                self.definitions[pointer] = self._node(raw, pointer, base)
        return root

    def _report(self, pointer: str, error: InvalidRequestError) -> None:
        """Report the error to `on_problem`, or raise it if there is none."""
        if self._on_problem is None:
            raise error
        self._on_problem(pointer, error.problem if isinstance(error, SchemaError) else str(error))

    def _node(self, raw: Any, pointer: str, base: str) -> Node:
        if isinstance(raw, bool):
            return true_node(pointer) if raw else false_node(pointer)
        if not isinstance(raw, dict):
            try:
                refuse(self._where, pointer, f"a schema is an object, true or false, got {raw!r:.40}")
            except SchemaError as error:
                self._report(pointer, error)
                return true_node(pointer)
        if pointer:
            base = self._document.base_within(raw, base)
        if "$ref" in raw and isinstance(raw["$ref"], str) and self._draft <= 7:
            try:  # it hides the words beside it
                return Node(pointer, {"$ref": self._target("$ref", raw["$ref"], pointer, base)})
            except InvalidRequestError as error:
                self._report(f"{pointer}/$ref", error)
                return true_node(pointer)
        place = Place(raw, pointer, base, {}, [])
        for word, value in raw.items():
            if word in _SILENT:
                continue
            read = _RULES_OF_DRAFT_3.get(word) if self._draft == 3 else None
            read = read or _RULES.get(word)
            if read is None:
                self.ignored.setdefault(word, pointer)
            else:
                try:
                    read(self, place, word, value)
                except InvalidRequestError as error:
                    self._report(f"{pointer}/{escaped(word)}", error)
        node = Node(pointer, place.words)
        return all_of(pointer, [node, *place.more]) if place.more else node

    def _target(self, word: str, reference: str, pointer: str, base: str) -> str:
        target = self._document.target(reference, pointer, base)
        self._pending.append((target, pointer, word))
        return target

    def _inner(self, place: Place, raw: Any, step: str) -> Node:
        return self._node(raw, f"{place.pointer}/{step}", place.base)

    def _listed(self, place: Place, word: str, value: Any) -> list[Node]:
        if not isinstance(value, list):
            refuse(self._where, place.pointer, f"{word!r} must be a list, got {value!r:.40}")
        if not value and word != "prefixItems" and word != "items":
            refuse(self._where, place.pointer, f"{word!r} must not be empty")
        return [self._inner(place, item, f"{word}/{index}") for index, item in enumerate(value)]

    def _check_object(self, place: Place, word: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(self._where, place.pointer, f"{word!r} must be an object, got {value!r:.40}")
        check_texts(self._where, value, place.pointer)

    def _read_schema(self, place: Place, word: str, value: Any) -> None:
        place.words[word] = self._inner(place, value, word)

    def _read_list(self, place: Place, word: str, value: Any) -> None:
        place.words[word] = self._listed(place, word, value)

    def _read_map(self, place: Place, word: str, value: Any) -> None:
        self._check_object(place, word, value)
        if word == "patternProperties":
            for name in value:
                try:
                    check_schema_pattern(self._where, name, place.pointer)
                except InvalidRequestError as error:
                    self._report(f"{place.pointer}/{word}/{escaped(name)}", error)
        place.words[word] = {name: self._inner(place, item, f"{word}/{escaped(name)}") for name, item in value.items()}

    def _read_properties(self, place: Place, word: str, value: Any) -> None:
        """Read `properties`, including draft 3's `required: true` in a property."""
        self._read_map(place, word, value)
        inside = [name for name, item in value.items() if isinstance(item, Mapping) and item.get("required") is True]
        if inside:
            self._require(place, inside)

    def _read_items(self, place: Place, word: str, value: Any) -> None:
        is_list = isinstance(place.raw.get("items"), list)
        if word == "prefixItems" or (word == "items" and is_list):
            place.words["prefixItems"] = self._listed(place, word, value)
        elif word == "items" or is_list:
            place.words["items"] = self._inner(place, value, word)

    def _read_dependencies(self, place: Place, word: str, value: Any) -> None:
        self._check_object(place, word, value)
        for name, item in value.items():
            listed = [item] if isinstance(item, str) else item
            if isinstance(listed, list):
                needed = read_names(self._where, word, listed, place.pointer)
                place.words.setdefault("dependentRequired", {})[name] = needed
            else:
                node = self._inner(place, item, f"{word}/{escaped(name)}")
                place.words.setdefault("dependentSchemas", {})[name] = node

    def _read_dependent_required(self, place: Place, word: str, value: Any) -> None:
        self._check_object(place, word, value)
        known = place.words.setdefault(word, {})
        known.update({name: read_names(self._where, word, names, place.pointer) for name, names in value.items()})

    def _read_reference(self, place: Place, word: str, value: Any) -> None:
        if not isinstance(value, str):
            refuse(self._where, place.pointer, f"{word!r} must be a string, got {value!r:.40}")
        if word == "$dynamicRef":
            self._document.check_dynamic(value, place.pointer)
        node = Node(place.pointer, {"$ref": self._target(word, value, place.pointer, place.base)})
        if len(_REFERENCES & place.raw.keys()) > 1:
            place.more.append(node)
        else:
            place.words.update(node)

    def _read_type(self, place: Place, word: str, value: Any) -> None:
        listed = value if isinstance(value, list) else [value]
        nested: list[Node] = []
        names: list[str] = []
        for index, name in enumerate(listed):
            if self._draft == 3 and isinstance(name, Mapping):
                nested.append(self._inner(place, name, f"{word}/{index}"))
            elif self._draft == 3 and name == "any":
                return
            elif name not in TYPES:
                refuse(self._where, place.pointer, f"'type' must be one of {', '.join(TYPES)}, got {name!r:.40}")
            else:
                names.append(name)
        if nested:
            listed_types = [Node(place.pointer, {"type": names})] if names else []
            place.more.append(any_of(place.pointer, [*nested, *listed_types]))
        elif names:
            place.words["type"] = list(dict.fromkeys(names))
        else:
            place.words.update(false_node(place.pointer))

    def _read_count(self, place: Place, word: str, value: Any) -> None:
        count = read_count(self._where, word, value, place.pointer)
        if count is not None:
            place.words[word] = count

    def _read_number(self, place: Place, word: str, value: Any) -> None:
        if word.startswith("exclusive") and isinstance(value, bool):  # draft 4
            bound = place.raw.get(word.removeprefix("exclusive").lower())
            if not value or bound is None:
                return
            value = bound
        place.words[word] = read_number(self._where, word, value, place.pointer)

    def _read_constants(self, place: Place, word: str, value: Any) -> None:
        place.words[word] = read_constants(self._where, word, value, place.pointer)

    def _read_required(self, place: Place, word: str, value: Any) -> None:
        if not isinstance(value, bool):  # draft 3: the object around reads it
            self._require(place, read_names(self._where, word, value, place.pointer))

    @staticmethod
    def _require(place: Place, names: list[str]) -> None:
        place.words["required"] = list(dict.fromkeys([*place.words.get("required", ()), *names]))

    def _read_unique(self, place: Place, word: str, value: Any) -> None:
        if not isinstance(value, bool):
            refuse(self._where, place.pointer, f"'uniqueItems' must be true or false, got {value!r:.40}")
        if value:
            place.words[word] = True

    def _read_text(self, place: Place, word: str, value: Any) -> None:
        if not isinstance(value, str):
            refuse(self._where, place.pointer, f"{word!r} must be a string, got {value!r:.40}")
        if word == "pattern":
            check_schema_pattern(self._where, value, place.pointer)
            place.words[word] = value
            return
        name = OLD_FORMATS.get(value, value)
        if name in FORMATS or (self._draft == 3 and name in FORMATS_OF_DRAFT_3):
            place.words[word] = name
        else:
            self.ignored.setdefault(f"format {value!r:.40}", place.pointer)

    def _read_divisor(self, place: Place, _word: str, value: Any) -> None:
        self._read_number(place, "multipleOf", value)

    def _read_extended(self, place: Place, word: str, value: Any) -> None:
        if isinstance(value, list):
            place.more.extend(self._inner(place, item, f"{word}/{index}") for index, item in enumerate(value))
        else:
            place.more.append(self._inner(place, value, word))

    def _read_disallowed(self, place: Place, word: str, value: Any) -> None:
        inner = Place(place.raw, f"{place.pointer}/{word}", place.base, {}, [])
        self._read_type(inner, "type", value)
        excluded = all_of(inner.pointer, [Node(inner.pointer, inner.words), *inner.more])
        place.more.append(Node(inner.pointer, {"not": excluded}))


_Rule = Callable[[Reader, Place, str, Any], None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("if", "then", "else", "not", "contains", "propertyNames"), Reader._read_schema),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), Reader._read_schema),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), Reader._read_list),
    **dict.fromkeys(("patternProperties", "dependentSchemas"), Reader._read_map),
    **dict.fromkeys(("items", "additionalItems", "prefixItems"), Reader._read_items),
    **dict.fromkeys(_REFERENCES, Reader._read_reference),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Reader._read_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), Reader._read_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), Reader._read_number),
    **dict.fromkeys(("enum", "const"), Reader._read_constants),
    **dict.fromkeys(("pattern", "format"), Reader._read_text),
    "properties": Reader._read_properties,
    "required": Reader._read_required,
    "type": Reader._read_type,
    "dependencies": Reader._read_dependencies,
    "dependentRequired": Reader._read_dependent_required,
    "uniqueItems": Reader._read_unique,
}
_RULES_OF_DRAFT_3: dict[str, _Rule] = {
    "divisibleBy": Reader._read_divisor,
    "extends": Reader._read_extended,
    "disallow": Reader._read_disallowed,
}
ASSERTIONS = frozenset(_RULES)
