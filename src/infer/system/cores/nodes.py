"""The machine's memory nodes, each with cores that reach it faster than the other cores (Linux), and pinning to nodes.

`root` is the folder that contains `/sys`. It differs from `/` only in tests.
"""

import os
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/")


def cpus_by_node(root: Path = _ROOT) -> list[frozenset[int]]:
    """Return the processors of each node that has processors, ordered by the nodes' numbers.

    The list is empty if the system does not report nodes.
    """
    folders = [path for path in root.glob("sys/devices/system/node/node*") if path.name[4:].isdecimal()]
    nodes = []
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        with suppress(OSError, ValueError):
            nodes.append(_numbers((folder / "cpulist").read_text(encoding="ascii")))
    return [cpus for cpus in nodes if cpus]


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's notation, such as 0-3,8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpus_of_thread(thread: int, num_threads: int, allowed: Set[int], root: Path = _ROOT) -> Set[int] | None:
    """Return the allowed processors of a thread's node, or None if all allowed processors are on one node.

    Neighbouring threads share a node. Each node gets threads in proportion to its allowed processors.
    """
    nodes = [found for cpus in cpus_by_node(root) if (found := cpus & allowed)]
    if len(nodes) < 2:
        return None
    place = (2 * thread + 1) * sum(map(len, nodes)) // (2 * num_threads)
    for cpus in nodes:
        if place < len(cpus):
            return cpus
        place -= len(cpus)
    return None


def cpus_of_rank(rank: int, num_ranks: int, num_threads: int, allowed: Set[int], root: Path = _ROOT) -> Set[int] | None:
    """Return the processors of a rank's node. None if its threads have several nodes, or the machine has one."""
    threads = range(rank * num_threads, (rank + 1) * num_threads)
    first, *others = (cpus_of_thread(thread, num_ranks * num_threads, allowed, root) for thread in threads)
    return first if all(other == first for other in others) else None


def node_of_thread(thread: int, num_threads: int) -> Set[int] | None:
    """Return the processors of a thread's node, of those that the calling thread may use. None if there is one node."""
    return cpus_of_thread(thread, num_threads, os.sched_getaffinity(0)) if sys.platform == "linux" else None


def keep_on_node(thread: int, num_threads: int) -> None:
    """Pin the calling thread to the processors of its node, if there are several nodes."""
    _keep_on(node_of_thread(thread, num_threads))


@contextmanager
def visit(cpus: Set[int]) -> Iterator[None]:
    """Pin the calling thread to those of the processors that it may use. Afterwards it runs wherever it did before."""
    allowed: Set[int] = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    _keep_on(allowed & cpus or None)
    try:
        yield
    finally:
        _keep_on(allowed or None)


def keep_rank_on_node(rank: int, num_ranks: int, num_threads: int) -> None:
    """Pin the calling thread, and all threads that a rank's process starts later, to the rank's node."""
    if sys.platform == "linux":
        _keep_on(cpus_of_rank(rank, num_ranks, num_threads, os.sched_getaffinity(0)))


def _keep_on(cpus: Set[int] | None) -> None:
    if cpus is not None and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, cpus)
