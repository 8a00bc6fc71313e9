"""A record of quantised activations, as `arithmetic` reads it: 32 inputs of one token.

    form 2 (exact): 80 bytes          form 1 (fast): 48 bytes       form 6 (words): 80 bytes
    0   hi, i8 × 32                   0   A, i8 × 32                0   A of inputs 0–15, i16, even ones of a quad first
    32  s f32, s ΣA f32               32  s f32, s ΣA f32           32  s f32, s ΣA f32
    40  lo, i8 × 32: A = 256 hi + lo  40  −ΣA of each half, i32 × 2  40  A of inputs 16–31
    72  −ΣA of each half, i32 × 2                                   72  −ΣA of each half, i32 × 2

Records are aligned to 16 bytes. The records of a panel's tokens follow each other (`activations`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.layouts import PLANE_BYTES, WORDS, Layout, activation_bytes
from infer.compute.backends.cpu.simd import I8, I32, I64, Value, constant, load

Dots = list[list[list[Value]]]  # i32 × 16 rows, by group, column and part of the record


@final
@dataclass(frozen=True)
class ActivationRecord:
    """The records of some columns, which are neighbouring tokens, for the same 32 inputs."""

    b: Builder
    layout: Layout  # of the weights
    form: int
    columns: range
    record: Value  # where the first column's lies; the others' follow

    @property
    def planes(self) -> int:
        return self.form % WORDS

    def at(self, column: int, num_bytes: int) -> Value:
        """Return the address of a byte of a column's record. A negative number counts from its end."""
        size = activation_bytes(self.form)
        return simd.offset(self.b, self.record, column * size + num_bytes % size)

    def four(self, column: int, plane: int, quad: int) -> Value:
        """Return 4 bytes of a column, as one i32."""
        return load(self.b, self.at(column, PLANE_BYTES * plane + 4 * quad), I32, 4)

    def four_of_lane(self, column: int, plane: int, quad: int) -> Value:
        """Return `four` in each 4-byte lane of 16 bytes, taken from a register that holds the bytes of 4 quads."""
        b, lanes = self.b, ir.VectorType(I32, 4)
        register = load(b, self.at(column, PLANE_BYTES * plane + 16 * (quad // 4)), lanes, 4)
        return b.shuffle_vector(register, register, constant(lanes, quad % 4))

    def eight_of_two(self, first: tuple[int, int], second: tuple[int, int], eight: int) -> Value:
        """Return the nth 8 bytes of two (column, plane) pairs, as one register."""
        b, register = self.b, ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
        for lane, (column, plane) in enumerate((first, second)):
            two = load(b, self.at(column, PLANE_BYTES * plane + 8 * eight), I64, 4)
            register = b.insert_element(register, two, constant(I32, lane))
        return b.bitcast(register, ir.VectorType(I8, 16))

    def two_words(self, column: int, quad: int, parity: int) -> Value:
        """Return the even or the odd inputs of a column's quad, as one i32."""
        return load(self.b, self.at(column, PLANE_BYTES * (quad // 4) + 8 * (quad % 4) + 4 * parity), I32, 4)

    def by_place(self, groups: int, dot: Callable[[int, int, int], Value]) -> Dots:
        """Return `dot(group, column, part)` for each place."""
        parts = range(self.layout.parts)
        return [[[dot(group, column, part) for part in parts] for column in self.columns] for group in range(groups)]

    def less_offset(self, dots: Dots, offset: int) -> Dots:
        """Return dots − offset ΣA: the sums of q A from those of (q + offset) A."""
        if not offset:
            return dots
        less = [self.negative_offset(column, offset) for column in self.columns]
        return [[[*map(self.b.add, *both)] for both in zip(group, less, strict=True)] for group in dots]

    def negative_sum(self, column: int, half: int) -> Value:
        """Return −ΣA of half of the record, an i32."""
        return load(self.b, self.at(column, 4 * half - 8), I32, 4)

    def negative_offset(self, column: int, offset: int) -> list[Value]:
        """Return −offset ΣA of each part of the record."""
        b, shift = self.b, constant(I32, offset.bit_length() - 1)
        sums = [self.negative_sum(column, half) for half in range(2)]
        if self.layout.parts == 1:
            sums = [b.add(*sums)]
        return [simd.splat(b, b.shl(one, shift)) for one in sums]
