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

from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backends.cpu import simd
from infer.backends.cpu.ahead import SECOND_CACHE, prefetch
from infer.backends.cpu.codes import load_exponent, look_up
from infer.backends.cpu.layouts import LANES, LAYOUTS, PLANE_BYTES, SCALE_AT, UNIT, Layout
from infer.backends.cpu.simd import F32, F32X16, I8, I16X16, I32, I32X16, I64, Value, constant, load

COLUMN_BYTES = 4 * LANES  # of the tile's result: a vector of 16 rows for each column


def dot4(
    b: Builder, instruction_set: str, total: Value, weights: Value, four: Value, *, is_small: bool = False
) -> Value:
    """total[lane] += Σ weights[4 lane + i] × four[i]: u8 × i8 in i32. `four` is one i32, the same for every lane.

    is_small: all weights are below 128.
    """
    if instruction_set in ("avx512vnni", "amx"):
        kind = ir.FunctionType(I32X16, [I32X16] * 3)
        dot = b.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
        return b.call(dot, [total, weights, simd.splat(b, four)])
    if instruction_set == "avxvnni":
        return _by_halves(b, _dot_avxvnni, total, weights, simd.splat(b, four))
    if instruction_set == "avx2":
        return _by_halves(b, _dot_avx2, total, weights, simd.splat(b, four))
    if instruction_set == "neon":
        return _dot_neon(b, total, weights, simd.splat(b, four), is_small)
    for byte in range(4):
        weight = b.and_(b.lshr(weights, constant(I32X16, 8 * byte)), constant(I32X16, 255))
        activation = b.ashr(b.shl(four, constant(I32, 24 - 8 * byte)), constant(I32, 24))
        total = b.add(total, b.mul(weight, simd.splat(b, activation)))
    return total


I32X8, I16X16_HALF = ir.VectorType(I32, 8), I16X16


def _by_halves(b: Builder, dot: Any, total: Value, weights: Value, activations: Value) -> Value:
    def half(x: Value, start: int) -> Value:
        return b.shuffle_vector(x, x, ir.Constant(I32X8, list(range(start, start + 8))))

    low, high = (dot(b, half(total, s), half(weights, s), half(activations, s)) for s in (0, 8))
    return b.shuffle_vector(low, high, ir.Constant(I32X16, list(range(16))))


def _dot_avxvnni(b: Builder, total: Value, weights: Value, activations: Value) -> Value:
    kind = ir.FunctionType(I32X8, [I32X8] * 3)
    dot = b.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.256", (), kind)
    return b.call(dot, [total, weights, activations])


def _dot_neon(b: Builder, total: Value, weights: Value, activations: Value, is_small: bool) -> Value:
    """`sdot` takes i8 × i8: of a larger weight it takes w − 128, and 128 as 64 twice."""
    four_lanes, bytes_ = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    sdot = b.module.declare_intrinsic(
        "llvm.aarch64.neon.sdot.v4i32.v16i8", (), ir.FunctionType(four_lanes, [four_lanes, bytes_, bytes_])
    )

    def quarter(x: Value, start: int) -> Value:
        return b.shuffle_vector(x, x, ir.Constant(four_lanes, list(range(start, start + 4))))

    parts = []
    for start in range(0, LANES, 4):
        sums, w, a = (quarter(x, start) for x in (total, weights, activations))
        w, a = b.bitcast(w, bytes_), b.bitcast(a, bytes_)
        if not is_small:
            w = b.xor(w, constant(bytes_, -128))
            for _ in range(2):
                sums = b.call(sdot, [sums, constant(bytes_, 64), a])
        parts.append(b.call(sdot, [sums, w, a]))
    eight = ir.Constant(I32X8, list(range(8)))
    low, high = (b.shuffle_vector(x, y, eight) for x, y in (parts[:2], parts[2:]))
    return b.shuffle_vector(low, high, ir.Constant(I32X16, list(range(LANES))))


def _dot_avx2(b: Builder, total: Value, weights: Value, activations: Value) -> Value:
    """Even and odd bytes as 16 bits each, for `vpmaddubsw` would saturate."""
    kind = ir.FunctionType(I32X8, [I16X16] * 2)
    multiply_add = b.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind)
    weights, activations = b.bitcast(weights, I16X16), b.bitcast(activations, I16X16)
    eight = constant(I16X16, 8)
    even = b.call(multiply_add, [b.and_(weights, constant(I16X16, 255)), b.ashr(b.shl(activations, eight), eight)])
    odd = b.call(multiply_add, [b.lshr(weights, eight), b.ashr(activations, eight)])
    return b.add(total, b.add(even, odd))


_AHEAD = 16384  # bytes; without it a Granite Rapids Xeon decodes at 0.85 × the speed: docs/log.md


class Tile:
    """One tile of a block type being emitted; `sums[group][column]` are its running float vectors."""

    def __init__(
        self, b: Builder, layout: Layout, planes: int, instruction_set: str, groups: int, columns: int
    ) -> None:
        self.b, self.layout, self.planes, self.instruction_set = b, layout, planes, instruction_set
        self.columns = range(columns)
        self.activation_bytes = layout.activation_bytes(planes)
        self.sums = [[cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in self.columns] for _ in range(groups)]

    def record(self, weights: list[Value], activations: Value, supers: list[tuple[Value, Value]]) -> None:
        """Add the products of one record of each group to the sums."""
        for where in weights:
            self.prefetch(where)
        quads = [self.quads(where) for where in weights]
        scales = [self.scales(where, *of_super) for where, of_super in zip(weights, supers, strict=True)]
        dots = self.dots(activations, quads)
        for group, (scale, minima) in enumerate(scales):
            for column in self.columns:
                self.finish(activations, group, column, dots[group][column], scale, minima)

    def dots(self, activations: Value, quads: list[list[Value]]) -> list[list[list[Value]]]:
        """Σ q A by group and column, whole or by halves. 256 × the high plane's sum is where the low one's starts."""
        b, parts, small = self.b, self.layout.parts, self.layout.is_small
        totals = [[[constant(I32X16, 0)] * parts for _ in self.columns] for _ in quads]
        for plane in range(self.planes):
            if plane:
                totals = [[[b.shl(x, constant(I32X16, 8)) for x in y] for y in chains] for chains in totals]
            if plane == self.planes - 1 and self.layout.offset:
                totals = [[self.less_offset(activations, c, x) for c, x in enumerate(chains)] for chains in totals]
            for quad in range(8):
                for column in self.columns:
                    at = column * self.activation_bytes + PLANE_BYTES * plane + 4 * quad
                    four = load(b, simd.offset(b, activations, at), I32, 4)
                    part = quad * parts // 8
                    for chains, weight in zip(totals, quads, strict=True):
                        total = chains[column][part]
                        chains[column][part] = dot4(b, self.instruction_set, total, weight[quad], four, is_small=small)
        return totals

    def quads(self, weights: Value) -> list[Value]:
        low = [self.low(weights, j) for j in range(self.layout.low_bits)]
        return [self.quad(low, weights, quad) for quad in range(8)]

    def less_offset(self, activations: Value, column: int, totals: list[Value]) -> list[Value]:
        """totals − offset ΣA"""
        b, shift = self.b, self.layout.offset.bit_length() - 1
        at = (column + 1) * self.activation_bytes - 8
        sums = [load(b, simd.offset(b, activations, at + 4 * half), I32, 4) for half in range(2)]
        if len(totals) == 1:
            sums = [b.add(*sums)]
        return [
            b.add(total, simd.splat(b, b.shl(one, constant(I32, shift))))
            for total, one in zip(totals, sums, strict=True)
        ]

    def prefetch(self, weights: Value) -> None:
        """Ask for the record that lies some pages after this one. The first cache has no room for so many requests."""
        prefetch(self.b, simd.offset(self.b, weights, _AHEAD), self.layout.record_bytes, SECOND_CACHE)

    def low(self, weights: Value, index: int) -> Value:
        return load(self.b, simd.offset(self.b, weights, 64 * index), I32X16, 16)

    def quad(self, low: list[Value], weights: Value, quad: int) -> Value:
        """64 stored values as bytes."""
        b, layout, bits = self.b, self.layout, self.layout.low_bits
        if bits == 8:
            return low[quad]
        vector, shift = (quad % 4, 4 * (quad // 4)) if bits == 4 else (quad // 4, 2 * (quad % 4))
        values = b.lshr(low[vector], constant(I32X16, shift)) if shift else low[vector]
        values = b.and_(values, constant(I32X16, 0x01010101 * ((1 << bits) - 1)))
        if layout.codes:
            return look_up(b, self.instruction_set, values, [code + layout.offset for code in layout.codes])
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


@intrinsic(prefer_literal=True)
def tile(
    context: Any,
    type_: Any,
    planes: Any,
    instruction_set: Any,
    columns: Any,
    first_weights: Any,
    second_weights: Any,
    activations: Any,
    stride: Any,
    num_records: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[group][column] = 16 rows × the column's activations. `second_weights` literally 0: one group, else two.

    The first four arguments are compile-time constants.
    """
    layout, width = LAYOUTS[type_.literal_value], columns.literal_value
    num_planes, name = planes.literal_value, instruction_set.literal_value
    num_groups = 1 if isinstance(second_weights, types.Literal) else 2

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, first, second, activations, stride, num_records, out, out_stride = arguments
        weights = [first, second][:num_groups]
        if layout.is_float:
            sums = emit_float_tile(b, layout, width, weights, activations, stride, num_records)
        else:
            one = Tile(b, layout, num_planes, name, num_groups, width)
            sums = emit_block_tile(one, weights, activations, stride, num_records)
        for group, totals in enumerate(sums):
            to = b.add(out, b.mul(out_stride, constant(I64, group)))
            for column, total in enumerate(totals):
                simd.store_f32(b, simd.offset(b, to, COLUMN_BYTES * column), total)
        return context.get_dummy_value()

    second = second_weights if num_groups == 1 else types.int64
    numbers = (types.int64,) * 5
    return types.void(type_, planes, instruction_set, columns, types.int64, second, *numbers), emit
