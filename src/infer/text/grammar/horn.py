"""The shortest text of every rule, and the rules that have no text. Linear in the size of the rules, except for a heap.

Source: Knuth, "A generalization of Dijkstra's algorithm" (1977).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple


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
