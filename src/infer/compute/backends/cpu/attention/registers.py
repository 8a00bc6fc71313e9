"""Sums of attention's tiles that LLVM keeps in registers: shapes of tiles, loops over tiles, variables of sums.

A tile is a number of columns (queries) × a number of vectors of 16 floats. Each column and vector has a sum.
"""

import platform
from collections.abc import Callable, Sequence

from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu.isa import target_features
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import F32X16, I64, Value, constant, dot_bf16, fma, multiply, store_f32


def vector_registers() -> tuple[int, int]:
    """Return (number of vector registers, floats per register) of this machine.

    It is what LLVM may use for float kernels. It does not depend on $INFER_ISA, which chooses integer products only.
    """
    features = target_features()
    if "avx512f" in features:
        return 32, 16
    if "avx" in features:
        return 16, 8
    return (32 if platform.machine().lower() in ("aarch64", "arm64") else 16), 4


def tile_shapes(num_registers: int, num_floats: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes (columns, vectors of 16 floats) of tiles, the widest first.

    The sums of a tile take at most three quarters of the registers. The rest is for operands. The last shape has one
    column, so any number of columns can be divided into these tiles.
    """
    sums = num_registers * 3 // 4 * num_floats // LANES
    widths = (12, 8, 4, 3, 2, 1) if sums >= 24 else (6, 4, 3, 2, 1)
    return tuple((width, 1 << min(2, (sums // width).bit_length() - 1)) for width in widths if width <= sums)


def for_each_tile(b: Builder, columns: Value, emit: Callable[[int, int, Value], None]) -> None:
    """Emit the loops over the tiles of `columns` columns, an i64 that is known at run time.

    `emit(width, vectors, first)` emits the body for a tile of `width` columns from number `first` on. `vectors` is the
    number of vectors that fit beside this width. It is called once for each shape of `tile_shapes`.
    """
    done: Value = constant(I64, 0)
    for width, vectors in tile_shapes(*vector_registers()):
        count = b.udiv(b.sub(columns, done), constant(I64, width))
        with cgutils.for_range(b, count) as loop:
            emit(width, vectors, b.add(done, multiply(b, loop.index, width)))
        done = b.add(done, multiply(b, count, width))


def for_each_vector(b: Builder, total: Value, at_once: int, emit: Callable[[int, Value], None]) -> None:
    """Emit the loops over `total` vectors: first `at_once` per iteration, then the remaining ones one by one.

    `emit(count, first)` emits the body for `count` vectors from number `first` on.
    """
    count = b.udiv(total, constant(I64, at_once))
    with cgutils.for_range(b, count) as loop:
        emit(at_once, multiply(b, loop.index, at_once))
    if at_once > 1:
        done = multiply(b, count, at_once)
        with cgutils.for_range(b, b.sub(total, done)) as loop:
            emit(1, b.add(done, loop.index))


def variables(b: Builder, values: Sequence[Value]) -> list[Value]:
    """Return LLVM variables, f32 × 16 each, which are set to `values` whenever this code runs.

    LLVM keeps them in registers.
    """
    slots = [cgutils.alloca_once(b, F32X16) for _ in values]
    for slot, value in zip(slots, values, strict=True):
        b.store(value, slot)
    return slots


def add_products(b: Builder, sums: Sequence[Value], x: Value, factors: Sequence[Value]) -> None:
    """Emit sums[i] += x × factors[i] for each factor. Sums are variables, f32 × 16.

    `x` and the factors are f32 × 16, with one FMA per product. Or they are pairs of bf16 as i32 × 16, as `dot_bf16`
    takes them. There may be more sums than factors: the others stay.
    """
    for total, factor in zip(sums, factors, strict=False):
        before = b.load(total)
        b.store(fma(b, x, factor, before) if x.type == F32X16 else dot_bf16(b, before, x, factor), total)


def store_variables(b: Builder, slots: Sequence[Value], places: Sequence[Value]) -> None:
    for slot, place in zip(slots, places, strict=True):
        store_f32(b, place, b.load(slot))


def lanes(b: Builder) -> Value:
    """Reserve 64 bytes on the stack of the kernel, aligned to 64, and return their address. They hold 16 floats."""
    with b.goto_entry_block():
        slot = b.alloca(F32X16)
    slot.align = 64
    return b.ptrtoint(slot, I64)
