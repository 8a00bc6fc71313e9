"""The available memory, limited by the machine and by the process's control groups, and the rate of reading it.

Freed memory of this process can be returned to the system. The rate limits every decode step.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from infer.system.memory.cgroup import memory_left_bytes, memory_limit_bytes

_ROOT = Path("/")
_BUFFER_BYTES = 128 << 20  # more than the caches of most processors
_PIECES_PER_THREAD, _TRIES = 8, 5
_FILLED, _SOUGHT = 1, 2


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
