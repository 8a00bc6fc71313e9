"""What this machine is and what it can do: the limits that a benchmark prints beside its figures.

A limit counts only in the run in which it was measured: neighbours move it.
"""

import json
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from infer import __version__
from infer.bench.speed import BYTES_PER_THREAD, READ_BYTES, MemoryProbe, peak_resident_bytes

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


def write_report(folder: Path, kind: str, settings: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """A JSON file named by kind and time, with what was measured, how and where."""
    path = folder / f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    report = {"version": __version__, "cpu": cpu_model(), "settings": settings} | dict(results)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
    return path


def device_line(device: str, threads: int) -> str:
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{device} ({torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GB)"
    return f"{device} ({cpu_model()}, {threads} threads)"


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_limits(threads: int) -> Limits:
    """About 0.3 s."""
    return Limits(
        threads,
        _memory(threads).read_rate(),
        matmul_rate(torch.bfloat16, threads),
        matmul_rate(torch.float32, threads),
    )


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


def read_rate(threads: int) -> float:
    """Bytes per second that so many threads read, now."""
    return _memory(threads).read_rate()


def unmeasured_bytes(threads: int) -> int:
    """What this process holds but for the buffer that rates are read from; its most, before there is one."""
    if not _memory.cache_info().currsize:
        return peak_resident_bytes()
    return resident_bytes() - max(READ_BYTES, threads * BYTES_PER_THREAD)


@cache
def _memory(threads: int) -> MemoryProbe:
    return MemoryProbe(threads)
