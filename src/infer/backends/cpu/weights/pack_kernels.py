"""GGML's blocks → groups of 16 rows (`layouts`). Each number is moved, and none is changed.

The files' blocks, one row's 32 (or 256) inputs each:

    Q4_0, Q4_1, Q5_0, Q5_1    d, [m], [fifth bits u32], 16 bytes: input i in the low nibble of byte i, i + 16 above
    Q8_0                      d, 32 × i8
    Q4_K, Q5_K                d, dmin, 12 bytes of 6-bit scales and minimums, [32 bytes of fifth bits], 4 × 32 bytes:
                              the low nibbles are sub-block 2 j, the high ones 2 j + 1
    Q6_K                      128 bytes of low nibbles, 64 of high pairs, 16 × i8 scales, d
    Q2_K                      16 × scale and minimum of 4 bits, 64 bytes of pairs of bits, d, dmin
    Q3_K                      32 bytes of third bits, 64 of pairs of bits, 12 of 6-bit scales, d
    IQ4_NL, MXFP4             d or an exponent, 16 bytes of codes, as in Q4_0
    IQ4_XS                    d, 2 bytes of scales' upper bits, 4 of their lower ones, 8 × 16 bytes of codes

In Q2_K and Q3_K, sub-block j (32 inputs) is the pair 2 (j mod 4) of the 32 bytes from 32 (j div 4) on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from infer.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, Layout
from infer.backends.cpu.simd import load_u8, load_u16, load_u32, stack, store_u8, store_u16, store_u32
from infer.quantization.ggml_types import BLOCK_TYPES

_ONE, _TWO, _FOUR = 0x01010101, 0x03030303, 0x0F0F0F0F  # bits of each byte


@njit(forceinline=True)
def _bits(at, shift, mask):
    return (load_u32(at) >> np.uint32(shift)) & np.uint32(mask)


@njit(forceinline=True)
def _nibbles(at, quad):
    """Return a quad's nibbles, one per byte: quads 0–3 are the low halves of 16 bytes, quads 4–7 the high ones."""
    return _bits(at + 4 * (quad % 4), 4 * (quad // 4), _FOUR)


@njit(forceinline=True)
def _word_8(source, record, quad):
    return load_u32(source + 2 + 4 * quad) ^ np.uint32(0x80808080)


def _make_word_4(at: int) -> Any:
    return njit(forceinline=True)(lambda source, record, quad: _nibbles(source + at, quad))


def _make_word_5(at: int) -> Any:
    @njit(forceinline=True)
    def word(source, record, quad):
        fifth = np.uint32(_bits(source + at, 4 * quad, 15) * np.uint32(0x00204081)) & np.uint32(_ONE)  # a bit to a byte
        return _nibbles(source + at + 4, quad) | (fifth << np.uint32(4))

    return word


@njit(forceinline=True)
def _word_2_k(source, record, quad):
    return _bits(source + 16 + 32 * (record // 4) + 4 * quad, 2 * (record % 4), _TWO)


@njit(forceinline=True)
def _word_3_k(source, record, quad):
    low = _bits(source + 32 + 32 * (record // 4) + 4 * quad, 2 * (record % 4), _TWO)
    return low | (_bits(source + 4 * quad, record, _ONE) << np.uint32(2))


@njit(forceinline=True)
def _word_4_k(source, record, quad):
    return _bits(source + 16 + 32 * (record // 2) + 4 * quad, 4 * (record % 2), _FOUR)


@njit(forceinline=True)
def _word_5_k(source, record, quad):
    return _word_4_k(source + 32, record, quad) | (_bits(source + 16 + 4 * quad, record, _ONE) << np.uint32(4))


@njit(forceinline=True)
def _word_6_k(source, record, quad):
    low = _bits(source + 64 * (record // 4) + 32 * (record % 2) + 4 * quad, 4 * (record % 4 // 2), _FOUR)
    high = _bits(source + 128 + 32 * (record // 4) + 4 * quad, 2 * (record % 4), _TWO)
    return low | (high << np.uint32(4))


@njit(forceinline=True)
def _word_iq4_xs(source, record, quad):
    return _nibbles(source + 8 + 16 * record, quad)


@njit(forceinline=True)
def _scales_2_k(source, record, part):
    both = load_u8(source + 2 * record + part)
    return both & np.uint8(15), both >> np.uint8(4)


@njit(forceinline=True)
def _scales_3_k(source, record, part):
    k = 2 * record + part
    low = (load_u8(source + 96 + k % 8) >> np.uint8(4 * (k // 8))) & np.uint8(15)
    high = (load_u8(source + 104 + k % 4) >> np.uint8(2 * (k // 4))) & np.uint8(3)
    return (low | (high << np.uint8(4))) - np.uint8(32), np.uint8(0)


@njit(forceinline=True)
def _scales_4_k(source, record, part):
    """Return a sub-block's scale and minimum of 6 bits each."""
    scales = source + 4
    if record < 4:
        return load_u8(scales + record) & np.uint8(63), load_u8(scales + 4 + record) & np.uint8(63)
    low = load_u8(scales + record + 4)
    scale = (low & np.uint8(15)) | ((load_u8(scales + record - 4) >> np.uint8(6)) << np.uint8(4))
    minimum = (low >> np.uint8(4)) | ((load_u8(scales + record) >> np.uint8(6)) << np.uint8(4))
    return scale, minimum


@njit(forceinline=True)
def _scales_6_k(source, record, part):
    return load_u8(source + 192 + 2 * record + part), np.uint8(0)


@njit(forceinline=True)
def _scales_iq4_xs(source, record, part):
    low = (load_u8(source + 4 + record // 2) >> np.uint8(4 * (record % 2))) & np.uint8(15)
    high = np.uint8((load_u16(source + 2) >> np.uint16(2 * record)) & np.uint16(3))
    return (low | (high << np.uint8(4))) - np.uint8(32), np.uint8(0)


class _Format(NamedTuple):
    """Functions and offsets that read a block. Its own scale and minimum are f16, except with an exponent."""

    word: Any  # (source, record, quad): four integers as they are stored, a byte each
    scale_at: int = 0
    minimum_at: int = 2
    scales: Any = None  # (source, record, part): a small scale and minimum of a K type


_FORMATS = {
    "Q4_0": _Format(_make_word_4(2)),
    "Q4_1": _Format(_make_word_4(4)),
    "Q5_0": _Format(_make_word_5(2)),
    "Q5_1": _Format(_make_word_5(4)),
    "Q8_0": _Format(_word_8),
    "IQ4_NL": _Format(_make_word_4(2)),
    "MXFP4": _Format(_make_word_4(1)),
    "Q2_K": _Format(_word_2_k, 80, 82, _scales_2_k),
    "Q3_K": _Format(_word_3_k, 108, scales=_scales_3_k),
    "Q4_K": _Format(_word_4_k, scales=_scales_4_k),
    "Q5_K": _Format(_word_5_k, scales=_scales_4_k),
    "Q6_K": _Format(_word_6_k, 208, scales=_scales_6_k),
    "IQ4_XS": _Format(_word_iq4_xs, scales=_scales_iq4_xs),
}


def _make_put_bits(word: Any, first_bit: int, width: int) -> Any:
    """Return put(source, record, to), which stores `width` bits of each value of a row's record in their vectors."""
    mask, per_vector = np.uint32(((1 << width) - 1) * _ONE), 8 // max(width, 1)
    step, apart = (1, 4) if width == 4 else (per_vector, 1)  # from vector to vector, and from quad to quad within one

    @njit(forceinline=True)
    def put_bits(source, record, to):
        for vector in range(width):
            bits = np.uint32(0)
            for i in range(per_vector):
                values = word(source, record, vector * step + i * apart) >> np.uint32(first_bit)
                bits |= (values & mask) << np.uint32(width * i)
            store_u32(to + 64 * vector, bits)

    return put_bits


def _make_pack_block(layout: Layout) -> Any:
    """Return pack(source, out, lane), which packs one block of a row."""
    word, scale_from, minimum_from, scales = _FORMATS[layout.type]
    put_low = _make_put_bits(word, 0, layout.low_bits)
    put_high = _make_put_bits(word, layout.low_bits, layout.high_bits)
    has_exponent, has_minimum, has_scales = layout.has_exponent, layout.has_minimum, layout.scales_per_record > 0
    scale_at, minimum_at, high_at, parts = layout.scale_at, layout.minimum_at, layout.high_at, layout.parts
    header, record_bytes, per_super = layout.super_header, layout.record_bytes, layout.records_per_super
    own_scale_at, own_minimum_at = (0, 2 * LANES) if has_scales else (scale_at, minimum_at)

    @njit(forceinline=True)
    def pack(source, out, lane):
        if has_exponent:
            store_u8(out + own_scale_at + lane, load_u8(source))
        else:
            store_u16(out + own_scale_at + 2 * lane, load_u16(source + scale_from))
        if has_minimum:
            store_u16(out + own_minimum_at + 2 * lane, load_u16(source + minimum_from))
        for index in range(per_super):
            record = out + header + index * record_bytes
            put_low(source, index, record + 4 * lane)
            put_high(source, index, record + high_at + 4 * lane)
            if has_scales:
                for part in range(parts):
                    scale, minimum = scales(source, index, part)
                    store_u8(record + scale_at + LANES * part + lane, scale)
                    if has_minimum:
                        store_u8(record + minimum_at + LANES * part + lane, minimum)

    return pack


def _make_pack_float(width: int) -> Any:
    """Return pack(source, out, lane), which packs one number of a row."""

    @njit(forceinline=True)
    def pack(source, out, lane):
        if width == 4:
            store_u32(out + 4 * lane, load_u32(source))
        else:
            store_u16(out + 2 * lane, load_u16(source))

    return pack


def _make_pair_quads(layout: Layout) -> Any:
    """Return a function that reorders a record's pairs of quads to 8 inputs × 8 rows."""
    bytes_end = 0 if layout.low_bits == 2 else layout.high_at
    low_bits_end, high_bits_end, high_width = layout.high_at, layout.scale_at, layout.high_bits

    @njit
    def pair_bits(vectors, end, width):
        """Reorder vectors whose bytes hold several quads' values, of `width` bits each."""
        even = np.uint32(0x55555555 if width == 1 else 0x33333333)
        width, copy = np.uint32(width), stack(64)
        for at in range(vectors, end, 64):
            _copy_words(at, copy, 16)
            for row in range(8):
                upper, lower = load_u32(copy + 4 * row), load_u32(copy + 32 + 4 * row)
                store_u32(at + 8 * row, upper & even | (lower & even) << width)
                store_u32(at + 8 * row + 4, upper >> width & even | lower & ~even)

    @njit
    def pair_quads(record):
        copy = stack(128)
        for at in range(record, record + bytes_end, 128):
            _copy_words(at, copy, 32)
            for row in range(LANES):
                store_u32(at + 8 * row, load_u32(copy + 4 * row))
                store_u32(at + 8 * row + 4, load_u32(copy + 64 + 4 * row))
        pair_bits(record + bytes_end, record + low_bits_end, 2)
        pair_bits(record + low_bits_end, record + high_bits_end, high_width)

    return pair_quads


@njit
def _copy_words(source, out, count):
    for word in range(count):
        store_u32(out + 4 * word, load_u32(source + 4 * word))


def make_pack(type_: str, inputs: int) -> Callable[..., None]:
    """Return the command that packs rows. `inputs` is the instruction set's.

    One thread packs all of a command's rows, so that the pages it writes first are in its node of memory.
    """
    layout, block_size, source_bytes = LAYOUTS[type_], BLOCK_TYPES[type_].block_size, BLOCK_TYPES[type_].block_bytes
    super_bytes = LANES * source_bytes if layout.is_float else layout.super_bytes
    header, record_bytes, per_super = layout.super_header, layout.record_bytes, layout.records_per_super
    pack_block = _make_pack_float(source_bytes) if layout.is_float else _make_pack_block(layout)
    pair_quads, is_paired = _make_pair_quads(layout), inputs == 8 and not layout.is_float

    def pack(args, state, thread, num_threads):
        if thread != args.thread % num_threads:
            return
        for row in range(args.rows):
            source, out = args.source + row * args.source_row_bytes, args.out + row // LANES * args.group_bytes
            for _ in range(args.in_features // block_size):
                pack_block(source, out, row % LANES)
                source += source_bytes
                out += super_bytes
        for group in range((args.rows + LANES - 1) // LANES if is_paired else 0):
            for record in range(args.in_features // BLOCK):
                start = args.out + group * args.group_bytes + record // per_super * super_bytes + header
                pair_quads(start + record % per_super * record_bytes)

    return pack
