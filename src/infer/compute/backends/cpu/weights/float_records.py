"""A packed weight's records of a float type: their numbers, each a vector of 16 rows."""

from collections.abc import Iterator

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.layouts import LANES, UNIT, Layout
from infer.compute.backends.cpu.prefetch import prefetch
from infer.compute.backends.cpu.simd import F32X16, I8, I16X16, I32X16, Value, constant, load
from infer.compute.backends.cpu.weight_streams import FAR
from infer.compute.backends.cpu.weights.low_codes import Record

_I8X32 = ir.VectorType(I8, 2 * LANES)


def float_scale(b: Builder, base: Value) -> Value:
    """Return the scale of a super-block's numbers as `floats_of` yields them."""
    return b.fmul(load(b, base, F32X16, 16), constant(F32X16, simd.E4M3_BY_HALF))


def floats_of(b: Builder, layout: Layout, record: Value) -> Iterator[Value]:
    """Yield the numbers of 16 rows for each input, loaded when they are used. E4M3's lack `simd.E4M3_BY_HALF`."""
    size = layout.record_bytes // UNIT
    if layout.type == "F8_E4M3":
        for at in range(0, layout.record_bytes, 2 * size):
            halves = simd.half_of_e4m3(b, load(b, simd.offset(b, record, at), _I8X32, 32))
            for first in (0, LANES):
                lanes = ir.Constant(I32X16, list(range(first, first + LANES)))
                yield simd.widen_f16(b, b.shuffle_vector(halves, halves, lanes))
        return
    for at in range(0, layout.record_bytes, size):
        where = simd.offset(b, record, at)
        if layout.type == "F32":
            yield load(b, where, F32X16, 16)
        else:
            bits = load(b, where, I16X16, 16)
            yield simd.widen_f16(b, bits) if layout.type == "F16" else simd.widen_bf16(b, bits)


def unpack_floats(b: Builder, layout: Layout, record: Record, to: Value) -> None:
    """Store a record's numbers as a record of F32, multiplied by their scales."""
    scale = float_scale(b, record.base) if layout.super_header else None
    prefetch(b, simd.offset(b, record.where, FAR), layout.record_bytes)
    for index, value in enumerate(floats_of(b, layout, record.where)):
        simd.store_f32(b, simd.offset(b, to, 4 * LANES * index), value if scale is None else b.fmul(value, scale))
