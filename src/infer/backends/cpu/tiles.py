"""The inner loop: one or two groups of 16 rows of a packed weight × `columns` tokens of activations, in registers.

Two groups share each broadcast activation: on an Ice Lake Xeon a dot with a broadcast from memory runs once a cycle,
one between registers twice.

For each record of 32 inputs, row r, token t, with activation a = s × A (A an integer of 16 or 8 bits):

    Σ (d q + m) a  =  d s Σ q A  +  m s Σ A          q stored as q + offset:  Σ q A = Σ (q + offset) A − offset Σ A

Σ q A is exact in 32-bit integers; then sum = fma(d × s, Σ q A, sum), and fma(m, s ΣA, sum) if there is a minimum. Where
the halves of a record have scales (and minimums) of their own, each half is summed by itself.
So a row's result is one chain of float operations over the records, the same for every number of columns.
A of 16 bits lies as two int8 planes, A = 256 hi + lo.

An activation record, one per block and token:   [hi × 32] scale f32, scale × ΣA f32  [lo × 32] −ΣA of each half i32
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.backends.cpu import simd
from infer.backends.cpu.ahead import SECOND_CACHE, prefetch
from infer.backends.cpu.arithmetic import Dots, Quads, arithmetic_of
from infer.backends.cpu.exponents import load_exponent
from infer.backends.cpu.isa import InstructionSet
from infer.backends.cpu.layouts import LANES, PLANE_BYTES, SCALE_AT, UNIT, WORDS, Layout
from infer.backends.cpu.simd import F32, F32X16, I8, I16X16, I32, I32X16, I64, Value, constant, load

I8X64 = ir.VectorType(I8, 64)
_AHEAD = 16384  # bytes; without it a Granite Rapids Xeon decodes at 0.85 × the speed: docs/log.md


class Tile:
    """One tile of a block type being emitted; `sums[group][column]` are its running float vectors."""

    def __init__(self, b: Builder, layout: Layout, form: int, isa: InstructionSet, groups: int, columns: int) -> None:
        self.b, self.layout, self.arithmetic = b, layout, arithmetic_of(isa)
        self.planes, self.has_words = form % WORDS, form > WORDS
        self.offset = 0 if self.arithmetic.is_signed and layout.largest > 127 else layout.offset
        self.columns = range(columns)
        self.activation_bytes = layout.activation_bytes(form)
        self.sums = [[cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in self.columns] for _ in range(groups)]

    def record(self, weights: list[Value], activations: Value, supers: list[tuple[Value, Value]]) -> None:
        """Add the products of one record of each group to the sums."""
        for where in weights:
            self.prefetch(where)
        quads = [self.quads(where) for where in weights]
        dots = self.arithmetic.dots(self, activations, quads)
        scales = [self.scales(where, *of_super) for where, of_super in zip(weights, supers, strict=True)]
        for group, (scale, minima) in enumerate(scales):
            for column in self.columns:
                self.finish(activations, group, column, dots[group][column], scale, minima)

    def four(self, activations: Value, column: int, plane: int, quad: int) -> Value:
        """4 bytes of a column's activations, as one i32."""
        at = column * self.activation_bytes + PLANE_BYTES * plane + 4 * quad
        return load(self.b, simd.offset(self.b, activations, at), I32, 4)

    def quads(self, weights: Value) -> Quads:
        return partial(self.quad, partial(self.low, weights), weights)

    def four_of_lane(self, activations: Value, column: int, plane: int, quad: int) -> Value:
        """`four` in each lane of 16 bytes, taken from a register that has them of 4 quads."""
        b, lanes = self.b, ir.VectorType(I32, 4)
        at = column * self.activation_bytes + PLANE_BYTES * plane + 16 * (quad // 4)
        register = load(b, simd.offset(b, activations, at), lanes, 4)
        return b.shuffle_vector(register, register, constant(lanes, quad % 4))

    def eight_of_two(self, activations: Value, first: tuple[int, int], second: tuple[int, int], eight: int) -> Value:
        """The nth 8 bytes of two (column, plane), as one register."""
        b, register = self.b, ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
        for lane, (column, plane) in enumerate((first, second)):
            at = column * self.activation_bytes + PLANE_BYTES * plane + 8 * eight
            register = b.insert_element(register, load(b, simd.offset(b, activations, at), I64, 4), constant(I32, lane))
        return b.bitcast(register, ir.VectorType(I8, 16))

    def two_words(self, activations: Value, column: int, quad: int, parity: int) -> Value:
        """Of a column's activations, those of the even or of the odd inputs of a quad, as one i32."""
        at = column * self.activation_bytes + PLANE_BYTES * (quad // 4) + 8 * (quad % 4) + 4 * parity
        return load(self.b, simd.offset(self.b, activations, at), I32, 4)

    def by_place(self, groups: int, dot: Callable[[int, int, int], Value]) -> Dots:
        """From the dot of a group, a column and a part."""
        parts = range(self.layout.parts)
        return [[[dot(group, column, part) for part in parts] for column in self.columns] for group in range(groups)]

    def less_offset(self, activations: Value, dots: Dots) -> Dots:
        """dots − offset ΣA"""
        if not self.offset:
            return dots
        less = [self.negative_offset(activations, column) for column in self.columns]
        return [[[*map(self.b.add, *both)] for both in zip(group, less, strict=True)] for group in dots]

    def negative_offset(self, activations: Value, column: int) -> list[Value]:
        """−offset ΣA of each part of the record."""
        b, shift = self.b, self.offset.bit_length() - 1
        at = (column + 1) * self.activation_bytes - 8
        sums = [load(b, simd.offset(b, activations, at + 4 * half), I32, 4) for half in range(2)]
        if self.layout.parts == 1:
            sums = [b.add(*sums)]
        return [simd.splat(b, b.shl(one, constant(I32, shift))) for one in sums]

    def prefetch(self, weights: Value) -> None:
        """Ask for the record that lies some pages after this one. The first cache has no room for so many requests."""
        prefetch(self.b, simd.offset(self.b, weights, _AHEAD), self.layout.record_bytes, SECOND_CACHE)

    def low(self, weights: Value, index: int) -> Value:
        return load(self.b, simd.offset(self.b, weights, 64 * index), I32X16, 16)

    def quad(self, low: Quads, weights: Value, quad: int) -> Value:
        """64 stored values as bytes, from the vectors of low bits."""
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        if bits == 8:
            return low(quad) if self.offset else b.xor(low(quad), constant(I32X16, -0x7F7F7F80))
        vector, shift = (quad % 4, 4 * (quad // 4)) if bits == 4 else (quad // 4, 2 * (quad % 4))
        values = b.lshr(b.bitcast(low(vector), I8X64), constant(I8X64, shift))
        values = b.bitcast(b.and_(values, constant(I8X64, (1 << bits) - 1)), I32X16)
        if layout.codes:
            return self.arithmetic.look_up(b, values, [(code + self.offset) % 256 for code in layout.codes])
        if layout.high_bits == 0:
            return values
        vector, bit = (0, quad) if layout.high_bits == 1 else (quad // 4, 2 * (quad % 4))
        high = load(b, simd.offset(b, weights, layout.high_at + 64 * vector), I32X16, 16)
        shifted = (
            b.shl(high, constant(I32X16, bits - bit)) if bit < bits else b.lshr(high, constant(I32X16, bit - bits))
        )
        mask = 0x01010101 * (((1 << layout.high_bits) - 1) << bits)
        return b.or_(values, b.and_(shifted, constant(I32X16, mask)))

    def scales(self, weights: Value, super_scale: Value, super_minimum: Value) -> tuple[list[Value], list[Value]]:
        """The record's scales and minima, one of each for each half or for the whole, as floats without rounding."""
        b, layout = self.b, self.layout
        at, minimum_at = simd.offset(b, weights, layout.scale_at), simd.offset(b, weights, layout.minimum_at)
        if not layout.scales_per_record:
            scale = load_exponent(b, at) if layout.has_exponent else simd.load_f16(b, at)
            return [scale], [simd.load_f16(b, minimum_at)] if layout.has_minimum else []
        widen = b.sext if layout.has_signed_scales else b.zext

        def whole(where: Value, index: int) -> Value:
            bytes_ = load(b, simd.offset(b, where, LANES * index), ir.VectorType(I8, LANES), 16)
            return b.sitofp(widen(bytes_, I32X16), F32X16)

        scales = [b.fmul(whole(at, i), super_scale) for i in range(layout.parts)]
        return scales, [b.fneg(b.fmul(whole(minimum_at, i), super_minimum)) for i in range(layout.minima)]

    def finish(
        self, activations: Value, group: int, column: int, dots: list[Value], scales: list[Value], minima: list[Value]
    ) -> None:
        b = self.b
        record = simd.offset(b, activations, column * self.activation_bytes)
        scale = load(b, simd.offset(b, record, SCALE_AT), F32, 4)
        total = add_products(b, b.load(self.sums[group][column]), simd.splat(b, scale), dots, scales)
        total = add_minima(b, total, scale, record, self.activation_bytes, minima)
        b.store(total, self.sums[group][column])


def add_products(b: Builder, total: Value, scale: Value, dots: list[Value], scales: list[Value]) -> Value:
    for dot, weight_scale in zip(dots, scales, strict=True):
        total = simd.fma(b, b.fmul(weight_scale, scale), b.sitofp(dot, F32X16), total)
    return total


def add_minima(b: Builder, total: Value, scale: Value, record: Value, record_bytes: int, minima: list[Value]) -> Value:
    """m × s ΣA, of the whole or of each half, from the activation record that has this scale."""
    if len(minima) == 1:
        sums = [load(b, simd.offset(b, record, SCALE_AT + 4), F32, 4)]
    else:
        at = record_bytes - 8
        negative = [load(b, simd.offset(b, record, at + 4 * half), I32, 4) for half in range(len(minima))]
        sums = [b.fmul(scale, b.sitofp(b.sub(constant(I32, 0), one), F32)) for one in negative]
    for minimum, scaled_sum in zip(minima, sums, strict=True):
        total = simd.fma(b, minimum, simd.splat(b, scaled_sum), total)
    return total


def emit_block_tile(
    tile: Tile, weights: list[Value], activations: Value, stride: Value, num_records: Value
) -> list[list[Value]]:
    b, layout = tile.b, tile.layout
    per_super = constant(I64, layout.records_per_super)
    with cgutils.for_range(b, b.sdiv(num_records, per_super)) as outer:
        past = b.mul(outer.index, constant(I64, layout.super_bytes))
        bases = [b.add(where, past) for where in weights]
        supers = [super_scales(b, layout, base) for base in bases]
        first = b.mul(outer.index, per_super)
        with cgutils.for_range(b, per_super) as inner:
            record = simd.offset(b, b.mul(inner.index, constant(I64, layout.record_bytes)), layout.super_header)
            at = b.add(activations, b.mul(b.add(first, inner.index), stride))
            tile.record([b.add(base, record) for base in bases], at, supers)
    return [[b.load(total) for total in sums] for sums in tile.sums]


def super_scales(b: Builder, layout: Layout, base: Value) -> tuple[Value, Value]:
    if not layout.scales_per_record:
        return None, None
    return simd.load_f16(b, base), simd.load_f16(b, simd.offset(b, base, 2 * LANES)) if layout.has_minimum else None


def emit_float_tile(
    b: Builder,
    layout: Layout,
    columns: int,
    weights: list[Value],
    activations: Value,
    stride: Value,
    num_records: Value,
) -> list[list[Value]]:
    """Even and odd inputs in a chain each, added at the end."""
    zero = constant(F32X16, 0.0)
    sums = [[[cgutils.alloca_once_value(b, zero) for _ in range(columns)] for _ in weights] for _ in range(2)]
    with cgutils.for_range(b, num_records) as loop:
        past = b.mul(loop.index, constant(I64, layout.record_bytes))
        inputs = b.add(activations, b.mul(loop.index, stride))
        for i in range(UNIT):
            at = simd.offset(b, past, i * layout.record_bytes // UNIT)
            values = [_load_float(b, layout, b.add(where, at)) for where in weights]
            for column in range(columns):
                x = simd.splat(b, load(b, simd.offset(b, inputs, 4 * (UNIT * column + i)), F32, 4))
                for group, weight in enumerate(values):
                    total = sums[i % 2][group][column]
                    b.store(simd.fma(b, weight, x, b.load(total)), total)
    return [
        [b.fadd(b.load(even), b.load(odd)) for even, odd in zip(*chains, strict=True)]
        for chains in zip(*sums, strict=True)
    ]


def _load_float(b: Builder, layout: Layout, where: Value) -> Value:
    if layout.type == "F32":
        return load(b, where, F32X16, 16)
    bits = load(b, where, I16X16, 16)
    return simd.widen_f16(b, bits) if layout.type == "F16" else simd.widen_bf16(b, bits)
