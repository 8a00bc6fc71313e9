"""Which instructions the kernels may use: the machine's best, or what $INFER_ISA names.

Only `simd.dot4` and the width of a tile differ between instruction sets; the sums are integers, so results do not.
"""

import os
from functools import cache
from importlib import import_module

from infer.errors import InvalidRequestError
from infer.kernels.cpu import kernel_cache

# Best first. LLVM's names of the features that dot4 uses, and the tile widths (right-hand sides at once) whose
# accumulators fit the registers.
_NEEDS = {
    "avx512vnni": frozenset({"avx512vnni", "avx512bw"}),
    "avxvnni": frozenset({"avxvnni"}),
    "avx2": frozenset({"avx2"}),
    "portable": frozenset[str](),
}
COLUMNS = {"avx512vnni": (8, 4, 2, 1), "avxvnni": (2, 1), "avx2": (2, 1), "portable": (2, 1)}
_FILE = "target-features"


@cache
def target_features() -> frozenset[str]:
    """The features that Numba compiles for. Only the compiler knows them: kept beside the kernels."""
    kept = kernel_cache.read(_FILE)
    if kept is not None:
        return frozenset(kept.decode().split())
    features: frozenset[str] = import_module("infer.kernels.cpu.compiler").target_features()
    kernel_cache.write(_FILE, " ".join(sorted(features)).encode())
    return features


def instruction_set() -> str:
    """Raises InvalidRequestError if $INFER_ISA names a set that does not exist or that this machine lacks."""
    wanted = os.environ.get("INFER_ISA")
    usable = [name for name, needs in _NEEDS.items() if target_features() >= needs]
    if wanted is None:
        return usable[0]
    if wanted in usable:
        return wanted
    raise InvalidRequestError(
        f"INFER_ISA={wanted} is not an instruction set of this machine; it has: {', '.join(usable)}"
    )
