"""The inner loop on a core's matrix unit (Intel AMX): two groups of 16 rows × 8 or 16 tokens, in integers.

A matrix register takes 16 rows of 64 bytes. Of a record, the weights' quads fill one (as bytes, which `unpack` makes of
them), the planes of 16 / planes tokens another, 40 bytes from one plane to the next, and their product is Σ q A of 16
rows, as exact as the vector unit's. What follows in floats is `tiles`' own order, so the bits are those of every other
instruction set.

Three records are under way at once, as nothing waits for another's results then: one is unpacked, the one before it
multiplied, the one before that added to the running sums; matrix and vector instructions alternate. (On a Granite
Rapids Xeon the vector unit does one instruction a cycle beside the matrix unit, two without it: docs/log.md.)

An unpacked record:   [8 quads × 64 bytes] [scale × 16 rows f32, one or two] [minimum × 16 rows f32, none, one or two]
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backends.cpu import simd
from infer.backends.cpu.isa import BY_NAME, InstructionSet
from infer.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, PANEL, PLANE_BYTES, QUADS_BYTES, SCALE_AT, Layout
from infer.backends.cpu.simd import F32, F32X16, I8, I32, I32X16, I64, Value, constant, load, store
from infer.backends.cpu.tiles import Tile, add_minima, add_products, super_scales

GROUPS = 2
_ROWS = 16  # of a matrix register
_VECTOR_BYTES, _SUMS_BYTES = 4 * LANES, 4 * LANES * _ROWS
_RING = 4  # unpacked records of a group that are kept while they are worked on
_PLACES = 2  # records whose sums are kept
_PLACE_BYTES = (
    GROUPS * 2 * 2 + 2
) * _SUMS_BYTES  # of a record, at most: two parts, two registers of rows; and see below
RING_BYTES = GROUPS * _RING * (QUADS_BYTES + 4 * _VECTOR_BYTES)
SCRATCH_BYTES = _PLACES * _PLACE_BYTES + RING_BYTES
_ACTIVATIONS, _WEIGHTS = (4, 5), (6, 7)  # matrix registers; 0 to 3 are sums

Emitter = Callable[[], None]


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
        config[48 + register] = 8 // parts if is_weight else _ROWS
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


def _alternate(*series: Sequence[Emitter]) -> None:
    """Each in its order, evenly mixed."""
    places = [((index + 0.5) / len(emitters), emitter) for emitters in series for index, emitter in enumerate(emitters)]
    for _, emitter in sorted(places, key=lambda place: place[0]):
        emitter()


class Unpacker:
    """Makes records of a group what `MatrixTile` multiplies."""

    def __init__(self, b: Builder, layout: Layout, isa: InstructionSet) -> None:
        self.b, self.layout = b, layout
        self.reader = Tile(b, layout, 1, isa, 0, 0)

    def packed(self, weights: Value, index: Value) -> tuple[Value, Value]:
        """Where a record and what is common to its super-block lie."""
        b, layout = self.b, self.layout
        per_super = constant(I64, layout.records_per_super)
        base = b.add(weights, b.mul(b.sdiv(index, per_super), constant(I64, layout.super_bytes)))
        within = b.mul(b.srem(index, per_super), constant(I64, layout.record_bytes))
        return simd.offset(b, b.add(base, within), layout.super_header), base

    def record(self, weights: Value, index: Value, to: Value, *, with_quads: bool = True) -> list[Emitter]:
        b, layout = self.b, self.layout
        where, base = self.packed(weights, index)
        low = list[Value]()

        def begin() -> None:
            self.reader.prefetch(where)
            low.extend(self.reader.low(where, j) for j in range(layout.low_bits if with_quads else 0))

        def quad(index: int) -> None:
            store(b, simd.offset(b, to, 64 * index), self.reader.quad(low.__getitem__, where, index), 64)

        def scales() -> None:
            found, minima = self.reader.scales(where, *super_scales(b, layout, base))
            for index, vector in enumerate([*found, *minima]):
                simd.store_f32(b, simd.offset(b, to, QUADS_BYTES + _VECTOR_BYTES * index), vector)

        return [begin, *(partial(quad, index) for index in range(8 if with_quads else 0)), scales]


@intrinsic(prefer_literal=True)
def unpack(context: Any, type_: Any, isa: Any, weights: Any, num_records: Any, out: Any) -> Any:
    """The records of a group as `matrix_tile` takes them."""
    layout, instructions = LAYOUTS[type_.literal_value], BY_NAME[isa.literal_value]

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, weights, num_records, out = arguments
        unpacker = Unpacker(b, layout, instructions)
        with cgutils.for_range(b, num_records) as loop:
            to = b.add(out, b.mul(loop.index, constant(I64, layout.unpacked_bytes)))
            _alternate(unpacker.record(weights, loop.index, to))
        return context.get_dummy_value()

    return types.void(type_, isa, *(types.int64,) * 3), emit


class MatrixTile:
    """One tile of a block type being emitted. `is_unpacked`: the weights are, all of them, where `weights` says."""

    def __init__(
        self,
        b: Builder,
        layout: Layout,
        planes: int,
        isa: InstructionSet,
        tokens: int,
        operands: list[Value],
        *,
        is_unpacked: bool,
    ) -> None:
        self.b, self.layout, self.planes, self.parts, self.tokens = b, layout, planes, layout.parts, tokens
        self.weights = operands[:GROUPS]
        self.activations, self.stride, out, out_stride, scratch = operands[GROUPS:]
        self.scratch, self.ring = scratch, simd.offset(b, scratch, _PLACES * _PLACE_BYTES)
        self.out = [out, b.add(out, out_stride)]
        self.record_bytes = layout.activation_bytes(planes)
        # No multiple of 4096: a load seems to wait for a store that agrees with it in the last 12 bits.
        self.place_bytes = _PLACE_BYTES - (_SUMS_BYTES if tokens == _ROWS else 0)
        self.num_registers = tokens * planes // _ROWS  # of activations
        self.unpacker = None if is_unpacked else Unpacker(b, layout, isa)
        self.has_bytes = layout.low_bits == 8  # quads need no unpacking
        self.sums = [
            [cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in range(tokens)] for _ in range(GROUPS)
        ]

    def unpacked(self, group: int, index: Value) -> Value:
        """Where an unpacked record lies."""
        b, size = self.b, constant(I64, self.layout.unpacked_bytes)
        if self.unpacker is None:
            return b.add(self.weights[group], b.mul(index, size))
        at = b.mul(b.and_(index, constant(I64, _RING - 1)), size)
        return simd.offset(b, b.add(self.ring, at), group * _RING * self.layout.unpacked_bytes)

    def quads(self, group: int, index: Value) -> Value:
        """Where a record's bytes lie."""
        if self.unpacker is None or not self.has_bytes:
            return self.unpacked(group, index)
        return self.unpacker.packed(self.weights[group], index)[0]

    def sums_at(self, index: Value) -> Value:
        """Where the integers of a record lie."""
        b = self.b
        return b.add(self.scratch, b.mul(b.and_(index, constant(I64, _PLACES - 1)), constant(I64, self.place_bytes)))

    def unpack(self, index: Value) -> list[Emitter]:
        if self.unpacker is None:
            return []
        emitters = [
            self.unpacker.record(self.weights[g], index, self.unpacked(g, index), with_quads=not self.has_bytes)
            for g in range(GROUPS)
        ]
        return [emitter for both in zip(*emitters, strict=True) for emitter in both]

    def multiply(self, index: Value) -> list[Emitter]:
        """Σ q A of a record, by part, group and register of activations."""
        b, size = self.b, BLOCK // self.parts
        inputs, sums = b.add(self.activations, b.mul(index, self.stride)), self.sums_at(index)
        weights = [self.quads(group, index) for group in range(GROUPS)]
        emitters = list[Emitter]()

        def load_weights(part: int, group: int) -> None:
            at = simd.offset(b, weights[group], part * QUADS_BYTES // self.parts)
            _call(b, "tileloadd64", _register(_WEIGHTS[group]), _pointer(b, at), constant(I64, 64))

        def load_activations(part: int, register: int) -> None:
            at = simd.offset(b, inputs, size * part + register * _ROWS // self.planes * self.record_bytes)
            stride = PLANE_BYTES if self.planes == 2 else self.record_bytes
            _call(b, "tileloadd64", _register(_ACTIVATIONS[register]), _pointer(b, at), constant(I64, stride))

        def product(group: int, register: int) -> None:
            total = _register(GROUPS * group + register)
            _call(b, "tilezero", total)
            _call(b, "tdpbsud", total, _register(_ACTIVATIONS[register]), _register(_WEIGHTS[group]))

        def keep(part: int, group: int, register: int) -> None:
            to = _pointer(b, simd.offset(b, sums, self.sums_offset(part, group, register)))
            _call(b, "tilestored64", _register(GROUPS * group + register), to, constant(I64, 64))

        pairs = [(group, register) for register in range(self.num_registers) for group in range(GROUPS)]
        for part in range(self.parts):
            emitters += [partial(load_weights, part, group) for group in range(GROUPS)]
            emitters += [partial(load_activations, part, r) for r in range(self.num_registers)]
            emitters += [partial(product, *pair) for pair in pairs]
            emitters += [partial(keep, part, *pair) for pair in pairs]
        return emitters

    def sums_offset(self, part: int, group: int, register: int) -> int:
        return ((part * GROUPS + group) * self.num_registers + register) * _SUMS_BYTES

    def finish(self, index: Value) -> list[Emitter]:
        """A record's products to the running sums of each token and group."""
        b = self.b
        sums, inputs = self.sums_at(index), b.add(self.activations, b.mul(index, self.stride))
        vectors = [self.scales(group, index) for group in range(GROUPS)]

        def one(token: int, group: int) -> None:
            record = simd.offset(b, inputs, token * self.record_bytes)
            scale = load(b, simd.offset(b, record, SCALE_AT), F32, 4)
            dots = [self.dot(sums, part, group, token, record) for part in range(self.parts)]
            scales, minima = vectors[group]
            slot = self.sums[group][token]
            total = add_products(b, b.load(slot), simd.splat(b, scale), dots, scales)
            b.store(add_minima(b, total, scale, record, self.record_bytes, minima), slot)

        return [partial(one, token, group) for token in range(self.tokens) for group in range(GROUPS)]

    def scales(self, group: int, index: Value) -> tuple[list[Value], list[Value]]:
        b, at = self.b, simd.offset(self.b, self.unpacked(group, index), QUADS_BYTES)
        vectors = [
            load(b, simd.offset(b, at, _VECTOR_BYTES * which), F32X16, 64)
            for which in range(self.parts + self.layout.minima)
        ]
        return vectors[: self.parts], vectors[self.parts :]

    def dot(self, sums: Value, part: int, group: int, token: int, record: Value) -> Value:
        """256 × the high plane's sum + the low one's − offset ΣA."""
        b, shift = self.b, self.layout.offset.bit_length() - 1
        register, row = divmod(token * self.planes, _ROWS)
        at = self.sums_offset(part, group, register) + row * _VECTOR_BYTES
        planes = [load(b, simd.offset(b, sums, at + plane * _VECTOR_BYTES), I32X16, 64) for plane in range(self.planes)]
        total = planes[0] if self.planes == 1 else b.add(b.shl(planes[0], constant(I32X16, 8)), planes[1])
        if not self.layout.offset:
            return total
        halves = [load(b, simd.offset(b, record, self.record_bytes - 8 + 4 * half), I32, 4) for half in range(2)]
        negative = halves[part] if self.parts == 2 else b.add(*halves)
        return b.add(total, simd.splat(b, b.shl(negative, constant(I32, shift))))

    def emit(self, num_records: Value) -> None:
        b, zero, one = self.b, constant(I64, 0), constant(I64, 1)
        last = b.sub(num_records, one)

        def behind(index: Value) -> Value:
            return b.select(b.icmp_signed("<", index, last), b.add(index, one), last)

        _alternate(self.unpack(zero))
        _alternate(self.unpack(behind(zero)), self.multiply(zero))
        with cgutils.for_range(b, last) as loop:
            index = b.add(loop.index, one)
            _alternate([*self.unpack(behind(index)), *self.finish(loop.index)], self.multiply(index))
        _alternate(self.finish(last))
        for group, slots in enumerate(self.sums):
            for token, slot in enumerate(slots):
                simd.store_f32(b, simd.offset(b, self.out[group], _VECTOR_BYTES * token), b.load(slot))


@intrinsic(prefer_literal=True)
def matrix_tile(
    context: Any,
    type_: Any,
    planes: Any,
    isa: Any,
    first_weights: Any,
    second_weights: Any,
    activations: Any,
    stride: Any,
    num_records: Any,
    out: Any,
    out_stride: Any,
    scratch: Any,
) -> Any:
    """out[group][token] = 16 rows × the token's activations: two groups, which `unpack` has unpacked, × 16 tokens."""
    layout, num_planes, instructions = LAYOUTS[type_.literal_value], planes.literal_value, BY_NAME[isa.literal_value]

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, first, second, activations, stride, num_records, out, out_stride, scratch = arguments
        operands = [first, second, activations, stride, out, out_stride, scratch]
        MatrixTile(b, layout, num_planes, instructions, PANEL, operands, is_unpacked=True).emit(num_records)
        return context.get_dummy_value()

    return types.void(type_, planes, isa, *(types.int64,) * 8), emit
