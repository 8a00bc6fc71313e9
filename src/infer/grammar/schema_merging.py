"""Merge objects that must all hold into one, because a compiler that merges references itself may follow them forever.

A merged object becomes a definition under its own name, so that a reference which leads back finds it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

from infer.grammar.schema_logic import KINDS, Logic
from infer.grammar.schema_node import Node, all_of

_MAX_MERGED = 500
_MAX_NAMES = 256
_OF_MAPS = frozenset({"type", "required", "additionalProperties", "patternProperties"})
_OF_OBJECTS = _OF_MAPS | {"properties"}


@final
class Merging:
    """Merges nodes, and adds its definitions to those of `logic`."""

    def __init__(self, logic: Logic) -> None:
        self._logic = logic
        self._names: dict[str, str] = {}

    def merged(self, node: Node) -> Node:
        """Return a reference to one merged object, or `node` if it cannot be merged.

        All parts that must hold must be objects, and at least one must be a reference.
        """
        if "allOf" not in node and not ("$ref" in node and len(node) > 1):
            return node
        parts = [part for part in _parts(node) if part]
        objects = [self._logic.target(part["$ref"]) if set(part) == {"$ref"} else part for part in parts]
        if len(parts) < 2 or not any("$ref" in part for part in parts) or not _are_mergeable(objects):
            return node
        key = repr(parts)
        if key not in self._names:
            if len(self._names) >= _MAX_MERGED:
                return node
            self._names[key] = f"{node.pointer}&{len(self._names)}"
            self._logic.define(self._names[key], _one_object(node.pointer, objects))
        return Node(node.pointer, {"$ref": self._names[key]})

    def without_implied_types(self, node: Node) -> Node:
        """Return the node without each `type` that the choices or references beside it imply."""
        parts = node["allOf"] if set(node) == {"allOf"} else [node]
        if not any("type" in part for part in parts) or not any("anyOf" in part or "$ref" in part for part in parts):
            return node
        found: list[Node] = list(parts)
        for index, part in enumerate(parts):
            if "type" in part:
                own = part.without("type")
                others = [*found[:index], own, *found[index + 1 :]]
                kinds = self._logic.kinds(others)
                is_implied = kinds != KINDS and kinds <= self._logic.kinds([Node("", {"type": part["type"]})])
                if is_implied and set(own) <= {"anyOf", "$ref"}:
                    found[index] = own
        return node if found == list(parts) else all_of(node.pointer, found)


def _parts(node: Node) -> list[Node]:
    """Return the node without its `allOf` and reference, followed by their parts. If they are written first, they come
    first.
    """
    own = node.without("allOf", "$ref")
    found = [own] if own else []
    for word, value in node.items():
        parts = [part for inner in value for part in _parts(inner)] if word == "allOf" else []
        parts += [Node(node.pointer, {"$ref": value})] if word == "$ref" else []
        found = parts + found if own and next(iter(node)) == word else found + parts
    return found


def _are_mergeable(objects: Sequence[Node]) -> bool:
    """Return True if the objects can be merged. A pattern of names cannot be merged with names that may match it."""
    if not all(_OF_OBJECTS.issuperset(part) for part in objects):
        return False
    if sum(len(part.get("properties", ())) for part in objects) > _MAX_NAMES:
        return False
    with_patterns = [part for part in objects if part.get("patternProperties")]
    return not with_patterns or (
        len(with_patterns) == 1 and all(part is with_patterns[0] or not part.get("properties") for part in objects)
    )


def _one_object(pointer: str, objects: Sequence[Node]) -> Node:
    words: dict[str, Any] = {}
    types = [part["type"] for part in objects if "type" in part]
    if types:
        words["type"] = _common_types(types)
    names = dict.fromkeys(name for part in objects for name in part.get("properties", ()))
    maps = [part for part in objects if not part.get("patternProperties")]
    if names:
        words["properties"] = {name: _all(pointer, _of_name(name, objects, maps)) for name in names}
    more = [part["additionalProperties"] for part in maps if "additionalProperties" in part]
    for part in objects:
        if part.get("patternProperties"):
            patterns = part["patternProperties"]
            words["patternProperties"] = {name: _all(pointer, [item, *more]) for name, item in patterns.items()}
    every = [part["additionalProperties"] for part in objects if "additionalProperties" in part]
    if every:
        words["additionalProperties"] = _all(pointer, every)
    required = dict.fromkeys(name for part in objects for name in part.get("required", ()))
    return Node(pointer, words | ({"required": list(required)} if required else {}))


def _of_name(name: str, objects: Sequence[Node], maps: Sequence[Node]) -> list[Node]:
    found = [part["properties"][name] for part in objects if name in part.get("properties", ())]
    return found + [
        part["additionalProperties"]
        for part in maps
        if "additionalProperties" in part and name not in part.get("properties", ())
    ]


def _all(pointer: str, nodes: Iterable[Node]) -> Node:
    return all_of(pointer, list({repr(node): node for node in nodes}.values()))


def _common_types(types: Sequence[list[str]]) -> list[str]:
    """Return the types that all lists allow. An integer counts as a number."""
    found = list(types[0])
    for more in types[1:]:
        both = [name for name in found if name in more or (name == "integer" and "number" in more)]
        found = both + [name for name in more if name == "integer" and "number" in found and name not in both]
    return found
