"""Partials of a chunk of slots for neighbouring queries: (largest score m, Σ e^(s − m), Σ e^(s − m) v) of each.

A query's partial has the same bits whatever its neighbours are. Queries share the blocks that are read, and slots that
a query does not see count as e^−∞ = 0. A query's partials are merged in the order of the chunks. A partial is stored as
dim floats of the last sum, then m, then the first sum.
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
    """Return (sinks, low, high).

    [0, sinks) and [low, high) include the slots of a chunk that tokens from one slot to another see.
    """
    sinks, low, _ = seen_of_chunk(args, row, chunk, first_slot)
    return sinks, low, seen_of_chunk(args, row, chunk, last_slot)[2]


@njit
def _mask_and_maximum(scores, parts, sinks, low, high, softcap):
    """Cap and mask the scores of a chunk's parts in place, and return the largest.

    If some scores are NaN it is any of the scores, because e^(s − m) is NaN then. It is NaN if all of them are.
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
    """Store the 16 weights of a column from position `at` on, and return what is stored."""
    store_f32(weights + 4 * at, p)
    return p


@njit(forceinline=True)
def _keep_bf16(weights, at, p):
    return simd.keep_bf16(weights + 2 * at, p)


def _make_exponentials(kv_type: str) -> Any:
    """Return exponentials(scores, parts, m).

    It replaces the scores of a chunk's parts by e^(s − m), in bf16 for `BF16_PAIRS`, and returns the sum of what it
    stores.
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
    """Return softmax(columns, args, chunk, parts, scores, out, stride).

    It replaces scores by e^(s − m), stores m and the sum in the partials, and sets the partials' last sums to 0. All
    maxima are computed first: a sum waits for its own maximum, but not for the next one.
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
    """Queries [first, first + num) of neighbouring tokens. The first token, to which query 0 belongs, is at `slot`."""

    row: int
    slot: int
    first: int
    num: int
    queries: int  # where they lie


@njit
def parts_for(columns, args, chunk):
    """Return the slots of a chunk that any of the queries sees.

    They are the parts as `parts_of_chunk` gives them, and (sinks, high). Slots below `sinks` are seen, and those from
    the window's start up to `high`.
    """
    group = args.num_heads // args.num_kv_heads
    first_slot = columns.slot + columns.first // group
    last_slot = columns.slot + (columns.first + columns.num - 1) // group
    sinks, low, high = seen_of_run(args, columns.row, chunk, first_slot, last_slot)
    return parts_of_chunk(sinks, low, high), (sinks, high)


@cache
def make_chunk_partials(kv_type: str, is_wide: bool) -> Any:
    """Return partials(columns, args, kv, chunk, scratch, out, stride, after).

    It stores partials `stride` bytes apart. `after` is the (row, kv head, slot) that is read next. Wide blocks follow
    the scores in the scratch.
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
    for i in range(0, dim, LANES):
        store_upto(partial + 4 * i, dim - i, splat_f32(np.float32(0)))
    store_scalar_f32(partial + 4 * dim, _NEVER)
    store_scalar_f32(partial + 4 * dim + 4, np.float32(0))


@njit
def merge(into, partial, dim):
    """Merge the partial of the next chunk into that of the chunks so far: the one with the smaller m is rescaled."""
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
    """Return the factors of a head's elements from i on."""
    first = args.gates + args.qkv_bytes * token
    if args.are_gates_of_heads != 0:
        gate = splat_f32(load_scalar_f32(first + 4 * head))
    else:
        gate = load_upto(first + 4 * (args.dim * head + i), args.dim - i)
    return softplus(gate) if args.is_gate_softplus != 0 else sigmoid(gate)


@njit
def divide(partial, args, token, head, out):
    """Store the values' sum divided by the sum of weights, and of the head's sink if it has one: attention's result.

    It is multiplied by the token's gates, if there are any.
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
