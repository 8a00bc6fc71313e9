"""Which instructions the kernels may use: the machine's best, or what $INFER_ISA names.

Only `tiles.dot4`, the width of a tile and `matrix_tiles` differ between instruction sets; the sums are integers, so
results do not.
"""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import final

import llvmlite.binding as llvm
from numba import config

from infer.errors import InvalidRequestError

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@final
@dataclass(frozen=True)
class InstructionSet:
    name: str
    needs: tuple[str, ...]  # LLVM's names of the features that dot4 uses
    columns: tuple[int, ...]  # tile widths (right-hand sides at once) whose accumulators fit the registers
    dot: str = ""  # whose dot4 it uses, if not its own
    has_matrices: bool = False  # 16 tokens at once through `matrix_tiles`


INSTRUCTION_SETS = (  # best first
    InstructionSet("amx", ("amx-int8", "avx512vnni", "avx512bw"), (8, 4, 2, 1), dot="avx512vnni", has_matrices=True),
    InstructionSet("avx512vnni", ("avx512vnni", "avx512bw"), (8, 4, 2, 1)),
    InstructionSet("avxvnni", ("avxvnni",), (2, 1)),
    InstructionSet("avx2", ("avx2",), (2, 1)),
    InstructionSet("neon", ("dotprod",), (4, 2, 1)),  # of AArch64
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
    usable = usable_instruction_sets()
    if wanted is None:
        return usable[0]
    for known in usable:
        if known.name == wanted:
            return known
    names = ", ".join(known.name for known in usable)
    raise InvalidRequestError(f"INFER_ISA={wanted} is not an instruction set of this machine; it has: {names}")


def usable_instruction_sets() -> list[InstructionSet]:
    """Of this machine, best first."""
    return [known for known in INSTRUCTION_SETS if _is_usable(known)]


def _is_usable(known: InstructionSet) -> bool:
    return target_features().issuperset(known.needs) and (not known.has_matrices or _may_use_matrices())


@cache
def _may_use_matrices() -> bool:
    """Whether the system lets this process, and what it forks, use AMX's registers: Linux wants to be asked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
