"""How much memory this machine has, and how much of it is free for more."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def total_memory_bytes() -> int | None:
    """None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def available_memory_bytes() -> int | None:
    """What programs may still take before the system swaps; None where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
