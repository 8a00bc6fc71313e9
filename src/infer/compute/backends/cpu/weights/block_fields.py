"""Readers of the numbers in GGML's blocks, made from `BLOCK_FIELDS` as `ggml_blocks.numbers_of` reads them in torch.

A reader is a function of (source, number). `source` is the address of a block in the file's form. It needs no
alignment.
"""

from typing import Any, Literal

import numpy as np
from numba import njit

from infer.compute.backends.cpu.simd import load_u8, load_u16, load_u32
from infer.compute.quantization.ggml_grids import grid
from infer.compute.quantization.ggml_types import Bits, BlockFields, Field, Grid, Trits

ONE = 0x01010101  # a bit of each byte


def _make_place(field: Field) -> Any:
    """Return place(source, number): the address of a number's byte, and how far it is to be shifted right.

    Sizes are powers of two. Shifts, unlike divisions of signed integers, leave nothing to compute for a constant.
    """
    at, run, bits = field.at, field.run, field.bits
    per_run, run_bits = run * 8 // bits, run.bit_length() - 1
    per_run_bits = per_run.bit_length() - 1

    @njit(forceinline=True)
    def place(source, number):
        byte = source + at + ((number >> per_run_bits) << run_bits) + (number & (run - 1))
        return byte, bits * ((number & (per_run - 1)) >> run_bits)

    return place


@njit(forceinline=True)
def _spread_bits(four):
    """Return four bits as the lowest bits of four bytes."""
    return (four * 0x00204081) & ONE


@njit(forceinline=True)
def _spread_pairs(four):
    """Return four pairs of bits as four bytes."""
    nibbles = (four | four << 12) & 0x000F000F
    return (nibbles | nibbles << 6) & 0x03030303


@njit(forceinline=True)
def _spread_nibbles(four):
    """Return four nibbles as four bytes."""
    pairs = (four | four << 8) & 0x00FF00FF
    return (pairs | pairs << 4) & 0x0F0F0F0F


def _make_field(field: Field) -> Any:
    """Return read(source, number), which reads four numbers of a field from `number` on, as the four bytes of a u32."""
    place, mask, is_bit = _make_place(field), np.uint32(((1 << field.bits) - 1) * ONE), field.bits == 1

    @njit(forceinline=True)
    def read(source, number):
        at, shift = place(source, number)
        return (load_u32(at) >> np.uint32(shift)) & mask

    @njit(forceinline=True)
    def read_neighbours(source, number):
        at, shift = place(source, number)
        bits = np.int64(load_u8(at)) >> shift
        return np.uint32(_spread_bits(bits & 15) if is_bit else _spread_pairs(bits))

    return read_neighbours if field.run == 1 else read


def make_word(fields: BlockFields, *, has_deltas: bool = False) -> Any:
    """Return word(source, number), which reads four codes from `number` on, as the four bytes of a u32.

    Codes are as the file has them: unsigned, with the type's offset. If `has_deltas`, the codes of a grid come without
    their signs, which `make_nibble` reads.
    """
    if isinstance(fields.codes, Grid):
        return _make_grid_word(fields, fields.codes, has_deltas)
    trits = tuple(part for part in fields.codes if isinstance(part, Trits))
    if trits:
        return _make_trits(trits)
    parts = tuple(part for part in fields.codes if isinstance(part, Field))
    first, *above = map(_make_field, parts)
    if not above:
        flipped = np.uint32(0x80808080 if fields.is_signed else 0)
        return njit(forceinline=True)(lambda source, number: first(source, number) ^ flipped)
    (high,), shift = above, np.uint32(parts[0].bits)
    return njit(forceinline=True)(lambda source, number: first(source, number) | (high(source, number) << shift))


def _make_trits(parts: tuple[Trits, ...], start: int = 0) -> Any:
    """Return word(source, number) for trits packed by powers of 3, as TQ1_0 has them: four trits as the bytes of a u32.

    `start` is the number of the first trit of these parts.
    """
    at, run, run_bits = parts[0].at, parts[0].run, parts[0].run.bit_length() - 1
    end = start + run * parts[0].per_byte

    @njit(forceinline=True)
    def word(source, number):
        byte, power, found = source + at + ((number - start) & (run - 1)), 1, np.int64(0)
        for _ in range((number - start) >> run_bits):
            power *= 3
        for i in range(4):
            left = (np.int64(load_u8(byte + i)) * power) & 255
            found |= ((3 * left) >> 8) << (8 * i)
        return np.uint32(found)

    if len(parts) == 1:
        return word
    others = _make_trits(parts[1:], end)
    return njit(forceinline=True)(lambda source, at: word(source, at) if at < end else others(source, at))


def _make_bits(bits: Bits) -> Any:
    """Return read(source, number), which reads number `number` of a bit field, as an i64."""
    at, stride, step, first, mask = bits.at, bits.stride, bits.step, bits.first, (1 << bits.bits) - 1
    per_word, per_word_bits = bits.per_word, bits.per_word.bit_length() - 1
    load = {1: load_u8, 2: load_u16, 4: load_u32}[bits.word_bytes]

    @njit(forceinline=True)
    def read(source, number):
        word = np.int64(load(source + at + stride * (number >> per_word_bits)))
        return (word >> (first + step * (number & (per_word - 1)))) & mask

    return read


def make_index(fields: BlockFields) -> Any:
    """Return index(source, number), which reads the index of pattern `number` in the type's grid."""
    assert isinstance(fields.codes, Grid)
    parts = fields.codes.indices
    low, high, shift = _make_bits(parts[0]), _make_bits(parts[-1]), parts[0].bits
    if len(parts) == 1:
        return low
    return njit(forceinline=True)(lambda source, number: low(source, number) | high(source, number) << shift)


def _make_signs(codes: Grid) -> Any:
    """Return signs(source, number): for four codes from `number` on, the bytes of a u32, 1 for a negative code."""
    read, per_bit, has_parity = (
        _make_bits(codes.signs),
        (256 // codes.num_signs).bit_length() - 1,
        codes.signs.bits == 7,
    )

    @njit(forceinline=True)
    def of_all(source, number):
        return read(source, number >> per_bit) * ONE

    @njit(forceinline=True)
    def of_each(source, number):
        signs = read(source, number >> 3)
        if has_parity:
            parity = signs ^ signs >> 4
            parity ^= parity >> 2
            signs |= ((parity ^ parity >> 1) & 1) << 7
        return _spread_bits((signs >> (number & 4)) & 15)

    return of_all if codes.signs.bits == 1 else of_each


def _make_grid_word(fields: BlockFields, codes: Grid, has_deltas: bool) -> Any:
    patterns, width_bits, shift = grid(codes.name), codes.width.bit_length() - 1, codes.sign_shift
    index, signs, are_pairs, is_mirrored = (
        make_index(fields),
        _make_signs(codes),
        codes.width == 8,
        codes.is_mirrored,
    )

    @njit(forceinline=True)
    def word(source, number):
        pattern = np.int64(patterns[index(source, number >> width_bits)])
        found = _spread_pairs((pattern >> (2 * (number & 4))) & 255) if are_pairs else _spread_nibbles(pattern)
        if has_deltas:
            return np.uint32(found)
        negative = signs(source, number)
        if is_mirrored:
            return np.uint32(2 * ONE - found if negative else found)
        return np.uint32(found | negative << shift)

    return word


def make_small(fields: BlockFields) -> Any:
    """Return small(source, number), which reads a record's small integer scale. The minima follow after all scales."""
    if fields.are_scales_odd:
        stored = make_stored_scale(fields)
        return njit(forceinline=True)(lambda source, number: np.uint8(2 * np.int64(stored(source, number)) + 1))
    if fields.scales == "6 bits":
        return _six_bits
    assert not isinstance(fields.scales, Bits)
    offset, has_high = np.uint8(fields.scale_offset), len(fields.scales) > 1
    low, high = _make_byte(fields.scales[0]), _make_byte(fields.scales[-1])
    shift = np.uint8(fields.scales[0].bits)

    @njit(forceinline=True)
    def small(source, number):
        value = low(source, number)
        if has_high:
            value |= high(source, number) << shift
        return value - offset

    return small


def make_stored_scale(fields: BlockFields) -> Any:
    """Return stored(source, number): s of a small scale that means 2 s + 1."""
    assert fields.scales != "6 bits"
    return _make_bits(fields.scales) if isinstance(fields.scales, Bits) else _make_byte(fields.scales[0])


def make_nibble(fields: BlockFields, contents: Literal["scales", "deltas", "numbers"]) -> Any:
    """Return nibble(source, index), which reads the four bits of record `index` that a super-block has for each row.

    `contents` says which: a scale with its sign, signs of deltas, or ninth bits of patterns' indices
    (`Layout.nibbles`).
    """
    assert isinstance(fields.codes, Grid)
    if contents == "scales":
        stored, negative = make_stored_scale(fields), _make_bits(fields.codes.signs)
        return njit(forceinline=True)(lambda source, index: stored(source, index) | negative(source, index) << 3)
    read, shift = (_make_bits(fields.codes.signs), 0) if contents == "deltas" else (make_index(fields), 8)

    @njit(forceinline=True)
    def of_eights(source, index):
        bits = np.int64(0)
        for i in range(4):
            bits |= (read(source, 4 * index + i) >> shift) << i
        return bits

    return of_eights


def _make_byte(field: Field) -> Any:
    """Return read(source, number), which reads one number of a block."""
    place, mask = _make_place(field), np.uint8((1 << field.bits) - 1)

    @njit(forceinline=True)
    def read(source, number):
        at, shift = place(source, number)
        return (load_u8(at) >> np.uint8(shift)) & mask

    return read


@njit(forceinline=True)
def _six_bits(source, number):
    """Return a scale or, from 8 on, a minimum, as `ggml_blocks.six_bits` does."""
    at, index = source + 4 + number // 8 * 4, number % 8
    if index < 4:
        return load_u8(at + index) & np.uint8(63)
    low = (load_u8(source + 8 + index) >> np.uint8(number // 8 * 4)) & np.uint8(15)
    return low | ((load_u8(at + index - 4) >> np.uint8(6)) << np.uint8(4))


def make_scale(fields: BlockFields) -> Any:
    """Return scale(source), which reads the 16 bits of a block's f16 scale."""
    at = fields.scale_at

    @njit(forceinline=True)
    def in_nibbles(source):
        bits = np.int64(0)
        for i in range(4):
            bits |= (np.int64(load_u8(source + at + 2 * i + 1)) >> 4) << (4 * i)
        return np.uint16(bits)

    if fields.scale_form == "nibbles":
        return in_nibbles
    return njit(forceinline=True)(lambda source: load_u16(source + at))
