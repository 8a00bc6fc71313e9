"""How each instruction set multiplies: Σ q A of a record in integers, and codes looked up.

Weights q are unsigned bytes, 64 of them (4 inputs × 16 rows) a quad; activations are signed bytes, in one plane or two,
A = 256 hi + lo. All sums are exact, so every set gives the same ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.backends.cpu import simd
from infer.backends.cpu.isa import InstructionSet
from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.simd import I8, I16, I16X16, I32, I32X16, Value, constant

if TYPE_CHECKING:
    from infer.backends.cpu.tiles import Tile

Dots = list[list[list[Value]]]  # i32 × 16 rows, by group, column and part of the record


class Arithmetic(ABC):
    """Of one instruction set. `width`: bytes of a register."""

    width: int
    shuffle: str | None = None  # LLVM's name of what looks bytes up in a register

    @abstractmethod
    def dots(self, tile: "Tile", activations: Value, quads: list[list[Value]]) -> Dots:
        """Σ q A less the offset of q, of each group's quads × each column of activations."""

    def look_up(self, b: Builder, codes: Value, table: Sequence[int]) -> Value:
        """Each byte of `codes`, from 0 to 15, becomes that entry of the table, from 0 to 255."""
        whole = ir.VectorType(I8, 64)
        if self.shuffle is None:
            codes, values = b.bitcast(codes, whole), constant(whole, 0)
            for code, entry in enumerate(table):
                values = b.select(b.icmp_unsigned("==", codes, constant(whole, code)), constant(whole, entry), values)
            return b.bitcast(values, I32X16)
        entries = ir.Constant(ir.VectorType(I8, self.width), [table[lane % 16] for lane in range(self.width)])
        return join(b, [call(b, self.shuffle, entries.type, entries, part) for part in split(b, codes, self.width, I8)])


def call(b: Builder, name: str, result: ir.Type, *arguments: Value) -> Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(b.module.declare_intrinsic(f"llvm.{name}", (), kind), arguments)


def split(b: Builder, x: Value, width: int, element: ir.IntType = I32) -> list[Value]:
    """64 bytes as registers of `width` bytes."""
    count, part = width // 4, ir.VectorType(element, 8 * width // element.width)
    if count == LANES:
        return [b.bitcast(x, part)]
    order = [ir.Constant(ir.VectorType(I32, count), list(range(i, i + count))) for i in range(0, LANES, count)]
    return [b.bitcast(b.shuffle_vector(x, x, lanes), part) for lanes in order]


def join(b: Builder, parts: list[Value]) -> Value:
    """Registers as 64 bytes."""
    parts = [b.bitcast(part, ir.VectorType(I32, LANES // len(parts))) for part in parts]
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [b.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Chained(Arithmetic):
    """With an instruction for 4 products added to a 32-bit sum. 256 × the high plane's sum is where the low one's
    starts."""

    @abstractmethod
    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        """total[lane] += Σ weights[4 lane + i] × four[i]. `four` is one i32; is_small: all weights are below 128."""

    def dots(self, tile: "Tile", activations: Value, quads: list[list[Value]]) -> Dots:
        b, parts, small = tile.b, tile.layout.parts, tile.layout.is_small
        totals: Dots = [[[constant(I32X16, 0)] * parts for _ in tile.columns] for _ in quads]
        for plane in range(tile.planes):
            if plane:
                totals = [[[b.shl(x, constant(I32X16, 8)) for x in y] for y in chains] for chains in totals]
            if plane == tile.planes - 1:
                totals = tile.less_offset(activations, totals)
            for quad in range(8):
                for column in tile.columns:
                    four = tile.four(activations, column, plane, quad)
                    part = quad * parts // 8
                    for chains, weight in zip(totals, quads, strict=True):
                        total = chains[column][part]
                        chains[column][part] = self.dot4(b, total, weight[quad], four, is_small=small)
        return totals


@final
class Vnni512(Chained):
    width, shuffle = 64, "x86.avx512.pshuf.b.512"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        return call(b, "x86.avx512.vpdpbusd.512", I32X16, total, weights, simd.splat(b, four))


@final
class Vnni256(Chained):
    width, shuffle = 32, "x86.avx2.pshuf.b"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        halves = zip(*(split(b, x, 32) for x in (total, weights, simd.splat(b, four))), strict=True)
        return join(b, [call(b, "x86.avx512.vpdpbusd.256", half[0].type, *half) for half in halves])


@final
class Avx2(Chained):
    """Even and odd bytes as 16 bits each, for `vpmaddubsw` would saturate."""

    width, shuffle = 32, "x86.avx2.pshuf.b"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        eight, halves = constant(I16X16, 8), []
        activations = split(b, simd.splat(b, four), 32, I16)
        for x, w, a in zip(split(b, total, 32), split(b, weights, 32, I16), activations, strict=True):
            even = call(
                b, "x86.avx2.pmadd.wd", x.type, b.and_(w, constant(I16X16, 255)), b.ashr(b.shl(a, eight), eight)
            )
            odd = call(b, "x86.avx2.pmadd.wd", x.type, b.lshr(w, eight), b.ashr(a, eight))
            halves.append(b.add(x, b.add(even, odd)))
        return join(b, halves)


@final
class Neon(Chained):
    width, shuffle = 16, "aarch64.neon.tbl1.v16i8"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        """`sdot` takes i8 × i8: of a larger weight it takes w − 128, and 128 as 64 twice."""
        sums, bytes_ = split(b, total, 16), ir.VectorType(I8, 16)
        activations = split(b, simd.splat(b, four), 16, I8)
        for index, (w, a) in enumerate(zip(split(b, weights, 16, I8), activations, strict=True)):
            products = [w] if is_small else [b.xor(w, constant(bytes_, -128)), *[constant(bytes_, 64)] * 2]
            for factor in products:
                sums[index] = call(b, "aarch64.neon.sdot.v4i32.v16i8", sums[index].type, sums[index], factor, a)
        return join(b, sums)


@final
class Portable(Chained):
    width = 64

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value, *, is_small: bool) -> Value:
        for byte in range(4):
            weight = b.and_(b.lshr(weights, constant(I32X16, 8 * byte)), constant(I32X16, 255))
            activation = b.ashr(b.shl(four, constant(I32, 24 - 8 * byte)), constant(I32, 24))
            total = b.add(total, b.mul(weight, simd.splat(b, activation)))
        return total


_CLASSES = {emitter.__name__: emitter for emitter in (Vnni512, Vnni256, Avx2, Neon, Portable)}


def arithmetic_of(isa: InstructionSet) -> Arithmetic:
    return _CLASSES[isa.arithmetic]()
