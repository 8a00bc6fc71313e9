"""GGML's blocks → groups of 16 rows (`layouts`, which draws a record). Each number is moved, and none is changed.

A function that packs handles one row at a time. `source` is the address of a block of the row in the file's form, and
`lane` is the row's place in its group, 0 to 15. `number` is that of the first of a record's 32 values in the block. A
`word` is four neighbouring values as four bytes of a u32 (`block_fields`), which is what a quad has of one row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, Layout
from infer.compute.backends.cpu.simd import load_u8, load_u16, load_u32, stack, store_u8, store_u16, store_u32
from infer.compute.backends.cpu.weights.block_fields import (
    ONE,
    make_index,
    make_nibble,
    make_scale,
    make_small,
    make_stored_scale,
    make_word,
)
from infer.compute.quantization.ggml_grids import UE4M3_HALVES
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES


def _make_store_bits(word: Any, first_bit: int, width: int) -> Any:
    """Return store(source, number, to): it stores `width` bits of each of a row's 32 values, from bit `first_bit` on.

    It writes 4 bytes to each of `width` vectors, 64 bytes apart. `to` is the row's place in the first of them: with
    4 bits, values 0–3 and 16–19 share the first.
    """
    mask, per_vector = np.uint32(((1 << width) - 1) * ONE), 8 // max(width, 1)
    step, apart = (1, 4) if width == 4 else (per_vector, 1)  # from vector to vector, and from quad to quad within one

    @njit(forceinline=True)
    def store_bits(source, number, to):
        for vector in range(width):
            bits = np.uint32(0)
            for i in range(per_vector):
                values = word(source, number + 4 * (vector * step + i * apart)) >> np.uint32(first_bit)
                bits |= (values & mask) << np.uint32(width * i)
            store_u32(to + 64 * vector, bits)

    return store_bits


def _make_store_patterns(layout: Layout) -> Any:
    """Return store(source, number, to): it stores the low bytes of the numbers of a row's patterns in a record.

    It writes 4 bytes to each of 1 or 2 vectors, 64 bytes apart, from the row's place `to` on.
    """
    index = make_index(BLOCK_FIELDS[layout.type])
    width_bits, num_words = layout.pattern_width.bit_length() - 1, 8 // layout.pattern_width

    @njit(forceinline=True)
    def store_patterns(source, number, to):
        for word in range(num_words):
            numbers = np.int64(0)
            for i in range(4):
                numbers |= (index(source, (number >> width_bits) + 4 * word + i) & 255) << (8 * i)
            store_u32(to + 64 * word, np.uint32(numbers))

    return store_patterns


def _make_store_trits(word: Any) -> Any:
    """Return store_trits(source, number, to, lane), which stores a row's 32 trits in the record that begins at `to`.

    Three trits t of quads 0–2 become t₀ + 3 t₁ + 9 t₂ ≤ 26, so in 5 bits, and so do those of quads 3–5. It writes their
    low 4 bits in 4 bytes, and what is left in the row's 3 bytes behind the vector (`low_codes` has the places). Four
    inputs, a byte each, are computed at a time.
    """
    nine, three = np.uint32(9), np.uint32(3)

    @njit(forceinline=True)
    def store_trits(source, number, to, lane):
        first = word(source, number) + three * word(source, number + 4) + nine * word(source, number + 8)
        second = word(source, number + 12) + three * word(source, number + 16) + nine * word(source, number + 20)
        low = (first & np.uint32(15 * ONE)) | (second & np.uint32(15 * ONE)) << np.uint32(4)
        store_u32(to + 4 * lane, low)
        rest = word(source, number + 24) + three * word(source, number + 28)
        rest |= (first & np.uint32(16 * ONE)) | (second & np.uint32(16 * ONE)) << np.uint32(1)
        bits = np.uint32(0)
        for byte in range(4):
            bits |= (rest >> np.uint32(8 * byte) & np.uint32(63)) << np.uint32(6 * byte)
        store_u16(to + 64 + 2 * lane, np.uint16(bits & np.uint32(0xFFFF)))
        store_u8(to + 96 + lane, np.uint8(bits >> np.uint32(16)))

    return store_trits


def _make_store_low_codes(layout: Layout, word: Any) -> Any:
    """Return store(source, number, record, lane): it stores the low codes of a row's 32 values in the record."""
    if layout.has_trits:
        return _make_store_trits(word)
    store = _make_store_patterns(layout) if layout.grid else _make_store_bits(word, 0, layout.low_bits)
    return njit(forceinline=True)(lambda source, number, record, lane: store(source, number, record + 4 * lane))


def make_pack_block(layout: Layout) -> Any:
    """Return pack(source, out, lane), which packs one block of a row.

    `out` is the first super-block of the group that the block goes to, or its first record if records have their own
    scales. Only the row's bytes of it are written.
    """
    fields, minimum_from = BLOCK_FIELDS[layout.type], BLOCK_FIELDS[layout.type].minimum_at or 0
    word, own_scale = make_word(fields, has_deltas=layout.nibbles == "deltas"), make_scale(fields)
    store_low_codes, store_high_bits = (
        _make_store_low_codes(layout, word),
        _make_store_bits(word, layout.low_bits, layout.high_bits),
    )
    store_scales, store_nibbles = _make_store_scales(layout), _make_store_nibbles(layout)
    has_half, has_exponent, has_minimum = layout.has_half, layout.has_exponent, layout.has_minimum
    high_at, header, record_bytes, num_records = (
        layout.high_at,
        layout.super_header,
        layout.record_bytes,
        layout.per_block,
    )
    scale_at, minimum_at = (0, 2 * LANES) if header else (layout.scale_at, layout.minimum_at)

    @njit(forceinline=True)
    def pack(source, out, lane):
        if has_exponent:
            store_u8(out + scale_at + lane, load_u8(source))
        elif has_half:
            store_u16(out + scale_at + 2 * lane, own_scale(source))
        if has_minimum:
            store_u16(out + minimum_at + 2 * lane, load_u16(source + minimum_from))
        store_nibbles(source, out, lane)
        for index in range(num_records):
            record = out + header + index * record_bytes
            store_low_codes(source, BLOCK * index, record, lane)
            store_high_bits(source, BLOCK * index, record + high_at + 4 * lane)
            store_scales(source, index, record, lane)

    return pack


def _make_store_nibbles(layout: Layout) -> Any:
    """Return store(source, out, lane), which stores a row's four bits for each of 8 records in a super-block."""
    at, contents = layout.nibbles_at, layout.nibbles
    if not contents:
        return njit(forceinline=True)(lambda source, out, lane: None)
    nibble = make_nibble(BLOCK_FIELDS[layout.type], contents)

    @njit(forceinline=True)
    def store_nibbles(source, out, lane):
        bits = np.int64(0)
        for index in range(8):
            bits |= nibble(source, index) << (4 * index)
        store_u32(out + at + 4 * lane, np.uint32(bits))

    return store_nibbles


def _make_store_scales(layout: Layout) -> Any:
    """Return store(source, index, record, lane), which stores the scales and minima of a row in record `index`.

    They are small integers, or E4M3 scales converted to f16. It does nothing if records have none of their own.
    """
    if layout.has_nibbles:
        return _make_store_scale_pair(layout)
    fields, parts, per_super = BLOCK_FIELDS[layout.type], layout.parts, layout.records_per_super
    scale_at, minimum_at, has_minimum = layout.scale_at, layout.minimum_at, layout.has_minimum
    has_small, has_halves = layout.has_small_scales and layout.nibbles != "scales", fields.scale_form == "UE4M3"
    small: Any = make_small(fields) if has_small else None

    @njit(forceinline=True)
    def store_scales(source, index, record, lane):
        if has_small:
            for part in range(parts):
                number = parts * index + part
                store_u8(record + scale_at + LANES * part + lane, small(source, number))
                if has_minimum:
                    minimum = small(source, parts * per_super + number)
                    store_u8(record + minimum_at + LANES * part + lane, minimum)
        if has_halves:
            for part in range(parts):
                half = UE4M3_HALVES[load_u8(source + parts * index + part)]
                store_u16(record + scale_at + 2 * LANES * part + 2 * lane, half)

    return store_scales


def _make_store_scale_pair(layout: Layout) -> Any:
    """Return store(source, index, record, lane), which stores a record's two 4-bit scales of a row in one byte."""
    stored, scale_at = make_stored_scale(BLOCK_FIELDS[layout.type]), layout.scale_at

    @njit(forceinline=True)
    def store_scale_pair(source, index, record, lane):
        both = np.int64(stored(source, 2 * index)) | np.int64(stored(source, 2 * index + 1)) << 4
        store_u8(record + scale_at + lane, np.uint8(both))

    return store_scale_pair


def _make_pack_float(layout: Layout) -> Any:
    """Return pack(source, out, lane), which copies one number of a row, or the two that lie side by side in a group."""
    width = layout.low_bits // 8 * layout.neighbours

    @njit(forceinline=True)
    def pack(source, out, lane):
        if width == 4:
            store_u32(out + 4 * lane, load_u32(source))
        else:
            store_u16(out + 2 * lane, load_u16(source))

    return pack


def _make_pack_scaled_floats(layout: Layout) -> Any:
    """Return pack(source, out, lane), which copies a row's f32 scale and the E4M3 bytes after it into a super-block."""
    header, num_inputs = layout.super_header, BLOCK_TYPES[layout.type].block_size

    @njit(forceinline=True)
    def pack(source, out, lane):
        store_u32(out + 4 * lane, load_u32(source))
        for i in range(num_inputs):
            store_u8(out + header + LANES * i + lane, load_u8(source + 4 + i))

    return pack


def _make_pack_source(layout: Layout) -> Any:
    """Return pack(source, out, lane), which packs one block, or one number of a float type, of a row."""
    if not layout.is_float:
        return make_pack_block(layout)
    return _make_pack_scaled_floats(layout) if layout.super_header else _make_pack_float(layout)


def _make_interleave_quads(layout: Layout) -> Any:
    """Return interleave_quads(record), which reorders a packed record in place, for instructions of 8 inputs.

    Before, a pair of vectors has inputs 0–3 of rows 0–15, then inputs 4–7 of rows 0–15. Afterwards it has inputs 0–7 of
    row 0, row 1 … row 7, then those of rows 8–15.
    """
    low_width, high_width = layout.low_bits, layout.high_bits
    low_bits_end, high_bits_end = layout.high_at, layout.scale_at
    is_reordered = not (layout.grid or layout.has_trits)  # else `PackedRecords` does it
    bytes_end = layout.high_at if low_width >= 4 and is_reordered else 0

    @njit
    def interleave_bits(vectors, end, width):
        """Reorder vectors whose bytes hold values of several quads, of `width` bits each.

        A pair of quads is in neighbouring bits of one vector, so bits move between the 8 words of rows 0–7 and those of
        rows 8–15.
        """
        even = np.uint32(0x55555555 if width == 1 else 0x33333333)
        width, copy = np.uint32(width), stack(64)
        for at in range(vectors, end, 64):
            _copy_words(at, copy, 16)
            for row in range(8):
                upper, lower = load_u32(copy + 4 * row), load_u32(copy + 32 + 4 * row)
                store_u32(at + 8 * row, upper & even | (lower & even) << width)
                store_u32(at + 8 * row + 4, upper >> width & even | lower & ~even)

    @njit
    def interleave_quads(record):
        copy = stack(128)
        for at in range(record, record + bytes_end, 128):
            _copy_words(at, copy, 32)
            for row in range(LANES):
                store_u32(at + 8 * row, load_u32(copy + 4 * row))
                store_u32(at + 8 * row + 4, load_u32(copy + 64 + 4 * row))
        if is_reordered:
            interleave_bits(record + bytes_end, record + low_bits_end, low_width)
        interleave_bits(record + low_bits_end, record + high_bits_end, high_width)

    return interleave_quads


@njit
def _copy_words(source, out, count):
    for word in range(count):
        store_u32(out + 4 * word, load_u32(source + 4 * word))


def make_pack(type_: str, inputs: int) -> Callable[..., None]:
    """Return the command that packs rows. `inputs` is the instruction set's.

    It reads `rows` rows of blocks at `source`, `source_row_bytes` apart, and writes whole groups at `out`,
    `group_bytes` apart. One thread packs all of a command's rows, so that the pages it writes first are in its node of
    memory.
    """
    layout, kind = LAYOUTS[type_], BLOCK_TYPES[type_]
    neighbours = layout.neighbours
    block_size, source_bytes = kind.block_size * neighbours, kind.block_bytes * neighbours
    super_bytes, per_super = layout.super_bytes, layout.records_per_super
    packed_bytes = LANES * source_bytes if layout.is_float else layout.per_block // per_super * super_bytes
    header, record_bytes, has_row_scales = layout.super_header, layout.record_bytes, layout.row_scale_bytes > 0
    pack_block = _make_pack_source(layout)
    interleave_quads, is_interleaved = _make_interleave_quads(layout), inputs == 8 and not layout.is_float

    def pack(args, state, thread, num_threads):
        if thread != args.thread % num_threads:
            return
        for row in range(args.rows):
            source, out = args.source + row * args.source_row_bytes, args.out + row // LANES * args.group_bytes
            for _ in range(args.in_features // block_size):
                pack_block(source, out, row % LANES)
                source += source_bytes
                out += packed_bytes
            if has_row_scales:
                store_u32(out + 4 * (row % LANES), load_u32(source))
            if neighbours == 2 and args.in_features % 2 == 1:
                store_u16(out + 4 * (row % LANES), load_u16(source))
        for group in range((args.rows + LANES - 1) // LANES if is_interleaved else 0):
            for record in range(args.in_features // BLOCK):
                start = args.out + group * args.group_bytes + record // per_super * super_bytes + header
                interleave_quads(start + record % per_super * record_bytes)

    return pack
