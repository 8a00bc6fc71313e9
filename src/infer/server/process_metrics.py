"""Metrics of the process itself, under the names that Prometheus' own clients use, and the build as labels."""

import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import infer
from infer.server.exposition import Counter, Family, gauge

_PROC = Path("/proc")
_START_FIELD = 19  # of /proc/self/stat after the name: clock ticks from the machine's start to the process's


def process_families() -> Iterator[Family]:
    """Yield the families of this process. Those of memory, files and start need a system with /proc."""
    version = infer.__version__
    yield gauge("infer_build_info", "Version.", 1, version=version, python=platform.python_version())
    seconds = Counter("process_cpu_seconds_total", "Processor time of the process, seconds.")
    seconds.add(time.process_time())
    yield seconds.family()
    yield gauge("process_max_fds", "Files that may be open.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with suppress(OSError, ValueError, IndexError, StopIteration):
        yield gauge("process_open_fds", "Files that are open.", len(os.listdir(_PROC / "self" / "fd")))
        virtual, resident = (_PROC / "self" / "statm").read_text().split()[:2]
        page_bytes = resource.getpagesize()
        yield gauge("process_virtual_memory_bytes", "Addresses of the process, bytes.", int(virtual) * page_bytes)
        yield gauge("process_resident_memory_bytes", "Memory of the process, bytes.", int(resident) * page_bytes)
        yield gauge("process_start_time_seconds", "Start of the process, seconds since 1970.", _started_at())


def _started_at() -> float:
    machine = (_PROC / "stat").read_text().splitlines()
    booted_at = next(int(line.split()[1]) for line in machine if line.startswith("btime"))
    ticks = int((_PROC / "self" / "stat").read_text().rpartition(")")[2].split()[_START_FIELD])
    return booted_at + ticks / os.sysconf("SC_CLK_TCK")
