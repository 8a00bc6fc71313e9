"""A packed weight's records: read by a tile, or unpacked in memory.

An unpacked record has one byte per value, with or without its offset, and its scales and minima as floats:

    8 quads × 64 bytes | f32 × 16 rows for each scale, then for each minimum

Unpacked, a record of floats is a record of F32.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.arithmetic import Quads, arithmetic_of
from infer.compute.backends.cpu.isa import InstructionSet
from infer.compute.backends.cpu.layouts import BLOCK, LANES, QUADS_BYTES, Layout
from infer.compute.backends.cpu.prefetch import prefetch
from infer.compute.backends.cpu.simd import (
    F32X16,
    I8,
    I8X64,
    I16X16,
    I32X16,
    I64,
    Value,
    address,
    constant,
    load,
    operation,
    store,
)
from infer.compute.backends.cpu.weight_streams import FAR
from infer.compute.backends.cpu.weights.low_codes import LowCodes, Record, make_low_codes, nibbles

Emitter = Callable[[], None]
_I8X32 = ir.VectorType(I8, 2 * LANES)


def alternate(*series: Sequence[Emitter]) -> None:
    """Call the emitters of all series, evenly interleaved. Each series keeps its order."""
    places = [((index + 0.5) / len(emitters), emitter) for emitters in series for index, emitter in enumerate(emitters)]
    for _, emitter in sorted(places, key=lambda place: place[0]):
        emitter()


class PackedRecords:
    """Emitter of reads of packed records of a block type, for tiles and for `make_unpack`."""

    def __init__(self, b: Builder, layout: Layout, isa: InstructionSet) -> None:
        self.b, self.layout, self.arithmetic, self.inputs = b, layout, arithmetic_of(isa), isa.inputs
        self.offset = self.arithmetic.offset(layout)

    def quads(self, record: Record) -> Quads:
        """Return quads(n), which emits quad n of the record. Its bytes still have the offset of `Arithmetic.offset`."""
        return partial(self.quad, self.low_codes(record), record)

    def low_codes(self, record: Record) -> LowCodes:
        return make_low_codes(self.b, self.layout, self.arithmetic, record)

    def quad(self, low: LowCodes, record: Record, quad: int) -> Value:
        """Emit a quad: 64 weights as the bytes of an i32 × 16. Lane r has 4 inputs of row r. Codes are looked up."""
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        values = self._low(low, quad)
        if bits == 8:
            return values if self.offset else b.xor(values, constant(I32X16, -0x7F7F7F80))
        if layout.nibbles == "deltas":
            return b.sub(values, self._deltas(record, quad))
        if layout.has_trits:
            return values
        place = bits
        if layout.high_bits:
            high, place = self._high(record.where, quad)
            values = simd.choose_bits(b, constant(I32X16, 0x01010101 * ((1 << bits) - 1)), values, high)
        if not layout.codes:
            return b.and_(values, constant(I32X16, 0x01010101 * ((1 << bits + layout.high_bits) - 1)))
        codes = [(code + self.offset) % 256 for code in layout.codes]
        if place > bits:
            codes = [codes[number % (1 << bits) | (number >> place & 1) << bits] for number in range(64)]
        return self.arithmetic.look_up(b, values, codes)

    def _low(self, low: LowCodes, quad: int) -> Value:
        """Emit the low codes of a quad, in the row order of the instruction set.

        Trits and patterns are packed in the same order for every instruction set, so they may be reordered here.
        """
        if self.inputs == 4 or not (self.layout.has_trits or self.layout.grid):
            return low.quad(quad)
        lanes = [8 * (quad % 2) + lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
        pair = [low.quad(quad // 2 * 2 + which) for which in range(2)]
        return self.b.shuffle_vector(*pair, ir.Constant(I32X16, lanes))

    def _high(self, weights: Value, quad: int) -> tuple[Value, int]:
        """Emit (a vector with the high bits of a quad, the place of the lowest of them in a byte).

        Bits of other quads are around them. The place is just above the low bits, or up to bit 5 if bytes are looked up
        in 64 entries: then shifts are few.
        """
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        vector, bit = (0, quad) if layout.high_bits == 1 else (quad // 4, 2 * (quad % 4))
        high = load(b, simd.offset(b, weights, layout.high_at + 64 * vector), I32X16, 16)
        width = 6 - bits if layout.codes and self.arithmetic.permutes_bytes else 1
        place = bits + (bit - bits) % width if layout.high_bits == 1 else bits
        shift = place - bit
        return b.shl(high, constant(I32X16, shift)) if shift > 0 else b.lshr(high, constant(I32X16, -shift)), place

    def _deltas(self, record: Record, quad: int) -> Value:
        """Emit 2 in each byte of a quad whose delta is negative, else 0."""
        b, eight = self.b, quad // 2
        bits = nibbles(b, self.layout, record)
        if self.inputs == 8:  # of a pair of quads, the first is rows 0–7 and the second rows 8–15
            lanes = [8 * (quad % 2) + lane // 2 for lane in range(LANES)]
            bits = b.shuffle_vector(bits, bits, ir.Constant(I32X16, lanes))
        filled = b.ashr(b.shl(bits, constant(I32X16, 31 - eight)), constant(I32X16, 31))
        return b.and_(filled, constant(I32X16, 0x02020202))

    def _bytes(self, where: Value) -> Value:
        """Load one byte per row as i32 × 16: signed scales, or unsigned ones beside minima."""
        widen = self.b.sext if self.layout.has_signed_scales else self.b.zext
        return widen(load(self.b, where, ir.VectorType(I8, LANES), 16), I32X16)

    def super_scales(self, base: Value) -> tuple[Value, Value]:
        """Load the super-block's scale d × `layout.factor`, and its dmin, f32 × 16 each; None if the type has none."""
        b, layout = self.b, self.layout
        if layout.records_per_super == 1:
            return None, None
        minimum = simd.load_f16(b, simd.offset(b, base, 2 * LANES)) if layout.has_minimum else None
        scale = simd.load_f16(b, base)
        return scale if layout.factor == 1 else b.fmul(scale, constant(F32X16, layout.factor)), minimum

    def scales(self, record: Record, super_scale: Value, super_minimum: Value) -> tuple[list[Value], list[Value]]:
        """Return (scales, minima) of a record: lists of f32 × 16, one per part of the record. No product is rounded."""
        b, layout = self.b, self.layout
        at, minimum_at = (simd.offset(b, record.where, offset) for offset in (layout.scale_at, layout.minimum_at))
        if layout.records_per_super == 1:
            halves = [simd.offset(b, at, 2 * LANES * part) for part in range(layout.parts)]
            scales = [_load_exponent(b, at)] if layout.has_exponent else [simd.load_f16(b, half) for half in halves]
            return scales, [simd.load_f16(b, minimum_at)] if layout.has_minimum else []
        if not layout.has_small_scales:
            return [super_scale], []
        if layout.nibbles == "scales":
            scale = self.arithmetic.look_up_odd(b, nibbles(b, layout, record), is_signed=True)
            return [b.fmul(scale, super_scale)], []

        def whole(where: Value, index: int) -> Value:
            if layout.has_nibbles:
                numbers = b.lshr(self._bytes(where), constant(I32X16, 4 * index))
                return self.arithmetic.look_up_odd(b, numbers, is_signed=False)
            return b.sitofp(self._bytes(simd.offset(b, where, LANES * index)), F32X16)

        scales = [b.fmul(whole(at, i), super_scale) for i in range(layout.parts)]
        return scales, [b.fneg(b.fmul(whole(minimum_at, i), super_minimum)) for i in range(layout.minima)]

    def record(self, base: Value, index: Value) -> Record:
        """Return the record `index` of the super-block that begins at `base`."""
        b, layout = self.b, self.layout
        within = simd.offset(b, b.mul(index, constant(I64, layout.record_bytes)), layout.super_header)
        return Record(b.add(base, within), base, index)

    def place(self, weights: Value, index: Value) -> Record:
        """Return the record `index` of the group that begins at `weights`."""
        b, layout = self.b, self.layout
        per_super = constant(I64, layout.records_per_super)
        base = b.add(weights, b.mul(b.sdiv(index, per_super), constant(I64, layout.super_bytes)))
        return self.record(base, b.srem(index, per_super))

    def unpack(self, record: Record, ahead: Value, to: Value, *, keeps_offset: bool = False) -> list[Emitter]:
        """Return emitters that unpack a record to the address `to`, which is aligned to 64 bytes.

        The first one also prefetches the record that is `ahead` bytes later. If `keeps_offset`, bytes are q + offset,
        else q.
        """
        b = self.b
        low, offset = self.low_codes(record), 0 if keeps_offset else self.offset

        def begin() -> None:
            prefetch(b, b.add(record.where, ahead), self.layout.record_bytes)
            low.load()

        def quad(index: int) -> None:
            values = b.bitcast(self.quad(low, record, index), I8X64)
            store(b, simd.offset(b, to, 64 * index), b.sub(values, constant(I8X64, offset)), 64)

        def scales() -> None:
            found, minima = self.scales(record, *self.super_scales(record.base))
            for index, vector in enumerate([*found, *minima]):
                simd.store_f32(b, simd.offset(b, to, QUADS_BYTES + 4 * LANES * index), vector)

        return [begin, *(partial(quad, index) for index in range(8)), scales]


class UnpackedRecords:
    """Emitter of reads of the records that `PackedRecords.unpack` has stored."""

    def __init__(self, b: Builder, layout: Layout) -> None:
        self.b, self.layout = b, layout

    def quads(self, record: Value) -> Quads:
        return lambda quad: load(self.b, simd.offset(self.b, record, 64 * quad), I32X16, 64)

    def scales(self, record: Value) -> tuple[list[Value], list[Value]]:
        """Return the record's scales and minima, as `PackedRecords.scales` does."""
        b, layout = self.b, self.layout
        at = [simd.offset(b, record, QUADS_BYTES + 4 * LANES * which) for which in range(layout.parts + layout.minima)]
        vectors = [load(b, where, F32X16, 64) for where in at]
        return vectors[: layout.parts], vectors[layout.parts :]


def make_unpack(layout: Layout, isa: InstructionSet, *, keeps_offset: bool = False) -> Any:
    """Return unpack(weights, first, count, out), which unpacks records [first, first + count) of a group.

    It reads the packed group at `weights`, and stores `count` unpacked records at `out`, aligned to 64 bytes.
    `matrix_tiles` and `embed` take values without their offset, and `strips` with it.
    """

    @operation(types.void, *(address,) * 4)
    def unpack(b: Builder, weights: Value, first: Value, count: Value, out: Value) -> None:
        records = PackedRecords(b, layout, isa)
        with cgutils.for_range(b, count) as loop:
            record = records.place(weights, b.add(first, loop.index))
            to = b.add(out, simd.multiply(b, loop.index, layout.unpacked_bytes))
            if layout.is_float:
                unpack_floats(b, layout, record, to)
            else:
                alternate(records.unpack(record, constant(I64, FAR), to, keeps_offset=keeps_offset))

    return unpack


def _load_exponent(b: Builder, where: Value) -> Value:
    """Load 16 bytes e and return 2^(e − 128), f32 × 16, as in MXFP4. For e = 0 and 1 that is subnormal."""
    exponent = b.zext(load(b, where, ir.VectorType(I8, LANES), 16), I32X16)
    normal = b.shl(b.sub(exponent, constant(I32X16, 1)), constant(I32X16, 23))
    subnormal = b.shl(constant(I32X16, 0x00200000), b.and_(exponent, constant(I32X16, 1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", exponent, constant(I32X16, 2)), subnormal, normal), F32X16)


def float_scale(b: Builder, base: Value) -> Value:
    """Load the f32 × 16 scales of a super-block of E4M3 numbers, multiplied for the numbers that `floats_of` yields."""
    return b.fmul(load(b, base, F32X16, 16), constant(F32X16, simd.E4M3_BY_HALF))


def floats_of(b: Builder, layout: Layout, where: Value, count: int) -> Iterator[Value]:
    """Yield f32 × 16 rows for each of `count` inputs, from the address `where` on. Each is loaded when it is used.

    Numbers of E4M3 are too small by the factor `simd.E4M3_BY_HALF`.
    """
    size = layout.record_bytes // BLOCK
    if layout.type == "F8_E4M3":
        for at in range(0, count * size, 2 * size):
            halves = simd.half_of_e4m3(b, load(b, simd.offset(b, where, at), _I8X32, 32))
            for first in (0, LANES):
                lanes = ir.Constant(I32X16, list(range(first, first + LANES)))
                yield simd.widen_f16(b, b.shuffle_vector(halves, halves, lanes))
        return
    for at in range(0, count * size, layout.neighbours * size):
        numbers = simd.offset(b, where, at)
        if layout.type == "F32":
            yield load(b, numbers, F32X16, 16)
        elif layout.type == "F16":
            yield simd.widen_f16(b, load(b, numbers, I16X16, 16))
        else:
            pairs = load(b, numbers, I32X16, 16)
            yield b.bitcast(b.shl(pairs, constant(I32X16, 16)), F32X16)
            yield b.bitcast(b.and_(pairs, constant(I32X16, -0x10000)), F32X16)


def unpack_floats(b: Builder, layout: Layout, record: Record, to: Value) -> None:
    """Store a record of a float type at `to` as f32 [32 inputs, 16 rows], multiplied by the scales if there are any."""
    scale = float_scale(b, record.base) if layout.super_header else None
    prefetch(b, simd.offset(b, record.where, FAR), layout.record_bytes)
    for index, value in enumerate(floats_of(b, layout, record.where, BLOCK)):
        simd.store_f32(b, simd.offset(b, to, 4 * LANES * index), value if scale is None else b.fmul(value, scale))
