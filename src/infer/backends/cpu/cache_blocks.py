"""What a position's key and value become when they are cached: bytes that `infer.quantization.kv_layout` defines."""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from infer.backends.cpu import simd
from infer.backends.cpu.cached_forms import KEYS, VALUES, Form
from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.quantized_tiles import emit_mix
from infer.backends.cpu.simd import load_f32, load_scalar_f32, splat_f32, splat_i32, store_scalar_f32
from infer.quantization.kv_formats import QUANTIZED

_CODES = BLOCK
_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@intrinsic
def mix_32(context: Any, where: Any) -> Any:
    """`kv_layout.mix` of 32 floats, in place."""

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        emit_mix(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic(prefer_literal=True)
def put_16(context: Any, kv_type: Any, apart: Any, where: Any, x: Any) -> Any:
    """16 floats as the cache's, each so many elements after the one before."""
    name, step = kv_type.literal_value, apart.literal_value

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        *_, where, stored = arguments
        if name != "f32":
            stored = simd.narrow_f16(b, stored) if name == "f16" else simd.narrow_bf16(b, stored)
        if step == 1:
            simd.store(b, where, stored, _FLOAT_BYTES[name])
        else:
            for lane in range(LANES):
                element = b.extract_element(stored, simd.constant(simd.I32, lane))
                simd.store(b, simd.offset(b, where, lane * step * _FLOAT_BYTES[name]), element, _FLOAT_BYTES[name])
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
        return _make_put_codes(_quantize_8, KEYS[kv_type], 1, LANES)
    return _make_put_floats(kv_type, LANES)


def make_put_value(kv_type: str) -> Any:
    """put(block, lane, dim, x), as for keys."""
    if kv_type in QUANTIZED:
        quantize, form = _quantize_8 if kv_type == "q8" else _quantize_4, VALUES[kv_type]
        return _make_put_codes(quantize, form, form.codes_bytes // LANES, 1)
    return _make_put_floats(kv_type, 1)


def _make_put_floats(kv_type: str, apart: int) -> Any:
    """An element of a position lies so many elements after the one before: 16, as positions are neighbours, or 1."""
    size, is_f16 = _FLOAT_BYTES[kv_type], kv_type == "f16"

    @njit
    def put(block, lane, dim, x):  # type: ignore[no-untyped-def]
        to, whole = block + lane * size * (dim if apart == 1 else 1), dim // LANES * LANES
        for i in range(0, whole, LANES):
            put_16(kv_type, apart, to + i * apart * size, load_f32(x + 4 * i))
        for i in range(whole, dim):
            _put(to + i * apart * size, size, is_f16, load_scalar_f32(x + 4 * i))

    return put


def _make_put_codes(quantize: Any, form: Form, lane_bytes: int, byte_bytes: int) -> Any:
    """Byte i of a position's codes lies at lane × lane_bytes + i × byte_bytes of each record."""
    codes_bytes, record_bytes = form.codes_bytes, form.record_bytes
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
