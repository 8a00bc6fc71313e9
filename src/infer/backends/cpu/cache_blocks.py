"""Blocks of 16 cached positions: a position put into one, scores against a run of blocks, p × values of a run.

`infer.quantization.kv_layout` defines what the bytes mean; nothing else in this package knows. A run is blocks one
after the other in memory. The order of every float sum is that of the positions (or dims) alone: a run may be cut into
shorter ones, and columns, blocks and dims taken several at once, without changing a bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from infer.backends.cpu import simd
from infer.backends.cpu.attention_tiles import FLOAT_BYTES, float_value, mix_32, score_tile, value_tile
from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.quantized_tiles import KEY_CODES, KEY_RECORD, VALUE_CODES, VALUE_RECORD
from infer.backends.cpu.records import CHUNK
from infer.backends.cpu.simd import load_f32, load_scalar_f32, splat_f32, splat_i32, store_scalar_f32
from infer.quantization.kv_formats import QUANTIZED, key_block_bytes, value_block_bytes

_CODES = BLOCK
_BLOCKS = 4  # of keys that all columns meet before the next: they stay in a core's first cache


@intrinsic(prefer_literal=True)
def key_bytes(context: Any, kv_type: Any, dim: Any) -> Any:
    """`kv_formats.key_block_bytes` for kernels."""
    return types.int64(kv_type, types.int64), _bytes_of(key_block_bytes, kv_type.literal_value)


@intrinsic(prefer_literal=True)
def value_bytes(context: Any, kv_type: Any, dim: Any) -> Any:
    return types.int64(kv_type, types.int64), _bytes_of(value_block_bytes, kv_type.literal_value)


def _bytes_of(block_bytes: Callable[[str, int], int], kv_type: str) -> Any:
    per_32 = block_bytes(kv_type, 32)

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.udiv(b.mul(arguments[1], simd.constant(simd.I64, per_32)), simd.constant(simd.I64, 32))

    return emit


@intrinsic(prefer_literal=True)
def put_16(context: Any, kv_type: Any, apart: Any, where: Any, x: Any) -> Any:
    """16 floats as the cache's, each so many elements after the one before."""
    name, step = kv_type.literal_value, apart.literal_value

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        *_, where, stored = arguments
        if name != "f32":
            stored = simd.narrow_f16(b, stored) if name == "f16" else simd.narrow_bf16(b, stored)
        if step == 1:
            simd.store(b, where, stored, FLOAT_BYTES[name])
        else:
            for lane in range(LANES):
                element = b.extract_element(stored, simd.constant(simd.I32, lane))
                simd.store(b, simd.offset(b, where, lane * step * FLOAT_BYTES[name]), element, FLOAT_BYTES[name])
        return context.get_dummy_value()

    return types.void(kv_type, apart, types.int64, simd.f32x16), emit


@njit(forceinline=True)
def _put(at, size, is_f16, value):  # type: ignore[no-untyped-def]
    if size == 4:
        store_scalar_f32(at, value)
    elif is_f16:
        simd.store_u16(at, simd.f16_bits(value))
    else:
        simd.store_u16(at, simd.bf16_bits(value))


def make_mix(kv_type: str) -> Any:
    """mix(x, dim), in place: what a query and a key go through before they meet a block, if anything."""
    is_mixed = kv_type in QUANTIZED

    @njit
    def mix(x, dim):  # type: ignore[no-untyped-def]
        if is_mixed:
            for i in range(0, 4 * dim, 4 * BLOCK):
                mix_32(x + i)

    return mix


def make_put_key(kv_type: str) -> Any:
    """put(block, lane, dim, x): the key of `dim` floats at x, mixed, becomes the block's position `lane`."""
    if kv_type in QUANTIZED:
        return _make_put_codes(_quantize_8, KEY_CODES, KEY_RECORD, 1, LANES)
    return _make_put_floats(kv_type, LANES)


def make_put_value(kv_type: str) -> Any:
    """put(block, lane, dim, x), as for keys."""
    if kv_type in QUANTIZED:
        quantize, codes_bytes = _quantize_8 if kv_type == "q8" else _quantize_4, VALUE_CODES[kv_type]
        return _make_put_codes(quantize, codes_bytes, VALUE_RECORD[kv_type], codes_bytes // LANES, 1)
    return _make_put_floats(kv_type, 1)


def _make_put_floats(kv_type: str, apart: int) -> Any:
    """An element of a position lies so many elements after the one before: 16, as positions are neighbours, or 1."""
    size, is_f16 = FLOAT_BYTES[kv_type], kv_type == "f16"

    @njit
    def put(block, lane, dim, x):  # type: ignore[no-untyped-def]
        to, whole = block + lane * size * (dim if apart == 1 else 1), dim // LANES * LANES
        for i in range(0, whole, LANES):
            put_16(kv_type, apart, to + i * apart * size, load_f32(x + 4 * i))
        for i in range(whole, dim):
            _put(to + i * apart * size, size, is_f16, load_scalar_f32(x + 4 * i))

    return put


def _make_put_codes(quantize: Any, codes_bytes: int, record_bytes: int, lane_bytes: int, byte_bytes: int) -> Any:
    """Byte i of a position's codes lies at lane × lane_bytes + i × byte_bytes of each record."""
    bytes_per_lane = codes_bytes // LANES

    @njit
    def put(block, lane, dim, x):  # type: ignore[no-untyped-def]
        codes = simd.stack(_CODES)
        for record in range(dim // BLOCK):
            at = block + record * record_bytes
            quantize(x + 4 * BLOCK * record, codes, at + codes_bytes + 2 * lane)
            for i in range(bytes_per_lane):
                simd.store_u8(at + lane * lane_bytes + i * byte_bytes, simd.load_u8(codes + i))

    return put


@njit
def _quantize_8(x, codes, scale_at):  # type: ignore[no-untyped-def]
    """32 floats at x → 32 bytes of codes, and the f16 scale."""
    first, second = load_f32(x), load_f32(x + 64)
    largest = simd.max_f32(simd.maximum(simd.absolute(first), simd.absolute(second)))
    bits = simd.f16_bits(largest / np.float32(127))
    simd.store_u16(scale_at, bits)
    scale = simd.f16_value(bits)
    if scale == np.float32(0):
        scale = np.float32(1)
    low, high = splat_f32(np.float32(-127)), splat_f32(np.float32(127))
    simd.store_i8(codes, simd.nearest_i32(simd.clamp(first / splat_f32(scale), low, high)))
    simd.store_i8(codes + LANES, simd.nearest_i32(simd.clamp(second / splat_f32(scale), low, high)))


@njit
def _quantize_4(x, codes, scale_at):  # type: ignore[no-untyped-def]
    """32 floats at x → 16 bytes of codes, and the f16 scale and, 32 bytes after it, minimum."""
    first, second = load_f32(x), load_f32(x + 64)
    largest = simd.max_f32(simd.maximum(first, second))
    minus = splat_f32(np.float32(-1))
    smallest = -simd.max_f32(simd.maximum(first * minus, second * minus))
    scale_bits, minimum_bits = simd.f16_bits((largest - smallest) / np.float32(15)), simd.f16_bits(smallest)
    simd.store_u16(scale_at, scale_bits)
    simd.store_u16(scale_at + 2 * LANES, minimum_bits)
    scale, minimum = simd.f16_value(scale_bits), splat_f32(simd.f16_value(minimum_bits))
    if scale == np.float32(0):
        scale = np.float32(1)
    low, high = splat_f32(np.float32(0)), splat_f32(np.float32(15))
    left = simd.nearest_i32(simd.clamp((first - minimum) / splat_f32(scale), low, high))
    right = simd.nearest_i32(simd.clamp((second - minimum) / splat_f32(scale), low, high))
    simd.store_i8(codes, left + right * splat_i32(np.int32(16)))


# (columns, blocks or vectors) of a tile: as many sums as fit the registers. The most columns first.
_TILES = ((12, 2), (8, 2), (4, 4), (3, 4), (2, 4), (1, 4))


@njit(forceinline=True)
def _takes_12(columns):  # type: ignore[no-untyped-def]
    return columns >= 12 and columns != 16


def make_block_scores(kv_type: str) -> Any:
    """scores(columns, q, dim, keys, num_blocks, out, values): of so many queries at q against a run of blocks of keys,
    as [column, 256]; the run's values are asked for."""
    twelve, eight, four, three, two, one = (_make_scores(kv_type, *tile) for tile in _TILES)

    @njit
    def block_scores(columns, q, dim, keys, num_blocks, out, values):  # type: ignore[no-untyped-def]
        block_bytes, of_values = key_bytes(kv_type, dim), value_bytes(kv_type, dim)
        for first in range(0, num_blocks, _BLOCKS):
            at, column = (keys + first * block_bytes, values + first * of_values, out + 4 * LANES * first), 0
            blocks = min(_BLOCKS, num_blocks - first)
            while _takes_12(columns - column):
                twelve(column, columns, q, dim, at, blocks)
                column += 12
            while columns - column >= 8:
                eight(column, columns, q, dim, at, blocks)
                column += 8
            if columns - column >= 4:
                four(column, columns, q, dim, at, blocks)
                column += 4
            if columns - column == 3:
                three(column, columns, q, dim, at, blocks)
            elif columns - column == 2:
                two(column, columns, q, dim, at, blocks)
            elif columns - column == 1:
                one(column, columns, q, dim, at, blocks)

    return block_scores


def _make_scores(kv_type: str, width: int, at_once: int) -> Any:
    """Tiles of `width` columns × `at_once` blocks. Of a block's values these columns ask for their share."""

    @njit
    def scores(column, columns, q, dim, at, num_blocks):  # type: ignore[no-untyped-def]
        block, (keys, values, out) = 0, at
        q, out = q + 4 * dim * column, out + 4 * CHUNK * column
        of_keys, of_values = key_bytes(kv_type, dim), value_bytes(kv_type, dim)
        while num_blocks - block >= at_once:
            to, keys_at = out + 4 * LANES * block, keys + block * of_keys
            ahead = values + block * of_values + at_once * of_values * column // columns
            step = at_once * of_values * width // (columns * dim)
            score_tile(kv_type, width, at_once, q, keys_at, dim, to, 4 * CHUNK, ahead, step)
            block += at_once
        while num_blocks - block > 0:
            to, keys_at = out + 4 * LANES * block, keys + block * of_keys
            ahead = values + block * of_values + of_values * column // columns
            step = of_values * width // (columns * dim)
            score_tile(kv_type, width, 1, q, keys_at, dim, to, 4 * CHUNK, ahead, step)
            block += 1

    return scores


def make_add_values(kv_type: str) -> Any:
    """add(columns, p, dim, values, num_positions, out, out_stride, keys): out[column] += Σ p × values over the first
    positions of a run; p lies as [column, 256].

    The sum goes on from what out holds: one chain of additions over positions, however they are cut into runs.
    As many keys, of another run, are asked for.
    """
    twelve, eight, four, three, two, one = (_make_values(kv_type, *tile) for tile in _TILES)

    @njit
    def add_values(columns, p, dim, values, num_positions, out, out_stride, keys):  # type: ignore[no-untyped-def]
        column = 0
        while _takes_12(columns - column):
            twelve(column, columns, p, dim, values, num_positions, out, out_stride, keys)
            column += 12
        while columns - column >= 8:
            eight(column, columns, p, dim, values, num_positions, out, out_stride, keys)
            column += 8
        if columns - column >= 4:
            four(column, columns, p, dim, values, num_positions, out, out_stride, keys)
            column += 4
        if columns - column == 3:
            three(column, columns, p, dim, values, num_positions, out, out_stride, keys)
        elif columns - column == 2:
            two(column, columns, p, dim, values, num_positions, out, out_stride, keys)
        elif columns - column == 1:
            one(column, columns, p, dim, values, num_positions, out, out_stride, keys)

    return add_values


def _make_values(kv_type: str, width: int, vectors: int) -> Any:
    """Tiles of `width` columns × `vectors` of 16 dims, then of two and of one, then single dims."""

    @njit
    def add(column, columns, p, dim, values, num_positions, out, out_stride, keys):  # type: ignore[no-untyped-def]
        at, stride, of_keys = 0, 4 * CHUNK, key_bytes(kv_type, dim)
        p, out, step = p + stride * column, out + out_stride * column, of_keys * width // (columns * dim)
        ahead, count = keys + of_keys * num_positions // LANES * column // columns, num_positions
        while dim - at >= vectors * LANES:
            many = vectors * step
            value_tile(kv_type, width, vectors, p, stride, values, dim, at, count, out, out_stride, ahead, many)
            at, ahead = at + vectors * LANES, ahead + many * count
        while dim - at >= 2 * LANES:
            value_tile(kv_type, width, 2, p, stride, values, dim, at, count, out, out_stride, ahead, 2 * step)
            at, ahead = at + 2 * LANES, ahead + 2 * step * count
        while dim - at >= LANES:
            value_tile(kv_type, width, 1, p, stride, values, dim, at, count, out, out_stride, ahead, step)
            at, ahead = at + LANES, ahead + step * count
        while at < dim:
            for i in range(width):
                to = out + i * out_stride + 4 * at
                total = load_scalar_f32(to)
                for position in range(count):
                    share = load_scalar_f32(p + stride * i + 4 * position)
                    total += share * float_value(kv_type, values, dim, at, position)
                store_scalar_f32(to, total)
            at += 1

    return add
