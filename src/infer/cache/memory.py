"""How much memory this machine has for more."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes() -> int | None:
    """What programs may still take before the system swaps; None where it does not say."""
    return _meminfo("MemAvailable")


def total_memory_bytes() -> int | None:
    return _meminfo("MemTotal")


def _meminfo(wanted: str) -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == wanted:
            return int(rest.split()[0]) * 1024
    return None
