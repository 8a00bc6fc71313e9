"""The available memory, limited by the machine and by the process's control groups, and the rate of reading it.

Freed memory of this process can be returned to the system. The rate limits every decode step.

Control groups (Linux, versions 1 and 2) limit processor time and memory. A limit applies in the process's own group and
in any group above it, as far as they are visible. `root` is the folder that contains `/proc` and `/sys`. It differs
from `/` only in tests.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from infer.system import macos

_ROOT = Path("/")
_BUFFER_BYTES = 128 << 20  # more than the caches of most processors
_PIECES_PER_THREAD, _TRIES = 8, 5
_FILLED, _SOUGHT = 1, 2
_UNLIMITED_BYTES = 1 << 60  # at least this number means no limit in version 1
_MOST_BYTES = 1 << 20  # most bytes of a file that is read here


def available_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process may use before the system swaps or ends its container. None if unknown."""
    if macos.IS_MACOS:
        return macos.free_memory_bytes()
    return _least(_meminfo(root, "MemAvailable"), memory_left_bytes(root))


def total_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory of the machine or of the container in bytes, or None if it is unknown."""
    if macos.IS_MACOS:
        return macos.sysctl("hw.memsize")
    return _least(_meminfo(root, "MemTotal"), memory_limit_bytes(root))


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def give_back_freed() -> None:
    """Return freed memory to the operating system immediately, if the C library would keep it, as glibc does.

    For example, reading a tokenizer.json of 262,144 tokens keeps 200 MB.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the C library's malloc_trim, or None: macOS has none, and musl has none, but keeps little memory."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _meminfo(root: Path, field: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None


@cache
def read_bandwidth(num_threads: int) -> float:
    """Return the best rate at which `num_threads` threads read memory together, in bytes per second.

    The C library searches a buffer for a byte that it does not contain, without Python's lock. The measurement takes
    about 0.1 s and 128 MiB, and is made once per process.
    """
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    address, piece = ctypes.addressof(buffer), _BUFFER_BYTES // (num_threads * _PIECES_PER_THREAD)
    ctypes.memset(address, _FILLED, _BUFFER_BYTES)
    starts = range(address, address + piece * num_threads * _PIECES_PER_THREAD, piece)
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_TRIES):
            started = time.perf_counter()
            list(threads.map(lambda start: search(start, _SOUGHT, piece), starts))
            best = min(best, time.perf_counter() - started)
    return len(starts) * piece / best


class _Mount(NamedTuple):
    """A hierarchy of groups as this process sees it. `top` is the group at `folder`."""

    version: int
    top: str
    folder: Path


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the number of cores whose time the process may use: the smallest quota, or None without a quota."""
    quotas = []
    for mount, group in _groups("cpu", root):
        if mount.version == 2:
            limit, _, period = (_text(group / "cpu.max") or "").strip().partition(" ")
        else:
            limit, period = (_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        quota, length = _number(limit), _number(period)
        if quota is not None and length is not None and quota > 0 and length > 0:
            quotas.append(quota / length)
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the smallest limit of the process's memory in bytes, or None if there is none."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that may be used before the first limit is reached, or None without a limit.

    Inactive cached files do not count as used, because the system evicts them.
    """
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that has one, and its use without the file pages that the system evicts first."""
    for mount, group in _groups("memory", root):
        if mount.version == 2:
            limits = [_number(_text(group / f"memory.{name}")) for name in ("max", "high")]
            used, cached = _number(_text(group / "memory.current")), "inactive_file"
        else:
            limits = [_number(_text(group / "memory.limit_in_bytes"))]
            used, cached = _number(_text(group / "memory.usage_in_bytes")), "total_inactive_file"
        known = [limit for limit in limits if limit is not None and 0 <= limit < _UNLIMITED_BYTES]
        if known:
            yield min(known), max(0, (used or 0) - _entry(_text(group / "memory.stat"), cached))


@cache
def _groups(controller: str, root: Path) -> list[tuple[_Mount, Path]]:
    """Return the folders of the process's group and of the groups above it, in each hierarchy with the controller.

    They are found once: the limits in them may change, but a process that is moved to another group is not followed.
    """
    groups = list[tuple[_Mount, Path]]()
    path_by_version = _own_paths(controller, root)
    for mount in (each for each in _mounts(controller, root) if each.version in path_by_version):
        path = path_by_version[mount.version]
        # Without its own namespace, a container's files show only the part below its group.
        below = path.removeprefix(mount.top) if (path + "/").startswith(mount.top.rstrip("/") + "/") else ""
        names = [name for name in below.split("/") if name not in ("", ".", "..")]
        groups += [(mount, mount.folder.joinpath(*names[:count])) for count in range(len(names), -1, -1)]
    return groups


def _own_paths(controller: str, root: Path) -> dict[int, str]:
    """Return the path of the process's group, by version."""
    found = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[2] = path
        elif controller in controllers.split(","):
            found[1] = path
    return found


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kinds) < 3:
            continue
        folder = root / _unescaped(fields[4]).lstrip("/")
        if kinds[0] == "cgroup2":
            yield _Mount(2, _unescaped(fields[3]), folder)
        elif kinds[0] == "cgroup" and controller in kinds[-1].split(","):
            yield _Mount(1, _unescaped(fields[3]), folder)


def _unescaped(text: str) -> str:
    """Return a path with its blanks, which the kernel writes as octal numbers."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def _text(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """Return the number, or None for "max" and any other text."""
    try:
        return int(text or "")
    except ValueError:
        return None


def _entry(text: str | None, name: str) -> int:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0
