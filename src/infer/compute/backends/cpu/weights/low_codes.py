"""Low codes of a record's quads, as `layouts` stores them: bits, trits, or indices of a grid's patterns.

Trits are 0, 1 or 2. Quads 0–7 have 8 trits for each row r and input b. They are stored in 14 bits:

    quads 0–2   a code of 5 bits   low 4 bits: byte 4 r + b, in its low half     fifth bit: among the six
    quads 3–5   a code of 5 bits   low 4 bits: byte 4 r + b, in its high half    fifth bit: among the six
    quads 6–7   a code of 4 bits   all bits are among the six

The six bits of row r and input b are that code of 4 bits, then the two fifth bits. They are bits 6 b to 6 b + 5 of the
row's 24 bits: two bytes at 64 + 2 r, and the third at 96 + r.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, final

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.arithmetic import Arithmetic
from infer.compute.backends.cpu.layouts import LANES, Layout
from infer.compute.backends.cpu.simd import I8, I8X64, I16, I32, I32X16, I64, Value, call, constant, load
from infer.compute.quantization.ggml_grids import grid, pattern_words


class Record(NamedTuple):
    """A packed record of 16 rows × 32 inputs."""

    where: Value  # its address
    base: Value  # address of its super-block
    index: Value  # its number in the super-block


def nibbles(b: Builder, layout: Layout, record: Record) -> Value:
    """Load 16 × i32, one per row.

    The lowest four bits are the row's number for this record: its delta, or its scale, see `Layout.nibbles`. The other
    bits are not cleared.
    """
    words = load(b, simd.offset(b, record.base, layout.nibbles_at), I32X16, 16)
    return b.lshr(words, simd.splat(b, b.shl(b.trunc(record.index, I32), constant(I32, 2))))


class LowCodes(ABC):
    """Reader of the low codes of one packed record. Each quad gives 64 bytes: 4 inputs × 16 rows."""

    def __init__(self, b: Builder, layout: Layout, arithmetic: Arithmetic, record: Record) -> None:
        self.b, self.layout, self.arithmetic, self.record, self.where = b, layout, arithmetic, record, record.where

    def load(self) -> None:  # noqa: B027 - most forms load nothing ahead
        """Emit the loads of vectors that all quads use, before the first quad is read."""

    @abstractmethod
    def quad(self, quad: int) -> Value:
        """Emit the low codes of a quad, 0 to 7: 64 bytes as an i32 × 16. Bits above the code may belong to other quads.

        Trits are returned as values, with the layout's offset.
        """

    def shifted(self, vector: Value, shift: int) -> Value:
        """Emit a shift to the right within each of 64 bytes. The bits that come in from above are undefined."""
        kind = (
            I32X16 if self.arithmetic.permutes_bytes else I8X64
        )  # else masks follow, which a shift of bytes may spare
        shifted = self.b.lshr(self.b.bitcast(vector, kind), constant(kind, shift))
        return self.b.bitcast(shifted, I32X16)


@final
class BitCodes(LowCodes):
    """Codes of 1, 2, 4 or 8 bits, several quads in a vector: `layouts` has the picture of 4 bits."""

    _loaded: Sequence[Value] = ()

    def load(self) -> None:
        self._loaded = [self._load(index) for index in range(self.layout.low_bits)]

    def _load(self, index: int) -> Value:
        return load(self.b, simd.offset(self.b, self.where, 64 * index), I32X16, 16)

    def quad(self, quad: int) -> Value:
        bits = self.layout.low_bits
        index, shift = {8: (quad, 0), 4: (quad % 4, 4 * (quad // 4)), 2: (quad // 4, 2 * (quad % 4)), 1: (0, quad)}[
            bits
        ]
        vector = self._loaded[index] if self._loaded else self._load(index)
        return self.shifted(vector, shift)


class Fused(LowCodes):
    """Codes of several quads that have bits in common, which are read once."""

    def __init__(self, b: Builder, layout: Layout, arithmetic: Arithmetic, record: Record) -> None:
        super().__init__(b, layout, arithmetic, record)
        self._made = dict[str, Value]()

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Return what `make` emits, which is emitted only at the first call with this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


@final
class TritCodes(Fused):
    """Codes 0, 1 and 2, three in 5 bits."""

    def quad(self, quad: int) -> Value:
        power = 3 ** (quad % 3)
        table = [self.layout.codes[code // power % 3] + self.layout.offset for code in range(32)]
        if quad >= 6:
            return self.arithmetic.look_up(self.b, self.once("rest", self._rest), table[:16])
        codes = self.once(f"codes {quad // 3}", lambda: self._three(quad // 3))
        return self.arithmetic.look_up(self.b, codes, table)

    def _three(self, which: int) -> Value:
        """Emit the 5-bit codes of the first or second three trits: 64 bytes, 4 inputs × 16 rows."""
        b, low_mask = self.b, constant(I32X16, 0x0F0F0F0F)
        first = load(b, self.where, I32X16, 16)
        low, fifth = self.shifted(first, 4 * which), self.shifted(self.once("rest", self._rest), which)
        return simd.choose_bits(b, low_mask, low, fifth)

    def _rest(self) -> Value:
        """Emit the six bits that are left of each byte of a row: the last two trits, with two fifth bits above them."""
        b, at = self.b, simd.offset(self.b, self.where, 64)
        if self.arithmetic.permutes_bytes:
            order = [byte for lane in range(LANES) for byte in (2 * lane, 2 * lane + 1, 2 * LANES + lane, 63)]
            packed = simd.load_first(b, at, I8X64, 3 * LANES)
            rows = call(b, "x86.avx512.permvar.qi.512", I8X64, packed, ir.Constant(I8X64, order))
            return spread(b, rows, 0, 6)
        low = b.zext(load(b, at, ir.VectorType(I16, LANES), 16), I32X16)
        high = b.zext(load(b, simd.offset(b, at, 2 * LANES), ir.VectorType(I8, LANES), 16), I32X16)
        rows = b.or_(low, b.shl(high, constant(I32X16, 16)))
        fields = [b.shl(rows, constant(I32X16, 2 * byte)) for byte in range(4)]
        fields = [b.and_(field, constant(I32X16, 0x3F << 8 * byte)) for byte, field in enumerate(fields)]
        return b.or_(b.or_(*fields[:2]), b.or_(*fields[2:]))


def spread(b: Builder, words: Value, first: int, bits: int) -> Value:
    """Emit 4 bytes per 32-bit word: the fields of `bits` bits from bit `first` of the word on (needs AVX-512 VBMI).

    `words` and the result are i32 × 16. The bits of a byte above `bits` belong to the fields after it, and are not
    cleared.
    """
    places = [32 * (byte // 4) + first + bits * (byte % 4) for byte in range(8)]
    found = call(b, "x86.avx512.pmultishift.qb.512", I8X64, ir.Constant(I8X64, places * 8), b.bitcast(words, I8X64))
    return b.bitcast(found, I32X16)


class PatternCodes(Fused):
    """Codes of patterns, whose numbers are bytes: number p of row r is byte 4 r + p mod 4 of vector p // 4."""

    @property
    def width(self) -> int:
        return self.layout.pattern_width


@final
class GatheredPatterns(PatternCodes):
    """Codes of patterns that are read from a table in memory."""

    def quad(self, quad: int) -> Value:
        if self.width == 4:
            return self._patterns(quad)
        words = self.once(f"words {quad // 2}", lambda: self._patterns(quad // 2))
        return self.shifted(words, 4 * (quad % 2))

    def _patterns(self, pattern: int) -> Value:
        """Emit i32 × 16, one pattern of each row, loaded one by one from the grid's table."""
        b, table = self.b, _table_of(self.b, self.layout)
        words: Value = ir.Constant(I32X16, ir.Undefined)
        for lane in range(LANES):
            place = 64 * (pattern // 4) + 4 * lane + pattern % 4
            number = b.zext(load(b, simd.offset(b, self.where, place), I8), I64)
            if self.layout.nibbles == "numbers":
                bits = self.once(f"nibble {lane}", partial(self._nibble, lane))
                number = b.or_(number, b.and_(b.shl(bits, constant(I64, 8 - pattern)), constant(I64, 256)))
            entry = b.load(b.gep(table, [constant(I64, 0), number], inbounds=True), align=4)
            words = b.insert_element(words, entry, constant(I32, lane))
        return words

    def _nibble(self, lane: int) -> Value:
        """Load the four bits of row `lane` for this record, as an i64. The bits above belong to later records."""
        b, at = self.b, simd.offset(self.b, self.record.base, self.layout.nibbles_at + 4 * lane)
        return b.lshr(b.zext(load(b, at, I32, 4), I64), b.shl(self.record.index, constant(I64, 2)))


def _table_of(b: Builder, layout: Layout) -> ir.GlobalVariable:
    name = f"infer.patterns.{layout.grid}"
    if name in b.module.globals:
        return b.module.globals[name]
    words = pattern_words(layout.grid, layout.pattern_width)
    table = ir.GlobalVariable(b.module, ir.ArrayType(I32, len(words)), name)
    table.linkage, table.global_constant, table.unnamed_addr = "internal", True, True
    table.initializer = ir.Constant(table.type.pointee, words.tolist())
    return table


@final
class PermutedPatterns(PatternCodes):
    """Codes of patterns that are looked up in registers, 64 at a time, by the byte permutations of AVX-512."""

    def quad(self, quad: int) -> Value:
        if self.width == 8:
            return spread(self.b, self._bytes(0, quad % 2), 8 * (quad // 2), 2)
        return spread(self.b, self.once(f"words {quad // 2}", lambda: self._words(quad // 2)), 16 * (quad % 2), 4)

    def _words(self, pair: int) -> Value:
        """Emit the patterns of two neighbouring quads, 16 bits each, as i32 × 16."""
        halves = [self.b.bitcast(self._bytes(pair // 2, half), I8X64) for half in range(2)]
        order = [4 * lane + 2 * (pair % 2) + i // 2 + 64 * (i % 2) for lane in range(LANES) for i in range(4)]
        shuffled = self.b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 64), order))
        return self.b.bitcast(shuffled, I32X16)

    def _bytes(self, vector: int, half: int) -> Value:
        """Emit the low (0) or high (1) bytes of the 64 patterns whose indices are in a vector."""
        return self.once(f"bytes {vector} {half}", lambda: self._look_up(vector, half))

    def _look_up(self, vector: int, half: int) -> Value:
        b = self.b
        numbers = self.once(f"numbers {vector}", lambda: self._numbers(vector))
        eighth = self.once(f"eighth {vector}", lambda: b.icmp_signed("<", numbers, constant(I8X64, 0)))
        parts = (grid(self.layout.grid) >> 8 * half).astype(np.uint8).reshape(-1, 64)
        tables = [ir.Constant(I8X64, part.tolist()) for part in parts]
        found = [
            call(b, "x86.avx512.vpermi2var.qi.512", I8X64, first, numbers, second)
            for first, second in zip(tables[::2], tables[1::2], strict=True)
        ]
        found = [b.select(eighth, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        return found[0] if len(found) == 1 else b.select(self.once("ninth", self._ninth), found[1], found[0])

    def _numbers(self, vector: int) -> Value:
        return load(self.b, simd.offset(self.b, self.where, 64 * vector), I8X64, 16)

    def _ninth(self) -> Value:
        """Emit the ninth bits of the patterns' indices, as a mask of 64 lanes."""
        b, order = self.b, ir.Constant(ir.VectorType(I32, 64), [4 * (byte // 4) for byte in range(64)])
        words = b.bitcast(nibbles(b, self.layout, self.record), I8X64)
        tested = b.and_(b.shuffle_vector(words, words, order), ir.Constant(I8X64, [1, 2, 4, 8] * LANES))
        return b.icmp_signed("!=", tested, constant(I8X64, 0))


def make_low_codes(b: Builder, layout: Layout, arithmetic: Arithmetic, record: Record) -> LowCodes:
    """Return the reader of a record's low codes, for its layout and instruction set."""
    if layout.has_trits:
        return TritCodes(b, layout, arithmetic, record)
    if not layout.grid:
        return BitCodes(b, layout, arithmetic, record)
    return (PermutedPatterns if arithmetic.permutes_bytes else GatheredPatterns)(b, layout, arithmetic, record)
