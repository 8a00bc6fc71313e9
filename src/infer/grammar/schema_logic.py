"""Relations of two schemas: the types that both allow, and whether no value can fulfil both.

All answers are conservative: schemas called disjoint are disjoint, and a value that may hold is never ruled out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from infer.grammar.schema_facts import (
    are_numbers_apart,
    are_strings_apart,
    is_within,
    item_node,
    key_of,
    kind_of,
    matches,
    property_nodes,
    same,
    values_of,
)
from infer.grammar.schema_node import Node

KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_KINDS_OF = {name: frozenset({name}) for name in KINDS} | {"number": frozenset({"integer", "fraction"})}
_MAX_DEPTH = 8
_MAX_PARTS = 200


@final
class Logic:
    """Facts about nodes whose references lead to `definitions`. `steps_left` limits the work for one schema."""

    def __init__(self, definitions: Mapping[str, Node], steps: int) -> None:
        self._definitions = dict(definitions)
        self.steps_left = steps
        self._flat: dict[int, tuple[Node, list[Node]]] = {}  # by id, with the node so that the id stays its own
        self._kinds: dict[int, tuple[Node, frozenset[str]]] = {}
        self._constants: dict[int, dict[str, frozenset[str]]] = {}
        self._rests: dict[tuple[int, str], Node] = {}
        self._disjoint: dict[tuple[int, frozenset[int]], bool] = {}

    def define(self, pointer: str, node: Node) -> None:
        """Add a definition of our own, under a name that no pointer has."""
        self._definitions[pointer] = node

    def target(self, pointer: str) -> Node:
        return self._definitions[pointer]

    def flat(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the parts that must all hold: the nodes, the parts of their `allOf`, and the targets of their
        references.
        """
        return [part for node in nodes for part in self._flat_of(node)]

    def _flat_of(self, node: Node) -> list[Node]:
        known = self._flat.get(id(node))
        if known is not None:
            return known[1]
        found: list[Node] = []
        seen: set[str] = set()
        pending = [node]
        while pending and len(found) < _MAX_PARTS:
            part = pending.pop()
            pointer = part.get("$ref")
            pending += part.get("allOf", ())
            if pointer is not None and pointer not in seen:
                seen.add(pointer)
                pending.append(self._definitions[pointer])
            own = part.without("$ref", "allOf") if "$ref" in part or "allOf" in part else part
            if own or part is node:
                found.append(own)
        self._flat[id(node)] = node, found
        return found

    def kinds(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Return the `KINDS` whose values may fulfil all nodes."""
        return KINDS.intersection(*map(self._kinds_of, nodes))

    def _kinds_of(self, node: Node) -> frozenset[str]:
        known = self._kinds.get(id(node))
        if known is not None:
            return known[1]
        self._kinds[id(node)] = node, KINDS  # of one that needs itself
        found = KINDS
        for part in self._flat_of(node):
            self.steps_left -= 1
            if part.is_false:
                found = frozenset()
            values = values_of(part)
            if values is not None:
                found &= frozenset(map(kind_of, values))
            if "type" in part:
                found &= frozenset().union(*(_KINDS_OF[name] for name in part["type"]))
            for word in ("anyOf", "oneOf"):
                if word in part and self.steps_left > 0:
                    found &= frozenset().union(*map(self._kinds_of, part[word]))
        self._kinds[id(node)] = node, found
        return found

    def are_disjoint(self, a: Sequence[Node], b: Sequence[Node], depth: int = 0) -> bool:
        """Return True if no value fulfils all of `a` and all of `b`."""
        if depth > _MAX_DEPTH or self.steps_left < 0:
            return False
        a, b = self.flat(a), self.flat(b)
        if not depth:
            return self._are_disjoint(a, b, depth)
        key = depth, frozenset(map(id, (*a, *b)))  # choices are taken in every order, and lead to the same parts
        known = self._disjoint.get(key)
        if known is None:
            known = self._disjoint[key] = self._are_disjoint(a, b, depth)
        return known

    def _are_disjoint(self, a: list[Node], b: list[Node], depth: int) -> bool:
        self.steps_left -= 1 + len(a) + len(b)
        kinds = self.kinds(a) & self.kinds(b)
        if not kinds:
            return True
        every = [*a, *b]
        values = self._values(every)
        if values is not None:
            return not any(all(self.may_hold(part, value) for part in every) for value in values)
        if all(self._are_apart(kind, a, b, depth) for kind in kinds):
            return True
        for own, other in ((a, b), (b, a)):
            for part in own:
                rest = [*other, *(each for each in own if each is not part)]
                for word in ("anyOf", "oneOf"):
                    others = [*rest, self._rest(part, word)] if word in part else []
                    if others and all(self.are_disjoint([branch], others, depth + 1) for branch in part[word]):
                        return True
        return False

    def _rest(self, part: Node, word: str) -> Node:
        key = id(part), word
        if key not in self._rests:
            self._rests[key] = part.without(word)
        return self._rests[key]

    @staticmethod
    def _values(nodes: Sequence[Node]) -> list[Any] | None:
        known = [values for node in nodes if (values := values_of(node)) is not None]
        return min(known, key=len) if known else None

    def may_hold(self, node: Node, value: Any, depth: int = 0) -> bool:
        """Return False only if the value does not fulfil the node."""
        self.steps_left -= 1
        if depth > _MAX_DEPTH or self.steps_left < 0:
            return True
        for part in self._flat_of(node):
            values = values_of(part)
            kind = kind_of(value)
            if part.is_false or (values is not None and not any(same(value, known) for known in values)):
                return False
            if "type" in part and not any(kind in _KINDS_OF[name] for name in part["type"]):
                return False
            for word in ("anyOf", "oneOf"):
                if word in part and not any(self.may_hold(branch, value, depth + 1) for branch in part[word]):
                    return False
            if not self._may_hold_kind(part, value, kind, depth):
                return False
        return True

    def _may_hold_kind(self, part: Node, value: Any, kind: str, depth: int) -> bool:
        if kind in ("integer", "fraction"):
            return is_within(part, value)
        if kind == "string":
            if value in part.get("notEnum", ()) or matches(part.get("pattern", ""), value) is False:
                return False
            return bool(part.get("minLength", 0) <= len(value) <= part.get("maxLength", math.inf))
        if kind == "array":
            first = part.get("prefixItems", [])
            rest = part.get("items", Node("", {}))
            if not part.get("minItems", 0) <= len(value) <= part.get("maxItems", math.inf):
                return False
            return all(
                self.may_hold(first[index] if index < len(first) else rest, item, depth + 1)
                for index, item in enumerate(value)
            )
        if kind == "object":
            if not set(part.get("required", ())) <= value.keys():
                return False
            return all(
                self.may_hold(of_name, item, depth + 1)
                for name, item in value.items()
                for of_name in property_nodes(part, name)
            )
        return True

    def _are_apart(self, kind: str, a: list[Node], b: list[Node], depth: int) -> bool:
        if kind == "object":
            return self._are_objects_apart(a, b, depth)
        if kind == "array":
            return self._are_arrays_apart(a, b, depth)
        if kind == "string":
            return are_strings_apart(a, b)
        if kind in ("integer", "fraction"):
            return are_numbers_apart([*a, *b])
        return False

    def _are_objects_apart(self, a: list[Node], b: list[Node], depth: int) -> bool:
        every = [*a, *b]
        required = dict.fromkeys(name for part in every for name in part.get("required", ()))
        least = max([len(required), *(part.get("minProperties", 0) for part in every)])
        if least > min((part.get("maxProperties", math.inf) for part in every), default=math.inf):
            return True
        of_a_by_name, of_b_by_name = self._constants_by_name(a), self._constants_by_name(b)
        for name in required:
            if name in of_a_by_name and of_a_by_name[name].isdisjoint(of_b_by_name.get(name, of_a_by_name[name])):
                return True
        for name in required:
            of_a = [node for part in a for node in property_nodes(part, name)]
            of_b = [node for part in b for node in property_nodes(part, name)]
            if self.are_disjoint(of_a, of_b, depth + 1):
                return True
        return False

    def _constants_by_name(self, parts: list[Node]) -> dict[str, frozenset[str]]:
        """Return the keys of the allowed values of each property that must be one of some constants."""
        found: dict[str, frozenset[str]] = {}
        for part in parts:
            if id(part) not in self._constants:
                known = {name: values_of(node) for name, node in part.get("properties", {}).items()}
                self._constants[id(part)] = {
                    name: frozenset(map(key_of, values)) for name, values in known.items() if values is not None
                }
            for name, keys in self._constants[id(part)].items():
                found[name] = found[name] & keys if name in found else keys
        return found

    def _are_arrays_apart(self, a: list[Node], b: list[Node], depth: int) -> bool:
        every = [*a, *b]
        if not every:
            return False
        least = max(part.get("minItems", 0) for part in every)
        if least > min(part.get("maxItems", math.inf) for part in every):
            return True
        return any(
            self.are_disjoint([item_node(part, index) for part in a], [item_node(part, index) for part in b], depth + 1)
            for index in range(min(least, 1 + max(len(part.get("prefixItems", ())) for part in every)))
        )
