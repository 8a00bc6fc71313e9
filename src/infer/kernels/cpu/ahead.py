"""Memory asked for ahead of its use, a little in each iteration of a loop that computes something else.

A core's own prefetcher stops at the end of each page, and starts anew with each head: docs/log.md.
"""

from dataclasses import dataclass
from typing import final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.kernels.cpu import simd
from infer.kernels.cpu.simd import I8, I32, I64, Value, constant

_LINE = 64
_SECOND_CACHE = 2  # of LLVM's four degrees of nearness


@final
@dataclass(frozen=True)
class Ahead:
    """A walk over memory, `step` bytes an iteration and `most_bytes` at most."""

    at: Value  # a variable
    step: Value
    most_bytes: int

    @staticmethod
    def begin(b: Builder, where: Value, step: Value, most_bytes: int) -> "Ahead":
        variable = cgutils.alloca_once(b, I64)
        b.store(where, variable)
        return Ahead(variable, step, most_bytes)

    def ask(self, b: Builder) -> None:
        where = b.load(self.at)
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        prefetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        for line in range(0, self.most_bytes, _LINE):
            pointer = b.inttoptr(simd.offset(b, where, line), I8.as_pointer())
            b.call(prefetch, [pointer, constant(I32, 0), constant(I32, _SECOND_CACHE), constant(I32, 1)])
        b.store(b.add(where, self.step), self.at)
