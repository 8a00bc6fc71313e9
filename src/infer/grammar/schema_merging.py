"""Objects that must all hold, merged into one: a compiler that merges references itself may follow them for ever.

What is merged becomes a definition under a name of its own, so that a reference which leads back finds it.
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
    """Adds its definitions to those of `logic`."""

    def __init__(self, logic: Logic) -> None:
        self._logic = logic
        self._names: dict[str, str] = {}

    def merged(self, node: Node) -> Node:
        """A reference to one object, where all that must hold are objects and one is a reference; else `node`."""
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
        """Without a `type` that the choices or references beside it imply."""
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
    """Itself without its `allOf` and reference, and those; first what stands first."""
    own = node.without("allOf", "$ref")
    found = [own] if own else []
    for word, value in node.items():
        parts = [part for inner in value for part in _parts(inner)] if word == "allOf" else []
        parts += [Node(node.pointer, {"$ref": value})] if word == "$ref" else []
        found = parts + found if own and next(iter(node)) == word else found + parts
    return found


def _are_mergeable(objects: Sequence[Node]) -> bool:
    """A pattern of names and names that may match it are not told apart."""
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
    """Those that all allow; an integer is a number."""
    found = list(types[0])
    for more in types[1:]:
        both = [name for name in found if name in more or (name == "integer" and "number" in more)]
        found = both + [name for name in more if name == "integer" and "number" in found and name not in both]
    return found
