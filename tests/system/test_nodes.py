"""Nodes of memory, read from trees of files like those of the kernel."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from infer.compute.operands.mixers import Attention
from infer.models.sharding import head_starts, kv_heads_of
from infer.system.cores import nodes
from infer.system.cores.nodes import cpus_by_node, cpus_of_rank, cpus_of_thread, keep_on_node, visit


def tree(root: Path, *cpu_lists: str) -> Path:
    folder = root / "sys/devices/system/node"
    for number, text in enumerate(cpu_lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}/cpulist").write_text(text)
    return root


def test_a_system_without_information_has_no_nodes(tmp_path: Path) -> None:
    assert cpus_by_node(tmp_path) == []
    assert cpus_of_thread(1, 2, {0, 1}, tmp_path) is None


def test_nodes_come_in_the_order_of_their_numbers_without_those_of_memory_alone(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-1\n", "2\n", "\n", *(f"{number}\n" for number in range(3, 12)))
    (root / "sys/devices/system/node/has_cpu").write_text("0-11\n")
    assert cpus_by_node(root) == [{0, 1}, *({number} for number in range(2, 12))]


def test_a_list_that_cannot_be_read_is_no_node(tmp_path: Path) -> None:
    assert cpus_by_node(tree(tmp_path, "0-x\n", "1\n")) == [{1}]


def test_neighbours_share_a_node_in_proportion_to_its_processors(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-3,8-11\n", "4-7,12-15\n")
    first, second = cpus_by_node(root)
    assert [cpus_of_thread(thread, 4, set(range(16)), root) for thread in range(4)] == [first, first, second, second]
    few = set(range(6))  # two of the second node
    assert [cpus_of_thread(thread, 3, few, root) for thread in range(3)] == [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}]


def test_threads_of_one_node_are_not_bound(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-3\n", "4-7\n")
    assert cpus_of_thread(1, 2, {1, 2}, root) is None
    assert cpus_of_thread(1, 2, {0, 1, 2, 3}, root) is None


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(32, 8, 2), (9, 3, 2), (8, 1, 4), (64, 8, 4)])
def test_a_head_s_keys_lie_on_the_node_whose_threads_read_them(
    tmp_path: Path, num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    """A rank for each node: its threads are all of the node, and no other rank has its query heads. A head of keys
    that several ranks read is stored by each."""
    root = tree(tmp_path, *(f"{4 * node}-{4 * node + 3}\n" for node in range(num_ranks)))
    layer = Attention(num_heads, num_kv_heads, 64, rope=None, scale=1.0)
    starts, nodes_by_kv_head = head_starts(layer, num_ranks), dict[int, list[int]]()
    assert starts is not None
    for rank, heads in enumerate(pairwise(starts)):
        assert cpus_of_rank(rank, num_ranks, 4, set(range(4 * num_ranks)), root) == set(range(4 * rank, 4 * rank + 4))
        for head in range(*kv_heads_of(layer, heads)):
            nodes_by_kv_head.setdefault(head, []).append(rank)
    assert sorted(nodes_by_kv_head) == list(range(num_kv_heads))
    assert num_ranks > num_kv_heads or all(len(ranks) == 1 for ranks in nodes_by_kv_head.values())


def test_a_rank_of_several_nodes_is_kept_on_none(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-3\n", "4-7\n")
    assert cpus_of_rank(0, 1, 8, set(range(8)), root) is None
    assert cpus_of_rank(1, 2, 4, set(range(4)), root) is None  # all processors that it may use are on one node


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: affinities are Linux's")
def test_only_a_machine_of_several_nodes_binds_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = list[tuple[int, object]]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: calls.append((process, cpus)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    for count, bound in ((1, []), (2, [(0, {2, 3})])):
        lists = [frozenset({0, 1, 2, 3})] if count == 1 else [frozenset({0, 1}), frozenset({2, 3})]
        monkeypatch.setattr(nodes, "cpus_by_node", lambda root, lists=lists: lists)
        keep_on_node(1, 2)
        assert calls == bound


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: affinities are Linux's")
def test_a_visitor_returns_to_all_its_processors_even_after_an_error() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    found = list[set[int]]()

    def fail() -> None:
        with visit({cpu, -1}):  # -1: a processor that the process has lost
            found.append(os.sched_getaffinity(0))
            raise ValueError("work failed")

    with pytest.raises(ValueError, match="work failed"):
        fail()
    assert found == [{cpu}]
    assert os.sched_getaffinity(0) == allowed
    with visit({-1}):
        assert os.sched_getaffinity(0) == allowed
    assert os.sched_getaffinity(0) == allowed
