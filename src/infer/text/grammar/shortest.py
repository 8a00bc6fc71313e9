"""Check that a finite value fulfils a schema, and that the shortest one is not too long.

A reference that must be followed may not lead back to itself. The shortest text of every rule takes time that is linear
in the size of the rules, except for a heap. Source: Knuth, "A generalization of Dijkstra's algorithm" (1977).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from infer.text.grammar.schema_logic import SchemaPart, refuse


class Clause(NamedTuple):
    """One way to fulfil `head`: all of `body`, in any order, and `length` additional bytes."""

    head: Hashable
    body: Sequence[Hashable] = ()
    length: int = 0
    times: int = 1  # how often the body is needed


def shortest(clauses: Iterable[Clause]) -> dict[Hashable, int]:
    """Return the bytes of the shortest text for each head that has one.

    If the clauses' lengths are lower bounds, the results are lower bounds.
    """
    heads: list[Hashable] = []
    missing: list[int] = []
    lengths: list[int] = []
    waiting: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    found: dict[Hashable, int] = {}
    order = count()  # because names cannot be compared
    heap: list[tuple[int, int, Hashable]] = []
    for index, clause in enumerate(clauses):
        needed: dict[Hashable, int] = dict.fromkeys(clause.body, 1)
        if len(needed) < len(clause.body):
            needed = Counter(clause.body)
        for name, uses in needed.items():
            waiting[name].append((index, uses * clause.times))
        heads.append(clause.head)
        missing.append(len(needed))
        lengths.append(clause.length)
        if not needed:
            heappush(heap, (clause.length, next(order), clause.head))
    while heap:
        length, _, name = heappop(heap)
        if name in found:
            continue
        found[name] = length
        for index, uses in waiting[name]:
            missing[index] -= 1
            lengths[index] += uses * length
            if not missing[index]:
                heappush(heap, (lengths[index], next(order), heads[index]))
    return found


MAX_SHORTEST = 100_000  # bytes: no context has room for more


def nodes_of(roots: Sequence[SchemaPart], definitions: Mapping[str, SchemaPart] | None = None) -> list[SchemaPart]:
    """Return all nodes of the roots, including nested nodes and the definitions they refer to, each once."""
    found: dict[int, SchemaPart] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if id(node) not in found:
            found[id(node)] = node
            pending += node.children()
            pending += [definitions[node["$ref"]]] if definitions and "$ref" in node else []
    return list(found.values())


def empty_definitions(root: SchemaPart, nodes: Sequence[SchemaPart], built: Mapping[str, SchemaPart]) -> frozenset[str]:
    """Return the definitions that no value fulfils.

    Raises InvalidRequestError with the deepest such place if no value fulfils the root.
    """
    lengths = shortest([clause for node in nodes for clause in _clauses(node, built)])
    if id(root) not in lengths:
        needed = {part for node in nodes for part in _of_object(node)[1]}
        impossible = [
            node.pointer
            for node in nodes
            if id(node) not in lengths and (id(node) in needed or not (node.is_false and node.pointer))
        ]
        deepest = max(impossible or [root.pointer], key=lambda pointer: (pointer.count("/"), pointer))
        refuse(deepest, "no value can fulfil it")
    if lengths[id(root)] > MAX_SHORTEST:
        refuse(root.pointer, f"no value shorter than {MAX_SHORTEST} bytes can fulfil it")
    return frozenset(pointer for pointer, node in built.items() if id(node) not in lengths)


def _clauses(node: SchemaPart, built: Mapping[str, SchemaPart]) -> Iterator[Clause]:
    if node.is_false:
        return
    needed: list[Any] = []
    length = 0
    if "$ref" in node:
        needed.append(id(built[node["$ref"]]))
    for index, part in enumerate(node.get("allOf", ())):  # at least as long as the longest part
        of_part = (id(node), "allOf", index)
        yield Clause(of_part, (id(part),), times=0)
        needed.append(of_part)
    kind = node.get("type")
    if kind == "object":
        length, needs = _of_object(node)
        needed += needs
    elif kind == "array":
        least, first = node.get("minItems", 0), node.get("prefixItems", [])
        length = least
        needed += [id(item) for item in first[:least]]
        if least > len(first) and "items" in node:
            of_items = (id(node), "items")
            yield Clause(of_items, (id(node["items"]),), times=least - len(first))
            needed.append(of_items)
    elif kind == "string":
        length = node.get("minLength", 0)
    for word in ("anyOf", "enum"):
        if word in node:
            head = (id(node), word)
            needed.append(head)
            for option in node[word]:
                yield Clause(head, (id(option),) if word == "anyOf" else ())
    yield Clause(id(node), needed, length)


def _of_object(node: SchemaPart) -> tuple[int, list[int]]:
    properties = node.get("properties", {})
    needed = []
    for name in node.get("required", ()):
        if name in properties:
            needed.append(id(properties[name]))
        elif "additionalProperties" in node and not node.get("patternProperties"):
            needed.append(id(node["additionalProperties"]))
    return sum(map(len, node.get("required", ()))), needed
