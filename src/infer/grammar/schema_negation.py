"""The negation of a schema, as schemas. `not`, `else` and the branches of `oneOf` are built from it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

from infer.grammar.schema_facts import key_of, kind_of, property_nodes, values_of
from infer.grammar.schema_logic import KINDS, Logic
from infer.grammar.schema_node import Node, all_of, false_node, refuse

_MAX_REFERENCES = 20
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_OF_THEMSELVES = frozenset({"pattern", "format", "multipleOf", "uniqueItems", *_OPPOSITES})
_TYPES_OF_HIDDEN = {
    **dict.fromkeys(("pattern", "format"), "string"),
    "multipleOf": "number",
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object"),
}


class Hidden(NamedTuple):
    """An alternative that our schemas cannot express. `node` contains the known part."""

    node: Node
    word: str


@final
class Negation:
    def __init__(self, logic: Logic, where: str) -> None:
        self._logic = logic
        self._where = where

    def alternatives(self, node: Node, context: Sequence[Node], pointer: str) -> list[Node]:
        """Return schemas for the values that fulfil the context but not `node`.

        A value of the context fulfils one of the returned schemas exactly if it does not fulfil `node`. Raises
        InvalidRequestError at `pointer` if no schema expresses this.
        """
        found: list[Node] = []
        for alternative in self._negated(node, context, 0):
            hidden = alternative if isinstance(alternative, Hidden) else None
            of_it = alternative.node if isinstance(alternative, Hidden) else alternative
            if of_it.is_false or self._logic.are_disjoint([of_it], context):
                continue
            if hidden is not None:
                refuse(self._where, pointer, f"what {hidden.word!r} excludes cannot be built here")
            found.append(of_it)
        return found

    def _negated(self, node: Node, context: Sequence[Node], depth: int) -> Iterator[Node | Hidden]:
        self._logic.steps_left -= 1
        if depth > _MAX_REFERENCES or self._logic.steps_left < 0:
            yield Hidden(Node(node.pointer, {}), "$ref")
            return
        if node.is_false:
            yield Node(node.pointer, {})
            return
        yield from self._negated_values(node)
        every = self._logic.flat(context)
        for word, value in node.items():
            if word in ("const", "enum", "additionalProperties", "then", "else"):
                continue
            if word in _OF_THEMSELVES and any(word in part and part[word] == value for part in every):
                continue  # what the context says too excludes nothing there
            if word in _OPPOSITES:
                yield self._opposite(node, word, value)
            elif word in _BY_WORD:
                yield from _BY_WORD[word](self, node, value, context, depth)
            elif word == "prefixItems":
                for index, item in enumerate(value):
                    inner = _all_known(self._negated(item, (), depth + 1))
                    for alternative in inner:
                        first = [*([Node(node.pointer, {})] * index), _node_of(alternative)]
                        words = {"type": ["array"], "prefixItems": first, "minItems": index + 1}
                        yield _as(alternative, Node(node.pointer, words))
            elif word == "items":
                yield from self._negated_items(node, value, context)
            elif word == "patternProperties":
                yield from self._negated_patterns(node, value, context)
            elif word == "notEnum":
                yield Node(node.pointer, {"enum": list(value)})
            else:
                yield Hidden(Node(node.pointer, {"type": [_TYPES_OF_HIDDEN[word]]}), word)
        if "additionalProperties" in node:
            yield from self._negated_additional(node, context, depth)

    def _negated_type(self, node: Node, value: Any, _context: Sequence[Node], _depth: int) -> Iterator[Node | Hidden]:
        kinds = KINDS - self._logic.kinds([Node(node.pointer, {"type": value})])
        names: list[str] = [name for name in ("null", "boolean", "string", "array", "object") if name in kinds]
        if kinds >= {"integer", "fraction"}:
            names.append("number")
        elif "fraction" in kinds:
            yield Hidden(Node(node.pointer, {"type": ["fraction"]}), "type")
        if names:
            yield Node(node.pointer, {"type": names})

    def _negated_values(self, node: Node) -> Iterator[Node | Hidden]:
        values = values_of(node)
        if values is None:
            return
        at = node.pointer
        kinds = {kind_of(value) for value in values}
        names = [name for name in ("null", "string", "array", "object") if name not in kinds]
        yield Node(at, {"type": names})
        yield Node(at, {"enum": [value for value in (True, False) if key_of(value) not in set(map(key_of, values))]})
        if "string" in kinds:
            yield Node(at, {"type": ["string"], "notEnum": [value for value in values if isinstance(value, str)]})
        numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
        for low, high in zip([None, *numbers], [*numbers, None], strict=True):
            words: dict[str, Any] = {"type": ["number"]}
            words |= {} if low is None else {"exclusiveMinimum": low}
            yield Node(at, words | ({} if high is None else {"exclusiveMaximum": high}))
        for kind in kinds & {"array", "object"}:
            yield Hidden(Node(at, {"type": [kind]}), "enum")

    @staticmethod
    def _opposite(node: Node, word: str, value: Any) -> Node:
        kind, opposite, change = _OPPOSITES[word]
        if value + change < 0 and change:
            return false_node(node.pointer)
        return Node(node.pointer, {"type": [kind], opposite: value + change})

    def _negated_required(
        self, node: Node, value: list[str], _context: Sequence[Node], _depth: int
    ) -> Iterator[Node | Hidden]:
        for name in value:
            yield Node(node.pointer, {"type": ["object"], "properties": {name: false_node(node.pointer)}})

    def _negated_properties(
        self, node: Node, value: dict[str, Node], context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        every = self._logic.flat(context)
        for name, item in value.items():
            of_name = [inner for part in every for inner in property_nodes(part, name)]
            for alternative in _all_known(self._negated(item, of_name, depth + 1)):
                inner = _node_of(alternative)
                words = {"type": ["object"], "properties": {name: inner}, "required": [name]}
                yield _as(alternative, Node(node.pointer, words))

    def _negated_items(self, node: Node, value: Node, context: Sequence[Node]) -> Iterator[Node | Hidden]:
        """Yield the negation of `items`.

        If no item of the context can fulfil `value`, one item after `prefixItems` is enough.
        """
        num_first = len(node.get("prefixItems", ()))
        others = [
            part["items"]
            for part in self._logic.flat(context)
            if "items" in part and len(part.get("prefixItems", ())) <= num_first
        ]
        if not num_first and value in others:
            return
        if value.is_false or (value and others and self._logic.are_disjoint(others, [value])):
            yield Node(node.pointer, {"type": ["array"], "minItems": num_first + 1})
        elif value:
            yield Hidden(Node(node.pointer, {"type": ["array"]}), "items")

    def _negated_patterns(self, node: Node, value: dict[str, Node], context: Sequence[Node]) -> Iterator[Node | Hidden]:
        """Yield the negation of `patternProperties`.

        One property is enough if all names of the context match the pattern and none of its values can fulfil the item.
        """
        for pattern, item in value.items():
            if self._is_never(item, context, pattern):
                yield Node(node.pointer, {"type": ["object"], "minProperties": 1})
            elif item:
                yield Hidden(Node(node.pointer, {"type": ["object"]}), "patternProperties")

    def _is_never(self, item: Node, context: Sequence[Node], pattern: str | None) -> bool:
        """Return True if no property that the context allows can fulfil `item`.

        With a pattern, all names that the context allows must also match it.
        """
        for part in self._logic.flat(context):
            patterns, more = part.get("patternProperties", {}), part.get("additionalProperties")
            of_names = [*part.get("properties", {}).values(), *patterns.values()]
            if more is None or (pattern is not None and (not more.is_false or set(patterns) != {pattern})):
                continue
            if pattern is not None and part.get("properties"):
                continue
            if all(each.is_false or self._logic.are_disjoint([each], [item]) for each in [*of_names, more]):
                return True
        return False

    def _negated_additional(self, node: Node, context: Sequence[Node], depth: int) -> Iterator[Node | Hidden]:
        """Yield the negation of `additionalProperties`.

        If the context allows only listed names, the additional names are the listed names that `node` does not have.
        """
        more: Node = node["additionalProperties"]
        if not more and not more.is_false:
            return
        is_map = not node.get("properties") and not node.get("patternProperties")
        if is_map and (more.is_false or self._is_never(more, context, None)):
            yield Node(node.pointer, {"type": ["object"], "minProperties": 1})
            return
        if node.get("patternProperties"):
            if not (more.is_false and self._has_names_of(context, node["patternProperties"])):
                yield Hidden(Node(node.pointer, {"type": ["object"]}), "additionalProperties")
            return
        closed = [
            part
            for part in self._logic.flat(context)
            if "additionalProperties" in part
            and part["additionalProperties"].is_false
            and not part.get("patternProperties")
        ]
        if not closed:
            yield Hidden(Node(node.pointer, {"type": ["object"]}), "additionalProperties")
            return
        smallest = min(closed, key=lambda part: len(part.get("properties", ())))
        for name in smallest.get("properties", ()):
            if name not in node.get("properties", ()):
                for alternative in _all_known(self._negated(more, (), depth + 1)):
                    words = {"type": ["object"], "properties": {name: _node_of(alternative)}, "required": [name]}
                    yield _as(alternative, Node(node.pointer, words))

    def _has_names_of(self, context: Sequence[Node], patterns: dict[str, Node]) -> bool:
        """Return True if every name that the context allows matches one of these patterns."""
        return any(
            "additionalProperties" in part
            and part["additionalProperties"].is_false
            and not part.get("properties")
            and part.get("patternProperties", {}).keys() <= patterns.keys()
            for part in self._logic.flat(context)
        )

    def _negated_all(
        self, _node: Node, value: list[Node], context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        for part in value:
            yield from self._negated(part, context, depth + 1)

    def _negated_any(
        self, node: Node, value: list[Node], context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        found: list[Node | Hidden] = [Node(node.pointer, {})]
        for branch in value:
            alternatives = list(self._negated(branch, context, depth + 1))
            found = [
                _join(node.pointer, one, other)
                for one in found
                for other in alternatives
                if not self._logic.are_disjoint([_node_of(one)], [_node_of(other), *context])
            ]
            if len(found) > 500:
                found = [Hidden(Node(node.pointer, {}), "anyOf")]
        yield from found

    def _negated_one(
        self, node: Node, value: list[Node], context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        apart = all(
            self._logic.are_disjoint([a], [b, *context]) for index, a in enumerate(value) for b in value[:index]
        )
        if apart:
            yield from self._negated_any(node, value, context, depth)
        else:
            yield Hidden(Node(node.pointer, {}), "oneOf")

    def _negated_not(self, _node: Node, value: Node, _context: Sequence[Node], _depth: int) -> Iterator[Node | Hidden]:
        yield value

    def _negated_if(self, node: Node, value: Node, context: Sequence[Node], depth: int) -> Iterator[Node | Hidden]:
        at = node.pointer
        for alternative in self._negated(node.get("then", Node(at, {})), context, depth + 1):
            yield _join(at, value, alternative)
        others = list(self._negated(node.get("else", Node(at, {})), context, depth + 1))
        if others:
            for alternative in self._negated(value, context, depth + 1):
                for other in others:
                    yield _join(at, alternative, other)

    def _negated_reference(
        self, _node: Node, value: str, context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        yield from self._negated(self._logic.target(value), context, depth + 4)

    def _negated_dependent(
        self, node: Node, value: dict[str, list[str]], _context: Sequence[Node], _depth: int
    ) -> Iterator[Node | Hidden]:
        at = node.pointer
        for name, needed in value.items():
            for other in needed:
                words = {"type": ["object"], "required": [name], "properties": {other: false_node(at)}}
                yield Node(at, words)

    def _negated_dependent_schemas(
        self, node: Node, value: dict[str, Node], context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        for name, needed in value.items():
            for alternative in self._negated(needed, context, depth + 1):
                has_name = Node(node.pointer, {"type": ["object"], "required": [name]})
                yield _join(node.pointer, has_name, alternative)

    def _negated_contains(
        self, node: Node, value: Node, _context: Sequence[Node], depth: int
    ) -> Iterator[Node | Hidden]:
        if node.get("minContains", 1) != 1 or "maxContains" in node:
            yield Hidden(Node(node.pointer, {"type": ["array"]}), "contains")
            return
        yield Node(node.pointer, {"type": ["array"], "items": Node(value.pointer, {"not": value})})

    def _negated_nothing(
        self, _node: Node, _value: Any, _context: Sequence[Node], _depth: int
    ) -> Iterator[Node | Hidden]:
        yield from ()


_Rule = Callable[[Negation, Node, Any, Sequence[Node], int], Iterator[Node | Hidden]]
_BY_WORD: dict[str, _Rule] = {
    "type": Negation._negated_type,
    "required": Negation._negated_required,
    "properties": Negation._negated_properties,
    "allOf": Negation._negated_all,
    "anyOf": Negation._negated_any,
    "oneOf": Negation._negated_one,
    "not": Negation._negated_not,
    "if": Negation._negated_if,
    "$ref": Negation._negated_reference,
    "dependentRequired": Negation._negated_dependent,
    "dependentSchemas": Negation._negated_dependent_schemas,
    "contains": Negation._negated_contains,
    "minContains": Negation._negated_nothing,
    "maxContains": Negation._negated_nothing,
}


def _all_known(alternatives: Iterator[Node | Hidden]) -> list[Node | Hidden]:
    """Return one schema of all known alternatives, followed by the hidden ones."""
    found = list(alternatives)
    known = [node for node in found if isinstance(node, Node) and not node.is_false]
    hidden: list[Node | Hidden] = [node for node in found if isinstance(node, Hidden)]
    if len(known) > 1:
        known = [Node(known[0].pointer, {"anyOf": known})]
    return [*known, *hidden]


def _node_of(alternative: Node | Hidden) -> Node:
    return alternative.node if isinstance(alternative, Hidden) else alternative


def _as(alternative: Node | Hidden, node: Node) -> Node | Hidden:
    return Hidden(node, alternative.word) if isinstance(alternative, Hidden) else node


def _join(pointer: str, one: Node | Hidden, other: Node | Hidden) -> Node | Hidden:
    joined = all_of(pointer, [_node_of(one), _node_of(other)])
    hidden = next((each for each in (one, other) if isinstance(each, Hidden)), None)
    return joined if hidden is None else Hidden(joined, hidden.word)
