"""Limits of control groups, read from trees of files like those of the kernel."""

from pathlib import Path

import pytest

from infer.system.memory.cgroup import cpu_quota, memory_left_bytes, memory_limit_bytes

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
