"""The inner loop on a core's matrix unit (Intel AMX): two groups of 16 rows × 8 or 16 tokens, in integers.

A matrix register holds 16 rows of 64 bytes. The weights' quads of a record fill one register. They are signed, as
`unpack` makes them, without an offset. The planes of 16 / planes tokens fill another register, with 40 bytes from one
plane to the next. Their product is Σ q A of 16 rows, as exact as the vector unit's. The float operations after it have
the order of `vector_tiles`, so the bits are those of every other instruction set.

Three records are processed at the same time, so that no instruction waits for another's result. One is unpacked, the
one before it multiplied, and the one before that added to the running sums; matrix and vector instructions alternate.
(On a Granite Rapids Xeon the vector unit executes one instruction per cycle beside the matrix unit, two without it:
docs/dev/log.md.)
"""

from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activation_record import ActivationRecord
from infer.compute.backends.cpu.isa import InstructionSet
from infer.compute.backends.cpu.layouts import BLOCK, LANES, PANEL, PLANE_BYTES, QUADS_BYTES, Layout, activation_bytes
from infer.compute.backends.cpu.matmul.vector_tiles import add_record
from infer.compute.backends.cpu.prefetch import Ahead
from infer.compute.backends.cpu.simd import F32X16, I8, I32X16, I64, Value, address, constant, load, operation, store
from infer.compute.backends.cpu.weight_streams import FAR
from infer.compute.backends.cpu.weights.unpacking import Emitter, PackedRecords, UnpackedRecords, alternate

GROUPS = 2
_ROWS = 16  # of a matrix register
_VECTOR_BYTES, _SUMS_BYTES = 4 * LANES, 4 * LANES * _ROWS
_RING = 4  # unpacked records of a group that are kept while they are worked on
_PLACES = 2  # records whose sums are kept
_PLACE_BYTES = (GROUPS * 2 * 2 + 2) * _SUMS_BYTES  # of a record, at most: two parts, two registers; and see below
RING_BYTES = GROUPS * _RING * (QUADS_BYTES + 4 * _VECTOR_BYTES)
SCRATCH_BYTES = _PLACES * _PLACE_BYTES + RING_BYTES
_ACTIVATIONS, _WEIGHTS = (4, 5), (6, 7)  # matrix registers; 0 to 3 are sums


def _call(b: Builder, name: str, *arguments: Value) -> None:
    simd.call(b, f"x86.{name}", ir.VoidType(), *arguments)


def _register(number: int) -> ir.Constant:
    return constant(I8, number)


def _pointer(b: Builder, where: Value) -> Value:
    return b.inttoptr(where, I8.as_pointer())


def shapes(layout: Layout) -> bytes:
    """Return the 64 bytes of AMX's tile configuration: palette 1, bytes per row from byte 16 on, rows from 48 on."""
    config, parts = bytearray(64), layout.parts
    config[0] = 1
    for register in range(8):
        is_activation, is_weight = register in _ACTIVATIONS, register in _WEIGHTS
        config[16 + 2 * register] = BLOCK // parts if is_activation else 64
        config[48 + register] = 8 // parts if is_weight else _ROWS
    return bytes(config)


def make_configure(layout: Layout) -> Any:
    """Return configure(is_used, scratch), which sets the shapes of the matrix registers until `release`.

    It writes the 64 bytes of the configuration at `scratch`. If `is_used` is false, it does nothing.
    """
    config = shapes(layout)

    @operation(types.void, types.boolean, address)
    def configure(b: Builder, is_used: Value, scratch: Value) -> None:
        with b.if_then(is_used):
            for at in range(0, 64, 8):
                word = constant(I64, int.from_bytes(config[at : at + 8], "little"))
                store(b, simd.offset(b, scratch, at), word, 8)
            _call(b, "ldtilecfg", _pointer(b, scratch))

    return configure


@operation(types.void, types.boolean)
def release(b: Builder, is_used: Value) -> None:
    """Release the registers, so that a switch of threads need not save them."""
    with b.if_then(is_used):
        _call(b, "tilerelease")


class MatrixTile:
    """One tile of a block type being emitted. `is_unpacked`: `weights` are the addresses of unpacked weights."""

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
        self.record_bytes = activation_bytes(planes)
        # No multiple of 4096: a load seems to wait for a store that agrees with it in the last 12 bits.
        self.place_bytes = _PLACE_BYTES - (_SUMS_BYTES if tokens == _ROWS else 0)
        self.num_registers = tokens * planes // _ROWS  # of activations
        self.records = None if is_unpacked else PackedRecords(b, layout, isa)
        self.ahead = Ahead(b, self.weights, FAR)  # of packed weights
        self.sums = [
            [cgutils.alloca_once_value(b, constant(F32X16, 0.0)) for _ in range(tokens)] for _ in range(GROUPS)
        ]

    def unpacked(self, group: int, index: Value) -> Value:
        """Return the address of unpacked record `index` of a group, in the weights or in the scratch's ring."""
        b, size = self.b, constant(I64, self.layout.unpacked_bytes)
        if self.records is None:
            return b.add(self.weights[group], b.mul(index, size))
        at = b.mul(b.and_(index, constant(I64, _RING - 1)), size)
        return simd.offset(b, b.add(self.ring, at), group * _RING * self.layout.unpacked_bytes)

    def sums_at(self, index: Value) -> Value:
        """Return the address in the scratch of the integer sums Σ q A of record `index`.

        Two records' sums alternate there.
        """
        b = self.b
        return b.add(self.scratch, b.mul(b.and_(index, constant(I64, _PLACES - 1)), constant(I64, self.place_bytes)))

    def unpack(self, index: Value) -> list[Emitter]:
        if self.records is None:
            return []
        records = [self.records.place(weights, index) for weights in self.weights]
        distance = self.ahead.of(records[0].where)
        emitters = [
            self.records.unpack(record, distance, self.unpacked(group, index)) for group, record in enumerate(records)
        ]
        return [emitter for both in zip(*emitters, strict=True) for emitter in both]

    def multiply(self, index: Value) -> list[Emitter]:
        """Return emitters that multiply one record: they load matrix registers, multiply, and store Σ q A at `sums_at`.

        The sums are i32 [part, group, register of activations, 16 planes of tokens, 16 rows].
        """
        b, size = self.b, BLOCK // self.parts
        inputs, sums = b.add(self.activations, b.mul(index, self.stride)), self.sums_at(index)
        weights = [self.unpacked(group, index) for group in range(GROUPS)]
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
            _call(b, "tdpbssd", total, _register(_ACTIVATIONS[register]), _register(_WEIGHTS[group]))

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
        """Return emitters that scale a record's Σ q A and add them to the running sums of each token and group."""
        b = self.b
        sums, inputs = self.sums_at(index), b.add(self.activations, b.mul(index, self.stride))
        activations = ActivationRecord(b, self.layout, self.planes, range(self.tokens), inputs)
        unpacked = UnpackedRecords(b, self.layout)
        vectors = [unpacked.scales(self.unpacked(group, index)) for group in range(GROUPS)]

        def one(token: int, group: int) -> None:
            dots = [self.dot(sums, part, group, token) for part in range(self.parts)]
            slot = self.sums[group][token]
            b.store(add_record(activations, token, b.load(slot), dots, *vectors[group]), slot)

        return [partial(one, token, group) for token in range(self.tokens) for group in range(GROUPS)]

    def dot(self, sums: Value, part: int, group: int, token: int) -> Value:
        """Load Σ q A of a token, i32 × 16 rows.

        It is 256 × the high plane's sum + the low plane's, or the single plane's sum.
        """
        b = self.b
        register, row = divmod(token * self.planes, _ROWS)
        at = self.sums_offset(part, group, register) + row * _VECTOR_BYTES
        planes = [load(b, simd.offset(b, sums, at + plane * _VECTOR_BYTES), I32X16, 64) for plane in range(self.planes)]
        return planes[0] if self.planes == 1 else b.add(b.shl(planes[0], constant(I32X16, 8)), planes[1])

    def emit(self, num_records: Value) -> None:
        b, zero, one = self.b, constant(I64, 0), constant(I64, 1)
        last = b.sub(num_records, one)

        def after(index: Value) -> Value:
            return b.select(b.icmp_signed("<", index, last), b.add(index, one), last)

        alternate(self.unpack(zero))
        alternate(self.unpack(after(zero)), self.multiply(zero))
        with cgutils.for_range(b, last) as loop:
            index = b.add(loop.index, one)
            alternate([*self.unpack(after(index)), *self.finish(loop.index)], self.multiply(index))
        alternate(self.finish(last))
        for group, slots in enumerate(self.sums):
            for token, slot in enumerate(slots):
                simd.store_f32(b, simd.offset(b, self.out[group], _VECTOR_BYTES * token), b.load(slot))


def make_matrix_tile(layout: Layout, planes: int, isa: InstructionSet) -> Any:
    """Return tile(first, second, activations, stride, num_records, out, out_stride, scratch).

    It reads two unpacked groups, aligned to 64 bytes, and 16 tokens' records, `stride` bytes from block to block. It
    stores f32 [group, token, 16 rows] at `out`, with `out_stride` bytes from group to group.
    """

    @operation(types.void, *(address,) * 8)
    def matrix_tile(
        b: Builder, first: Value, second: Value, activations: Value, stride: Value, num_records: Value, out: Value,
        out_stride: Value, scratch: Value,
    ) -> None:  # fmt: skip
        operands = [first, second, activations, stride, out, out_stride, scratch]
        MatrixTile(b, layout, planes, isa, PANEL, operands, is_unpacked=True).emit(num_records)

    return matrix_tile
