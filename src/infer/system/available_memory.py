"""How much memory there is for more, by the machine and by the process's control groups, and what this process can give
back of its own.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from infer.system.cgroup import memory_left_bytes, memory_limit_bytes

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int | None:
    """What this process may still take before the system swaps or its container is ended; None where it is not known.

    `root` is the folder that holds `/proc` and `/sys`; other than `/` in tests only.
    """
    return _least(_meminfo(root, "MemAvailable"), memory_left_bytes(root))


def total_memory_bytes(root: Path = _ROOT) -> int | None:
    """The machine's memory, or the container's."""
    return _least(_meminfo(root, "MemTotal"), memory_limit_bytes(root))


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def give_back_freed() -> None:
    """What was freed goes back to the system at once, where the C library would keep it for later (glibc does).

    Reading the tokenizer.json of 262,144 tokens keeps 200 MB, for instance.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """None where the C library has no such call; musl, which has not, keeps little."""
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
