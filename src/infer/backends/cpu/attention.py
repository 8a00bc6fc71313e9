"""Attention over a cache: rotate and append, attend in chunks of slots, merge and quantise.

A row's slots are cut into chunks of 256, always at multiples of 256. A chunk gives a partial result for a query,
(largest score m, Σ e^(s − m), Σ e^(s − m) v), and a query's partials are merged in the order of the chunks
(online softmax, arXiv:1805.02867). A token or two share the chunks out over threads; of more tokens a thread takes
queries, walks their chunks in sequence and is done: the same partials, merged in the same order, so the same bits.
A chunk may lie in several pages: its sums go on from one to the next, so that bits do not depend on pages either.

Queries lie rotated and scaled as [kv head, token, query head of the group, dim]: the columns of a tile are neighbours.
"""

from collections.abc import Callable

from numba import carray, njit

from infer.backends.cpu import simd
from infer.backends.cpu.activations import quantize_block, quantized_size, record_address
from infer.backends.cpu.cache_slots import chunks_seen, slot_of
from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.partials import BUNDLE, SCORE_BYTES, clear, divide, make_chunk_partials, merge
from infer.backends.cpu.records import CHUNK, MAX_HEAD_DIM, SPLIT_TOKENS
from infer.backends.cpu.rotation import make_put_queries
from infer.backends.cpu.shares import (
    chunk_after,
    chunks_between,
    mine,
    nth_chunk,
    run_at,
    stretch,
    weight_of_chunk,
    weight_of_few,
    weight_of_run,
)
from infer.backends.cpu.simd import load_f32, load_i64

_COLUMNS_PER_ITEM = 3 * BUNDLE
_SUM_BYTES = 4 * BUNDLE * (MAX_HEAD_DIM + LANES)
_RESULT_BYTES = 4 * _COLUMNS_PER_ITEM * (MAX_HEAD_DIM + LANES)
_HEAD_BYTES = 4 * (MAX_HEAD_DIM + LANES)


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
    num_records, record_bytes = args.num_heads * args.dim // BLOCK, quantized_size(args.form)
    first = head * args.dim // BLOCK
    for record in range(first, first + count * args.dim // BLOCK):
        at = args.out + 4 * (token * args.num_heads * args.dim + BLOCK * record)
        to = record_address(args.quantized, token, tokens, num_records, record, record_bytes)
        quantize_block(load_f32(at), load_f32(at + 4 * LANES), args.form, to)


def make_attend(kv_type: str) -> Callable[..., None]:
    """Queries with the same keys go together, 72 at a time, their chunks merged in order. Those of a few tokens are
    shared out by weight; of very few the partials are, as parts of (chunk, kv head), for `finish` to merge.
    """
    put_queries, chunk_partials = make_put_queries(kv_type), make_chunk_partials(kv_type)

    def attend(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        tokens, dim, group = state.num_tokens, args.dim, args.num_heads // args.num_kv_heads
        is_few, (total, is_split) = tokens <= SPLIT_TOKENS, weight_of_few(args, state, num_threads)
        partial_bytes = 4 * (dim + LANES)
        scores, sums, results = simd.stack(SCORE_BYTES), simd.stack(_SUM_BYTES), simd.stack(_RESULT_BYTES)
        begin, stop, item, token = total * thread // num_threads, total * (thread + 1) // num_threads, 0, 0
        while token < tokens:
            row, run, slot = run_at(args, state, token)
            columns, last_slot = run * group, slot + run - 1
            weight = weight_of_run(args, row, run, slot) if is_few else 0
            num_chunks, num_parts = chunks_between(args, row, slot, last_slot), -(-columns // _COLUMNS_PER_ITEM)
            for part in range(num_chunks if is_split else num_parts):
                for kv in range(args.num_kv_heads):
                    left, right, first, first_slot, end = 0, columns, part, slot, part + 1
                    if is_split:
                        weight = weight_of_chunk(args, row, run, slot, part)
                    else:
                        left, right = part * _COLUMNS_PER_ITEM, min(columns, (part + 1) * _COLUMNS_PER_ITEM)
                    if is_few:
                        here, item = item, item + weight * (right - left)
                        left, right = mine(left, right, weight, here, begin, stop)
                    else:
                        right, item = right if item % num_threads == thread else left, item + 1
                    if not is_split:
                        first, (first_slot, end) = 0, stretch(args, row, slot, left, right)
                        put_queries(args, state, kv, token * group + left, token * group + right)
                    for number in range(first, end):
                        chunk = nth_chunk(args, row, first_slot, number)
                        for at in range(left, right, BUNDLE):
                            count, query = min(BUNDLE, right - at), (kv * tokens + token) * group + at
                            out, stride, after = results + (at - left) * partial_bytes, partial_bytes, (kv, chunk)
                            if is_split:
                                stride = partial_bytes * args.num_chunks
                                out = args.partials + stride * query + partial_bytes * chunk
                            elif number > first:
                                out = sums
                            if is_few and at + count == right and (item < stop or not is_split):
                                first_chunk = nth_chunk(args, row, first_slot, 0)
                                after = chunk_after(args, kv, chunk, first_chunk, last_slot, is_split)
                            q = args.queries + 4 * dim * query
                            chunk_partials(args, row, kv, chunk, slot, at, count, q, scores, out, stride, after)
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
        _, is_split = weight_of_few(args, state, num_threads)
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
