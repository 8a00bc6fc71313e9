"""Limits of control groups and nodes of memory, read from trees of files like those of the kernel."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from infer.compute.operands.mixers import Attention
from infer.models.sharding import head_starts, kv_heads_of
from infer.system import cores
from infer.system.available_memory import cpu_quota, memory_left_bytes, memory_limit_bytes
from infer.system.cores import cpus_by_node, cpus_of_rank, cpus_of_thread, keep_on_node, visit

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def tree(root: Path, own: str, mounts: str, text_by_file: dict[str, str], mount: str = "sys/fs/cgroup") -> Path:
    files = {f"{mount}/{name}": text for name, text in text_by_file.items()}
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000\n", 1.5), ("400000 100000\n", 4.0), ("max 100000\n", None), ("", None), ("a b\n", None)],
)
def test_the_quota_of_a_namespace_of_its_own_is_that_of_the_top(text: str, quota: float | None, tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", V2_MOUNT, {"cpu.max": text})
    assert cpu_quota(root) == quota


def test_a_quota_counts_wherever_it_is_set(tmp_path: Path) -> None:
    """`systemd-run --scope -p CPUQuota=200%` sets it like this."""
    files = {"user.slice/cpu.max": "max 100000\n", "user.slice/run.scope/cpu.max": "200000 100000\n"}
    files |= {"user.slice/run.scope/job/cpu.max": "800000 100000\n", "other/cpu.max": "10000 100000\n"}
    root = tree(tmp_path, "0::/user.slice/run.scope/job\n", V2_MOUNT, files)
    assert cpu_quota(root) == 2.0


def test_version_1_has_a_group_for_each_controller(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n"}
    files |= {f"cpu,cpuacct/{group}cpu.cfs_period_us": "100000\n" for group in ("", "a/")}
    files |= {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/b/memory.limit_in_bytes": "1000000\n"}
    files |= {"memory/b/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\n"}
    files |= {"memory/b/memory.usage_in_bytes": "700000\n"}
    root = tree(tmp_path, "4:memory:/b\n1:cpu,cpuacct:/a\n", V1_MOUNTS, files)
    assert (cpu_quota(root), memory_limit_bytes(root), memory_left_bytes(root)) == (3.0, 1_000_000, 500_000)


def test_a_container_without_a_namespace_finds_its_group_at_the_mount(tmp_path: Path) -> None:
    """/proc names the path on the host, and only the files of the container's group exist."""
    mounts = V1_MOUNTS.replace("0:32 / ", "0:32 /docker/0a1b ")
    files = {"memory/memory.limit_in_bytes": "5000000\n"}
    assert memory_limit_bytes(tree(tmp_path, "4:memory:/docker/0a1b\n", mounts, files)) == 5_000_000
    assert memory_limit_bytes(tree(tmp_path, "4:memory:/elsewhere\n", mounts, files)) == 5_000_000


def test_the_smallest_remainder_of_the_limits_of_memory_counts(tmp_path: Path) -> None:
    files = {"a/memory.max": "9000000\n", "a/memory.current": "8000000\n", "a/b/memory.max": "max\n"}
    files |= {"a/b/memory.high": "4000000\n", "a/b/memory.current": "1500000\n"}
    files |= {"a/b/memory.stat": "anon 1000000\ninactive_file 500000\n"}
    root = tree(tmp_path, "0::/a/b\n", V2_MOUNT, files)
    assert memory_limit_bytes(root) == 4_000_000
    assert memory_left_bytes(root) == 1_000_000  # the limit of a, most of which others use


def test_more_in_use_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "100\n", "memory.current": "300\n"}
    assert memory_left_bytes(tree(tmp_path, "0::/\n", V2_MOUNT, files)) == 0


@pytest.mark.parametrize("own", ["", "0::/\n", "nonsense\n", "0::/../..\n"])
def test_without_files_there_is_no_limit(own: str, tmp_path: Path) -> None:
    root = tree(tmp_path, own, V2_MOUNT + "short line\n", {})
    assert (cpu_quota(root), memory_limit_bytes(root), memory_left_bytes(root)) == (None, None, None)
    assert memory_limit_bytes(tmp_path / "absent") is None


def test_a_path_with_a_blank_is_found(tmp_path: Path) -> None:
    mounts = "30 23 0:26 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n"
    assert memory_limit_bytes(tree(tmp_path, "0::/\n", mounts, {"memory.max": "7\n"}, "sys/fs/c group")) == 7


def node_tree(root: Path, *cpu_lists: str) -> Path:
    folder = root / "sys/devices/system/node"
    for number, text in enumerate(cpu_lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}/cpulist").write_text(text)
    return root


def test_a_system_without_information_has_no_nodes(tmp_path: Path) -> None:
    assert cpus_by_node(tmp_path) == []
    assert cpus_of_thread(1, 2, {0, 1}, tmp_path) is None


def test_nodes_come_in_the_order_of_their_numbers_without_those_of_memory_alone(tmp_path: Path) -> None:
    root = node_tree(tmp_path, "0-1\n", "2\n", "\n", *(f"{number}\n" for number in range(3, 12)))
    (root / "sys/devices/system/node/has_cpu").write_text("0-11\n")
    assert cpus_by_node(root) == [{0, 1}, *({number} for number in range(2, 12))]


def test_a_list_that_cannot_be_read_is_no_node(tmp_path: Path) -> None:
    assert cpus_by_node(node_tree(tmp_path, "0-x\n", "1\n")) == [{1}]


def test_neighbours_share_a_node_in_proportion_to_its_processors(tmp_path: Path) -> None:
    root = node_tree(tmp_path, "0-3,8-11\n", "4-7,12-15\n")
    first, second = cpus_by_node(root)
    assert [cpus_of_thread(thread, 4, set(range(16)), root) for thread in range(4)] == [first, first, second, second]
    few = set(range(6))  # two of the second node
    assert [cpus_of_thread(thread, 3, few, root) for thread in range(3)] == [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}]


def test_threads_of_one_node_are_not_bound(tmp_path: Path) -> None:
    root = node_tree(tmp_path, "0-3\n", "4-7\n")
    assert cpus_of_thread(1, 2, {1, 2}, root) is None
    assert cpus_of_thread(1, 2, {0, 1, 2, 3}, root) is None


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(32, 8, 2), (9, 3, 2), (8, 1, 4), (64, 8, 4)])
def test_a_head_s_keys_lie_on_the_node_whose_threads_read_them(
    tmp_path: Path, num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    """A rank for each node: its threads are all of the node, and no other rank has its query heads. A head of keys
    that several ranks read is stored by each."""
    root = node_tree(tmp_path, *(f"{4 * node}-{4 * node + 3}\n" for node in range(num_ranks)))
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
    root = node_tree(tmp_path, "0-3\n", "4-7\n")
    assert cpus_of_rank(0, 1, 8, set(range(8)), root) is None
    assert cpus_of_rank(1, 2, 4, set(range(4)), root) is None  # all processors that it may use are on one node


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: affinities are Linux's")
def test_only_a_machine_of_several_nodes_binds_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = list[tuple[int, object]]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: calls.append((process, cpus)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    for count, bound in ((1, []), (2, [(0, {2, 3})])):
        lists = [frozenset({0, 1, 2, 3})] if count == 1 else [frozenset({0, 1}), frozenset({2, 3})]
        monkeypatch.setattr(cores, "cpus_by_node", lambda root, lists=lists: lists)
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
