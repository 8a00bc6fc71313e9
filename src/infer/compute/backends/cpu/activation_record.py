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
    """Access to the activation records of a tile's columns, which are neighbouring tokens, for the same 32 inputs.

    Its methods emit loads. Memory is only read. A quad is 4 inputs, number 0 to 7.
    """

    b: Builder
    layout: Layout  # of the weights
    form: int
    columns: range
    record: Value  # where the first column's lies; the others' follow

    @property
    def planes(self) -> int:
        return self.form % WORDS

    def at(self, column: int, num_bytes: int) -> Value:
        """Return the address of byte `num_bytes` of a column's record.

        A negative number counts from the record's end.
        """
        size = activation_bytes(self.form)
        return simd.offset(self.b, self.record, column * size + num_bytes % size)

    def four(self, column: int, plane: int, quad: int) -> Value:
        """Load the 4 bytes of a column's quad in one plane, as one i32."""
        return load(self.b, self.at(column, PLANE_BYTES * plane + 4 * quad), I32, 4)

    def four_of_lane(self, column: int, plane: int, quad: int) -> Value:
        """Load `four` in each lane of i32 × 4, from a register with 4 quads: NEON multiplies by one lane."""
        b, lanes = self.b, ir.VectorType(I32, 4)
        register = load(b, self.at(column, PLANE_BYTES * plane + 16 * (quad // 4)), lanes, 4)
        return b.shuffle_vector(register, register, constant(lanes, quad % 4))

    def eight_of_two(self, first: tuple[int, int], second: tuple[int, int], eight: int) -> Value:
        """Load 8 bytes, inputs 8 × `eight` on, of two (column, plane) pairs, as one i8 × 16."""
        b, register = self.b, ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
        for lane, (column, plane) in enumerate((first, second)):
            two = load(b, self.at(column, PLANE_BYTES * plane + 8 * eight), I64, 4)
            register = b.insert_element(register, two, constant(I32, lane))
        return b.bitcast(register, ir.VectorType(I8, 16))

    def two_words(self, column: int, quad: int, parity: int) -> Value:
        """Load two 16-bit inputs of a column's quad from a record of words, as one i32.

        Parity 0 gives inputs 0 and 2 of the quad, parity 1 inputs 1 and 3.
        """
        return load(self.b, self.at(column, PLANE_BYTES * (quad // 4) + 8 * (quad % 4) + 4 * parity), I32, 4)

    def by_place(self, groups: int, dot: Callable[[int, int, int], Value]) -> Dots:
        """Return `dot(group, column, part)` for each group, column and part of the record, as `Dots`."""
        parts = range(self.layout.parts)
        return [[[dot(group, column, part) for part in parts] for column in self.columns] for group in range(groups)]

    def less_offset(self, dots: Dots, offset: int) -> Dots:
        """Return dots − offset × ΣA: the sums of q A from those of (q + offset) A."""
        if not offset:
            return dots
        less = [self.negative_offset(column, offset) for column in self.columns]
        return [[[*map(self.b.add, *both)] for both in zip(group, less, strict=True)] for group in dots]

    def negative_sum(self, column: int, half: int) -> Value:
        """Load −ΣA of the first or second half of a column's record, an i32."""
        return load(self.b, self.at(column, 4 * half - 8), I32, 4)

    def negative_offset(self, column: int, offset: int) -> list[Value]:
        """Return −offset × ΣA of each part of a column's record, i32 × 16. `offset` is a power of two."""
        b, shift = self.b, constant(I32, offset.bit_length() - 1)
        sums = [self.negative_sum(column, half) for half in range(2)]
        if self.layout.parts == 1:
            sums = [b.add(*sums)]
        return [simd.splat(b, b.shl(one, shift)) for one in sums]
