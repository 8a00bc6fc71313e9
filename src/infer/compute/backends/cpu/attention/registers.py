"""Tiles whose sums stay in registers: the number of a machine's registers, and variables that LLVM keeps in them."""

import platform
from collections.abc import Callable, Sequence

from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu.isa import target_features
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import F32X16, I64, Value, constant, dot_bf16, fma, multiply, store_f32


def vector_registers() -> tuple[int, int]:
    """Return (number of vector registers, floats per register).

    Kernels of floats are the same for every $INFER_ISA, so this is what the compiler may use, not what the set has.
    """
    features = target_features()
    if "avx512f" in features:
        return 32, 16
    if "avx" in features:
        return 16, 8
    return (32 if platform.machine().lower() in ("aarch64", "arm64") else 16), 4


def tile_shapes(num_registers: int, num_floats: int) -> tuple[tuple[int, int], ...]:
    """Return (columns, vectors of 16 floats) of tiles, the most columns first: sums use three quarters of the
    registers.
    """
    sums = num_registers * 3 // 4 * num_floats // LANES
    widths = (12, 8, 4, 3, 2, 1) if sums >= 24 else (6, 4, 3, 2, 1)
    return tuple((width, 1 << min(2, (sums // width).bit_length() - 1)) for width in widths if width <= sums)


def for_each_tile(b: Builder, columns: Value, emit: Callable[[int, int, Value], None]) -> None:
    """Emit a call of emit(columns of the tile, vectors, its first column) until all columns are done."""
    done: Value = constant(I64, 0)
    for width, vectors in tile_shapes(*vector_registers()):
        count = b.udiv(b.sub(columns, done), constant(I64, width))
        with cgutils.for_range(b, count) as loop:
            emit(width, vectors, b.add(done, multiply(b, loop.index, width)))
        done = b.add(done, multiply(b, count, width))


def for_each_vector(b: Builder, total: Value, at_once: int, emit: Callable[[int, Value], None]) -> None:
    """Emit a call of emit(number of vectors, the first vector): `at_once` vectors each, then single ones."""
    count = b.udiv(total, constant(I64, at_once))
    with cgutils.for_range(b, count) as loop:
        emit(at_once, multiply(b, loop.index, at_once))
    if at_once > 1:
        done = multiply(b, count, at_once)
        with cgutils.for_range(b, b.sub(total, done)) as loop:
            emit(1, b.add(done, loop.index))


def variables(b: Builder, values: Sequence[Value]) -> list[Value]:
    """Return variables that are set to the values each time control passes here."""
    slots = [cgutils.alloca_once(b, F32X16) for _ in values]
    for slot, value in zip(slots, values, strict=True):
        b.store(value, slot)
    return slots


def add_products(b: Builder, sums: Sequence[Value], x: Value, factors: Sequence[Value]) -> None:
    """Add x × factors[i] to each sums[i]. They are floats, or pairs of bf16 as integers."""
    for total, factor in zip(sums, factors, strict=False):
        before = b.load(total)
        b.store(fma(b, x, factor, before) if x.type == F32X16 else dot_bf16(b, before, x, factor), total)


def store_variables(b: Builder, slots: Sequence[Value], places: Sequence[Value]) -> None:
    for slot, place in zip(slots, places, strict=True):
        store_f32(b, place, b.load(slot))


def lanes(b: Builder) -> Value:
    """Return the address of 16 floats in the frame."""
    with b.goto_entry_block():
        slot = b.alloca(F32X16)
    slot.align = 64
    return b.ptrtoint(slot, I64)
