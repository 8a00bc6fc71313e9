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
from infer.kernels.cpu.cache_slots import block_at, chunks_seen, parts_of_chunk, slot_of
from infer.kernels.cpu.layouts import BLOCK, LANES
from infer.kernels.cpu.partials import BUNDLE, SCORE_BYTES, chunk_partials, clear, divide, merge, seen_of_run
from infer.kernels.cpu.records import CHUNK, MAX_HEAD_DIM, SPLIT_TOKENS
from infer.kernels.cpu.rotation import norm_of_all, norm_of_head, rotate_head
from infer.kernels.cpu.simd import load_f32, load_i64

_COLUMNS_PER_ITEM = 3 * BUNDLE
_SUM_BYTES = 4 * BUNDLE * (MAX_HEAD_DIM + LANES)
_RESULT_BYTES = 4 * _COLUMNS_PER_ITEM * (MAX_HEAD_DIM + LANES)
_HEAD_BYTES = 4 * (MAX_HEAD_DIM + LANES)


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
def _run_at(args, state, token):  # type: ignore[no-untyped-def]
    """(row, how many tokens from here on are of it, the slot of the first)."""
    row, run = load_i64(state.rows + 8 * token), 1
    while token + run < state.num_tokens and load_i64(state.rows + 8 * (token + run)) == row:
        run += 1
    return row, run, slot_of(args, row, load_i64(state.positions + 8 * token))


@njit
def _weight_of_chunk(args, row, chunk, first_slot, last_slot):  # type: ignore[no-untyped-def]
    """How many slots a query of the run is multiplied with."""
    sinks, low, high = seen_of_run(args, row, chunk, first_slot, last_slot)
    gap, first, end = parts_of_chunk(sinks, low, high)
    return max(LANES, gap + end - first)


@njit
def _weight_of_step(args, state):  # type: ignore[no-untyped-def]
    """Sum of the weights of all (query, chunk)."""
    total, token = 0, 0
    while token < state.num_tokens:
        row, run, slot = _run_at(args, state, token)
        last_slot = slot + run - 1
        num_first, num_skipped = chunks_seen(args, row, slot)
        for index in range(last_slot // CHUNK + 1 - num_skipped):
            chunk = index if index < num_first else index + num_skipped
            total += _weight_of_chunk(args, row, chunk, slot, last_slot) * run * args.num_heads
        token += run
    return total


@njit(inline="always")
def _share(kv_type, args, state, thread, num_threads):  # type: ignore[no-untyped-def]
    """A few tokens: partials of (chunk, query), shared out by weight. Queries with the same keys go together."""
    tokens, dim, group = state.num_tokens, args.dim, args.num_heads // args.num_kv_heads
    stride = 4 * (dim + LANES) * args.num_chunks
    queries = args.queries + (thread * args.private_bytes if tokens == 1 else 0)
    scores = simd.stack(SCORE_BYTES)
    total = _weight_of_step(args, state)
    begin, stop, item, token = total * thread // num_threads, total * (thread + 1) // num_threads, 0, 0
    while token < tokens:
        row, run, slot = _run_at(args, state, token)
        last_slot = slot + run - 1
        num_first, num_skipped = chunks_seen(args, row, slot)
        for index in range(last_slot // CHUNK + 1 - num_skipped):
            chunk = index if index < num_first else index + num_skipped
            weight = _weight_of_chunk(args, row, chunk, slot, last_slot)
            for kv in range(args.num_kv_heads):
                column = max(0, (begin - item + weight - 1) // weight)
                end = min(run * group, (stop - item + weight - 1) // weight)
                item += weight * run * group
                while column < end:
                    count = min(BUNDLE, end - column)
                    query, after = (kv * tokens + token) * group + column, (kv, chunk)
                    if column + count == run * group and item < stop:
                        after = _after(args, kv, chunk, last_slot)
                    q, out = queries + 4 * dim * query, args.partials + stride * query + 4 * (dim + LANES) * chunk
                    chunk_partials(kv_type, args, row, kv, chunk, slot, column, count, q, scores, out, stride, after)
                    column += count
        token += run


@njit
def _after(args, kv, chunk, last_slot):  # type: ignore[no-untyped-def]
    """The (kv head, chunk) behind this one. The last chunk is seldom whole, and counts as none."""
    if kv + 1 < args.num_kv_heads:
        return kv + 1, chunk
    return (0, chunk + 1) if (chunk + 2) * CHUNK <= last_slot + 1 else (kv, chunk)


@njit(inline="always")
def _walk(kv_type, args, state, thread, num_threads):  # type: ignore[no-untyped-def]
    """Many tokens: results of 72 queries at a time, shared out; a query's chunks are merged in order."""
    tokens, dim, kv_heads, heads = state.num_tokens, args.dim, args.num_kv_heads, args.num_heads
    group, stride = heads // kv_heads, 4 * (dim + LANES)
    scores, sums, results = simd.stack(SCORE_BYTES), simd.stack(_SUM_BYTES), simd.stack(_RESULT_BYTES)
    token, item = 0, 0
    while token < tokens:
        row, run, slot = _run_at(args, state, token)
        for kv in range(kv_heads):
            for start in range(0, run * group, _COLUMNS_PER_ITEM):
                item += 1
                if item % num_threads != thread:
                    continue
                stop = min(start + _COLUMNS_PER_ITEM, run * group)
                for column in range(stop - start):
                    clear(results + column * stride, dim)
                left, right = slot + start // group, slot + (stop - 1) // group
                num_first, num_skipped = chunks_seen(args, row, left)
                for number in range(right // CHUNK + 1 - num_skipped):
                    chunk = number if number < num_first else number + num_skipped
                    for at in range(start, stop, BUNDLE):
                        count, after = min(BUNDLE, stop - at), (kv, chunk)
                        q = args.queries + 4 * dim * ((kv * tokens + token) * group + at)
                        chunk_partials(kv_type, args, row, kv, chunk, slot, at, count, q, scores, sums, stride, after)
                        for i in range(count):
                            merge(results + (at - start + i) * stride, sums + i * stride, dim)
                for column in range(start, stop):
                    index = (token + column // group) * heads + kv * group + column % group
                    divide(results + (column - start) * stride, dim, args.out + 4 * dim * index)
        token += run


def make_attend(kv_type: str) -> Callable[..., None]:
    """Queries → partials of a few tokens, or the outputs of many."""

    def attend(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        if state.num_tokens <= SPLIT_TOKENS:
            _share(kv_type, args, state, thread, num_threads)
        else:
            _walk(kv_type, args, state, thread, num_threads)

    return attend


def make_finish() -> Callable[..., None]:
    """Merge a few tokens' partials; quantise out for the next projection."""

    def finish(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, heads = state.num_tokens, args.dim, args.num_heads
        result, partial_bytes, group = simd.stack(_HEAD_BYTES), 4 * (dim + LANES), heads // args.num_kv_heads
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
                    clear(result, dim)
                    query = (head // group * tokens + token) * group + head % group
                    for index in range(slot // CHUNK + 1 - num_skipped):
                        chunk = index if index < num_first else index + num_skipped
                        merge(result, args.partials + (query * args.num_chunks + chunk) * partial_bytes, dim)
                    divide(result, dim, out + 4 * dim * (head - first))
            if args.quantized != 0:
                for i in range(per_item * dim // BLOCK):
                    record = first * dim // BLOCK + i
                    to = record_address(args.quantized, token, tokens, num_records, record, record_bytes)
                    at = out + 4 * BLOCK * i
                    quantize_block(load_f32(at), load_f32(at + 64), args.planes, to)

    return finish
