"""Storing a token's key and value in the cache, in the bytes that `infer.compute.quantization.kv_layout` defines.

A block has 16 positions of one head. Float keys are [dim, 16 positions], float values [16 positions, dim]. q8 and q4
have a record for each 32 dims: codes, then a scale per position, then minima for values of q4 (`cached_forms`).
"""

from typing import Any

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention.cached_forms import KEYS, VALUES, Form
from infer.compute.backends.cpu.attention.quantized_tiles import emit_mix
from infer.compute.backends.cpu.isa import BF16_PAIRS
from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.simd import Value, address, operation
from infer.compute.quantization.kv_formats import QUANTIZED

_CODES = BLOCK
_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, BF16_PAIRS: 2}


mix_32 = operation(types.void, address)(emit_mix)


def _make_store_16(kv_type: str, apart: int) -> Any:
    """Return store(where, x), which stores f32 × 16 in the cache's type.

    Elements are `apart` elements from each other.
    """
    size = _FLOAT_BYTES[kv_type]

    @operation(types.void, address, simd.f32x16)
    def store_16(b: Builder, where: Value, stored: Value) -> None:
        if kv_type != "f32":
            stored = simd.narrow_f16(b, stored) if kv_type == "f16" else simd.narrow_bf16(b, stored)
        if apart == 1:
            simd.store(b, where, stored, size)
            return
        for lane in range(LANES):
            element = b.extract_element(stored, simd.constant(simd.I32, lane))
            simd.store(b, simd.offset(b, where, lane * apart * size), element, size)

    return store_16


@njit(forceinline=True)
def _put(at, size, is_f16, value):
    if size == 4:
        simd.store_scalar_f32(at, value)
    elif is_f16:
        simd.store_u16(at, simd.narrow_f16(value))
    else:
        simd.store_u16(at, simd.narrow_bf16(value))


def make_mix(kv_type: str) -> Any:
    """Return mix(x, dim), which rotates f32 [dim] by Hadamard matrices of 32 dims, in place, for quantised types.

    For other types it does nothing. `emit_mix` has the definition.
    """
    is_mixed = kv_type in QUANTIZED

    @njit
    def mix(x, dim):
        if is_mixed:
            for i in range(0, 4 * dim, 4 * BLOCK):
                mix_32(x + i)

    return mix


def make_prepare_query(kv_type: str) -> Any:
    """Return prepare(x, dim), which brings a query, f32 [dim], into the form that scores read, in place.

    For quantised types it mixes the query as keys are mixed. For `BF16_PAIRS` it stores bf16 [dim] in the first half.
    For other types it does nothing.
    """
    if kv_type != BF16_PAIRS:
        return make_mix(kv_type)

    @njit
    def round_query(x, dim):
        for i in range(0, dim, LANES):
            simd.keep_bf16(x + 2 * i, simd.load_f32(x + 4 * i))

    return round_query


def make_store_key(kv_type: str) -> Any:
    """Return store(block, lane, dim, x), which stores a key as position `lane`, 0 to 15, of a block of keys.

    It reads f32 [dim] at `x`, which must be mixed already, and writes only the position's bytes of the block.
    """
    if kv_type in QUANTIZED:
        return _make_store_codes(_quantize_8, KEYS[kv_type], 1, LANES)
    return _make_store_floats(kv_type, LANES)


def make_store_value(kv_type: str) -> Any:
    """Return store(block, lane, dim, x), which stores a value as position `lane`, 0 to 15, of a block of values.

    It reads f32 [dim] at `x`, and writes only the position's bytes of the block.
    """
    if kv_type in QUANTIZED:
        quantize, form = _quantize_8 if kv_type == "q8" else _quantize_4, VALUES[kv_type]
        return _make_store_codes(quantize, form, form.codes_bytes // LANES, 1)
    return _make_store_floats(kv_type, 1)


def _make_store_floats(kv_type: str, apart: int) -> Any:
    """Return store(block, lane, dim, x) for float types.

    The elements of a position are `apart` elements from each other.

    `apart` is 16 for keys, [dim, 16 positions], and 1 for values, [16 positions, dim].
    """
    size, is_f16, store_16 = _FLOAT_BYTES[kv_type], kv_type == "f16", _make_store_16(kv_type, apart)

    @njit
    def put(block, lane, dim, x):
        to, whole = block + lane * size * (dim if apart == 1 else 1), dim // LANES * LANES
        for i in range(0, whole, LANES):
            store_16(to + i * apart * size, simd.load_f32(x + 4 * i))
        for i in range(whole, dim):
            _put(to + i * apart * size, size, is_f16, simd.load_scalar_f32(x + 4 * i))

    return put


def _make_store_codes(quantize: Any, form: Form, lane_bytes: int, byte_bytes: int) -> Any:
    """Return store(block, lane, dim, x) for q8 and q4.

    `quantize` makes the codes and stores the scale (and the minimum).

    Byte i of a position's codes is at lane × `lane_bytes` + i × `byte_bytes` of each record.
    """
    codes_bytes, record_bytes = form.codes_bytes, form.record_bytes
    bytes_per_lane = codes_bytes // LANES

    @njit
    def put(block, lane, dim, x):
        codes = simd.stack(_CODES)
        for record in range(dim // BLOCK):
            at = block + record * record_bytes
            quantize(x + 4 * BLOCK * record, codes, at + codes_bytes + 2 * lane)
            for i in range(bytes_per_lane):
                simd.store_u8(at + lane * lane_bytes + i * byte_bytes, simd.load_u8(codes + i))

    return put


@njit
def _quantize_8(x, codes, scale_at):
    """Quantise f32 [32] at x. Write i8 [32] at `codes`, and the f16 scale, max |x| / 127, at `scale_at`."""
    first, second = simd.load_f32(x), simd.load_f32(x + 64)
    largest = simd.max_f32(simd.maximum(simd.absolute(first), simd.absolute(second)))
    bits = simd.narrow_f16(largest / np.float32(127))
    simd.store_u16(scale_at, bits)
    scale = simd.widen_f16(bits)
    if scale == np.float32(0):
        scale = np.float32(1)
    low, high = simd.splat_f32(np.float32(-127)), simd.splat_f32(np.float32(127))
    simd.store_i8(codes, simd.nearest_i32(simd.clamp(first / simd.splat_f32(scale), low, high)))
    simd.store_i8(codes + LANES, simd.nearest_i32(simd.clamp(second / simd.splat_f32(scale), low, high)))


@njit
def _quantize_4(x, codes, scale_at):
    """Quantise f32 [32] at x. Write 32 codes of 4 bits at `codes`, the f16 scale and the f16 minimum.

    The codes are 16 bytes: byte i has dim i in its low half, and dim i + 16 in its high half. The scale is (max − min)
    / 15, at `scale_at`. The minimum is 32 bytes after it.
    """
    first, second = simd.load_f32(x), simd.load_f32(x + 64)
    largest = simd.max_f32(simd.maximum(first, second))
    minus = simd.splat_f32(np.float32(-1))
    smallest = -simd.max_f32(simd.maximum(first * minus, second * minus))
    scale_bits, minimum_bits = simd.narrow_f16((largest - smallest) / np.float32(15)), simd.narrow_f16(smallest)
    simd.store_u16(scale_at, scale_bits)
    simd.store_u16(scale_at + 2 * LANES, minimum_bits)
    scale, minimum = simd.widen_f16(scale_bits), simd.splat_f32(simd.widen_f16(minimum_bits))
    if scale == np.float32(0):
        scale = np.float32(1)
    low, high = simd.splat_f32(np.float32(0)), simd.splat_f32(np.float32(15))
    left = simd.nearest_i32(simd.clamp((first - minimum) / simd.splat_f32(scale), low, high))
    right = simd.nearest_i32(simd.clamp((second - minimum) / simd.splat_f32(scale), low, high))
    simd.store_i8(codes, left + right * simd.splat_i32(np.int32(16)))
