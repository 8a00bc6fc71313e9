"""GGML's blocks → groups of 16 rows (`layouts`), each number moved and none changed; and single rows out of them again.

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
Of Q2_K and Q3_K, sub-block j (32 inputs) is the pair 2 (j mod 4) of the 32 bytes from 32 (j div 4) on.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from infer.backends.cpu.exponents import exponent_value
from infer.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, Layout
from infer.backends.cpu.simd import (
    bf16_value,
    f16_value,
    load_i64,
    load_scalar_f32,
    load_u8,
    load_u16,
    load_u32,
    stack,
    store_scalar_f32,
    store_u8,
    store_u16,
    store_u32,
)
from infer.quantization.ggml_types import BLOCK_TYPES


def _make_pack_simple(layout: Layout) -> Any:
    """One block of Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL or MXFP4: its 16 bytes are already quad j with quad j + 4."""
    high_bits, has_minimum, has_exponent, scale_at = (
        layout.high_bits, layout.has_minimum, layout.has_exponent, layout.scale_at
    )  # fmt: skip

    @njit(inline="always")
    def pack(source, out, lane):  # type: ignore[no-untyped-def]
        if has_exponent:
            store_u8(out + scale_at + lane, load_u8(source))
            at = source + 1
        else:
            store_u16(out + scale_at + 2 * lane, load_u16(source))
            at = source + 2
        if has_minimum:
            store_u16(out + scale_at + 32 + 2 * lane, load_u16(at))
            at += 2
        if high_bits:
            store_u32(out + 256 + 4 * lane, _spread_fifth_bits(load_u32(at)))
            at += 4
        for j in range(4):
            store_u32(out + 64 * j + 4 * lane, load_u32(at + 4 * j))

    return pack


@njit(inline="always")
def _spread_fifth_bits(bits):  # type: ignore[no-untyped-def]
    """Bit 4 j + b → bit j of byte b."""
    word = np.uint32(0)
    for j in range(8):
        nibble = (bits >> np.uint32(4 * j)) & np.uint32(15)
        word |= _nibble_to_bytes(nibble) << np.uint32(j)
    return word


@njit(inline="always")
def _nibble_to_bytes(nibble):  # type: ignore[no-untyped-def]
    """Bit b → bit 0 of byte b."""
    return np.uint32((nibble * np.uint32(0x00204081)) & np.uint32(0x01010101))


@njit(inline="always")
def _pack_q8_0(source, out, lane):  # type: ignore[no-untyped-def]
    store_u16(out + 512 + 2 * lane, load_u16(source))
    for j in range(8):
        store_u32(out + 64 * j + 4 * lane, load_u32(source + 2 + 4 * j) ^ np.uint32(0x80808080))


@njit(inline="always")
def _scale_and_minimum(scales, j):  # type: ignore[no-untyped-def]
    """The j-th 6-bit pair of a Q4_K or Q5_K super-block."""
    if j < 4:
        return load_u8(scales + j) & np.uint8(63), load_u8(scales + 4 + j) & np.uint8(63)
    low = load_u8(scales + j + 4)
    scale = (low & np.uint8(15)) | ((load_u8(scales + j - 4) >> np.uint8(6)) << np.uint8(4))
    minimum = (low >> np.uint8(4)) | ((load_u8(scales + j) >> np.uint8(6)) << np.uint8(4))
    return scale, minimum


def _make_pack_q4_q5_k(layout: Layout) -> Any:
    high_bits, record_bytes = layout.high_bits, layout.record_bytes

    @njit(inline="always")
    def pack(source, out, lane):  # type: ignore[no-untyped-def]
        store_u16(out + 2 * lane, load_u16(source))
        store_u16(out + 32 + 2 * lane, load_u16(source + 2))
        fifth, nibbles = source + 16, source + 16 + 32 * high_bits
        mask = np.uint32(0x0F0F0F0F)
        for j in range(8):
            record = out + 64 + j * record_bytes
            scale, minimum = _scale_and_minimum(source + 4, j)
            store_u8(record + record_bytes - 32 + lane, scale)
            store_u8(record + record_bytes - 16 + lane, minimum)
            shift = np.uint32(4 * (j % 2))
            high = np.uint32(0)
            for quad in range(4):
                first = (load_u32(nibbles + 32 * (j // 2) + 4 * quad) >> shift) & mask
                second = (load_u32(nibbles + 32 * (j // 2) + 16 + 4 * quad) >> shift) & mask
                store_u32(record + 64 * quad + 4 * lane, first | (second << np.uint32(4)))
                if high_bits:
                    one = np.uint32(0x01010101)
                    high |= ((load_u32(fifth + 4 * quad) >> np.uint32(j)) & one) << np.uint32(quad)
                    high |= ((load_u32(fifth + 16 + 4 * quad) >> np.uint32(j)) & one) << np.uint32(quad + 4)
            if high_bits:
                store_u32(record + 256 + 4 * lane, high)

    return pack


@njit(inline="always")
def _pack_q6_k(source, out, lane):  # type: ignore[no-untyped-def]
    store_u16(out + 2 * lane, load_u16(source + 208))
    for j in range(8):
        record = out + 32 + j * 416
        store_u8(record + 384 + lane, load_u8(source + 192 + 2 * j))
        store_u8(record + 400 + lane, load_u8(source + 192 + 2 * j + 1))
        low, high = source + 64 * (j // 4) + 32 * (j % 2), source + 128 + 32 * (j // 4)
        low_shift, high_shift = np.uint32(4 * (j % 4 // 2)), np.uint32(2 * (j % 4))
        for half in range(2):
            pairs = np.uint32(0)
            for quad in range(4):
                at = 16 * half + 4 * quad
                two_bits = (load_u32(high + at) >> high_shift) & np.uint32(0x03030303)
                pairs |= two_bits << np.uint32(2 * quad)
                if half == 0:
                    first = (load_u32(low + at) >> low_shift) & np.uint32(0x0F0F0F0F)
                    second = (load_u32(low + at + 16) >> low_shift) & np.uint32(0x0F0F0F0F)
                    store_u32(record + 64 * quad + 4 * lane, first | (second << np.uint32(4)))
            store_u32(record + 256 + 64 * half + 4 * lane, pairs)


@njit(inline="always")
def _store_pairs(source, shift, record, lane):  # type: ignore[no-untyped-def]
    """32 values of 2 bits, from as many bytes that have them at `shift`."""
    for vector in range(2):
        word = np.uint32(0)
        for quad in range(4):
            two_bits = (load_u32(source + 16 * vector + 4 * quad) >> shift) & np.uint32(0x03030303)
            word |= two_bits << np.uint32(2 * quad)
        store_u32(record + 64 * vector + 4 * lane, word)


@njit(inline="always")
def _pack_q2_k(source, out, lane):  # type: ignore[no-untyped-def]
    store_u16(out + 2 * lane, load_u16(source + 80))
    store_u16(out + 32 + 2 * lane, load_u16(source + 82))
    for j in range(8):
        record = out + 64 + j * 192
        _store_pairs(source + 16 + 32 * (j // 4), np.uint32(2 * (j % 4)), record, lane)
        for half in range(2):
            both = load_u8(source + 2 * j + half)
            store_u8(record + 128 + 16 * half + lane, both & np.uint8(15))
            store_u8(record + 160 + 16 * half + lane, both >> np.uint8(4))


@njit(inline="always")
def _pack_q3_k(source, out, lane):  # type: ignore[no-untyped-def]
    store_u16(out + 2 * lane, load_u16(source + 108))
    for j in range(8):
        record = out + 32 + j * 224
        _store_pairs(source + 32 + 32 * (j // 4), np.uint32(2 * (j % 4)), record, lane)
        third = np.uint32(0)
        for quad in range(8):
            third |= ((load_u32(source + 4 * quad) >> np.uint32(j)) & np.uint32(0x01010101)) << np.uint32(quad)
        store_u32(record + 128 + 4 * lane, third)
        for half in range(2):
            k = 2 * j + half
            low = (load_u8(source + 96 + k % 8) >> np.uint8(4 * (k // 8))) & np.uint8(15)
            high = (load_u8(source + 104 + k % 4) >> np.uint8(2 * (k // 4))) & np.uint8(3)
            store_u8(record + 192 + 16 * half + lane, (low | (high << np.uint8(4))) - np.uint8(32))


@njit(inline="always")
def _pack_iq4_xs(source, out, lane):  # type: ignore[no-untyped-def]
    store_u16(out + 2 * lane, load_u16(source))
    upper = load_u16(source + 2)
    for j in range(8):
        record = out + 32 + j * 272
        low = (load_u8(source + 4 + j // 2) >> np.uint8(4 * (j % 2))) & np.uint8(15)
        high = np.uint8((upper >> np.uint16(2 * j)) & np.uint16(3))
        store_u8(record + 256 + lane, (low | (high << np.uint8(4))) - np.uint8(32))
        for quad in range(4):
            store_u32(record + 64 * quad + 4 * lane, load_u32(source + 8 + 16 * j + 4 * quad))


def _make_pack_block(layout: Layout) -> Any:
    """What packs one block of a row: `(source, out, lane)`."""
    if layout.type in ("Q4_K", "Q5_K"):
        return _make_pack_q4_q5_k(layout)
    own = {"Q8_0": _pack_q8_0, "Q2_K": _pack_q2_k, "Q3_K": _pack_q3_k, "Q6_K": _pack_q6_k, "IQ4_XS": _pack_iq4_xs}
    return own.get(layout.type) or _make_pack_simple(layout)


def _make_pair_quads(layout: Layout) -> Any:
    """Brings a record's pairs of quads into the order of 8 inputs × 8 rows."""
    bytes_end = 0 if layout.low_bits == 2 else layout.high_at
    low_bits_end, high_bits_end, high_width = layout.high_at, layout.scale_at, layout.high_bits

    @njit
    def pair_bits(vectors, end, width):  # type: ignore[no-untyped-def]
        """Of vectors whose bytes have several quads' values, of so many bits each."""
        even = np.uint32(0x55555555 if width == 1 else 0x33333333)
        width, copy = np.uint32(width), stack(64)
        for at in range(vectors, end, 64):
            _copy_words(at, copy, 16)
            for row in range(8):
                upper, lower = load_u32(copy + 4 * row), load_u32(copy + 32 + 4 * row)
                store_u32(at + 8 * row, upper & even | (lower & even) << width)
                store_u32(at + 8 * row + 4, upper >> width & even | lower & ~even)

    @njit
    def pair_quads(record):  # type: ignore[no-untyped-def]
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
def _copy_words(source, out, count):  # type: ignore[no-untyped-def]
    for word in range(count):
        store_u32(out + 4 * word, load_u32(source + 4 * word))


def make_pack(type_: str, inputs: int) -> Callable[..., None]:
    """`inputs` is the instruction set's. One thread packs them all: the pages that it writes first lie in its node of
    memory."""
    layout = LAYOUTS[type_]
    if layout.is_float:
        return _make_pack_float(layout.low_bits // 8, layout.record_bytes)
    source_bytes, super_bytes = BLOCK_TYPES[type_].block_bytes, layout.super_bytes
    header, record_bytes, per_super = layout.super_header, layout.record_bytes, layout.records_per_super
    pack_block, pair_quads, is_paired = _make_pack_block(layout), _make_pair_quads(layout), inputs == 8

    def pack(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        if thread != args.thread % num_threads:
            return
        for group in range((args.rows + LANES - 1) // LANES):
            for lane in range(min(LANES, args.rows - group * LANES)):
                source = args.source + (group * LANES + lane) * args.source_row_bytes
                out = args.out + group * args.group_bytes
                for _ in range(args.in_features // (BLOCK * per_super)):
                    pack_block(source, out, lane)
                    source += source_bytes
                    out += super_bytes
            if is_paired:
                for record in range(args.in_features // BLOCK):
                    start = args.out + group * args.group_bytes + record // per_super * super_bytes + header
                    pair_quads(start + record % per_super * record_bytes)

    return pack


def _make_pack_float(width: int, record_bytes: int) -> Callable[..., None]:
    def pack(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        if thread != args.thread % num_threads:
            return
        for group in range((args.rows + LANES - 1) // LANES):
            out = args.out + group * args.group_bytes
            for lane in range(min(LANES, args.rows - group * LANES)):
                source = args.source + (group * LANES + lane) * args.source_row_bytes
                for i in range(args.in_features):
                    to = out + (i * LANES + lane) * width
                    if width == 4:
                        store_u32(to, load_u32(source + 4 * i))
                    else:
                        store_u16(to, load_u16(source + 2 * i))

    return pack


def _make_float_at(type_: str) -> Callable[..., np.float32]:
    """What reads one weight of a float type."""
    if type_ == "F32":
        return load_scalar_f32  # type: ignore[no-any-return]
    widen = f16_value if type_ == "F16" else bf16_value
    return njit(inline="always")(lambda at: widen(load_u16(at)))  # type: ignore[no-any-return]


def _make_integer_at(layout: Layout) -> Any:
    """What reads the integer of one weight, its offset still on it: `(record, quad, byte of the quad)`."""
    low_bits, high_bits, high_at = layout.low_bits, layout.high_bits, layout.high_at
    has_codes, codes = bool(layout.codes), np.array([code + layout.offset for code in layout.codes or (0,)], np.int32)

    @njit(inline="always")
    def integer_at(record, quad, byte):  # type: ignore[no-untyped-def]
        if low_bits == 8:
            q = np.int32(load_u8(record + 64 * quad + byte))
        elif low_bits == 4:
            q = np.int32(load_u8(record + 64 * (quad % 4) + byte)) >> (4 * (quad // 4)) & 15
        else:
            q = np.int32(load_u8(record + 64 * (quad // 4) + byte)) >> (2 * (quad % 4)) & 3
        if high_bits == 1:
            q |= (np.int32(load_u8(record + high_at + byte)) >> quad & 1) << low_bits
        if high_bits == 2:
            pair = np.int32(load_u8(record + high_at + 64 * (quad // 4) + byte)) >> (2 * (quad % 4)) & 3
            q |= pair << low_bits
        return codes[q] if has_codes else q

    return integer_at


def _make_scale_at(layout: Layout) -> Any:
    """What reads a scale or a minimum of one row's record: `(where the first is, half, of the super-block)`."""
    is_nested, has_exponent, is_signed = layout.scales_per_record > 0, layout.has_exponent, layout.has_signed_scales
    has_halves = layout.parts == 2

    @njit(inline="always")
    def scale_at(at, half, lane, of_super):  # type: ignore[no-untyped-def]
        if is_nested:
            small = load_u8(at + (half * LANES if has_halves else 0) + lane)
            whole = np.float32(np.int8(small)) if is_signed else np.float32(small)
            return f16_value(load_u16(of_super + 2 * lane)) * whole
        return exponent_value(load_u8(at + lane)) if has_exponent else f16_value(load_u16(at + 2 * lane))

    return scale_at


def make_embed(type_: str, inputs: int) -> Callable[..., None]:
    """Rows of the tokens, times scale. A token outside the table counts as the nearest row in it."""
    layout = LAYOUTS[type_]
    offset, has_minimum = np.float32(layout.offset), layout.has_minimum
    sign = np.float32(-1 if layout.scales_per_record else 1)  # K types subtract their minima
    scale_from, minimum_from, record_bytes = layout.scale_at, layout.minimum_at, layout.record_bytes
    super_bytes, header, per_super = layout.super_bytes, layout.super_header, layout.records_per_super
    is_float, width, float_at = layout.is_float, layout.low_bits // 8, _make_float_at(type_)
    integer_at, scale_at, is_paired = _make_integer_at(layout), _make_scale_at(layout), inputs == 8

    def embed(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        for token in range(thread, state.num_tokens, num_threads):
            row = min(max(load_i64(state.tokens + 8 * token), 0), args.num_rows - 1)
            group, lane, out = args.table + row // LANES * args.group_bytes, row % LANES, args.out
            out += 4 * args.in_features * token
            for i in range(args.in_features):
                if is_float:
                    value = float_at(group + (i * LANES + lane) * width)
                else:
                    block, within = i // BLOCK, i % BLOCK
                    base = group + block // per_super * super_bytes
                    record = base + header + block % per_super * record_bytes
                    quad, byte = within // 4, 4 * lane + within % 4
                    if is_paired:
                        quad, byte = within // 8 * 2 + lane // 8, 8 * (lane % 8) + within % 8
                    q = integer_at(record, quad, byte)
                    half = within // 16
                    value = scale_at(record + scale_from, half, lane, base) * (np.float32(q) - offset)
                    if has_minimum:
                        value += sign * scale_at(record + minimum_from, half, lane, base + 2 * LANES)
                store_scalar_f32(out + 4 * i, value * args.scale)

    return embed
