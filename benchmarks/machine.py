"""What this machine is and what it can do: the limits that a benchmark prints beside its figures.

A limit counts only in the run in which it was measured: neighbours move it.
"""

import os
import platform
import resource
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numba import njit

READ_BYTES = 256 << 20  # for each thread; larger than any cache
MATMUL_SIZE = 1024


@dataclass(frozen=True)
class Limits:
    """Rates measured with one number of threads."""

    threads: int
    read_bytes_per_second: float
    bfloat16_flops_per_second: float
    float32_flops_per_second: float


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_line(device: str, threads: int) -> str:
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{device} ({torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GB)"
    return f"{device} ({cpu_model()}, {threads} threads)"


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_limits(threads: int) -> Limits:
    """About 0.3 s."""
    return Limits(
        threads,
        read_bandwidth(threads),
        matmul_rate(torch.bfloat16, threads),
        matmul_rate(torch.float32, threads),
    )


def read_bandwidth(threads: int, tries: int = 3) -> float:
    """Bytes per second that `threads` vectorised loops read together; the best of a few tries."""
    arrays = [_read_array(i) for i in range(threads)]
    rates = []
    for _ in range(tries):
        team = [threading.Thread(target=_sum, args=(array,)) for array in arrays]
        start = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        rates.append(threads * READ_BYTES / (time.perf_counter() - start))
    return max(rates)


def matmul_rate(dtype: torch.dtype, threads: int, tries: int = 3) -> float:
    """Floating-point operations per second of torch's matrix product; the best of a few tries."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype) for _ in range(2))
        left @ right
        rates = []
        for _ in range(tries):
            start = time.perf_counter()
            left @ right
            rates.append(2 * MATMUL_SIZE**3 / (time.perf_counter() - start))
        return max(rates)
    finally:
        torch.set_num_threads(before)


@cache
def _read_array(index: int) -> np.ndarray:
    """One for each thread: what one has read must not be in the other's cache."""
    array = np.full(READ_BYTES // 4, index, np.float32)
    _sum(array[:16])  # compiles
    return array


@njit(nogil=True, fastmath=True)
def _sum(values: np.ndarray) -> float:
    total = np.float32(0)
    for i in range(values.shape[0]):
        total += values[i]
    return total
