"""Attention over a cache: rotate and append, attend in chunks of slots, merge and quantise.

A row's slots are cut into chunks of 256, always at multiples of 256. A chunk gives a partial result for a query,
(largest score m, Σ e^(s − m), Σ e^(s − m) v), and a query's partials are merged in the order of the chunks
(online softmax, arXiv:1805.02867). A few tokens share the chunks out over threads, many tokens walk them in sequence
with the keys and values of a chunk in the cache: the same partials, merged in the same order, so the same bits.
A chunk may lie in several pages: its sums go on from one to the next, so that bits do not depend on pages either.

Queries lie rotated and scaled as [kv head, token, query head of the group, dim]: the columns of a tile are neighbours.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.kernels.cpu import simd
from infer.kernels.cpu.activations import quantize_block, record_address
from infer.kernels.cpu.cache_blocks import make_mix, make_put_key, make_put_value
from infer.kernels.cpu.cache_slots import (
    add_chunk_values,
    block_at,
    chunk_scores,
    chunks_seen,
    parts_of_chunk,
    seen_lanes,
    seen_of_chunk,
    slot_of,
)
from infer.kernels.cpu.curves import softcapped
from infer.kernels.cpu.layouts import BLOCK, LANES
from infer.kernels.cpu.records import CHUNK, MAX_HEAD_DIM, SPLIT_TOKENS
from infer.kernels.cpu.rotation import norm_of_all, norm_of_head, rotate_head
from infer.kernels.cpu.simd import (
    load_f32,
    load_i64,
    load_scalar_f32,
    splat_f32,
    store_f32,
    store_scalar_f32,
)

_COLUMNS = 8
_COLUMNS_PER_ITEM = 64
_SCORE_BYTES = 4 * _COLUMNS * CHUNK
_SUM_BYTES = 4 * _COLUMNS * (MAX_HEAD_DIM + LANES)
_RESULT_BYTES = 4 * _COLUMNS_PER_ITEM * (MAX_HEAD_DIM + LANES)
_HEAD_BYTES = 4 * (MAX_HEAD_DIM + LANES)
_NEVER = np.float32(-np.inf)


def make_rotate(kv_type: str) -> Callable[..., None]:
    """q → queries; k, v → cache. Tokens are shared out, or a single one done by every thread for itself."""
    mix, put_key, put_value = make_mix(kv_type), make_put_key(kv_type), make_put_value(kv_type)

    def rotate(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        dim, kv_heads = args.dim, args.num_kv_heads
        group = args.num_heads // kv_heads
        tokens, first, step, queries = state.num_tokens, thread, num_threads, args.queries
        if tokens == 1:
            first, step, queries = 0, 1, queries + thread * args.private_bytes
        rotated = simd.stack(_HEAD_BYTES)
        for token in range(first, tokens, step):
            position, row = load_i64(state.positions + 8 * token), load_i64(state.rows + 8 * token)
            x = args.qkv + 4 * dim * (args.num_heads + 2 * kv_heads) * token
            cos = 0 if args.cos == 0 else args.cos + 4 * args.half * position
            sin = args.sin + 4 * args.half * position
            of_all_q = norm_of_all(args, 0, x, args.num_heads)
            of_all_k = norm_of_all(args, 1, x + 4 * dim * args.num_heads, kv_heads)
            for head in range(args.num_heads):
                weight, factor = norm_of_head(args, 0, x + 4 * dim * head, head, of_all_q)
                to = queries + 4 * dim * ((head // group * tokens + token) * group + head % group)
                rotate_head(x + 4 * dim * head, weight, factor, cos, sin, args.half, dim, args.scale, to)
                mix(to, dim)
                if args.far_bytes != 0:
                    far, also = 4 * args.half * min(0, args.furthest - position), to + args.far_bytes
                    where = x + 4 * dim * head
                    rotate_head(where, weight, factor, cos + far, sin + far, args.half, dim, args.scale, also)
                    mix(also, dim)
            for head in range(kv_heads):
                k = x + 4 * dim * (args.num_heads + head)
                weight, factor = norm_of_head(args, 1, k, head, of_all_k)
                rotate_head(k, weight, factor, cos, sin, args.half, dim, np.float32(1), rotated)
                slot = slot_of(args, row, position)
                keys, values = block_at(kv_type, args, row, head, slot)
                mix(rotated, dim)
                put_key(keys, slot % LANES, dim, rotated)
                put_value(values, slot % LANES, dim, k + 4 * dim * kv_heads)

    return rotate


@njit
def _softmax_part(scores, parts, sinks, low, high, softcap):  # type: ignore[no-untyped-def]
    """Scores → e^(s − m) in place over the parts; only [0, sinks) and [low, high) are seen. (m, sum)."""
    gap, first, end = parts
    begin = 0 if gap > 0 else first
    largest = splat_f32(_NEVER)
    at = begin
    while at < end:
        score = load_f32(scores + 4 * at)
        if softcap != np.float32(0):
            score = softcapped(score, softcap)
        seen = seen_lanes(at, sinks, low, high, score)
        store_f32(scores + 4 * at, seen)
        largest = simd.maximum(seen, largest)
        at = first if at + LANES == gap else at + LANES
    m = simd.max_f32(largest)
    total = splat_f32(np.float32(0))
    if m == _NEVER:
        return m, np.float32(0)
    shift = splat_f32(m)
    at = begin
    while at < end:
        p = simd.exp(load_f32(scores + 4 * at) - shift)
        store_f32(scores + 4 * at, p)
        total = total + p
        at = first if at + LANES == gap else at + LANES
    return m, simd.sum_f32(total)


@njit
def _merge(into, partial, dim):  # type: ignore[no-untyped-def]
    """(O, m, l) of the chunks so far and of the next one; each lies as dim floats, then m and l."""
    m_left, m_right = load_scalar_f32(into + 4 * dim), load_scalar_f32(partial + 4 * dim)
    if m_right == _NEVER:
        return
    m = m_left if m_left > m_right else m_right
    left, right = np.float32(0), simd.exp_scalar(m_right - m)
    if m_left != _NEVER:
        left = simd.exp_scalar(m_left - m)
    whole = dim // LANES * LANES
    for i in range(0, 4 * whole, 64):
        merged = load_f32(into + i) * splat_f32(left) + load_f32(partial + i) * splat_f32(right)
        store_f32(into + i, merged)
    for i in range(4 * whole, 4 * dim, 4):
        store_scalar_f32(into + i, load_scalar_f32(into + i) * left + load_scalar_f32(partial + i) * right)
    l_left, l_right = load_scalar_f32(into + 4 * dim + 4), load_scalar_f32(partial + 4 * dim + 4)
    store_scalar_f32(into + 4 * dim, m)
    store_scalar_f32(into + 4 * dim + 4, l_left * left + l_right * right)


@njit
def _clear(partial, dim):  # type: ignore[no-untyped-def]
    for i in range(0, 4 * dim, 4):
        store_scalar_f32(partial + i, np.float32(0))
    store_scalar_f32(partial + 4 * dim, _NEVER)
    store_scalar_f32(partial + 4 * dim + 4, np.float32(0))


@njit
def _divide(partial, dim, out):  # type: ignore[no-untyped-def]
    total = load_scalar_f32(partial + 4 * dim + 4)
    whole = dim // LANES * LANES
    for i in range(0, 4 * whole, 64):
        store_f32(out + i, load_f32(partial + i) / splat_f32(total))
    for i in range(4 * whole, 4 * dim, 4):
        store_scalar_f32(out + i, load_scalar_f32(partial + i) / total)


@njit(inline="always")
def _same_slot(kv_type, columns, args, row, kv, chunk, seen, q, scores, out, out_stride):  # type: ignore[no-untyped-def]
    """Partials of a few heads that share keys, for one token."""
    dim, (sinks, low, high) = args.dim, seen
    parts = parts_of_chunk(sinks, low, high)
    chunk_scores(kv_type, columns, args, row, kv, chunk, parts, q, scores)
    for column in range(columns):
        _clear(out + column * out_stride, dim)
        m, part = _softmax_part(scores + 4 * CHUNK * column, parts, sinks, low, high, args.softcap)
        store_scalar_f32(out + column * out_stride + 4 * dim, m)
        store_scalar_f32(out + column * out_stride + 4 * dim + 4, part)
    add_chunk_values(kv_type, columns, args, row, kv, chunk, parts, (sinks, high), scores, out, out_stride)


def make_attend_few(kv_type: str) -> Callable[..., None]:
    """Partials of (token, chunk, head), shared out. Neighbours with the same keys go together."""

    def attend_few(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, heads = state.num_tokens, args.dim, args.num_heads
        if tokens > SPLIT_TOKENS:
            return
        group, stride = heads // args.num_kv_heads, 4 * (dim + LANES) * args.num_chunks
        queries = args.queries + (thread * args.private_bytes if tokens == 1 else 0)
        scores = simd.stack(_SCORE_BYTES)
        total = 0
        for token in range(tokens):
            row = load_i64(state.rows + 8 * token)
            slot = slot_of(args, row, load_i64(state.positions + 8 * token))
            total += (slot // CHUNK + 1 - chunks_seen(args, row, slot)[1]) * heads
        begin, stop, item = total * thread // num_threads, total * (thread + 1) // num_threads, 0
        for token in range(tokens):
            row = load_i64(state.rows + 8 * token)
            slot = slot_of(args, row, load_i64(state.positions + 8 * token))
            num_first, num_skipped = chunks_seen(args, row, slot)
            for index in range(slot // CHUNK + 1 - num_skipped):
                head, last = max(0, begin - item), min(heads, stop - item)
                item += heads
                if head >= last:
                    continue
                chunk = index if index < num_first else index + num_skipped
                seen = seen_of_chunk(args, row, chunk, slot)
                while head < last:
                    kv = head // group
                    count = min(last, (kv + 1) * group) - head
                    q = queries + 4 * dim * ((kv * tokens + token) * group + head % group)
                    out = args.partials + (token * heads + head) * stride + chunk * 4 * (dim + LANES)
                    if count >= 4:
                        _same_slot(kv_type, 4, args, row, kv, chunk, seen, q, scores, out, stride)
                        head += 4
                    elif count == 3:
                        _same_slot(kv_type, 3, args, row, kv, chunk, seen, q, scores, out, stride)
                        head += 3
                    elif count == 2:
                        _same_slot(kv_type, 2, args, row, kv, chunk, seen, q, scores, out, stride)
                        head += 2
                    else:
                        _same_slot(kv_type, 1, args, row, kv, chunk, seen, q, scores, out, stride)
                        head += 1

    return attend_few


@njit(inline="always")
def _consecutive(kv_type, width, args, row, kv, chunk, slot, column, q, scores, sums, results):  # type: ignore[no-untyped-def]
    """Merge a chunk into the results of `width` queries from `column` on, whose first token is at `slot`."""
    dim, group = args.dim, args.num_heads // args.num_kv_heads
    partial_bytes = 4 * (dim + LANES)
    sinks, low, _ = seen_of_chunk(args, row, chunk, slot + column // group)
    _, _, high = seen_of_chunk(args, row, chunk, slot + (column + width - 1) // group)
    if low >= high and sinks == 0:
        return
    parts = parts_of_chunk(sinks, low, high)
    chunk_scores(kv_type, width, args, row, kv, chunk, parts, q, scores)
    for i in range(width):
        _clear(sums + i * partial_bytes, dim)
        own_sinks, own_low, own_high = seen_of_chunk(args, row, chunk, slot + (column + i) // group)
        m, part = _softmax_part(scores + 4 * CHUNK * i, parts, own_sinks, own_low, own_high, args.softcap)
        store_scalar_f32(sums + i * partial_bytes + 4 * dim, m)
        store_scalar_f32(sums + i * partial_bytes + 4 * dim + 4, part)
    add_chunk_values(kv_type, width, args, row, kv, chunk, parts, (sinks, high), scores, sums, partial_bytes)
    for i in range(width):
        _merge(results + i * partial_bytes, sums + i * partial_bytes, dim)


@njit(inline="always")
def _run_length(state, token):  # type: ignore[no-untyped-def]
    """How many tokens from here on are of one row."""
    row, run = load_i64(state.rows + 8 * token), 1
    while token + run < state.num_tokens and load_i64(state.rows + 8 * (token + run)) == row:
        run += 1
    return row, run


def make_attend(kv_type: str) -> Callable[..., None]:
    """Many tokens: results of 64 queries at a time, shared out; a query's chunks are merged in order."""

    def attend(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, kv_heads, heads = state.num_tokens, args.dim, args.num_kv_heads, args.num_heads
        if tokens <= SPLIT_TOKENS:
            return
        group, partial_bytes = heads // kv_heads, 4 * (dim + LANES)
        scores, sums, results = simd.stack(_SCORE_BYTES), simd.stack(_SUM_BYTES), simd.stack(_RESULT_BYTES)
        token, item = 0, 0
        while token < tokens:
            row, run = _run_length(state, token)
            run_slot = slot_of(args, row, load_i64(state.positions + 8 * token))
            for kv in range(kv_heads):
                for start in range(0, run * group, _COLUMNS_PER_ITEM):
                    item += 1
                    if item % num_threads != thread:
                        continue
                    count = min(_COLUMNS_PER_ITEM, run * group - start)
                    q = args.queries + 4 * dim * ((kv * tokens + token) * group + start)
                    for column in range(count):
                        _clear(results + column * partial_bytes, dim)
                    left, right = run_slot + start // group, run_slot + (start + count - 1) // group
                    num_first, num_skipped = chunks_seen(args, row, left)
                    for number in range(right // CHUNK + 1 - num_skipped):
                        chunk, at = number if number < num_first else number + num_skipped, 0
                        while at < count:
                            index, to, query = start + at, results + at * partial_bytes, q + 4 * dim * at
                            if count - at >= _COLUMNS:
                                _consecutive(kv_type, 8, args, row, kv, chunk, run_slot, index, query, scores, sums, to)
                                at += _COLUMNS
                            else:
                                _consecutive(kv_type, 1, args, row, kv, chunk, run_slot, index, query, scores, sums, to)
                                at += 1
                    for column in range(count):
                        index = start + column
                        out = args.out + 4 * dim * ((token + index // group) * heads + kv * group + index % group)
                        _divide(results + column * partial_bytes, dim, out)
            token += run

    return attend


def make_finish() -> Callable[..., None]:
    """Merge a few tokens' partials; quantise out for the next projection."""

    def finish(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, heads = state.num_tokens, args.dim, args.num_heads
        result = simd.stack(_HEAD_BYTES)
        partial_bytes = 4 * (dim + LANES)
        per_item = 1 if dim % BLOCK == 0 else heads  # heads whose blocks of 32 are their own
        items = tokens * (heads // per_item)
        num_records, record_bytes = heads * dim // BLOCK, BLOCK * args.planes + 16
        for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
            token, first = item // (heads // per_item), item % (heads // per_item) * per_item
            row = load_i64(state.rows + 8 * token)
            slot = slot_of(args, row, load_i64(state.positions + 8 * token))
            out = args.out + 4 * dim * (token * heads + first)
            if tokens <= SPLIT_TOKENS:
                num_first, num_skipped = chunks_seen(args, row, slot)
                for head in range(first, first + per_item):
                    _clear(result, dim)
                    for index in range(slot // CHUNK + 1 - num_skipped):
                        chunk = index if index < num_first else index + num_skipped
                        at = args.partials + ((token * heads + head) * args.num_chunks + chunk) * partial_bytes
                        _merge(result, at, dim)
                    _divide(result, dim, out + 4 * dim * (head - first))
            if args.quantized != 0:
                for i in range(per_item * dim // BLOCK):
                    record = first * dim // BLOCK + i
                    to = record_address(args.quantized, token, tokens, num_records, record, record_bytes)
                    at = out + 4 * BLOCK * i
                    quantize_block(load_f32(at), load_f32(at + 64), args.planes, to)

    return finish
