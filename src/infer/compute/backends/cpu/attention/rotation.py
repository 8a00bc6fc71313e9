"""A token's heads before attention: the norm of q, k and v, the rotation of q and k, and storing k and v in the cache.

Heads are normalised by themselves, or all heads of a token together. Queries are also scaled.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import inverse_rms
from infer.compute.backends.cpu.attention.cache_blocks import (
    make_mix,
    make_prepare_query,
    make_store_key,
    make_store_value,
)
from infer.compute.backends.cpu.attention.cache_slots import make_block_at, slot_of
from infer.compute.backends.cpu.attention.partition import is_split
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.records import MAX_HEAD_DIM, NORM_AFTER, NORM_CENTRED
from infer.compute.backends.cpu.simd import load_scalar_f32, load_upto, splat_f32, store_scalar_f32, store_upto
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_share

_HEAD_BYTES = 4 * MAX_HEAD_DIM
_LEAST = 32  # heads of 16 tokens that a thread takes at once


@njit(forceinline=True)
def _norm_of_all(args, which, x, heads):
    """Return 1 / rms over all heads of a token, if they are normalised together; else 1.

    `which` is 0 for q, 1 for k. `x` is the address of f32 [heads × dim].
    """
    if args.norms[which] == 0 or args.norm_strides[which] == 0 or args.norm_form == NORM_CENTRED:
        return np.float32(1)
    return inverse_rms(x, args.dim * heads, args.eps[which])


@njit(forceinline=True)
def _norm_of_head(args, which, x, head, of_all):
    """Return (address of the head's norm weight, or 0, mean that is subtracted, or 0, factor) of one head.

    `x` is the address of f32 [dim], and `of_all` is the result of `_norm_of_all`.
    """
    weight, stride, factor, mean = args.norms[which], args.norm_strides[which], of_all, np.float32(0)
    if weight != 0 and args.norm_form == NORM_CENTRED:
        mean, factor = _centring(x, args.dim, args.eps[which])
    elif weight != 0 and stride == 0:
        factor = inverse_rms(x, args.dim, args.eps[which])
    return weight + stride * head, mean, factor


@njit
def _centring(x, dim, eps):
    """Return the mean of f32 [dim], and 1 / sqrt(variance + eps)."""
    total, squares = np.float32(0), np.float32(0)
    for i in range(dim):
        total += load_scalar_f32(x + 4 * i)
    mean = total / np.float32(dim)
    for i in range(dim):
        squares += (load_scalar_f32(x + 4 * i) - mean) * (load_scalar_f32(x + 4 * i) - mean)
    return mean, np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)


@njit
def _rotate_head(x, weight, mean, factor, is_after, cos, sin, half, dim, scale, out):
    """Store scale × rotate((x − mean) × factor × weight) at out, or scale × weight × rotate(x × factor) if `is_after`.

    x, `weight` and out are f32 [dim], and out may not overlap x. `weight` 0 means no norm, so `factor` is not used.
    `cos` and `sin` are f32 [half], or 0 for no rotation. Element i < half is rotated with element half + i; those from
    2 × half on stay. Nothing beyond `dim` is read or written, and addresses need only the alignment of a float.
    """
    for i in range(0, dim, LANES):
        vector = load_upto(x + 4 * i, dim - i)
        if weight != 0:
            vector = (vector - splat_f32(mean)) * splat_f32(factor)
            if not is_after:
                vector = vector * load_upto(weight + 4 * i, dim - i)
        store_upto(out + 4 * i, dim - i, vector)
    for i in range(0, half if cos != 0 else 0, LANES):
        left, right, room = out + 4 * i, out + 4 * (half + i), half - i
        first, second = load_upto(left, room), load_upto(right, room)
        c, s = load_upto(cos + 4 * i, room), load_upto(sin + 4 * i, room)
        store_upto(left, room, first * c - second * s)
        store_upto(right, room, second * c + first * s)
    for i in range(0, dim if weight != 0 and is_after else 0, LANES):
        store_upto(out + 4 * i, dim - i, load_upto(out + 4 * i, dim - i) * load_upto(weight + 4 * i, dim - i))
    for i in range(0, dim if scale != np.float32(1) else 0, LANES):
        store_upto(out + 4 * i, dim - i, load_upto(out + 4 * i, dim - i) * splat_f32(scale))


@njit
def _store_finite(x, dim, factor, out):
    """Store x × factor at out, and 0 for elements that are not finite."""
    for i in range(0, dim, LANES):
        store_upto(out + 4 * i, dim - i, simd.finite(load_upto(x + 4 * i, dim - i) * splat_f32(factor)))


@njit
def _times_0(x, dim):
    """Return Σ x × 0: 0, or NaN if an element is not finite."""
    total, zero = splat_f32(np.float32(0)), np.float32(0)
    for i in range(0, dim // LANES * LANES, LANES):
        total = total + simd.load_f32(x + 4 * i) * splat_f32(zero)
    found = simd.sum_f32(total)
    for i in range(dim // LANES * LANES, dim):
        found += load_scalar_f32(x + 4 * i) * zero
    return found


@njit(forceinline=True)
def _of_token(args, state, token):
    """Return (position, address of the cosines, address of the sines) of a token.

    The addresses are of f32 [half], or 0.
    """
    position, row = state.positions[token], state.rows[token]
    at = 4 * args.half * position + args.set_bytes * args.rope_sets[row]
    return position, 0 if args.cos == 0 else args.cos + at, args.sin + at


def make_store_queries(kv_type: str) -> Any:
    """Return store(args, state, kv, first, end), which makes queries [first, end) of a kv head.

    Queries are numbered as [token, query head of the group]. It reads `q`, the norms and the rotations. It writes f32
    [kv heads, tokens × group, dim] at `queries`, as `make_prepare_query` prepares them. With sinks it writes a second
    set at `sink_queries_at`, rotated back to `last_position`.
    """
    prepare = make_prepare_query(kv_type)

    @njit
    def store_queries(args, state, kv, first, end):
        dim, group = args.dim, args.num_heads // args.num_kv_heads
        of_all, of_token = np.float32(1), -1
        for column in range(first, end):
            token, head = column // group, kv * group + column % group
            position, cos, sin = _of_token(args, state, token)
            scale = args.scale
            if args.query_scales != 0:
                scale *= load_scalar_f32(args.query_scales + 4 * position)
            x = args.q + args.qkv_bytes * token
            if token != of_token:
                of_all, of_token = _norm_of_all(args, 0, x, args.num_heads), token
            x += 4 * dim * head
            weight, mean, factor = _norm_of_head(args, 0, x, head, of_all)
            to = args.queries + 4 * dim * (kv * state.num_tokens * group + column)
            is_after = args.norm_form == NORM_AFTER
            _rotate_head(x, weight, mean, factor, is_after, cos, sin, args.half, dim, scale, to)
            prepare(to, dim)
            if args.sink_queries_at != 0:
                back, to = 4 * args.half * min(0, args.last_position - position), to + args.sink_queries_at
                _rotate_head(x, weight, mean, factor, is_after, cos + back, sin + back, args.half, dim, scale, to)
                prepare(to, dim)

    return store_queries


def make_rotate(kv_type: str) -> Callable[..., None]:
    """Return the command that stores k and v in the cache, and makes queries from q if threads share them.

    It reads `q`, `k` and `v`, whose tokens are `qkv_bytes` apart. It writes one slot per token in the blocks of `keys`
    and `values`, in the form of `kv_type`, and `queries`. A key with an element that is not finite, or whose value has
    one, is marked by NaN; such elements of values are 0. Heads of 16 tokens go to one thread, because their keys share
    cache lines.
    """
    rotate_share = _make_rotate_share(kv_type)

    def rotate(args, state, thread, num_threads):
        num_queries = 0  # but for few, each is made by who needs it
        if args.only_stores == 0 and is_split(args, state, num_threads):
            num_queries = args.num_heads
        total = (state.num_tokens + LANES - 1) // LANES * (num_queries + 2 * args.num_new_heads)
        begin_units(state, thread)
        begin, stop = take_share(state, thread, num_threads, total, _LEAST)
        while begin < stop:
            rotate_share(args, state, num_queries, begin, stop)
            begin, stop = take_share(state, thread, num_threads, total, _LEAST)

    return rotate


def _make_rotate_share(kv_type: str) -> Any:
    """Return rotate(args, state, num_queries, begin, stop), which processes some heads.

    For each 16 tokens, q's heads come first, then k's and v's.
    """
    mix, store_key, store_value = make_mix(kv_type), make_store_key(kv_type), make_store_value(kv_type)
    store_queries, block_at = make_store_queries(kv_type), make_block_at(kv_type)

    @njit
    def rotate_share(args, state, num_queries, begin, stop):
        dim, kv_heads, tokens, rotated = args.dim, args.num_new_heads, state.num_tokens, simd.stack(_HEAD_BYTES)
        group, of_16 = args.num_heads // args.num_kv_heads, num_queries + 2 * kv_heads
        end = min(tokens, (stop + of_16 - 1) // of_16 * LANES)
        for token in range(begin // of_16 * LANES, end):
            first = token // LANES * of_16
            for head in range(max(0, begin - first), min(num_queries, stop - first)):
                column = token * group + head % group
                store_queries(args, state, head // group, column, column + 1)
            if kv_heads == 0:
                continue
            first += num_queries
            position, cos, sin = _of_token(args, state, token)
            row, ahead = state.rows[token], args.qkv_bytes * token
            k, v = args.k + ahead, args.v + ahead
            slot, of_all = slot_of(args, row, position), _norm_of_all(args, 1, k, kv_heads)
            for item in range(max(0, begin - first), min(2 * kv_heads, stop - first)):
                head, at = item // 2, 4 * dim * (item // 2)
                keys, values = block_at(args, row, head, slot)
                if item % 2 == 0:
                    weight, mean, factor = _norm_of_head(args, 1, k + at, head, of_all)
                    is_after, one = args.norm_form == NORM_AFTER, np.float32(1)
                    _rotate_head(k + at, weight, mean, factor, is_after, cos, sin, args.half, dim, one, rotated)
                    if _times_0(rotated, dim) + _times_0(v + at, dim) != np.float32(0):
                        store_scalar_f32(rotated, np.float32(np.nan))  # as `kv_layout.storable`
                    mix(rotated, dim)
                    store_key(keys, slot % LANES, dim, rotated)
                else:
                    factor = np.float32(1)
                    if args.v_eps >= 0:
                        factor = inverse_rms(v + at, dim, args.v_eps)
                    _store_finite(v + at, dim, factor, rotated)
                    store_value(values, slot % LANES, dim, rotated)

    return rotate_share
