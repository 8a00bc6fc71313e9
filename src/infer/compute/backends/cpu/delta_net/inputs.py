"""Convolutions over tokens: of short convolutions, and of the inputs of gated delta nets.

A short convolution is C × conv(B × u) of each token, with what the cache keeps of the tokens before the step. A delta
net's inputs are the convolution with its silu, the norms of q and k, and the gates.
"""

from typing import NamedTuple

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import quantize_row
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.math_functions import sigmoid, silu, softplus
from infer.compute.backends.cpu.prefetch import prefetch
from infer.compute.backends.cpu.records import MAX_TAPS
from infer.compute.backends.cpu.simd import (
    Value,
    address,
    load_f32,
    load_i64,
    load_scalar_f32,
    load_upto,
    operation,
    splat_f32,
    store_f32,
    store_i64,
    store_scalar_f32,
    store_upto,
    sum_f32,
)
from infer.compute.operands.limits import RECENT_PAGES

_SOURCE_BYTES = 8 * MAX_TAPS
_TOKENS_AHEAD = 4  # whose inputs are prefetched: each lies in a row of its own
_EPS = np.float32(1e-6)  # of the norms of q and k


@operation(types.void, address)
def _prefetch(b: Builder, where: Value) -> None:
    prefetch(b, where, 4 * LANES)


class PageTokens(NamedTuple):
    """Tokens of one row that follow each other in a step, and lie in one page."""

    first: int  # number in the step
    num: int
    row: int
    position: int  # of the first
    num_before: int  # tokens of this row before the first in this step
    page: int
    place: int  # of the first, in the page


@njit(forceinline=True)
def page_of(args, row, index):
    return args.table[row * args.table_stride + index]


@njit(forceinline=True)
def column(args, token, index):
    """Return the address of a column of a token's projection."""
    return args.projected + 4 * (token * args.num_columns + index)


@njit
def convolve(args, tokens, channel, num_channels, out, out_bytes):
    """Store silu(convolution) of some channels of each token, and their inputs in the page.

    Reads the channels from `channel` on of `projected`, and for the taps before the step's first token those of the
    page; before position 0 there is nothing to add. Writes f32 [tokens, num_channels] at `out`, with rows `out_bytes`
    apart. `channel` and `num_channels` are multiples of 16.
    """
    sources = simd.stack(_SOURCE_BYTES)
    kept = args.inputs + tokens.page * args.page_bytes + 4 * args.num_channels * tokens.place
    for t in range(tokens.num):
        for tap in range(args.num_taps):
            store_i64(sources + 8 * tap, _input_of(args, tokens, t - (args.num_taps - 1 - tap)))
        for i in range(4 * channel, 4 * (channel + num_channels), 4 * LANES):
            total = splat_f32(np.float32(0))
            for tap in range(args.num_taps):
                source = load_i64(sources + 8 * tap)
                if source != 0:
                    taps = args.taps + 4 * tap * args.num_channels
                    total = simd.fma(load_f32(taps + i), load_f32(source + i), total)
            own = column(args, tokens.first + t, 0) + i
            _prefetch(own + _TOKENS_AHEAD * 4 * args.num_columns)  # which may be beyond the last: nothing is read
            store_f32(kept + i, load_f32(own))
            store_f32(out + i - 4 * channel, silu(total))
        kept, out = kept + 4 * args.num_channels, out + out_bytes


@njit
def _input_of(args, tokens, index):
    """Return the address of the inputs of the token `index` tokens after the first; 0 before position 0.

    They are f32 [num_channels].

    Tokens of the step are read from `projected`, earlier ones from their page.
    """
    position = tokens.position + index
    if position < 0:
        return 0
    if index >= -tokens.num_before:
        return column(args, tokens.first + index, 0)
    page = page_of(args, tokens.row, position // args.page_tokens)
    return args.inputs + page * args.page_bytes + 4 * args.num_channels * (position % args.page_tokens)


@njit
def store_keys_and_queries(args, tokens, key_head, out):
    """Store k / |k| and q / (|q| √dim) as f32 [token, 2, dim] at `out`, and k in the page.

    The page's keys are transposed, f32 [dim, page_tokens], so a token's k is written as one float per row.
    """
    dim, row = args.key_dim, 4 * args.page_tokens
    keys = args.keys + tokens.page * args.page_bytes + key_head * dim * row + 4 * tokens.place
    convolve(args, tokens, (args.num_key_heads + key_head) * dim, dim, out, 8 * dim)
    convolve(args, tokens, key_head * dim, dim, out + 4 * dim, 8 * dim)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for t in range(tokens.num):
        k = out + 8 * dim * t
        _normalize(k, dim, np.float32(1))
        _normalize(k + 4 * dim, dim, scale)
        for i in range(dim):
            store_scalar_f32(keys + row * i + 4 * t, load_scalar_f32(k + 4 * i))


@njit(forceinline=True)
def _normalize(x, dim, scale):
    squares = splat_f32(np.float32(0))
    for at in range(x, x + 4 * dim, 4 * LANES):
        squares = simd.fma(load_f32(at), load_f32(at), squares)
    factor = splat_f32(scale / np.sqrt(sum_f32(squares) + _EPS))
    for at in range(x, x + 4 * dim, 4 * LANES):
        store_f32(at, load_f32(at) * factor)


@njit
def store_gates(args, tokens, value_head, log_alphas, betas):
    """Store log α and β of each token, for a value head, as f32 [tokens].

    Reads the head's columns of a and b in `projected`, and its `dt_bias` and `decay`. Whole vectors are
    written, so both arrays have room for a multiple of 16.
    """
    last = args.num_columns - args.num_value_heads + value_head
    for t in range(tokens.num):
        a = column(args, tokens.first + t, last)
        store_scalar_f32(log_alphas + 4 * t, load_scalar_f32(a))
        store_scalar_f32(betas + 4 * t, load_scalar_f32(a - 4 * args.num_value_heads))
    bias = splat_f32(load_scalar_f32(args.dt_bias + 4 * value_head))
    decay = splat_f32(load_scalar_f32(args.decay + 4 * value_head))
    for at in range(0, 4 * tokens.num, 4 * LANES):
        store_f32(log_alphas + at, decay * softplus(load_f32(log_alphas + at) + bias))
        store_f32(betas + at, sigmoid(load_f32(betas + at)) * splat_f32(args.beta_scale))


def short_conv(args, state, thread, num_threads):
    """Store C × conv(B × u) of each token, and its B × u in the cache. Neighbouring tokens go to one thread.

    Reads `projected`, f32 [tokens, 3 × features] of B, C and u, `taps`, f32 [num_taps, features], and the cached B × u
    of earlier tokens. Writes `out`, f32 [tokens, features], the activation records at `quantized` if there are any, and
    f32 [features] per token in the page. A token whose page is overwritten later in the same step stores nothing there.
    """
    num_tokens, width, page_tokens = state.num_tokens, 4 * args.features, 1 << args.page_bits
    for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
        row, position = state.rows[token], state.positions[token]
        projected, out = args.projected + 3 * width * token, args.out + width * token
        num_before = 0  # of the taps' tokens in this step
        while num_before < args.num_taps - 1 and num_before < token and state.rows[token - num_before - 1] == row:
            num_before += 1
        later = token + RECENT_PAGES * page_tokens  # which overwrites what this one would store in a page of the step
        first = token - (position & (page_tokens - 1))
        goes_on = first < 0 or state.rows[first] != row  # the page is older than the step, and shares no memory
        is_kept = goes_on or later >= num_tokens or state.rows[later] != row
        kept = _kept_input(args, row, position)
        for i in range(0, args.features, LANES):
            room, at = args.features - i, 4 * i
            total = splat_f32(np.float32(0))
            if args.bias != 0:
                total = load_upto(args.bias + at, room)
            for tap in range(args.num_taps):
                back = args.num_taps - 1 - tap
                if back > position:
                    continue
                if back <= num_before:
                    source = projected - 3 * width * back + at
                    value = load_upto(source, room) * load_upto(source + 2 * width, room)
                    if back == 0 and is_kept:
                        store_upto(kept + at, room, value)
                else:
                    value = load_upto(_kept_input(args, row, position - back) + at, room)
                total = simd.fma(load_upto(args.taps + width * tap + at, room), value, total)
            store_upto(out + at, room, load_upto(projected + width + at, room) * total)
        if args.quantized != 0:
            quantize_row(out, 0, np.float32(1), args, token, num_tokens, args.quantized)


@njit(forceinline=True)
def _kept_input(args, row, position):
    """Return the address of the cached B × u, f32 [features], of a row's token at this position."""
    page = args.table[row * args.table_stride + (position >> args.page_bits)]
    return args.inputs + page * args.page_bytes + 4 * args.features * (position & ((1 << args.page_bits) - 1))
