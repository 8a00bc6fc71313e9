"""The rate at which threads read memory, measured by a loop that does nothing else."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self, final

import numpy as np
from numba import njit

_PIECES_PER_THREAD = 4
_MOST_BYTES = 1 << 30  # larger than any cache


@final
class MemoryProbe:
    """A buffer in pieces, and threads that read the pieces as fast as they arrive.

    Each thread takes the next free piece. The buffer has `num_bytes`, but at most 1 GiB.
    """

    def __init__(self, threads: int, num_bytes: int) -> None:
        self._buffer = np.ones(min(num_bytes, _MOST_BYTES) // 8, np.int64)
        self._pieces = np.array_split(self._buffer, threads * _PIECES_PER_THREAD)
        self._threads = ThreadPoolExecutor(threads)
        _read(self._buffer[:4])  # compiles it

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def read_rate(self, tries: int = 5) -> float:
        """Return the bytes per second that all threads read together: the best of the tries."""
        rates = []
        for _ in range(tries):
            started = time.perf_counter()
            list(self._threads.map(_read, self._pieces))
            rates.append(self._buffer.nbytes / (time.perf_counter() - started))
        return max(rates)


@njit(nogil=True)
def _read(words):
    """Return a sum of the words in four streams, because a core reads several faster than one."""
    size, total = len(words) // 4, 0
    for i in range(size):
        total += words[i] ^ words[size + i] ^ words[2 * size + i] ^ words[3 * size + i]
    return total
