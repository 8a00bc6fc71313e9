"""How much memory this machine has for more."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


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
