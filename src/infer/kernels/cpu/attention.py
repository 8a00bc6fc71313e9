"""Attention over a cache: rotate and append, attend in chunks of slots, merge and quantise.

A row's slots are cut into chunks of 256, always at multiples of 256. A chunk gives a partial result for a query,
(largest score m, Σ e^(s − m), Σ e^(s − m) v), and a query's partials are merged in the order of the chunks
(online softmax, arXiv:1805.02867). A token or two share the chunks out over threads; of more tokens a thread takes
queries, walks their chunks in sequence and is done: the same partials, merged in the same order, so the same bits.
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

_FEWEST_QUERIES = 12  # of a thread
_COLUMNS_PER_ITEM = 3 * BUNDLE
_SUM_BYTES = 4 * BUNDLE * (MAX_HEAD_DIM + LANES)
_RESULT_BYTES = 4 * _COLUMNS_PER_ITEM * (MAX_HEAD_DIM + LANES)
_HEAD_BYTES = 4 * (MAX_HEAD_DIM + LANES)


def make_rotate(kv_type: str) -> Callable[..., None]:
    """q → queries; k, v → cache. Heads of 16 tokens are shared out, for their keys lie in the same cache lines, and as
    a projection's columns are, so that a thread finds what it wrote.
    """
    mix, put_key, put_value = make_mix(kv_type), make_put_key(kv_type), make_put_value(kv_type)

    def rotate(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        dim, heads, kv_heads = args.dim, args.num_heads, args.num_kv_heads
        group, of_16, tokens = heads // kv_heads, heads + 2 * kv_heads, state.num_tokens
        total = (tokens + LANES - 1) // LANES * of_16
        begin, stop = total * thread // num_threads, total * (thread + 1) // num_threads
        rotated = simd.stack(_HEAD_BYTES)
        for token in range(tokens):
            position, row = load_i64(state.positions + 8 * token), load_i64(state.rows + 8 * token)
            x = args.qkv + 4 * dim * of_16 * token
            cos = 0 if args.cos == 0 else args.cos + 4 * args.half * position
            sin = args.sin + 4 * args.half * position
            of_all_q = norm_of_all(args, 0, x, heads)
            of_all_k = norm_of_all(args, 1, x + 4 * dim * heads, kv_heads)
            first = token // LANES * of_16
            for head in range(max(0, begin - first), min(heads, stop - first)):
                weight, factor = norm_of_head(args, 0, x + 4 * dim * head, head, of_all_q)
                to = args.queries + 4 * dim * ((head // group * tokens + token) * group + head % group)
                rotate_head(x + 4 * dim * head, weight, factor, cos, sin, args.half, dim, args.scale, to)
                mix(to, dim)
                if args.far_bytes != 0:
                    far, also = 4 * args.half * min(0, args.furthest - position), to + args.far_bytes
                    where = x + 4 * dim * head
                    rotate_head(where, weight, factor, cos + far, sin + far, args.half, dim, args.scale, also)
                    mix(also, dim)
            first += heads  # a key and its value count as two
            for head in range(max(0, (begin - first + 1) // 2), min(kv_heads, (stop - first + 1) // 2)):
                k = x + 4 * dim * (heads + head)
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
def _num_chunks(args, row, first_slot, last_slot):  # type: ignore[no-untyped-def]
    """How many chunks tokens from one slot to another see something of."""
    return last_slot // CHUNK + 1 - chunks_seen(args, row, first_slot)[1]


@njit
def _nth_chunk(args, row, first_slot, number):  # type: ignore[no-untyped-def]
    num_first, num_skipped = chunks_seen(args, row, first_slot)
    return number if number < num_first else number + num_skipped


@njit
def _weight(args, row, run, slot, number):  # type: ignore[no-untyped-def]
    """How many slots of its nth chunk a query of a run is multiplied with."""
    chunk, last_slot = _nth_chunk(args, row, slot, number), slot + run - 1
    gap, first, end = parts_of_chunk(*seen_of_run(args, row, chunk, slot, last_slot))
    return max(LANES, gap + end - first)


@njit
def _weight_of_run(args, row, run, slot):  # type: ignore[no-untyped-def]
    """The same of all chunks."""
    total = 0
    for number in range(_num_chunks(args, row, slot, slot + run - 1)):
        total += _weight(args, row, run, slot, number)
    return total


@njit
def _weight_of_few(args, state, num_threads):  # type: ignore[no-untyped-def]
    """(the sum over (query, chunk), whether threads share out chunks, not queries); (0, no) of many tokens.

    A thread's share that were less than a few queries would have it read most keys for hardly anything.
    """
    total, largest, token = 0, 0, 0
    while token < state.num_tokens and state.num_tokens <= SPLIT_TOKENS:
        row, run, slot = _run_at(args, state, token)
        weight = _weight_of_run(args, row, run, slot)
        total, largest = total + weight * run * args.num_heads, max(largest, weight)
        token += run
    return total, num_threads > 1 and largest * _FEWEST_QUERIES * num_threads > total


@njit
def _mine(left, right, weight, item, begin, stop):  # type: ignore[no-untyped-def]
    """Which of the queries [left, right) begin in a thread's share, [begin, stop) of the weights; theirs begin at
    item."""
    return max(left, left - (item - begin) // weight), min(right, left - (item - stop) // weight)


@njit
def _stretch(args, row, slot, left, right):  # type: ignore[no-untyped-def]
    """(slot of the first query's token, how many chunks the queries see)."""
    group = args.num_heads // args.num_kv_heads
    first_slot = slot + left // group
    if left >= right:
        return first_slot, 0
    return first_slot, _num_chunks(args, row, first_slot, slot + (right - 1) // group)


@njit
def _after(args, kv, chunk, first_chunk, last_slot, is_split):  # type: ignore[no-untyped-def]
    """The (kv head, chunk) behind this one. The last chunk is seldom whole, and counts as none."""
    has_head, has_chunk = kv + 1 < args.num_kv_heads, (chunk + 2) * CHUNK <= last_slot + 1
    if has_head and (is_split or not has_chunk):
        return kv + 1, (chunk if is_split else first_chunk)
    if has_chunk:
        return (0 if is_split else kv), chunk + 1
    return kv, chunk


@njit
def _merge_all(results, sums, count, dim):  # type: ignore[no-untyped-def]
    for i in range(0, count * 4 * (dim + LANES), 4 * (dim + LANES)):
        merge(results + i, sums + i, dim)


@njit
def _divide_all(args, tokens, token, kv, left, right, results):  # type: ignore[no-untyped-def]
    """Results → outputs of queries [left, right) of the run that begins at a token."""
    dim, group = args.dim, args.num_heads // args.num_kv_heads
    for column in range(left, right):
        own, head = token + column // group, kv * group + column % group
        out = args.out + 4 * dim * (own * args.num_heads + head)
        divide(results + (column - left) * 4 * (dim + LANES), dim, out)
        if dim % BLOCK == 0:
            _quantize_heads(args, tokens, own, head, 1)


@njit
def _quantize_heads(args, tokens, token, head, count):  # type: ignore[no-untyped-def]
    """Outputs of a token's heads from one on → activation records."""
    if args.quantized == 0:
        return
    num_records, record_bytes = args.num_heads * args.dim // BLOCK, BLOCK * args.planes + 16
    first = head * args.dim // BLOCK
    for record in range(first, first + count * args.dim // BLOCK):
        at = args.out + 4 * (token * args.num_heads * args.dim + BLOCK * record)
        to = record_address(args.quantized, token, tokens, num_records, record, record_bytes)
        quantize_block(load_f32(at), load_f32(at + 4 * LANES), args.planes, to)


def make_attend(kv_type: str) -> Callable[..., None]:
    """Queries with the same keys go together, 72 at a time, their chunks merged in order. Those of a few tokens are
    shared out by weight; of very few the partials are, as parts of (chunk, kv head), for `finish` to merge.
    """

    def attend(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, group = state.num_tokens, args.dim, args.num_heads // args.num_kv_heads
        is_few, (total, is_split) = tokens <= SPLIT_TOKENS, _weight_of_few(args, state, num_threads)
        partial_bytes = 4 * (dim + LANES)
        scores, sums, results = simd.stack(SCORE_BYTES), simd.stack(_SUM_BYTES), simd.stack(_RESULT_BYTES)
        begin, stop, item, token = total * thread // num_threads, total * (thread + 1) // num_threads, 0, 0
        while token < tokens:
            row, run, slot = _run_at(args, state, token)
            columns, last_slot = run * group, slot + run - 1
            weight = _weight_of_run(args, row, run, slot) if is_few else 0
            num_chunks, num_parts = _num_chunks(args, row, slot, last_slot), -(-columns // _COLUMNS_PER_ITEM)
            for part in range(num_chunks if is_split else num_parts):
                for kv in range(args.num_kv_heads):
                    left, right, first, first_slot, end = 0, columns, part, slot, part + 1
                    if is_split:
                        weight = _weight(args, row, run, slot, part)
                    else:
                        left, right = part * _COLUMNS_PER_ITEM, min(columns, (part + 1) * _COLUMNS_PER_ITEM)
                    if is_few:
                        here, item = item, item + weight * (right - left)
                        left, right = _mine(left, right, weight, here, begin, stop)
                    else:
                        right, item = right if item % num_threads == thread else left, item + 1
                    if not is_split:
                        first, (first_slot, end) = 0, _stretch(args, row, slot, left, right)
                    for number in range(first, end):
                        chunk = _nth_chunk(args, row, first_slot, number)
                        for at in range(left, right, BUNDLE):
                            count, query = min(BUNDLE, right - at), (kv * tokens + token) * group + at
                            out, stride, after = results + (at - left) * partial_bytes, partial_bytes, (kv, chunk)
                            if is_split:
                                stride = partial_bytes * args.num_chunks
                                out = args.partials + stride * query + partial_bytes * chunk
                            elif number > first:
                                out = sums
                            if is_few and at + count == right and (item < stop or not is_split):
                                first_chunk = _nth_chunk(args, row, first_slot, 0)
                                after = _after(args, kv, chunk, first_chunk, last_slot, is_split)
                            q = args.queries + 4 * dim * query
                            chunk_partials(
                                kv_type, args, row, kv, chunk, slot, at, count, q, scores, out, stride, after
                            )
                            if number > first and not is_split:
                                _merge_all(results + (at - left) * partial_bytes, sums, count, dim)
                    if not is_split:
                        _divide_all(args, tokens, token, kv, left, right, results)
            token += run

    return attend


def make_finish() -> Callable[..., None]:
    """What `attend` has left: to merge a few tokens' partials, to quantise heads whose blocks are not their own."""

    def finish(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, heads = state.num_tokens, args.dim, args.num_heads
        _, is_split = _weight_of_few(args, state, num_threads)
        result, partial_bytes, group = simd.stack(_HEAD_BYTES), 4 * (dim + LANES), heads // args.num_kv_heads
        per_item = 1 if dim % BLOCK == 0 else heads  # heads whose blocks of 32 are their own
        items = tokens * (heads // per_item) if is_split or per_item > 1 else 0
        for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
            token, first = item // (heads // per_item), item % (heads // per_item) * per_item
            row = load_i64(state.rows + 8 * token)
            slot = slot_of(args, row, load_i64(state.positions + 8 * token))
            if is_split:
                num_first, num_skipped = chunks_seen(args, row, slot)
                for head in range(first, first + per_item):
                    clear(result, dim)
                    query = (head // group * tokens + token) * group + head % group
                    for index in range(slot // CHUNK + 1 - num_skipped):
                        chunk = index if index < num_first else index + num_skipped
                        merge(result, args.partials + (query * args.num_chunks + chunk) * partial_bytes, dim)
                    divide(result, dim, args.out + 4 * dim * (token * heads + head))
            _quantize_heads(args, tokens, token, first, per_item)

    return finish
