"""Integer products by each instruction set: Σ q A of a record of 32 inputs, and the lookup of codes in tables.

Weights q are unsigned bytes (but see `is_signed`). A quad is 64 of them: 4 inputs × 16 rows, row by row. Activations A
are signed bytes, in one plane or two, A = 256 hi + lo. All sums are exact, so every set gives the same sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activation_record import ActivationRecord, Dots
from infer.compute.backends.cpu.isa import InstructionSet
from infer.compute.backends.cpu.layouts import LANES, WORDS, Layout
from infer.compute.backends.cpu.simd import F32X16, I8, I8X64, I16, I32, I32X16, Value, call, constant

# quads(n) emits quad n of a group's record: 64 bytes, 4 inputs × 16 rows, each computed where it is asked for.
Quads = Callable[[int], Value]
_Sums = dict[tuple[int, ...], list[Value]]  # the registers of a sum, by group and column


class Arithmetic(ABC):
    """Emitter of the integer products of one instruction set, for `vector_tiles`.

    Attributes:
        width: Bytes of a vector register.
        shuffle: LLVM's name of the instruction that looks up bytes in a register; None if there is none.
        is_signed: True if weights above 127 come without their offset, which makes them signed bytes.
    """

    width: int
    shuffle: str | None = None  # LLVM's name of what looks bytes up in a register
    is_signed = False  # weights that do not fit a signed byte are given without their offset, which makes them signed

    def offset(self, layout: Layout) -> int:
        """Return the offset that the weights' bytes still contain when they are multiplied.

        `dots` subtracts offset × ΣA.
        """
        return 0 if self.is_signed and layout.largest > 127 else layout.offset

    @abstractmethod
    def dots(self, activations: ActivationRecord, quads: list[Quads]) -> Dots:
        """Emit Σ q A of a record, without the offset of q, of each group's quads × each column of activations.

        Returns:
            i32 × 16 rows, by group, column and part of the record.
        """

    @property
    def permutes_bytes(self) -> bool:
        """True if a byte can be looked up in 64 or 128 others: AVX-512 VBMI."""
        return self.width == 64 and self.shuffle is not None and simd.has_byte_permutation()

    def look_up(self, b: Builder, codes: Value, table: Sequence[int]) -> Value:
        """Replace each of 64 bytes by the entry of a table, from 0 to 255, whose number is in the byte's lowest bits.

        A table has 2, 4, 8, 16 or 32 entries, or 64 if the set permutes bytes. The bits above are ignored.
        """
        codes = b.bitcast(codes, I8X64)
        if self.permutes_bytes:
            entries = ir.Constant(I8X64, [*table] * (64 // len(table)))
            return b.bitcast(call(b, "x86.avx512.permvar.qi.512", I8X64, entries, codes), I32X16)
        if len(table) == 32:
            is_high = b.icmp_signed("<", b.shl(codes, constant(I8X64, 3)), constant(I8X64, 0))
            halves = [b.bitcast(self.look_up(b, codes, half), I8X64) for half in (table[16:], table[:16])]
            return b.bitcast(b.select(is_high, *halves), I32X16)
        codes = b.and_(codes, constant(I8X64, len(table) - 1))
        if self.shuffle is None:
            values: Value = constant(I8X64, 0)
            for code, entry in enumerate(table):
                values = b.select(b.icmp_unsigned("==", codes, constant(I8X64, code)), constant(I8X64, entry), values)
            return b.bitcast(values, I32X16)
        repeated = ir.Constant(ir.VectorType(I8, self.width), [table[lane % len(table)] for lane in range(self.width)])
        parts = split(b, b.bitcast(codes, I32X16), self.width, I8)
        return join(b, [call(b, self.shuffle, repeated.type, repeated, part) for part in parts])

    def look_up_odd(self, b: Builder, numbers: Value, *, is_signed: bool) -> Value:
        """Return 2 s + 1 as a float for the lowest four bits of each lane. If `is_signed`, the fourth is the sign."""
        if self.width == 64 and self.shuffle is not None:
            table = [2 * s + 1 if not is_signed or s < 8 else -2 * (s - 8) - 1 for s in range(16)]
            return call(b, "x86.avx512.permvar.sf.512", F32X16, ir.Constant(F32X16, table), numbers)
        one = constant(I32X16, 1)
        odd = b.or_(b.and_(b.shl(numbers, one), constant(I32X16, 14 if is_signed else 30)), one)
        if is_signed:
            sign = b.ashr(b.shl(numbers, constant(I32X16, 28)), constant(I32X16, 31))
            odd = b.sub(b.xor(odd, sign), sign)
        return b.sitofp(odd, F32X16)


def split(b: Builder, x: Value, width: int, element: ir.IntType = I32) -> list[Value]:
    """Return 64 bytes, an i32 × 16, as vectors of `width` bytes whose elements have the type `element`, in order."""
    count, part = width // 4, ir.VectorType(element, 8 * width // element.width)
    if count == LANES:
        return [b.bitcast(x, part)]
    order = [ir.Constant(ir.VectorType(I32, count), list(range(i, i + count))) for i in range(0, LANES, count)]
    return [b.bitcast(b.shuffle_vector(x, x, lanes), part) for lanes in order]


def join(b: Builder, parts: list[Value]) -> Value:
    """Return vectors of 64 bytes in all as one i32 × 16. It is the inverse of `split`."""
    parts = [b.bitcast(part, ir.VectorType(I32, LANES // len(parts))) for part in parts]
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [b.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Chained(Arithmetic):
    """Arithmetic with an instruction that adds 4 products to a 32-bit sum.

    The sums of the low plane start with 256 × those of the high plane.
    """

    @abstractmethod
    def dot4(self, b: Builder, total: Value, weights: Value, four: Value) -> Value:
        """Emit total[lane] + Σ weights[4 lane + i] × four[i] for i < 4, i32 × 16.

        `total` is i32 × 16, `weights` are 64 unsigned bytes, and `four` is one i32 of four signed bytes.
        """

    def dots(self, activations: ActivationRecord, quads: list[Quads]) -> Dots:
        b, parts = activations.b, activations.layout.parts
        weights = [[of_group(quad) for quad in range(8)] for of_group in quads]
        if len(quads) == len(activations.columns) == parts == 1 and activations.planes == 2:
            return self._single_dot(activations, weights[0])
        totals: Dots = [[[constant(I32X16, 0)] * parts for _ in activations.columns] for _ in quads]
        for plane in range(activations.planes):
            if plane:
                totals = [[[b.shl(x, constant(I32X16, 8)) for x in y] for y in chains] for chains in totals]
            if plane == activations.planes - 1:
                totals = activations.less_offset(totals, self.offset(activations.layout))
            for quad in range(8):
                for column in activations.columns:
                    four = activations.four(column, plane, quad)
                    part = quad * parts // 8
                    for chains, of_group in zip(totals, weights, strict=True):
                        total = chains[column][part]
                        chains[column][part] = self.dot4(b, total, of_group[quad], four)
        return totals

    def _single_dot(self, activations: ActivationRecord, weights: list[Value]) -> Dots:
        """Return the sums of one group, column and part.

        The two planes have chains of their own, so that the latency of the additions is halved.
        """
        b, (column,) = activations.b, activations.columns
        sums = [constant(I32X16, 0)] * 2
        for quad, plane in product(range(8), range(2)):
            sums[plane] = self.dot4(b, sums[plane], weights[quad], activations.four(column, plane, quad))
        both = b.add(b.shl(sums[0], constant(I32X16, 8)), sums[1])
        return activations.less_offset([[[both]]], self.offset(activations.layout))


@final
class Vnni512(Chained):
    width, shuffle = 64, "x86.avx512.pshuf.b.512"

    def dot4(self, b: Builder, total: Value, weights: Value, four: Value) -> Value:
        return call(b, "x86.avx512.vpdpbusd.512", I32X16, total, weights, simd.splat(b, four))


class Apart(Arithmetic):
    """Arithmetic like `Chained`, but each plane has sums of its own.

    So a quad is unpacked when it is used and then dropped: there are too few registers to keep all quads.
    """

    @abstractmethod
    def factor(self, activations: ActivationRecord, column: int, plane: int, quad: int) -> Value:
        """Return the four activation bytes of a column, a plane and a quad, in every 32-bit lane of a register."""

    @abstractmethod
    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        """Emit the same sums as `Chained.dot4`, in registers of `width` bytes. `factor` is what `factor` returns."""

    def dots(self, activations: ActivationRecord, quads: list[Quads]) -> Dots:
        b, sums, size = activations.b, _Sums(), 8 // activations.layout.parts
        zeros = split(b, constant(I32X16, 0), self.width)
        for quad in sorted(range(8), key=lambda quad: (quad // size, quad % 4)):
            weights = [split(b, of_group(quad), self.width) for of_group in quads]
            for column, plane in product(activations.columns, range(activations.planes)):
                factor = self.factor(activations, column, plane, quad)
                for group, vectors in enumerate(weights):
                    totals = sums.setdefault((group, column, quad // size, plane), zeros)
                    pairs = zip(totals, vectors, strict=True)
                    sums[group, column, quad // size, plane] = [self.dot4(b, *pair, factor) for pair in pairs]

        def whole(*key: int) -> Value:
            return self.of_planes(b, [join(b, sums[*key, plane]) for plane in range(activations.planes)])

        return activations.less_offset(activations.by_place(len(quads), whole), self.offset(activations.layout))

    def of_planes(self, b: Builder, planes: list[Value]) -> Value:
        return planes[0] if len(planes) == 1 else b.add(b.shl(planes[0], constant(I32X16, 8)), planes[1])


@final
class Vnni256(Apart):
    width, shuffle = 32, "x86.avx2.pshuf.b"

    def factor(self, activations: ActivationRecord, column: int, plane: int, quad: int) -> Value:
        return split(activations.b, simd.splat(activations.b, activations.four(column, plane, quad)), self.width)[0]

    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        return call(b, "x86.avx512.vpdpbusd.256", total.type, total, weights, factor)


@final
class Neon(Apart):
    """Arithmetic whose activations for all lanes come from one lane of a register."""

    width, shuffle, is_signed = 16, "aarch64.neon.tbl1.v16i8", True

    def factor(self, activations: ActivationRecord, column: int, plane: int, quad: int) -> Value:
        return activations.four_of_lane(column, plane, quad)

    def dot4(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        bytes_ = [b.bitcast(x, ir.VectorType(I8, 16)) for x in (weights, factor)]
        return call(b, "aarch64.neon.sdot.v4i32.v16i8", total.type, total, *bytes_)


@final
class I8mm(Arithmetic):
    """Arithmetic with an instruction for 2 rows × 2 columns of 8 products each.

    The columns are the planes of a token, or two tokens. Of two quads, the first is 8 inputs of one half of the rows,
    and the second of the other half.
    """

    width, shuffle = 16, "aarch64.neon.tbl1.v16i8"

    def dots(self, activations: ActivationRecord, quads: list[Quads]) -> Dots:
        b, sums, size = activations.b, _Sums(), 8 // activations.layout.parts
        zeros = split(b, constant(I32X16, 0), self.width)
        for half in sorted(range(8), key=lambda half: (half // size, half % 4)):
            weights = [split(b, of_group(half), self.width, I8) for of_group in quads]
            for first in activations.columns[:: 3 - activations.planes]:
                second = (first, 1) if activations.planes == 2 else (min(first + 1, activations.columns[-1]), 0)
                factor = activations.eight_of_two((first, 0), second, half // 2)
                for group, vectors in enumerate(weights):
                    key = group, first, half // size, half % 2
                    pairs = zip(sums.get(key, zeros), vectors, strict=True)
                    sums[key] = [self._dot8(b, *pair, factor) for pair in pairs]

        def whole(group: int, column: int, part: int) -> Value:
            first = column // (3 - activations.planes) * (3 - activations.planes)
            registers = sums[group, first, part, 0] + sums[group, first, part, 1]
            if activations.planes == 1:
                return self._column(b, registers, column - first)
            return b.add(b.shl(self._column(b, registers, 0), constant(I32X16, 8)), self._column(b, registers, 1))

        return activations.less_offset(activations.by_place(len(quads), whole), self.offset(activations.layout))

    def _dot8(self, b: Builder, total: Value, weights: Value, factor: Value) -> Value:
        return call(b, "aarch64.neon.usmmla.v4i32.v16i8", total.type, total, weights, factor)

    def _column(self, b: Builder, registers: list[Value], column: int) -> Value:
        """Return the 16 rows of one column as i32 × 16, from registers that hold 2 rows × 2 columns each."""
        order = ir.Constant(registers[0].type, [column, column + 2, column + 4, column + 6])
        return join(b, [b.shuffle_vector(*pair, order) for pair in zip(registers[::2], registers[1::2], strict=True)])


class Words(Arithmetic):
    """Arithmetic with sums of 16 bits, for CPUs that cannot add products of bytes to anything wider.

    Two products of bytes give one word, and words are added as long as they cannot overflow: with weights of 4 bits,
    all words of a record. Then one more multiplication gives 256 × the high plane's sum + the low one's. Larger
    weights, and their activations, are words from the start (`InstructionSet.form`). `_hold` keeps LLVM from
    reassociating the sums and from computing all products first, which takes more registers than there are.
    """

    multiply_bytes: str
    multiply_words: str
    register: str  # inline assembly's letter for it

    def dots(self, activations: ActivationRecord, quads: list[Quads]) -> Dots:
        emit = self._of_words if activations.form > WORDS else self._of_bytes
        size = 8 // activations.layout.parts
        parts = [emit(activations, quads, range(first, first + size)) for first in range(0, 8, size)]
        dots = activations.by_place(
            len(quads), lambda group, column, part: join(activations.b, parts[part][group, column])
        )
        return activations.less_offset(dots, self.offset(activations.layout))

    def _of_bytes(self, activations: ActivationRecord, quads: list[Quads], part: range) -> _Sums:
        b, totals, sums = activations.b, _Sums(), _Sums()
        most = min(len(part), 32767 // (256 * activations.layout.largest))
        num_added = 1 << most.bit_length() - 1  # quads: a power of two divides their number
        at_once = 2 if num_added == 2 else 1  # so that a column's words need not wait for the other columns'
        order = sorted(part, key=lambda quad: quad % 4)  # a vector that is two quads is used at once
        for first in range(0, len(order), at_once):
            some = order[first : first + at_once]
            weights = [[split(b, of_group(quad), self.width, I8) for quad in some] for of_group in quads]
            for column, plane in product(activations.columns, range(activations.planes)):
                factors = [self._splat(b, activations.four(column, plane, quad), I8) for quad in some]
                for group, vectors in enumerate(weights):
                    key = group, column, plane
                    for parts, factor in zip(vectors, factors, strict=True):
                        self._add(
                            b, sums, key, [self._call(b, self.multiply_bytes, I16, part, factor) for part in parts]
                        )
                    if (first + at_once) % num_added == 0:
                        words = sums.pop(key)
                        by = constant(words[0].type, 256 if plane < activations.planes - 1 else 1)
                        wide = [self._call(b, self.multiply_words, I32, x, by) for x in words]
                        self._add(b, totals, (group, column), wide)
        return totals

    def _of_words(self, activations: ActivationRecord, quads: list[Quads], part: range) -> _Sums:
        b, sums = activations.b, _Sums()
        for quad in part:
            weights = [split(b, of_group(quad), self.width, I16) for of_group in quads]
            low, eight = constant(weights[0][0].type, 255), constant(weights[0][0].type, 8)
            pairs = [([b.and_(x, low) for x in parts], [b.lshr(x, eight) for x in parts]) for parts in weights]
            for column, parity in product(activations.columns, range(2)):
                factor = self._splat(b, activations.two_words(column, quad, parity), I16)
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
        """Return x, and keep LLVM from moving or regrouping its computation."""
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
