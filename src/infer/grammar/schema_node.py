"""A JSON schema in one form for all drafts: draft 2020-12's words, each value checked, each place recorded.

Two words are special: `notEnum` lists strings that a string must not be, and `$ref` contains the target's pointer,
without the `#`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from infer.errors import SchemaError

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Node(dict[str, Any]):
    """An object schema. `pointer` is its place in the user's schema.

    `true` is the empty node. `false` is a node with the word `nothing`.
    """

    __slots__ = ("pointer",)

    def __init__(self, pointer: str, words: Mapping[str, Any]) -> None:
        super().__init__(words)
        self.pointer = pointer

    @property
    def is_false(self) -> bool:
        return NOTHING in self

    def without(self, *words: str) -> "Node":
        return Node(self.pointer, {word: value for word, value in self.items() if word not in words})


NOTHING = "nothing"  # the word of a schema that nothing fulfils


def false_node(pointer: str) -> Node:
    return Node(pointer, {NOTHING: True})


def true_node(pointer: str) -> Node:
    return Node(pointer, {})


def all_of(pointer: str, nodes: Sequence[Node]) -> Node:
    nodes = [node for node in nodes if node]
    if len(nodes) == 1 and not nodes[0].is_false:
        return nodes[0]
    nodes = _without_repeats(nodes)
    if any(node.is_false for node in nodes):
        return false_node(pointer)
    return nodes[0] if len(nodes) == 1 else Node(pointer, {"allOf": list(nodes)} if nodes else {})


def _without_repeats(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes without repeated references."""
    found: list[Node] = []
    references: set[str] = set()
    for node in nodes:
        if set(node) == {"$ref"}:
            if node["$ref"] in references:
                continue
            references.add(node["$ref"])
        found.append(node)
    return found


def any_of(pointer: str, nodes: Sequence[Node]) -> Node:
    nodes = [node for node in nodes if not node.is_false]
    if not nodes:
        return false_node(pointer)
    if not all(nodes):
        return true_node(pointer)
    return nodes[0] if len(nodes) == 1 else Node(pointer, {"anyOf": list(nodes)})


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def refuse(where: str, pointer: str, problem: str) -> NoReturn:
    """Raise SchemaError for the part at `pointer`."""
    raise SchemaError(f"{where} at {pointer or '/'}: {problem}", pointer, problem)
