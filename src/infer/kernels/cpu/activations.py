"""Activations in the form that the tiles read: normalised, quantised in blocks of 32, and lying in panels of 16 tokens.

    panel 0 (tokens 0–15)                              panel 1 (16–31)      the last panel is as narrow as it has tokens
    [block 0: token 0, 1, … 15] [block 1: …] …         [block 0: …] …

so a token's records lie a constant distance from its neighbours', whatever the number of tokens.
`tiles` describes a record; for float weights a record is 8 floats. A block's scale is max |x| / 32512 (or / 127).
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import BLOCK, PANEL, PLANE_BYTES, SCALE_AT, UNIT
from infer.kernels.cpu.simd import (
    absolute,
    load_f32,
    load_i64,
    load_scalar_f32,
    max_f32,
    maximum,
    nearest_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i8,
    store_i32,
    store_scalar_f32,
    sum_f32,
    sum_i32,
)

_SMALLEST = np.float32(1e-33)  # a block below this counts as this, so that its scale is a normal number


@njit(inline="always")
def record_address(base, token, num_tokens, num_records, record, record_bytes):  # type: ignore[no-untyped-def]
    panel = token // PANEL * PANEL
    width = min(PANEL, num_tokens - panel)
    return base + (panel * num_records + record * width + token - panel) * record_bytes


@njit(inline="always")
def quantize_block(first, second, planes, at):  # type: ignore[no-untyped-def]
    """32 values into the record at `at`."""
    unit = np.float32(32512.0) if planes == 2 else np.float32(127.0)
    largest = max_f32(maximum(maximum(absolute(first), absolute(second)), splat_f32(_SMALLEST)))
    inverse = splat_f32(unit / largest)
    scale = largest / unit
    a, b = nearest_i32(first * inverse), nearest_i32(second * inverse)
    if planes == 2:
        high_a, high_b = simd.shift_round_8(a), simd.shift_round_8(b)
        store_i8(at, high_a)
        store_i8(at + 16, high_b)
        store_i8(at + PLANE_BYTES, a - high_a * splat_i32(np.int32(256)))
        store_i8(at + PLANE_BYTES + 16, b - high_b * splat_i32(np.int32(256)))
    else:
        store_i8(at, a)
        store_i8(at + 16, b)
    sum_a, sum_b = sum_i32(a), sum_i32(b)
    store_scalar_f32(at + SCALE_AT, scale)
    store_scalar_f32(at + SCALE_AT + 4, scale * np.float32(sum_a + sum_b))
    sums = at + BLOCK * planes + 8
    store_i32(sums, -sum_a)
    store_i32(sums + 4, -sum_b)


@njit(inline="always")
def inverse_rms(x, features, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x²) + eps)"""
    squares = splat_f32(np.float32(0))
    whole = features // 16 * 16
    for i in range(0, whole, 16):
        v = load_f32(x + 4 * i)
        squares = simd.fma(v, v, squares)
    total = sum_f32(squares)
    for i in range(whole, features):
        total += load_scalar_f32(x + 4 * i) * load_scalar_f32(x + 4 * i)
    return np.float32(1) / np.sqrt(total / np.float32(features) + eps)


@njit
def _quantize_token(x, weight, factor, args, token, num_tokens, out):  # type: ignore[no-untyped-def]
    num_records = args.features // BLOCK
    record_bytes = BLOCK * args.planes + 16
    scale = splat_f32(factor)
    for record in range(num_records):
        at = 4 * BLOCK * record
        first, second = load_f32(x + at), load_f32(x + at + 64)
        if weight != 0:
            first = first * scale * load_f32(weight + at)
            second = second * scale * load_f32(weight + at + 64)
        to = record_address(out, token, num_tokens, num_records, record, record_bytes)
        quantize_block(first, second, args.planes, to)


@njit
def _keep_token(x, weight, factor, args, token, num_tokens, out):  # type: ignore[no-untyped-def]
    num_records = (args.features + UNIT - 1) // UNIT
    for i in range(num_records * UNIT):
        value = np.float32(0)
        if i < args.features:
            value = load_scalar_f32(x + 4 * i)
            if weight != 0:
                value = value * factor * load_scalar_f32(weight + 4 * i)
        to = record_address(out, token, num_tokens, num_records, i // UNIT, 4 * UNIT)
        store_scalar_f32(to + 4 * (i % UNIT), value)


def make_normalize() -> Callable[..., None]:
    """x × weight / rms(x), quantised: the tokens are shared out, or a single one done by every thread for itself."""

    def normalize(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        num_tokens = state.num_wanted if args.of_wanted else state.num_tokens
        first, step, out = thread, num_threads, args.out
        if num_tokens == 1 and args.private_bytes != 0:
            first, out = 0, args.out + thread * args.private_bytes
        for token in range(first, num_tokens, step):
            source = load_i64(state.wanted + 8 * token) if args.of_wanted else token
            x = args.x + 4 * args.features * source
            factor = np.float32(1)
            if args.weight != 0:
                factor = inverse_rms(x, args.features, args.eps)
            if args.planes == 0:
                _keep_token(x, args.weight, factor, args, token, num_tokens, out)
            else:
                _quantize_token(x, args.weight, factor, args, token, num_tokens, out)

    return normalize


def make_add_normalized() -> Callable[..., None]:
    """residual += y × weight / rms(y), tokens shared out."""

    def add_normalized(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        whole = args.features // 16 * 16
        for token in range(thread, state.num_tokens, num_threads):
            y, residual = args.y + 4 * args.features * token, args.residual + 4 * args.features * token
            factor = inverse_rms(y, args.features, args.eps)
            for i in range(0, whole, 16):
                normed = load_f32(y + 4 * i) * splat_f32(factor) * load_f32(args.weight + 4 * i)
                store_f32(residual + 4 * i, load_f32(residual + 4 * i) + normed)
            for i in range(whole, args.features):
                value = load_scalar_f32(y + 4 * i) * factor * load_scalar_f32(args.weight + 4 * i)
                store_scalar_f32(residual + 4 * i, load_scalar_f32(residual + 4 * i) + value)

    return add_normalized
