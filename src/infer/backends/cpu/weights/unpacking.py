"""A packed weight's records of a block type: read by a tile, or unpacked in memory.

An unpacked record has one signed byte per value, less its offset, and its scales and minima as floats:

    8 quads × 64 bytes | f32 × 16 rows for each scale, then for each minimum
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.backends.cpu import simd
from infer.backends.cpu.isa import InstructionSet
from infer.backends.cpu.layouts import LANES, QUADS_BYTES, Layout
from infer.backends.cpu.matmul.arithmetic import Quads, arithmetic_of
from infer.backends.cpu.prefetch import prefetch
from infer.backends.cpu.simd import F32X16, I8, I32X16, I64, Value, address, constant, load, operation, store
from infer.backends.cpu.weights.weight_streams import FAR

Emitter = Callable[[], None]
I8X64 = ir.VectorType(I8, 64)


def alternate(*series: Sequence[Emitter]) -> None:
    """Call the emitters of all series, each series in its order, evenly mixed."""
    places = [((index + 0.5) / len(emitters), emitter) for emitters in series for index, emitter in enumerate(emitters)]
    for _, emitter in sorted(places, key=lambda place: place[0]):
        emitter()


class PackedRecords:
    def __init__(self, b: Builder, layout: Layout, isa: InstructionSet) -> None:
        self.b, self.layout, self.arithmetic, self.inputs = b, layout, arithmetic_of(isa), isa.inputs
        self.offset = self.arithmetic.offset(layout)

    def quads(self, weights: Value) -> Quads:
        return partial(self.quad, partial(self.low, weights), weights)

    def prefetch(self, weights: Value, ahead: int) -> None:
        """Prefetch the record that is `ahead` bytes after this one."""
        prefetch(self.b, simd.offset(self.b, weights, ahead), self.layout.record_bytes)

    def low(self, weights: Value, index: int) -> Value:
        return load(self.b, simd.offset(self.b, weights, 64 * index), I32X16, 16)

    def quad(self, low: Quads, weights: Value, quad: int) -> Value:
        """Return 64 stored values as bytes, from the vectors of low bits."""
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        if bits == 8:
            return low(quad) if self.offset else b.xor(low(quad), constant(I32X16, -0x7F7F7F80))
        vector, shift = {4: (quad % 4, 4 * (quad // 4)), 2: (quad // 4, 2 * (quad % 4)), 1: (0, quad)}[bits]
        values = b.lshr(b.bitcast(low(vector), I8X64), constant(I8X64, shift))
        values = b.bitcast(b.and_(values, constant(I8X64, (1 << bits) - 1)), I32X16)
        if layout.high_bits:
            values = b.or_(values, self._high(weights, quad))
        if layout.has_deltas:
            values = b.or_(values, self._deltas(weights, quad))
        if not layout.codes:
            return values
        return self.arithmetic.look_up(b, values, [(code + self.offset) % 256 for code in layout.codes])

    def _high(self, weights: Value, quad: int) -> Value:
        """Return the high bits of a quad, in their place above the low ones."""
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        vector, bit = (0, quad) if layout.high_bits == 1 else (quad // 4, 2 * (quad % 4))
        high = load(b, simd.offset(b, weights, layout.high_at + 64 * vector), I32X16, 16)
        shifted = (
            b.shl(high, constant(I32X16, bits - bit)) if bit < bits else b.lshr(high, constant(I32X16, bit - bits))
        )
        mask = 0x01010101 * (((1 << layout.high_bits) - 1) << bits)
        return b.and_(shifted, constant(I32X16, mask))

    def _deltas(self, weights: Value, quad: int) -> Value:
        """Return the sign bits of a quad above its two bits, from its row's scale."""
        b, half, eight = self.b, quad // 4, quad % 4 // 2
        bits = self._bytes(simd.offset(b, weights, self.layout.scale_at + LANES * half))
        if self.inputs == 8:  # of a pair of quads, the first is rows 0–7 and the second rows 8–15
            lanes = [8 * (quad % 2) + lane // 2 for lane in range(LANES)]
            bits = b.shuffle_vector(bits, bits, ir.Constant(I32X16, lanes))
        filled = b.ashr(b.shl(bits, constant(I32X16, 27 - eight)), constant(I32X16, 31))
        return b.and_(filled, constant(I32X16, 0x04040404))

    def _bytes(self, where: Value) -> Value:
        """Return a byte of each row as an integer."""
        widen = self.b.sext if self.layout.has_signed_scales else self.b.zext
        return widen(load(self.b, where, ir.VectorType(I8, LANES), 16), I32X16)

    def super_scales(self, base: Value) -> tuple[Value, Value]:
        b, layout = self.b, self.layout
        if layout.records_per_super == 1:
            return None, None
        minimum = simd.load_f16(b, simd.offset(b, base, 2 * LANES)) if layout.has_minimum else None
        scale = simd.load_f16(b, base)
        return scale if layout.factor == 1 else b.fmul(scale, constant(F32X16, layout.factor)), minimum

    def scales(self, weights: Value, super_scale: Value, super_minimum: Value) -> tuple[list[Value], list[Value]]:
        """Return the record's scales and minima, one per half or one for the whole, as floats without rounding."""
        b, layout = self.b, self.layout
        at, minimum_at = simd.offset(b, weights, layout.scale_at), simd.offset(b, weights, layout.minimum_at)
        if layout.records_per_super == 1:
            halves = [simd.offset(b, at, 2 * LANES * part) for part in range(layout.parts)]
            scales = [_load_exponent(b, at)] if layout.has_exponent else [simd.load_f16(b, half) for half in halves]
            return scales, [simd.load_f16(b, minimum_at)] if layout.has_minimum else []
        if not layout.has_small_scales:
            return [super_scale], []

        def whole(where: Value, index: int) -> Value:
            if layout.has_nibbles:
                nibble = b.and_(b.lshr(self._bytes(where), constant(I32X16, 4 * index)), constant(I32X16, 15))
                return b.sitofp(b.or_(b.shl(nibble, constant(I32X16, 1)), constant(I32X16, 1)), F32X16)
            number = self._bytes(simd.offset(b, where, LANES * index))
            return b.sitofp(b.and_(number, constant(I32X16, 15)) if layout.has_deltas else number, F32X16)

        scales = [b.fmul(whole(at, i), super_scale) for i in range(layout.parts)]
        return scales, [b.fneg(b.fmul(whole(minimum_at, i), super_minimum)) for i in range(layout.minima)]

    def place(self, weights: Value, index: Value) -> tuple[Value, Value]:
        """Return the addresses of a record and of its super-block, which holds the common values."""
        b, layout = self.b, self.layout
        per_super = constant(I64, layout.records_per_super)
        base = b.add(weights, b.mul(b.sdiv(index, per_super), constant(I64, layout.super_bytes)))
        within = b.mul(b.srem(index, per_super), constant(I64, layout.record_bytes))
        return simd.offset(b, b.add(base, within), layout.super_header), base

    def unpack(self, weights: Value, index: Value, to: Value) -> list[Emitter]:
        b, layout = self.b, self.layout
        where, base = self.place(weights, index)
        low = list[Value]()

        def begin() -> None:
            self.prefetch(where, FAR)
            low.extend(self.low(where, j) for j in range(layout.low_bits))

        def quad(index: int) -> None:
            values = b.bitcast(self.quad(low.__getitem__, where, index), I8X64)
            store(b, simd.offset(b, to, 64 * index), b.sub(values, constant(I8X64, self.offset)), 64)

        def scales() -> None:
            found, minima = self.scales(where, *self.super_scales(base))
            for index, vector in enumerate([*found, *minima]):
                simd.store_f32(b, simd.offset(b, to, QUADS_BYTES + 4 * LANES * index), vector)

        return [begin, *(partial(quad, index) for index in range(8)), scales]


def make_unpack(layout: Layout, isa: InstructionSet) -> Any:
    """Return unpack(weights, num_records, out): it unpacks a group's records for `matrix_tiles` and `embed`."""

    @operation(types.void, *(address,) * 3)
    def unpack(b: Builder, weights: Value, num_records: Value, out: Value) -> None:
        records = PackedRecords(b, layout, isa)
        with cgutils.for_range(b, num_records) as loop:
            to = b.add(out, b.mul(loop.index, constant(I64, layout.unpacked_bytes)))
            alternate(records.unpack(weights, loop.index, to))

    return unpack


def _load_exponent(b: Builder, where: Value) -> Value:
    """Return 2^(e − 128) of 16 bytes e, as in MXFP4: the two smallest are subnormal."""
    exponent = b.zext(load(b, where, ir.VectorType(I8, LANES), 16), I32X16)
    normal = b.shl(b.sub(exponent, constant(I32X16, 1)), constant(I32X16, 23))
    subnormal = b.shl(constant(I32X16, 0x00200000), b.and_(exponent, constant(I32X16, 1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", exponent, constant(I32X16, 2)), subnormal, normal), F32X16)
