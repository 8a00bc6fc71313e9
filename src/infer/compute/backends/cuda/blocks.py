"""Reading of a packed matrix (`layouts`): a block's integers, as words or one by one, and its scales.

Products inside a block are exact in int32, whatever instruction computes them. Only `block_values` converts them to
floats, so every kernel has the same bits for a block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from infer.compute.backends.cuda.layouts import Layout, PackedWeight


class Matrix(NamedTuple):
    """A packed matrix as kernels take it. Planes that the type lacks are `codes`, so that each is a pointer."""

    codes: Any
    high: Any
    scales: Any
    minima: Any
    supers: Any
    num_blocks: Any
    LOW_BITS: tl.constexpr
    HIGH_BITS: tl.constexpr
    OFFSET: tl.constexpr
    HAS_MINIMUM: tl.constexpr
    SCALES: tl.constexpr  # integer scales of a block
    TABLE_LOW: tl.constexpr  # what the codes 0–7 stand for, a byte each; both 0: themselves
    TABLE_HIGH: tl.constexpr


def matrix_of(weight: PackedWeight, unit: torch.dtype) -> Matrix:
    """Return the matrix with its integers as `unit`: int32 for words, uint8 for bytes."""
    layout, codes = weight.layout, weight.codes.view(unit)
    return Matrix(
        codes=codes,
        high=codes if weight.high is None else weight.high.view(unit),
        scales=weight.scales,
        minima=codes if weight.minima is None else weight.minima,
        supers=codes if weight.supers is None else weight.supers,
        num_blocks=weight.codes.shape[1],
        **constants_of(layout),
    )


def constants_of(layout: Layout) -> dict[str, tl.constexpr]:
    """Return the constants of a layout that a kernel is compiled with."""

    def as_integer(values: tuple[int, ...]) -> int:
        return int.from_bytes((value % 256 for value in values), "little", signed=True)

    constants = {
        "LOW_BITS": layout.low_bits,
        "HIGH_BITS": layout.high_bits,
        "OFFSET": layout.offset,
        "HAS_MINIMUM": layout.has_minimum,
        "SCALES": layout.scales_per_block,
        "TABLE_LOW": as_integer(layout.table[:8]),
        "TABLE_HIGH": as_integer(layout.table[8:]),
    }
    return {name: tl.constexpr(value) for name, value in constants.items()}


@triton.jit
def word_pair(matrix, at, words, mask, DP4A: tl.constexpr):
    """Return words 0–3 and 4–7 of the blocks `at`: four inputs per word, in signed bytes."""
    if matrix.LOW_BITS == 8:
        first = tl.load(matrix.codes + at * 8 + words, mask=mask, other=0)
        second = tl.load(matrix.codes + at * 8 + 4 + words, mask=mask, other=0)
    elif matrix.LOW_BITS == 2:
        first, second = _pairs_of_bits(matrix.codes, at, words, mask)
    else:
        packed = tl.load(matrix.codes + at * 4 + words, mask=mask, other=0)
        if matrix.TABLE_LOW == 0:
            first, second = packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F
        else:
            first, second = _looked_up(packed, matrix.TABLE_LOW, matrix.TABLE_HIGH, DP4A)
    if matrix.HIGH_BITS == 1:
        bits = tl.load(matrix.high + at, mask=mask, other=0)
        first |= ((bits >> words) & 0x01010101) << matrix.LOW_BITS
        second |= ((bits >> (words + 4)) & 0x01010101) << matrix.LOW_BITS
    elif matrix.HIGH_BITS == 2:
        above, above_second = _pairs_of_bits(matrix.high, at, words, mask)
        first |= above << matrix.LOW_BITS
        second |= above_second << matrix.LOW_BITS
    return first, second


@triton.jit
def _pairs_of_bits(plane, at, words, mask):
    first = tl.load(plane + at * 2, mask=mask, other=0)
    second = tl.load(plane + at * 2 + 1, mask=mask, other=0)
    return (first >> (2 * words)) & 0x03030303, (second >> (2 * words)) & 0x03030303


@triton.jit
def _looked_up(packed, TABLE_LOW: tl.constexpr, TABLE_HIGH: tl.constexpr, DP4A: tl.constexpr):
    """Return the table's bytes for the low codes and for the high codes of each word."""
    if DP4A:
        # A selector's nibble takes one of 8 bytes: of both halves of the table, then of the two results by the top bit.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 index, top, below, above, even, odd;
            and.b32 index, $2, 0x77777777;
            and.b32 top, $2, 0x88888888;
            shr.b32 top, top, 1;
            or.b32 top, top, 0x32103210;
            prmt.b32 below, $3, $4, index;
            prmt.b32 above, $5, $6, index;
            prmt.b32 even, below, above, top;
            shr.b32 index, index, 16;
            shr.b32 top, top, 16;
            prmt.b32 below, $3, $4, index;
            prmt.b32 above, $5, $6, index;
            prmt.b32 odd, below, above, top;
            prmt.b32 $0, even, odd, 0x6420;
            prmt.b32 $1, even, odd, 0x7531;
            }""",
            "=r,=r,r,r,r,r,r",
            [
                packed,
                _half_of(TABLE_LOW, 0),
                _half_of(TABLE_LOW, 32),
                _half_of(TABLE_HIGH, 0),
                _half_of(TABLE_HIGH, 32),
            ],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return low, high
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        low, high = packed & 0, packed & 0
        for i in tl.static_range(4):
            low |= table_value((packed >> (8 * i)) & 15, TABLE_LOW, TABLE_HIGH) << (8 * i)
            high |= table_value((packed >> (8 * i + 4)) & 15, TABLE_LOW, TABLE_HIGH) << (8 * i)
        return low, high


@triton.jit
def _half_of(TABLE: tl.constexpr, SHIFT: tl.constexpr):
    return (tl.full((), TABLE, tl.int64) >> SHIFT).to(tl.int32)


@triton.jit
def table_value(code, TABLE_LOW: tl.constexpr, TABLE_HIGH: tl.constexpr):
    """Return the byte that a code stands for, as int32 without its sign: 0–255."""
    low, high = tl.full((), TABLE_LOW, tl.int64), tl.full((), TABLE_HIGH, tl.int64)
    return ((tl.where(code < 8, low, high) >> (8 * (code & 7)).to(tl.int64)) & 255).to(tl.int32)


@triton.jit
def integers(matrix, at, inputs):
    """Return int8 inputs 0–31 of the blocks `at`, read from bytes. They equal the contents of `word_pair`'s words."""
    if matrix.LOW_BITS == 8:
        q = tl.load(matrix.codes + at * 32 + inputs).to(tl.int8, bitcast=True)
    else:
        pair, shift = (inputs // 16) * 4 + inputs % 4, (inputs // 4 % 4) * 2
        if matrix.LOW_BITS == 2:
            q = (tl.load(matrix.codes + at * 8 + pair).to(tl.int32) >> shift) & 3
        else:
            q = (tl.load(matrix.codes + at * 16 + inputs % 16).to(tl.int32) >> (inputs // 16 * 4)) & 15
        if matrix.TABLE_LOW != 0:
            q = table_value(q, matrix.TABLE_LOW, matrix.TABLE_HIGH)
        if matrix.HIGH_BITS == 1:
            bits = tl.load(matrix.high + at * 4 + inputs % 4).to(tl.int32)
            q |= ((bits >> (inputs // 4)) & 1) << matrix.LOW_BITS
        elif matrix.HIGH_BITS == 2:
            q |= ((tl.load(matrix.high + at * 8 + pair).to(tl.int32) >> shift) & 3) << matrix.LOW_BITS
        q = q.to(tl.int8)
    return q


@triton.jit
def signed_integers(matrix, at, inputs, DP4A: tl.constexpr):
    """Return `integers` less the type's offset."""
    if DP4A and matrix.LOW_BITS == 4 and matrix.HIGH_BITS == 0 and matrix.TABLE_LOW == 0:
        packed = tl.load(matrix.codes + at * 16 + inputs % 16)
        is_high = tl.where(inputs >= 16, 255, 0).to(tl.uint8) + (packed & 0)
        # Four weights at a time. No byte borrows from the next one, because its top bit is set.
        q = tl.inline_asm_elementwise(
            """{
            .reg .b32 high;
            and.b32 high, $1, 0xF0F0F0F0;
            shr.b32 high, high, 4;
            and.b32 $0, $1, 0x0F0F0F0F;
            lop3.b32 $0, $2, high, $0, 0xCA;
            or.b32 $0, $0, 0x80808080;
            sub.s32 $0, $0, $3;
            xor.b32 $0, $0, 0x80808080;
            }""",
            "=&r,r,r,r",
            [packed, is_high, tl.full(packed.shape, matrix.OFFSET, tl.uint8)],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        q = integers(matrix, at, inputs)
        if matrix.OFFSET != 0:
            q = (q - matrix.OFFSET).to(tl.int8)
    return q


@triton.jit
def block_values(matrix, row, block, first, second, first_sum, second_sum, mask):
    """Return Σ w a of a block without the scale of a.

    `first` and `second` are Σ q a of its halves; the sums are Σ a.
    """
    if matrix.OFFSET != 0:
        first -= matrix.OFFSET * first_sum
        second -= matrix.OFFSET * second_sum
    return scaled_values(matrix, row, block, first, second, first_sum, second_sum, mask)


@triton.jit
def scaled_values(matrix, row, block, first, second, first_sum, second_sum, mask):
    """Return what `block_values` does for integers from which the type's offset is already subtracted."""
    at = row * matrix.num_blocks + block
    if matrix.SCALES == 0:
        value = number(matrix.scales, at, mask) * (first + second).to(tl.float32)
        if matrix.HAS_MINIMUM:
            value += number(matrix.minima, at, mask) * (first_sum + second_sum).to(tl.float32)
    else:
        above = (row * (matrix.num_blocks // 8) + block // 8) * (2 if matrix.HAS_MINIMUM else 1)
        value = number(matrix.supers, above, mask) * _scaled(matrix.scales, matrix.SCALES, at, first, second, mask)
        if matrix.HAS_MINIMUM:
            least = _scaled(matrix.minima, matrix.SCALES, at, first_sum, second_sum, mask)
            value -= number(matrix.supers, above + 1, mask) * least
    return value


@triton.jit
def _scaled(scales, SCALES: tl.constexpr, at, first, second, mask):
    if SCALES == 1:
        return number(scales, at, mask) * (first + second).to(tl.float32)
    else:  # noqa: RET505 - as above
        value = number(scales, at * 2, mask) * first.to(tl.float32)
        return value + number(scales, at * 2 + 1, mask) * second.to(tl.float32)


@triton.jit
def number(plane, at, mask):
    return tl.load(plane + at, mask=mask, other=0).to(tl.float32)
