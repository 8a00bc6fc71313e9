"""GGML's blocks → groups of 16 rows (`layouts`). Each number is moved, and none is changed.

The functions that read a block are made from `BLOCK_FIELDS`, as `ggml_blocks.numbers_of` reads it in torch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from infer.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, Layout
from infer.backends.cpu.simd import load_u8, load_u16, load_u32, stack, store_u8, store_u16, store_u32
from infer.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, BlockFields, Field

_ONE = 0x01010101  # a bit of each byte


def _make_place(field: Field) -> Any:
    """Return place(source, number): the address of a number's byte, and the bits below the number there.

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


def _make_field(field: Field) -> Any:
    """Return read(source, number), which reads four numbers of a block from `number` on, a byte each."""
    place, mask = _make_place(field), np.uint32(((1 << field.bits) - 1) * _ONE)

    @njit(forceinline=True)
    def read(source, number):
        at, shift = place(source, number)
        return (load_u32(at) >> np.uint32(shift)) & mask

    @njit(forceinline=True)
    def read_from_bits(source, number):
        at, shift = place(source, number)
        four = (load_u8(at) >> np.uint8(shift)) & np.uint8(15)
        return np.uint32(np.uint32(four) * np.uint32(0x00204081)) & np.uint32(_ONE)  # a bit to a byte

    return read_from_bits if field.run == 1 else read


def _make_word(fields: BlockFields) -> Any:
    """Return word(source, number): four codes from `number` on as they are stored, a byte each."""
    low = _make_field(fields.codes[0])
    if len(fields.codes) == 1:
        flipped = np.uint32(0x80808080 if fields.is_signed else 0)
        return njit(forceinline=True)(lambda source, number: low(source, number) ^ flipped)
    high, shift = _make_field(fields.codes[1]), np.uint32(fields.codes[0].bits)
    return njit(forceinline=True)(lambda source, number: low(source, number) | (high(source, number) << shift))


def _make_small(fields: BlockFields) -> Any:
    """Return small(source, number): a small scale of a K type, or the minimum of the same number after all scales."""
    if fields.scales == "6 bits":
        return _six_bits
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


def _make_put_bits(word: Any, first_bit: int, width: int) -> Any:
    """Return put(source, number, to), which stores `width` bits of each value of a row's record in their vectors.

    The record has the 32 values from `number` on.
    """
    mask, per_vector = np.uint32(((1 << width) - 1) * _ONE), 8 // max(width, 1)
    step, apart = (1, 4) if width == 4 else (per_vector, 1)  # from vector to vector, and from quad to quad within one

    @njit(forceinline=True)
    def put_bits(source, number, to):
        for vector in range(width):
            bits = np.uint32(0)
            for i in range(per_vector):
                values = word(source, number + 4 * (vector * step + i * apart)) >> np.uint32(first_bit)
                bits |= (values & mask) << np.uint32(width * i)
            store_u32(to + 64 * vector, bits)

    return put_bits


def make_pack_block(layout: Layout) -> Any:
    """Return pack(source, out, lane), which packs one block of a row."""
    fields = BLOCK_FIELDS[layout.type]
    word, scale_from, minimum_from = _make_word(fields), fields.scale_at, fields.minimum_at or 0
    put_low = _make_put_bits(word, 0, layout.low_bits)
    put_high = _make_put_bits(word, layout.low_bits, layout.high_bits)
    has_exponent, has_minimum, has_scales = layout.has_exponent, layout.has_minimum, layout.scales_per_record > 0
    scale_at, minimum_at, high_at, parts = layout.scale_at, layout.minimum_at, layout.high_at, layout.parts
    header, record_bytes, per_super = layout.super_header, layout.record_bytes, layout.records_per_super
    small: Any = _make_small(fields) if has_scales else None
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
            put_low(source, BLOCK * index, record + 4 * lane)
            put_high(source, BLOCK * index, record + high_at + 4 * lane)
            if has_scales:
                for part in range(parts):
                    number = parts * index + part
                    store_u8(record + scale_at + LANES * part + lane, small(source, number))
                    if has_minimum:
                        minimum = small(source, parts * per_super + number)
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
    pack_block = _make_pack_float(source_bytes) if layout.is_float else make_pack_block(layout)
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
