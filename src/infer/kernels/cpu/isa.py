"""Which instructions the kernels may use: the machine's best, or what $INFER_ISA names.

Only `simd.dot4` and the width of a tile differ between instruction sets; the sums are integers, so results do not.
"""

import os
from dataclasses import dataclass
from functools import cache
from typing import final

import llvmlite.binding as llvm
from numba import config

from infer.errors import InvalidRequestError


@final
@dataclass(frozen=True)
class InstructionSet:
    name: str
    needs: tuple[str, ...]  # LLVM's names of the features that dot4 uses
    columns: tuple[int, ...]  # tile widths (right-hand sides at once) whose accumulators fit the registers


INSTRUCTION_SETS = (  # best first
    InstructionSet("avx512vnni", ("avx512vnni", "avx512bw"), (8, 4, 2, 1)),
    InstructionSet("avxvnni", ("avxvnni",), (2, 1)),
    InstructionSet("avx2", ("avx2",), (2, 1)),
    InstructionSet("portable", (), (2, 1)),
)


@cache
def target_features() -> frozenset[str]:
    """The features that Numba compiles for."""
    if config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
    if config.CPU_NAME not in (None, "host"):
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def instruction_set() -> InstructionSet:
    """Raises InvalidRequestError if $INFER_ISA names a set that does not exist or that this machine lacks."""
    wanted = os.environ.get("INFER_ISA")
    usable = [known for known in INSTRUCTION_SETS if target_features().issuperset(known.needs)]
    if wanted is None:
        return usable[0]
    for known in usable:
        if known.name == wanted:
            return known
    names = ", ".join(known.name for known in usable)
    raise InvalidRequestError(f"INFER_ISA={wanted} is not an instruction set of this machine; it has: {names}")
