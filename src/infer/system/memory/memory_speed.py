"""The rate at which this machine reads memory, which limits every decode step."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_BUFFER_BYTES = 128 << 20  # more than the caches of most processors
_PIECES_PER_THREAD, _TRIES = 8, 5
_FILLED, _SOUGHT = 1, 2


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
