"""Which instructions the kernels may use: the machine's best, or what $INFER_ISA names.

Only `tiles.dot4`, the width of a tile and `matrix_tiles` differ between instruction sets; the sums are integers, so
results do not.
"""

import ctypes
import os
import platform
import re
import sys
from functools import cache
from importlib import import_module

from infer.backends.cpu import kernel_cache
from infer.backends.cpu.layouts import Layout
from infer.errors import InvalidRequestError

# Best first. LLVM's names of the features that a set uses, and the tile widths (right-hand sides at once) whose
# accumulators fit the registers. amx is avx512vnni with `matrix_tiles` for 16 tokens at once.
_NEEDS = {
    "amx": frozenset({"amx-int8", "avx512vnni", "avx512bw"}),
    "avx512vnni": frozenset({"avx512vnni", "avx512bw"}),
    "avxvnni": frozenset({"avxvnni"}),
    "avx2": frozenset({"avx2"}),
    "neon": frozenset({"dotprod"}),  # of AArch64
    "portable": frozenset[str](),
}
INSTRUCTION_SETS = tuple(_NEEDS)
COLUMNS = {
    "amx": (8, 4, 2, 1),
    "avx512vnni": (8, 4, 2, 1),
    "avxvnni": (2, 1),
    "avx2": (2, 1),
    "neon": (4, 2, 1),
    "portable": (2, 1),
}
_FILE = "target-features"
_FEATURES = re.compile(rb"[A-Za-z0-9_.+-]+( [A-Za-z0-9_.+-]+)*")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def target_features() -> frozenset[str]:
    """The features that Numba compiles for. Only the compiler knows them: kept beside the kernels."""
    kept = kernel_cache.read(_FILE)
    if kept is not None and _FEATURES.fullmatch(kept):
        return frozenset(kept.decode().split())
    features: frozenset[str] = import_module("infer.backends.cpu.host_features").target_features()
    kernel_cache.write(_FILE, " ".join(sorted(features)).encode())
    return features


def instruction_set() -> str:
    """Raises InvalidRequestError if $INFER_ISA names a set that does not exist or that this machine lacks."""
    wanted = os.environ.get("INFER_ISA")
    usable = usable_instruction_sets()
    if wanted is None:
        return usable[0]
    if wanted in usable:
        return wanted
    raise InvalidRequestError(
        f"INFER_ISA={wanted} is not an instruction set of this machine; it has: {', '.join(usable)}"
    )


def usable_instruction_sets() -> list[str]:
    """Of this machine, best first."""
    return [
        name for name, needs in _NEEDS.items() if target_features() >= needs and (name != "amx" or _has_permission())
    ]


def may_use_matrices(layout: Layout, isa: str) -> bool:
    return isa == "amx" and not layout.is_float


@cache
def _has_permission() -> bool:
    """Whether the system lets this process, and what it forks, use AMX's registers: Linux wants to be asked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
