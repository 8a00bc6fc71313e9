"""The inner loop: 16 rows of a packed weight × `columns` tokens of activations, in registers.

For each record of 32 inputs, row r, token t, with activation a = s × A (A an integer of 16 or 8 bits):

    Σ (d q + m) a  =  d s Σ q A  +  m s Σ A          q stored as q + offset:  Σ q A = Σ (q + offset) A − offset Σ A

Σ q A is exact in 32-bit integers; then sum = fma(d × s, Σ q A, sum), and fma(m, s ΣA, sum) if there is a minimum.
So a row's result is one chain of float operations over the records, the same for every number of columns.
A of 16 bits lies as two int8 planes, A = 256 hi + lo.

An activation record, one per block and token:   [hi × 32] [lo × 32] scale f32, scale × ΣA f32, −ΣA of each half i32
"""

from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import BLOCK, LAYOUTS, UNIT, Layout
from infer.kernels.cpu.simd import F32, F32X16, I8, I16X16, I32, I32X16, I64, LANES, Value, constant, load

I8X64 = ir.VectorType(I8, 64)
COLUMN_BYTES = 4 * LANES  # of the tile's result: a vector of 16 rows for each column


def activation_bytes(layout: Layout, planes: int) -> int:
    """Size of the activation record that goes with a weight record."""
    return 4 * UNIT if layout.is_float else BLOCK * planes + 16


def dot4(b: Builder, instruction_set: str, total: Value, weights: Value, four: Value) -> Value:
    """total[lane] += Σ weights[4 lane + i] × four[i]: u8 × i8 in i32. `four` is one i32, the same for every lane."""
    if instruction_set == "avx512vnni":
        kind = ir.FunctionType(I32X16, [I32X16] * 3)
        dot = b.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
        return b.call(dot, [total, weights, simd.splat(b, four)])
    if instruction_set == "avxvnni":
        return _by_halves(b, _dot_avxvnni, total, weights, simd.splat(b, four))
    if instruction_set == "avx2":
        return _by_halves(b, _dot_avx2, total, weights, simd.splat(b, four))
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


def _dot_avx2(b: Builder, total: Value, weights: Value, activations: Value) -> Value:
    """Even and odd bytes as 16 bits each, for `vpmaddubsw` would saturate."""
    kind = ir.FunctionType(I32X8, [I16X16] * 2)
    multiply_add = b.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind)
    weights, activations = b.bitcast(weights, I16X16), b.bitcast(activations, I16X16)
    eight = constant(I16X16, 8)
    even = b.call(multiply_add, [b.and_(weights, constant(I16X16, 255)), b.ashr(b.shl(activations, eight), eight)])
    odd = b.call(multiply_add, [b.lshr(weights, eight), b.ashr(activations, eight)])
    return b.add(total, b.add(even, odd))


_AHEAD = 8192  # bytes; 6 to 12 KiB measured alike on an Ice Lake Xeon
_NEAREST_CACHE = 3


class Tile:
    """One tile of a block type being emitted; `sums` are the columns' running float vectors."""

    def __init__(self, b: Builder, layout: Layout, planes: int, instruction_set: str, columns: int) -> None:
        self.b, self.layout, self.planes, self.instruction_set = b, layout, planes, instruction_set
        self.columns = range(columns)
        self.activation_bytes = activation_bytes(layout, planes)
        self.sums = [cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in self.columns]

    def record(self, weights: Value, activations: Value, super_scale: Value, super_minimum: Value) -> None:
        """Add the products of one record to the sums."""
        b, layout = self.b, self.layout
        if len(self.columns) <= 2:
            self.prefetch(weights)
        low = [self.low(weights, j) for j in range(4 if layout.low_bits == 4 else 8)]
        scales, minimum = self.scales(weights, super_scale, super_minimum)
        totals = [self.start(activations, column) for column in self.columns]
        for quad in range(8):
            weight = self.quad(low, weights, quad)
            for column in self.columns:
                for plane in range(self.planes):
                    at = column * self.activation_bytes + BLOCK * plane + 4 * quad
                    four = load(b, simd.offset(b, activations, at), I32, 4)
                    chain = totals[column][plane]
                    half = quad // 4
                    chain[half] = dot4(b, self.instruction_set, chain[half], weight, four)
        for column in self.columns:
            self.finish(activations, column, totals[column], scales, minimum)

    def prefetch(self, weights: Value) -> None:
        """Ask for what lies some pages ahead: the core's own prefetcher stops at the end of each page."""
        b = self.b
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        prefetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        for line in range(0, self.layout.record_bytes, 64):
            where = b.inttoptr(simd.offset(b, weights, _AHEAD + line), I8.as_pointer())
            b.call(prefetch, [where, constant(I32, 0), constant(I32, _NEAREST_CACHE), constant(I32, 1)])

    def low(self, weights: Value, index: int) -> Value:
        return load(self.b, simd.offset(self.b, weights, 64 * index), I32X16, 16)

    def quad(self, low: list[Value], weights: Value, quad: int) -> Value:
        """64 stored values as bytes."""
        b, layout = self.b, self.layout
        if layout.low_bits == 8:
            return low[quad]
        nibbles = low[quad % 4] if quad < 4 else b.lshr(low[quad % 4], constant(I32X16, 4))
        values = b.and_(nibbles, constant(I32X16, 0x0F0F0F0F))
        if layout.high_bits == 0:
            return values
        vector, bit = (0, quad) if layout.high_bits == 1 else (quad // 4, 2 * (quad % 4))
        high = load(b, simd.offset(b, weights, layout.high_at + 64 * vector), I32X16, 16)
        shifted = b.shl(high, constant(I32X16, 4 - bit)) if bit < 4 else b.lshr(high, constant(I32X16, bit - 4))
        mask = 0x10101010 if layout.high_bits == 1 else 0x30303030
        return b.or_(values, b.and_(shifted, constant(I32X16, mask)))

    def scales(self, weights: Value, super_scale: Value, super_minimum: Value) -> tuple[list[Value], Value]:
        """The record's scale (one for each half in Q6_K) and minimum, as floats without rounding."""
        b, layout = self.b, self.layout
        at, minimum_at = simd.offset(b, weights, layout.scale_at), simd.offset(b, weights, layout.minimum_at)
        if not layout.scales_per_record:
            return [simd.load_f16(b, at)], simd.load_f16(b, minimum_at) if layout.has_minimum else None
        bytes_ = ir.VectorType(I8, LANES)
        widen = b.zext if layout.has_minimum else b.sext
        scales = [
            b.fmul(b.sitofp(widen(load(b, simd.offset(b, at, LANES * i), bytes_, 16), I32X16), F32X16), super_scale)
            for i in range(layout.scales_per_record)
        ]
        if not layout.has_minimum:
            return scales, None
        minimum = b.sitofp(b.zext(load(b, minimum_at, bytes_, 16), I32X16), F32X16)
        return scales, b.fneg(b.fmul(minimum, super_minimum))

    def start(self, activations: Value, column: int) -> list[list[Value]]:
        """Integer sums by plane and half, the low plane's starting from −offset ΣA."""
        b, offset = self.b, self.layout.offset
        zero = constant(I32X16, 0)
        chains = [[zero, zero] for _ in range(self.planes)]
        if offset:
            at = (column + 1) * self.activation_bytes - 8
            for half in range(2):
                minus_sum = simd.splat(b, load(b, simd.offset(b, activations, at + 4 * half), I32, 4))
                chains[-1][half] = b.shl(minus_sum, constant(I32X16, offset.bit_length() - 1))
        return chains

    def finish(self, activations: Value, column: int, chains: Any, scales: list[Value], minimum: Value) -> None:
        b = self.b
        end = (column + 1) * self.activation_bytes
        scale = simd.splat(b, load(b, simd.offset(b, activations, end - 16), F32, 4))
        planes = [[b.add(*halves)] if len(scales) == 1 else halves for halves in chains]
        total = b.load(self.sums[column])
        for part, weight_scale in enumerate(scales):
            dots = planes[-1][part]
            if self.planes == 2:
                dots = b.add(b.shl(planes[0][part], constant(I32X16, 8)), dots)
            total = simd.fma(b, b.fmul(weight_scale, scale), b.sitofp(dots, F32X16), total)
        if minimum is not None:
            scaled_sum = simd.splat(b, load(b, simd.offset(b, activations, end - 12), F32, 4))
            total = simd.fma(b, minimum, scaled_sum, total)
        b.store(total, self.sums[column])


def emit_block_tile(tile: Tile, weights: Value, activations: Value, stride: Value, num_records: Value) -> list[Value]:
    b, layout = tile.b, tile.layout
    per_super = constant(I64, layout.records_per_super)
    with cgutils.for_range(b, b.sdiv(num_records, per_super)) as outer:
        base = b.add(weights, b.mul(outer.index, constant(I64, layout.super_bytes)))
        nested = layout.scales_per_record
        scale = simd.load_f16(b, base) if nested else None
        minimum = simd.load_f16(b, simd.offset(b, base, 2 * LANES)) if nested and layout.has_minimum else None
        first = b.mul(outer.index, per_super)
        with cgutils.for_range(b, per_super) as inner:
            record = b.add(base, b.mul(inner.index, constant(I64, layout.record_bytes)))
            at = b.add(activations, b.mul(b.add(first, inner.index), stride))
            tile.record(simd.offset(b, record, layout.super_header), at, scale, minimum)
    return [b.load(total) for total in tile.sums]


def emit_float_tile(
    b: Builder, layout: Layout, columns: int, weights: Value, activations: Value, stride: Value, num_records: Value
) -> list[Value]:
    """Even and odd inputs in a chain each, added at the end."""
    sums = [[cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in range(columns)] for _ in range(2)]
    with cgutils.for_range(b, num_records) as loop:
        record = b.add(weights, b.mul(loop.index, constant(I64, layout.record_bytes)))
        inputs = b.add(activations, b.mul(loop.index, stride))
        for i in range(UNIT):
            weight = _load_float(b, layout, simd.offset(b, record, i * layout.record_bytes // UNIT))
            for column in range(columns):
                x = simd.splat(b, load(b, simd.offset(b, inputs, 4 * (UNIT * column + i)), F32, 4))
                total = sums[i % 2][column]
                b.store(simd.fma(b, weight, x, b.load(total)), total)
    return [b.fadd(b.load(even), b.load(odd)) for even, odd in zip(*sums, strict=True)]


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
    weights: Any,
    activations: Any,
    stride: Any,
    num_records: Any,
    out: Any,
) -> Any:
    """out[column] = 16 rows × the column's activations. The first four arguments are compile-time constants."""
    layout, width = LAYOUTS[type_.literal_value], columns.literal_value
    num_planes, name = planes.literal_value, instruction_set.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, weights, activations, stride, num_records, out = arguments
        if layout.is_float:
            sums = emit_float_tile(b, layout, width, weights, activations, stride, num_records)
        else:
            one = Tile(b, layout, num_planes, name, width)
            sums = emit_block_tile(one, weights, activations, stride, num_records)
        for column, total in enumerate(sums):
            simd.store_f32(b, simd.offset(b, out, COLUMN_BYTES * column), total)
        return context.get_dummy_value()

    numbers = (types.int64,) * 5
    return types.void(type_, planes, instruction_set, columns, *numbers), emit
