"""Partial results of attention: those of one chunk of 256 slots, for neighbouring queries.

    partial of a query and a chunk, f32 [dim + 2]:   Σ e^(s − m) v  [dim]  |  m  |  Σ e^(s − m)

s is a score, m the largest score, v a value. A query's partial has the same bits whatever its neighbours are. Queries
share the blocks that are read, and slots that a query does not see count as e^−∞ = 0. A query's partials are merged in
the order of the chunks.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention.cache_slots import parts_of_chunk, seen_lanes, seen_of_chunk
from infer.compute.backends.cpu.attention.chunk_products import make_add_chunk_values, make_chunk_scores
from infer.compute.backends.cpu.isa import BF16_PAIRS
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.math_functions import exp_scalar, exp_up_to_0, sigmoid, softcapped, softplus
from infer.compute.backends.cpu.records import CHUNK, SCORE_BYTES
from infer.compute.backends.cpu.simd import (
    load_f32,
    load_scalar_f32,
    load_upto,
    splat_f32,
    store_f32,
    store_scalar_f32,
    store_upto,
)

_NEVER = np.float32(-np.inf)


@njit
def seen_of_run(args, row, chunk, first_slot, last_slot):
    """Return (sinks, low, high) of a chunk, for a row's tokens from slot `first_slot` to slot `last_slot`.

    Every slot of the chunk that one of these tokens sees is in [0, sinks) or [low, high). Slots are relative to the
    chunk.
    """
    sinks, low, _ = seen_of_chunk(args, row, chunk, first_slot)
    return sinks, low, seen_of_chunk(args, row, chunk, last_slot)[2]


@njit
def _mask_and_maximum(scores, parts, sinks, low, high, softcap):
    """Softcap and mask one query's scores of a chunk in place, and return the largest.

    `scores` is the address of f32 [256]. `parts` is what `parts_of_chunk` returns: only these blocks are read and
    written. Slots outside [0, sinks) and [low, high) get −inf. If some scores are NaN, any of the scores is returned,
    because e^(s − m) is NaN then. If all are NaN, NaN is returned.
    """
    gap, first, end = parts
    largest = splat_f32(_NEVER)
    at = 0 if gap > 0 else first
    while at < end:
        if at >= low and at + 4 * LANES <= high and softcap == np.float32(0):
            left = simd.larger(load_f32(scores + 4 * at), load_f32(scores + 4 * at + 64))
            right = simd.larger(load_f32(scores + 4 * at + 128), load_f32(scores + 4 * at + 192))
            largest = simd.larger(largest, simd.larger(left, right))
            at += 4 * LANES
            continue
        score = load_f32(scores + 4 * at)
        if softcap != np.float32(0):
            score = softcapped(score, softcap)
        seen = seen_lanes(at, sinks, low, high, score)
        store_f32(scores + 4 * at, seen)
        largest = simd.maximum(seen, largest)
        at = first if at + LANES == gap else at + LANES
    return simd.max_f32(largest)


@njit(forceinline=True)
def _keep_f32(weights, at, p):
    """Store 16 weights, f32, from position `at` on, and return them."""
    store_f32(weights + 4 * at, p)
    return p


@njit(forceinline=True)
def _keep_bf16(weights, at, p):
    """Store 16 weights in bf16 from position `at` on, and return the stored values as floats."""
    return simd.keep_bf16(weights + 2 * at, p)


def _make_exponentials(kv_type: str) -> Any:
    """Return exponentials(scores, parts, m), which replaces one query's scores of a chunk by weights e^(s − m).

    It reads f32 [256] at `scores`. It writes f32 [256], or bf16 [256] for `BF16_PAIRS`, and returns the sum of the
    stored weights. Only the blocks of `parts` are read and written.
    """
    keep = _keep_bf16 if kv_type == BF16_PAIRS else _keep_f32

    @njit
    def exponentials(scores, parts, m):
        gap, first, end = parts
        total, shift = splat_f32(np.float32(0)), splat_f32(m)
        at = 0 if gap > 0 else first
        while at < end:
            where = scores + 4 * at
            if at + 4 * LANES <= (gap if at < gap else end):  # at once: the curve's constants stay in registers
                p, q = exp_up_to_0(load_f32(where) - shift), exp_up_to_0(load_f32(where + 64) - shift)
                r, s = exp_up_to_0(load_f32(where + 128) - shift), exp_up_to_0(load_f32(where + 192) - shift)
                total = total + keep(scores, at, p) + keep(scores, at + LANES, q)
                total = total + keep(scores, at + 2 * LANES, r) + keep(scores, at + 3 * LANES, s)
                at += 4 * LANES
            else:
                total = total + keep(scores, at, exp_up_to_0(load_f32(where) - shift))
                at += LANES
            at = first if at == gap else at
        return simd.sum_f32(total)

    return exponentials


def _make_softmax(kv_type: str) -> Any:
    """Return softmax(columns, args, chunk, parts, scores, out, stride), the first half of the partials of a chunk.

    It replaces `scores`, f32 [column, 256], by weights. It writes m, Σ e^(s − m) and `dim` zeros to each column's
    partial, which is `stride` bytes after the partial of the column before, from `out` on. All maxima are computed
    first: a sum waits for its own maximum, but not for the next one.
    """
    exponentials = _make_exponentials(kv_type)

    @njit
    def softmax(columns, args, chunk, parts, scores, out, stride):
        dim, group = args.dim, args.num_heads // args.num_kv_heads
        for i in range(columns.num):
            sinks, low, high = seen_of_chunk(args, columns.row, chunk, columns.slot + (columns.first + i) // group)
            clear(out + i * stride, dim)
            m = _mask_and_maximum(scores + 4 * CHUNK * i, parts, sinks, low, high, args.softcap)
            store_scalar_f32(out + i * stride + 4 * dim, m)
        for i in range(columns.num):
            m = load_scalar_f32(out + i * stride + 4 * dim)
            if m != _NEVER:
                total = exponentials(scores + 4 * CHUNK * i, parts, m)
                store_scalar_f32(out + i * stride + 4 * dim + 4, total)

    return softmax


class Columns(NamedTuple):
    """The queries of one kv head that are computed together. Query i of a run of tokens belongs to token i // group.

    Attributes:
        row: The cache row of all these tokens.
        slot: The slot of the token to which query 0 belongs.
        first: Number of the first query.
        num: Number of queries.
        queries: Address of the first query, f32 [num, dim].
    """

    row: int
    slot: int
    first: int
    num: int
    queries: int  # where they lie


@njit
def parts_for(columns, args, chunk):
    """Return the slots of a chunk that any of the queries sees, as (parts, (sinks, high)).

    `parts` is what `parts_of_chunk` returns. Slots are relative to the chunk. A query may see slots below `sinks`, and
    slots from its window's start up to `high`.
    """
    group = args.num_heads // args.num_kv_heads
    first_slot = columns.slot + columns.first // group
    last_slot = columns.slot + (columns.first + columns.num - 1) // group
    sinks, low, high = seen_of_run(args, columns.row, chunk, first_slot, last_slot)
    return parts_of_chunk(sinks, low, high), (sinks, high)


@cache
def make_chunk_partials(kv_type: str, is_wide: bool) -> Any:
    """Return partials(columns, args, kv, chunk, scratch, out, stride, after), for one chunk and one kv head.

    It reads the queries, and the chunk's keys and values in the cache, in the form of `kv_type`. If `is_wide`, it reads
    widened blocks behind the scores in the scratch. It overwrites `scratch`: scores f32 [column, 256]. It writes a
    partial for each column, `stride` bytes apart, from `out` on. `after` is the (row, kv head, slot) that the thread
    reads next, for prefetches.
    """
    chunk_scores, add_chunk_values = make_chunk_scores(kv_type, is_wide), make_add_chunk_values(kv_type, is_wide)
    softmax = _make_softmax(kv_type)

    @njit
    def chunk_partials(columns, args, kv, chunk, scratch, out, stride, after):
        (parts, seen), wide = parts_for(columns, args, chunk), scratch + SCORE_BYTES
        chunk_scores(columns, args, kv, chunk, parts, wide, scratch, after)
        softmax(columns, args, chunk, parts, scratch, out, stride)
        add_chunk_values(columns, args, kv, chunk, parts, seen, scratch, wide, out, stride, after)

    return chunk_partials


@njit
def clear(partial, dim):
    """Make a partial of no slots at the address `partial`: sums of 0, and m = −inf."""
    for i in range(0, dim, LANES):
        store_upto(partial + 4 * i, dim - i, splat_f32(np.float32(0)))
    store_scalar_f32(partial + 4 * dim, _NEVER)
    store_scalar_f32(partial + 4 * dim + 4, np.float32(0))


@njit
def merge(into, partial, dim):
    """Merge `partial`, of the next chunk, into `into`, that of the chunks so far. Both are addresses of f32 [dim + 2].

    The one with the smaller m is rescaled by e^(its m − the larger m).
    """
    m_left, m_right = load_scalar_f32(into + 4 * dim), load_scalar_f32(partial + 4 * dim)
    if m_right == _NEVER:
        return
    left, right, m, is_first = np.float32(1), np.float32(1), m_right, m_left == _NEVER
    if is_first:
        left = np.float32(0)
    elif m_left > m_right:
        right, m = exp_scalar(m_right - m_left), m_left
    else:
        left = exp_scalar(m_left - m_right)
    for i in range(0, dim, LANES):
        merged = load_upto(partial + 4 * i, dim - i) * splat_f32(right)
        if not is_first:
            merged = load_upto(into + 4 * i, dim - i) * splat_f32(left) + merged
        store_upto(into + 4 * i, dim - i, merged)
    l_left, l_right = load_scalar_f32(into + 4 * dim + 4), load_scalar_f32(partial + 4 * dim + 4)
    store_scalar_f32(into + 4 * dim, m)
    store_scalar_f32(into + 4 * dim + 4, l_left * left + l_right * right)


@njit(forceinline=True)
def _gate(args, token, head, i):
    """Return 16 gates of a head's outputs, for dims i to i + 15: sigmoid or softplus of the projected gates.

    The gates are f32 [heads × dim] of the token, or f32 [heads] if `are_gates_of_heads`: then all lanes have the
    head's.
    """
    first = args.gates + args.qkv_bytes * token
    if args.are_gates_of_heads != 0:
        gate = splat_f32(load_scalar_f32(first + 4 * head))
    else:
        gate = load_upto(first + 4 * (args.dim * head + i), args.dim - i)
    return softplus(gate) if args.is_gate_softplus != 0 else sigmoid(gate)


@njit
def divide(partial, args, token, head, out):
    """Store attention's result of one head, f32 [dim] at `out`: Σ weight × value / Σ weight, then × the token's gates.

    It reads the merged `partial`, f32 [dim + 2]. The head's sink logit, if there is one, adds e^(sink − m) to the
    divisor.
    """
    dim, factor = args.dim, np.float32(1)
    total = load_scalar_f32(partial + 4 * dim + 4)
    if args.sink_logits != 0:
        m, sink = load_scalar_f32(partial + 4 * dim), load_scalar_f32(args.sink_logits + 4 * head)
        if sink > m:
            factor = exp_scalar(m - sink)
            total = total * factor + np.float32(1)
        else:
            total += exp_scalar(sink - m)
    for i in range(0, dim, LANES):
        value = load_upto(partial + 4 * i, dim - i)
        if args.sink_logits != 0:
            value = value * splat_f32(factor)
        value = value / splat_f32(total)
        if args.gates != 0:
            value = value * _gate(args, token, head, i)
        store_upto(out + 4 * i, dim - i, value)
