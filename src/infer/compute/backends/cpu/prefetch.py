"""Prefetches: a kernel asks for memory that it will read soon, while it computes.

A core's own prefetcher stops at the end of each page, and starts again with each head: docs/dev/log.md. Prefetches
change no result. Their addresses may lie outside of any memory.
"""

from collections.abc import Callable, Sequence
from typing import final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.simd import I8, I32, I64, Value, constant

LoopPrefetch = Callable[[], None]  # emits what one iteration of a loop prefetches

_LINE = 64
_SECOND_CACHE = 2  # of LLVM's four degrees of nearness


def prefetch(b: Builder, where: Value, num_bytes: int) -> None:
    """Emit prefetches of the cache lines of `num_bytes` from `where` on, into the second cache.

    The first cache has no room for so many requests. The address may lie outside of any memory.
    """
    hints = constant(I32, 0), constant(I32, _SECOND_CACHE), constant(I32, 1)
    for line in range(0, num_bytes, _LINE):
        pointer = b.inttoptr(simd.offset(b, where, line), I8.as_pointer())
        simd.call(b, "prefetch.p0", ir.VoidType(), pointer, *hints)


@final
class Ahead:
    """The prefetch distance of a tile: bytes from the record that it reads now to one that it reads `num_bytes` later.

    A tile of one group reads its groups one after the other, so the distance is `num_bytes`. A tile of two groups reads
    two neighbouring groups at the same time, then the next two. So near a group's end the distance also passes over the
    other group.
    """

    def __init__(self, b: Builder, streams: Sequence[Value], num_bytes: int) -> None:
        """Emit the parts of the distance that are the same for all records of a tile.

        `streams` are the addresses of one group, or of two neighbouring groups.
        """
        self._b, self._near, self._border = b, constant(I64, num_bytes), None
        if len(streams) == 2:
            self._group_bytes = b.sub(streams[1], streams[0])
            passed = b.mul(b.udiv(self._near, self._group_bytes), self._group_bytes)
            self._border = b.sub(streams[1], b.sub(self._near, passed))
            self._near = b.add(self._near, passed)

    def of(self, record: Value) -> Value:
        """Emit the distance in bytes, an i64, for the address of a record of the first group.

        The second group has the same.
        """
        if self._border is None:
            return self._near
        is_near = self._b.icmp_unsigned("<", record, self._border)
        return self._b.select(is_near, self._near, self._b.add(self._near, self._group_bytes))


def begin_region(b: Builder, where: Value) -> Value:
    """Emit an i64 variable with the address that the region's loops prefetch next. It begins at `where`."""
    variable = cgutils.alloca_once(b, I64)
    b.store(where, variable)
    return variable


def make_loop_prefetch(b: Builder, at: Value, num_bytes: int, width: int, columns: Value) -> LoopPrefetch:
    """Return an emitter of the prefetches of one iteration of a tile's loop.

    They advance the variable `at` of the region.

    An iteration reads `num_bytes` bytes for a tile of `width` columns. It advances the variable by num_bytes × width /
    columns, rounded up. So all columns of the region together prefetch each byte once.
    """
    step = b.udiv(b.add(constant(I64, num_bytes * width - 1), columns), columns)

    def emit() -> None:
        where = b.load(at)
        prefetch(b, where, num_bytes)
        b.store(b.add(where, step), at)

    return emit
