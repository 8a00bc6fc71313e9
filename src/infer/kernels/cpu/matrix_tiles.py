"""The inner loop on a core's matrix unit (Intel AMX): two groups of 16 rows × 16 tokens, in integers.

A matrix register takes 16 rows of 64 bytes. Of a record, the weights' quads fill one (as bytes, which `unpack` makes of
them once for all tokens), the tokens' planes another, and their product is Σ q A of 16 tokens × 16 rows, as exact as
`dot4`'s. What follows in floats is `tiles`' own order, so the bits are those of every other instruction set.

The two units take turns: on a Granite Rapids Xeon neither a product nor a store of matrix registers runs beside
vector arithmetic, so nothing is interleaved.

An unpacked record:   [8 quads × 64 bytes] [scale × 16 rows f32, one or two] [minimum × 16 rows f32, none, one or two]
"""

from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import BLOCK, LANES, LAYOUTS, QUADS_BYTES, Layout
from infer.kernels.cpu.simd import F32, F32X16, I8, I32, I32X16, I64, Value, constant, load, store
from infer.kernels.cpu.tiles import Tile, add_minima, add_products, super_scales

TOKENS, GROUPS = 16, 2
_BATCH = 2  # records that are multiplied before their sums become floats, with one plane and one part; else one
_VECTOR_BYTES, _SUMS_BYTES = 4 * LANES, 4 * LANES * TOKENS
SCRATCH_BYTES = 2 * GROUPS * 2 * _SUMS_BYTES  # for one record: two parts, two groups, two planes
_ACTIVATIONS, _WEIGHTS = (4, 5), (6, 7)  # matrix registers: by plane, by group; 0 to 3 are sums


def _call(b: Builder, name: str, *arguments: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(b.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), arguments)


def _register(number: int) -> ir.Constant:
    return constant(I8, number)


def _pointer(b: Builder, where: Value) -> Value:
    return b.inttoptr(where, I8.as_pointer())


def shapes(layout: Layout) -> bytes:
    """The 64 bytes that describe the registers: palette 1, bytes of a row from 16 on, rows from 48 on."""
    config, parts = bytearray(64), layout.parts
    config[0] = 1
    for register in range(8):
        is_activation, is_weight = register in _ACTIVATIONS, register in _WEIGHTS
        config[16 + 2 * register] = BLOCK // parts if is_activation else 64
        config[48 + register] = 8 // parts if is_weight else 16
    return bytes(config)


@intrinsic(prefer_literal=True)
def configure(context: Any, type_: Any, is_wanted: Any, scratch: Any) -> Any:
    """Give the registers the shapes that `matrix_tile` wants, through 64 bytes at `scratch`, until `release`."""
    config = shapes(LAYOUTS[type_.literal_value])

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        _, is_wanted, scratch = arguments
        with b.if_then(is_wanted):
            for at in range(0, 64, 8):
                word = constant(I64, int.from_bytes(config[at : at + 8], "little"))
                store(b, simd.offset(b, scratch, at), word, 8)
            _call(b, "ldtilecfg", _pointer(b, scratch))
        return context.get_dummy_value()

    return types.void(type_, types.boolean, types.int64), emit


@intrinsic
def release(context: Any, is_wanted: Any) -> Any:
    """Leave nothing behind that a switch of threads would have to save."""

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        with b.if_then(arguments[0]):
            _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(types.boolean), emit


@intrinsic(prefer_literal=True)
def unpack(context: Any, type_: Any, weights: Any, num_records: Any, out: Any) -> Any:
    """The records of a group as `matrix_tile` takes them."""
    layout = LAYOUTS[type_.literal_value]

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        _, weights, num_records, out = arguments
        reader = Tile(b, layout, 1, "amx", 0, 0)
        per_super = constant(I64, layout.records_per_super)
        with cgutils.for_range(b, num_records) as loop:
            past = b.mul(b.sdiv(loop.index, per_super), constant(I64, layout.super_bytes))
            base = b.add(weights, past)
            within = b.mul(b.srem(loop.index, per_super), constant(I64, layout.record_bytes))
            where = simd.offset(b, b.add(base, within), layout.super_header)
            reader.prefetch(where)
            to = b.add(out, b.mul(loop.index, constant(I64, layout.unpacked_bytes)))
            for quad, values in enumerate(reader.quads(where)):
                store(b, simd.offset(b, to, 64 * quad), values, 64)
            scales, minima = reader.scales(where, *super_scales(b, layout, base))
            for index, vector in enumerate([*scales, *minima]):
                simd.store_f32(b, simd.offset(b, to, QUADS_BYTES + _VECTOR_BYTES * index), vector)
        return context.get_dummy_value()

    return types.void(type_, *(types.int64,) * 3), emit


class MatrixTile:
    """One tile of a block type being emitted."""

    def __init__(self, b: Builder, layout: Layout, planes: int, operands: list[Value]) -> None:
        self.b, self.layout, self.planes, self.parts = b, layout, planes, layout.parts
        self.weights = operands[:GROUPS]
        self.activations, self.stride, out, out_stride, self.scratch = operands[GROUPS:]
        self.out = [out, b.add(out, out_stride)]
        self.record_bytes = layout.activation_bytes(planes)

    def multiply(self, index: Value, place: int) -> None:
        """Σ q A of a record into a place of the scratch, by part, group and plane."""
        b, size = self.b, BLOCK // self.parts
        past = b.mul(index, constant(I64, self.layout.unpacked_bytes))
        inputs = b.add(self.activations, b.mul(index, self.stride))
        for part in range(self.parts):
            for register, where in zip(_WEIGHTS, self.weights, strict=True):
                at = simd.offset(b, b.add(where, past), part * QUADS_BYTES // self.parts)
                _call(b, "tileloadd64", _register(register), _pointer(b, at), constant(I64, 64))
            for plane in range(self.planes):
                at = simd.offset(b, inputs, BLOCK * plane + size * part)
                _call(
                    b, "tileloadd64", _register(_ACTIVATIONS[plane]), _pointer(b, at), constant(I64, self.record_bytes)
                )
            for group, plane in self.products():
                total = _register(GROUPS * group + plane)
                _call(b, "tilezero", total)
                _call(b, "tdpbsud", total, _register(_ACTIVATIONS[plane]), _register(_WEIGHTS[group]))
            for group, plane in self.products():
                to = _pointer(b, simd.offset(b, self.scratch, self.sums_offset(place, part, group, plane)))
                _call(b, "tilestored64", _register(GROUPS * group + plane), to, constant(I64, 64))

    def products(self) -> list[tuple[int, int]]:
        return [(group, plane) for group in range(GROUPS) for plane in range(self.planes)]

    def sums_offset(self, place: int, part: int, group: int, plane: int) -> int:
        return (((place * self.parts + part) * GROUPS + group) * self.planes + plane) * _SUMS_BYTES

    def scales(self, first: Value, place: int, group: int) -> tuple[list[Value], list[Value]]:
        b, size = self.b, self.layout.unpacked_bytes
        at = b.add(self.weights[group], b.mul(first, constant(I64, size)))
        vectors = [
            load(b, simd.offset(b, at, place * size + QUADS_BYTES + _VECTOR_BYTES * index), F32X16, 64)
            for index in range(self.parts + self.layout.minima)
        ]
        return vectors[: self.parts], vectors[self.parts :]

    def finish(self, token: Value, group: int, first: Value, scales: list[tuple[list[Value], list[Value]]]) -> None:
        """The running sums of one token and group, through all records of the batch."""
        b = self.b
        row = b.mul(token, constant(I64, _VECTOR_BYTES))
        to = b.add(self.out[group], row)
        end = b.add(self.activations, b.mul(first, self.stride))
        end = simd.offset(b, b.add(end, b.mul(token, constant(I64, self.record_bytes))), self.record_bytes - 16)
        total = simd.load_f32(b, to)
        for place, (weight_scales, minima) in enumerate(scales):
            dots = [self.dot(b.add(self.scratch, row), place, part, group, end) for part in range(self.parts)]
            scale = load(b, end, F32, 4)
            total = add_products(b, total, simd.splat(b, scale), dots, weight_scales)
            total = add_minima(b, total, scale, end, minima)
            end = b.add(end, self.stride)
        simd.store_f32(b, to, total)

    def dot(self, sums: Value, place: int, part: int, group: int, end: Value) -> Value:
        """256 × the high plane's sum + the low one's − offset ΣA."""
        b, shift = self.b, self.layout.offset.bit_length() - 1
        planes = [
            load(b, simd.offset(b, sums, self.sums_offset(place, part, group, plane)), I32X16, 64)
            for plane in range(self.planes)
        ]
        total = planes[0] if self.planes == 1 else b.add(b.shl(planes[0], constant(I32X16, 8)), planes[1])
        if not self.layout.offset:
            return total
        halves = [load(b, simd.offset(b, end, 8 + 4 * half), I32, 4) for half in range(2)]
        negative = halves[part] if self.parts == 2 else b.add(*halves)
        return b.add(total, simd.splat(b, b.shl(negative, constant(I32, shift))))

    def add(self, first: Value, count: int) -> None:
        """The products of `count` records to the running sums."""
        b = self.b
        for place in range(count):
            self.multiply(b.add(first, constant(I64, place)), place)
        scales = [[self.scales(first, place, group) for place in range(count)] for group in range(GROUPS)]
        with cgutils.for_range(b, constant(I64, TOKENS)) as loop:
            for group in range(GROUPS):
                self.finish(loop.index, group, first, scales[group])

    def emit(self, num_records: Value) -> None:
        b, count = self.b, max(1, _BATCH // (self.planes * self.parts))
        for row in self.out:
            for token in range(TOKENS):
                simd.store_f32(b, simd.offset(b, row, _VECTOR_BYTES * token), constant(F32X16, 0.0))
        num_batches = b.sdiv(num_records, constant(I64, count))
        with cgutils.for_range(b, num_batches) as loop:
            self.add(b.mul(loop.index, constant(I64, count)), count)
        done = b.mul(num_batches, constant(I64, count))
        with cgutils.for_range(b, b.sub(num_records, done)) as loop:
            self.add(b.add(done, loop.index), 1)


@intrinsic(prefer_literal=True)
def matrix_tile(
    context: Any,
    type_: Any,
    planes: Any,
    first_weights: Any,
    second_weights: Any,
    activations: Any,
    stride: Any,
    num_records: Any,
    out: Any,
    out_stride: Any,
    scratch: Any,
) -> Any:
    """out[group][token] = 16 rows × the token's activations, as `tile` does it. Two unpacked groups, 16 tokens."""
    layout, num_planes = LAYOUTS[type_.literal_value], planes.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        _, _, first, second, activations, stride, num_records, out, out_stride, scratch = arguments
        MatrixTile(b, layout, num_planes, [first, second, activations, stride, out, out_stride, scratch]).emit(
            num_records
        )
        return context.get_dummy_value()

    return types.void(type_, planes, *(types.int64,) * 8), emit
