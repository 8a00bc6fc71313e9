"""The available memory, limited by the machine and by the process's control groups.

Freed memory of this process can be returned to the system.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from infer.system.memory.cgroup import memory_left_bytes, memory_limit_bytes

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process may use before the system swaps or ends its container. None if unknown.

    `root` is the folder that contains `/proc` and `/sys`. It differs from `/` only in tests.
    """
    return _least(_meminfo(root, "MemAvailable"), memory_left_bytes(root))


def total_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory of the machine or of the container in bytes, or None if it is unknown."""
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
    """Return the C library's malloc_trim, or None if it has none. musl has none, but keeps little memory."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
            return trim
    return None


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
