"""How each instruction set multiplies: Σ q A of a record in integers, and codes looked up.

Weights q are unsigned bytes (but see `is_signed`), 64 of them (4 inputs × 16 rows) a quad; activations are signed
bytes, in one plane or two, A = 256 hi + lo. All sums are exact, so every set gives the same ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import Protocol, final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.backends.cpu import simd
from infer.backends.cpu.isa import InstructionSet
from infer.backends.cpu.layouts import LANES, Layout
from infer.backends.cpu.simd import I8, I16, I32, I32X16, Value, constant

Dots = list[list[list[Value]]]  # i32 × 16 rows, by group, column and part of the record
Quads = Callable[[int], Value]  # of a group's record, each computed where it is asked for
_Sums = dict[tuple[int, ...], list[Value]]  # the registers of a sum, by group and column


class Tile(Protocol):
    """What is asked of `tiles.Tile`."""

    b: Builder
    layout: Layout
    planes: int
    has_words: bool
    columns: range

    def four(self, activations: Value, column: int, plane: int, quad: int) -> Value: ...

    def four_of_lane(self, activations: Value, column: int, plane: int, quad: int) -> Value: ...

    def eight_of_two(
        self, activations: Value, first: tuple[int, int], second: tuple[int, int], eight: int
    ) -> Value: ...

    def two_words(self, activations: Value, column: int, quad: int, parity: int) -> Value: ...

    def by_place(self, groups: int, dot: Callable[[int, int, int], Value]) -> Dots: ...

    def less_offset(self, activations: Value, dots: Dots) -> Dots: ...


class Arithmetic(ABC):
    """Of one instruction set. `width`: bytes of a register."""

    width: int
    shuffle: str | None = None  # LLVM's name of what looks bytes up in a register
    is_signed = False  # weights that do not fit a signed byte are given without their offset, which makes them signed

    @abstractmethod
    def dots(self, tile: Tile, activations: Value, quads: list[Quads]) -> Dots:
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
    def dot4(self, b: Builder, total: Value, weights: Value, four: Value) -> Value:
        """total[lane] += Σ weights[4 lane + i] × four[i]. `four` is one i32."""

    def dots(self, tile: Tile, activations: Value, quads: list[Quads]) -> Dots:
        b, parts = tile.b, tile.layout.parts
        weights = [[of_group(quad) for quad in range(8)] for of_group in quads]
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
                    for chains, of_group in zip(totals, weights, strict=True):
                        total = chains[column][part]
                        chains[column][part] = self.dot4(b, total, of_group[quad], four)
        return totals


@final
class Vnni512(Chained):
    width, shuffle = 64, "x86.avx512.pshuf.b.512"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value) -> Value:
        return call(b, "x86.avx512.vpdpbusd.512", I32X16, total, weights, simd.splat(b, four))


class Apart(Arithmetic):
    """As `Chained`, but a plane has sums of its own. So a quad is unpacked when its turn comes and then forgotten:
    there are too few registers to keep them all."""

    @abstractmethod
    def factor(self, tile: Tile, activations: Value, column: int, plane: int, quad: int) -> Value:
        """A column's activations that meet a quad, for every lane of a register."""

    @abstractmethod
    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        """As `Chained.dot4`, of registers."""

    def dots(self, tile: Tile, activations: Value, quads: list[Quads]) -> Dots:
        b, sums, size = tile.b, _Sums(), 8 // tile.layout.parts
        zeros = split(b, constant(I32X16, 0), self.width)
        for quad in sorted(range(8), key=lambda quad: (quad // size, quad % 4)):
            weights = [split(b, of_group(quad), self.width) for of_group in quads]
            for column, plane in product(tile.columns, range(tile.planes)):
                factor = self.factor(tile, activations, column, plane, quad)
                for group, vectors in enumerate(weights):
                    totals = sums.setdefault((group, column, quad // size, plane), zeros)
                    pairs = zip(totals, vectors, strict=True)
                    sums[group, column, quad // size, plane] = [self.dot4(b, *pair, factor) for pair in pairs]

        def whole(*key: int) -> Value:
            return self.of_planes(b, [join(b, sums[*key, plane]) for plane in range(tile.planes)])

        return tile.less_offset(activations, tile.by_place(len(quads), whole))

    def of_planes(self, b: Builder, planes: list[Value]) -> Value:
        return planes[0] if len(planes) == 1 else b.add(b.shl(planes[0], constant(I32X16, 8)), planes[1])


@final
class Vnni256(Apart):
    width, shuffle = 32, "x86.avx2.pshuf.b"

    def factor(self, tile: Tile, activations: Value, column: int, plane: int, quad: int) -> Value:
        return split(tile.b, simd.splat(tile.b, tile.four(activations, column, plane, quad)), self.width)[0]

    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        return call(b, "x86.avx512.vpdpbusd.256", total.type, total, weights, factor)


@final
class Neon(Apart):
    """The activations of all lanes come from one lane of a register."""

    width, shuffle, is_signed = 16, "aarch64.neon.tbl1.v16i8", True

    def factor(self, tile: Tile, activations: Value, column: int, plane: int, quad: int) -> Value:
        return tile.four_of_lane(activations, column, plane, quad)

    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        bytes_ = [b.bitcast(x, ir.VectorType(I8, 16)) for x in (weights, factor)]
        return call(b, "aarch64.neon.sdot.v4i32.v16i8", total.type, total, *bytes_)


@final
class I8mm(Arithmetic):
    """With an instruction for 2 rows × 2 columns of 8 products each. The columns are the planes of a token, or two
    tokens. Two quads are 8 inputs of half of the rows, and of the other half."""

    width, shuffle = 16, "aarch64.neon.tbl1.v16i8"

    def dots(self, tile: Tile, activations: Value, quads: list[Quads]) -> Dots:
        b, sums, size = tile.b, _Sums(), 8 // tile.layout.parts
        zeros = split(b, constant(I32X16, 0), self.width)
        for half in sorted(range(8), key=lambda half: (half // size, half % 4)):
            weights = [split(b, of_group(half), self.width, I8) for of_group in quads]
            for first in tile.columns[:: 3 - tile.planes]:
                second = (first, 1) if tile.planes == 2 else (min(first + 1, tile.columns[-1]), 0)
                factor = tile.eight_of_two(activations, (first, 0), second, half // 2)
                for group, vectors in enumerate(weights):
                    key = group, first, half // size, half % 2
                    pairs = zip(sums.get(key, zeros), vectors, strict=True)
                    sums[key] = [self._dot8(b, *pair, factor) for pair in pairs]

        def whole(group: int, column: int, part: int) -> Value:
            first = column // (3 - tile.planes) * (3 - tile.planes)
            registers = sums[group, first, part, 0] + sums[group, first, part, 1]
            if tile.planes == 1:
                return self._column(b, registers, column - first)
            return b.add(b.shl(self._column(b, registers, 0), constant(I32X16, 8)), self._column(b, registers, 1))

        return tile.less_offset(activations, tile.by_place(len(quads), whole))

    def _dot8(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        return call(b, "aarch64.neon.usmmla.v4i32.v16i8", total.type, total, weights, factor)

    def _column(self, b: Builder, registers: list[Value], column: int) -> Value:
        """Of 2 rows × 2 columns in each register, 16 rows of a column."""
        order = ir.Constant(registers[0].type, [column, column + 2, column + 4, column + 6])
        return join(b, [b.shuffle_vector(*pair, order) for pair in zip(registers[::2], registers[1::2], strict=True)])


class Words(Arithmetic):
    """With sums of 16 bits, for CPUs that can add products to nothing wider.

    Two products of bytes are one word, and words are added as long as they cannot overflow: of a weight of 4 bits all
    of a record's. Then 256 × the high plane's + the low one's is one more multiplication. Larger weights, and
    activations beside them, are words from the start (`InstructionSet.form`). `hold` keeps LLVM from reassociating the
    sums and from computing all products first, which takes more registers than there are.
    """

    multiply_bytes: str
    multiply_words: str
    register: str  # inline assembly's letter for it

    def dots(self, tile: Tile, activations: Value, quads: list[Quads]) -> Dots:
        emit = self._of_words if tile.has_words else self._of_bytes
        size = 8 // tile.layout.parts
        parts = [emit(tile, activations, quads, range(first, first + size)) for first in range(0, 8, size)]
        dots = tile.by_place(len(quads), lambda group, column, part: join(tile.b, parts[part][group, column]))
        return tile.less_offset(activations, dots)

    def _of_bytes(self, tile: Tile, activations: Value, quads: list[Quads], part: range) -> _Sums:
        b, totals, sums = tile.b, _Sums(), _Sums()
        num_added = min(len(part), 32767 // (256 * tile.layout.largest))  # quads
        at_once = 2 if num_added == 2 else 1  # so that a column's words need not wait for the other columns'
        order = sorted(part, key=lambda quad: quad % 4)  # a vector that is two quads is used at once
        for first in range(0, len(order), at_once):
            some = order[first : first + at_once]
            weights = [[split(b, of_group(quad), self.width, I8) for quad in some] for of_group in quads]
            for column, plane in product(tile.columns, range(tile.planes)):
                factors = [self._splat(b, tile.four(activations, column, plane, quad), I8) for quad in some]
                for group, vectors in enumerate(weights):
                    key = group, column, plane
                    for parts, factor in zip(vectors, factors, strict=True):
                        self._add(
                            b, sums, key, [self._call(b, self.multiply_bytes, I16, part, factor) for part in parts]
                        )
                    if (first + at_once) % num_added == 0:
                        words = sums.pop(key)
                        by = constant(words[0].type, 256 if plane < tile.planes - 1 else 1)
                        wide = [self._call(b, self.multiply_words, I32, x, by) for x in words]
                        self._add(b, totals, (group, column), wide)
        return totals

    def _of_words(self, tile: Tile, activations: Value, quads: list[Quads], part: range) -> _Sums:
        b, sums = tile.b, _Sums()
        for quad in part:
            weights = [split(b, of_group(quad), self.width, I16) for of_group in quads]
            low, eight = constant(weights[0][0].type, 255), constant(weights[0][0].type, 8)
            pairs = [([b.and_(x, low) for x in parts], [b.lshr(x, eight) for x in parts]) for parts in weights]
            for column, parity in product(tile.columns, range(2)):
                factor = self._splat(b, tile.two_words(activations, column, quad, parity), I16)
                for group, pair in enumerate(pairs):
                    products = [self._call(b, self.multiply_words, I32, x, factor) for x in pair[parity]]
                    self._add(b, sums, (group, column), products)
        return sums

    def _call(self, b: Builder, name: str, element: ir.IntType, *arguments: Value) -> Value:
        return call(b, name, ir.VectorType(element, 8 * self.width // element.width), *arguments)

    def _splat(self, b: Builder, four_bytes: Value, element: ir.IntType) -> Value:
        return split(b, simd.splat(b, four_bytes), self.width, element)[0]

    def _add(self, b: Builder, sums: _Sums, key: tuple[int, ...], more: list[Value]) -> None:
        if key in sums:
            more = [b.add(x, y) for x, y in zip(sums[key], more, strict=True)]
        sums[key] = [self._hold(b, x) for x in more]

    def _hold(self, b: Builder, x: Value) -> Value:
        """x, computed here and now."""
        kind = ir.FunctionType(x.type, [x.type])
        return b.call(
            ir.InlineAsm(kind, "", f"={self.register},0", side_effect=True), [x], attrs=("nounwind", "readnone")
        )


@final
class Avx2(Words):
    width, shuffle, register = 32, "x86.avx2.pshuf.b", "x"
    multiply_bytes, multiply_words = "x86.avx2.pmadd.ub.sw", "x86.avx2.pmadd.wd"


@final
class Avx512(Words):
    width, shuffle, register = 64, "x86.avx512.pshuf.b.512", "v"
    multiply_bytes, multiply_words = "x86.avx512.pmaddubs.w.512", "x86.avx512.pmaddw.d.512"


@final
class Portable(Chained):
    width = 64

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value) -> Value:
        for byte in range(4):
            weight = b.and_(b.lshr(weights, constant(I32X16, 8 * byte)), constant(I32X16, 255))
            activation = b.ashr(b.shl(four, constant(I32, 24 - 8 * byte)), constant(I32, 24))
            total = b.add(total, b.mul(weight, simd.splat(b, activation)))
        return total


_CLASSES = {emitter.__name__: emitter for emitter in (Vnni512, Vnni256, Avx2, Avx512, I8mm, Neon, Portable)}


def arithmetic_of(isa: InstructionSet) -> Arithmetic:
    return _CLASSES[isa.arithmetic]()
