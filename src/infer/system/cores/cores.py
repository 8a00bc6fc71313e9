"""The number of threads to compute with, by default and at most, and the processors that the process may use."""

import os
import platform
import sys
from collections import Counter
from pathlib import Path

from infer.errors import InvalidRequestError
from infer.system.memory.cgroup import cpu_quota

MOST_THREADS = 256  # that a team has room for
_ALWAYS_ALLOWED, _PER_PROCESSOR = 64, 4


def default_num_threads() -> int:
    """Return the number of physical cores that the process may use, at most `MOST_THREADS`.

    Its affinity and the quota of its control groups limit them.
    """
    cores = {_siblings(cpu) for cpu in _allowed()}
    return min(_within_quota(len(cores)), MOST_THREADS)


def num_processors() -> int:
    """Return the number of hardware threads that affinity and quota let the process use."""
    return _within_quota(len(_allowed()))


def processors_by_core() -> list[int]:
    """Return the hardware threads that the process may use: first one of each core, then the second ones."""
    num_before, ranked = Counter[str](), list[tuple[int, int]]()
    for processor in sorted(_allowed()):
        core = _siblings(processor)
        ranked.append((num_before[core], processor))
        num_before[core] += 1
    return [processor for _, processor in sorted(ranked)]


def processor_name() -> str:
    """Return the processor's name as the system reports it.

    If the machine has several kinds of cores, it is the name of the first one.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _within_quota(count: int) -> int:
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def most_threads() -> int:
    """Return the largest number of threads. More would only wait for each other, and each takes a stack."""
    return min(MOST_THREADS, max(_ALWAYS_ALLOWED, _PER_PROCESSOR * (os.cpu_count() or 1)))


def check_num_threads(threads: object) -> int:
    """Return the number if it is an integer from 1 to `most_threads()`, else raise InvalidRequestError."""
    most = most_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise InvalidRequestError(
            f"threads must be a whole number from 1 to {most} on this machine, got {_short(threads)}: "
            f"leave it out for {default_num_threads()}, one per core"
        )
    return threads


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a number of many digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
