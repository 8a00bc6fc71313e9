"""Facts about a Mac that the system reports: numbers by name, its memory, and the memory of another process.

Nothing here was run on a Mac. Each function returns None, or an empty text, if the system does not answer.
"""

import ctypes
import re
import subprocess
import sys
from functools import cache

IS_MACOS = bool(sys.platform == "darwin")  # not what a type checker takes for another system's dead code
_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_COUNT = re.compile(r'^"?(Pages free|File-backed pages|Pages purgeable)"?:\s+(\d+)', re.MULTILINE)
_SECONDS = 5.0
_USAGE_WORDS, _FOOTPRINT = 12, 9  # of 64 bits, in `struct rusage_info_v0`: an identifier takes the first two


def sysctl(name: str) -> int | None:
    """Return the number that the system has under a name, such as "hw.memsize"."""
    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    failed = _library().sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else value.value & ((1 << 8 * size.value) - 1)  # little endian: the lower bytes are set


def sysctl_text(name: str) -> str:
    """Return the text that the system has under a name, such as "machdep.cpu.brand_string"."""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = _library().sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0)
    return "" if failed else value.value.decode(errors="replace")


def free_memory_bytes() -> int | None:
    """Return the memory that needs neither the compressor nor swapping: free, cached files, and purgeable pages.

    Activity Monitor counts all other memory as used.
    """
    try:
        done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return bytes_of_vm_stat(done.stdout)


def bytes_of_vm_stat(text: str) -> int | None:
    """Return the bytes that are free according to the output of `vm_stat`. None if it is of another form."""
    size, counts = _PAGE_SIZE.search(text), dict(_COUNT.findall(text))
    return int(size[1]) * sum(map(int, counts.values())) if size is not None and counts else None


def footprint_bytes(process: int) -> int | None:
    """Return the memory of a process of this user."""
    usage = (ctypes.c_uint64 * _USAGE_WORDS)()
    return None if _library().proc_pid_rusage(process, 0, ctypes.byref(usage)) else usage[_FOOTPRINT]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
