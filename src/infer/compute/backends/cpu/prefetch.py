"""Prefetching of memory while something else is computed.

A core's own prefetcher stops at the end of each page, and starts again with each head: docs/dev/log.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.simd import I8, I32, I64, Value, constant

_LINE = 64
_SECOND_CACHE = 2  # of LLVM's four degrees of nearness


def prefetch(b: Builder, where: Value, num_bytes: int) -> None:
    """Prefetch into the second cache: the first has no room for so many requests."""
    hints = constant(I32, 0), constant(I32, _SECOND_CACHE), constant(I32, 1)
    for line in range(0, num_bytes, _LINE):
        pointer = b.inttoptr(simd.offset(b, where, line), I8.as_pointer())
        simd.call(b, "prefetch.p0", ir.VoidType(), pointer, *hints)


@final
class Ahead:
    """The distance from a tile's records to those that it reads so many bytes later.

    A tile of two streams reads two neighbouring groups, then the next two. So a stream passes over the other one's
    group when its own ends.
    """

    def __init__(self, b: Builder, streams: Sequence[Value], num_bytes: int) -> None:
        """Emit what is the same for all records. `streams` are the addresses of one group or of two neighbours."""
        self._b, self._near, self._border = b, constant(I64, num_bytes), None
        if len(streams) == 2:
            self._group_bytes = b.sub(streams[1], streams[0])
            passed = b.mul(b.udiv(self._near, self._group_bytes), self._group_bytes)
            self._border = b.sub(streams[1], b.sub(self._near, passed))
            self._near = b.add(self._near, passed)

    def of(self, record: Value) -> Value:
        """Emit the distance of the first stream's record, which is that of the other stream's too."""
        if self._border is None:
            return self._near
        is_near = self._b.icmp_unsigned("<", record, self._border)
        return self._b.select(is_near, self._near, self._b.add(self._near, self._group_bytes))


@final
@dataclass(frozen=True)
class Prefetch:
    """A prefetch address that advances beside the tiles of a region. The region's columns share its bytes."""

    at: Value  # a variable

    @staticmethod
    def begin(b: Builder, where: Value) -> "Prefetch":
        variable = cgutils.alloca_once(b, I64)
        b.store(where, variable)
        return Prefetch(variable)

    def share(self, b: Builder, num_bytes: int, width: int, columns: Value) -> "Share":
        """Return the share of a loop of a tile of `width` columns that reads `num_bytes` per iteration."""
        step = b.udiv(b.add(constant(I64, num_bytes * width - 1), columns), columns)
        return Share(self.at, step, num_bytes)


@final
@dataclass(frozen=True)
class Share:
    at: Value
    step: Value
    most_bytes: int

    def prefetch(self, b: Builder) -> None:
        where = b.load(self.at)
        prefetch(b, where, self.most_bytes)
        b.store(b.add(where, self.step), self.at)
