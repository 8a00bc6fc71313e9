"""Attention over a cache: attend in chunks of slots, merge and quantise.

A row's slots are cut into chunks of 256, always at multiples of 256. A chunk gives a partial result for a query,
(largest score m, Σ e^(s − m), Σ e^(s − m) v). A query's partials are merged in the order of the chunks (online softmax,
arXiv:1805.02867). For a few tokens, chunks are divided among threads. For more tokens, a thread takes queries and
processes all their chunks in sequence. If many queries share the same keys, as in a prompt, blocks are widened once for
all of them. Rows that begin with the same pages process these together (`prefix_at`, cascade attention). All of these
give the same partials, merged in the same order, so the same bits. A chunk may span several pages: its sums continue
from one page to the next, so that bits do not depend on pages either.

Queries are stored rotated and scaled as [kv head, token, query head of the group, dim]: the columns of a tile are
neighbours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import quantize_block, record_address, record_size
from infer.compute.backends.cpu.attention.cache_slots import chunks_seen, last_seen, slot_of
from infer.compute.backends.cpu.attention.chunk_products import make_widen_chunk
from infer.compute.backends.cpu.attention.partials import Columns, clear, divide, make_chunk_partials, merge, parts_for
from infer.compute.backends.cpu.attention.partition import (
    chunk_after,
    chunks_between,
    first_of,
    is_for_many,
    is_split,
    nth_chunk,
    queries_of_share,
    run_at,
    share_of,
    weight_of_chunk,
    weight_of_chunks,
    weight_of_queries,
)
from infer.compute.backends.cpu.attention.rotation import make_store_queries
from infer.compute.backends.cpu.attention.tiles import REGION
from infer.compute.backends.cpu.compile.record_types import nth_record
from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.records import BUNDLE, CHUNK, MAX_HEAD_DIM, MOST_COLUMNS, SCORE_BYTES
from infer.compute.backends.cpu.simd import load_f32
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_share

_HEAD_BYTES = 4 * (MAX_HEAD_DIM + LANES)
_LEAST_OF_FEW, _LEAST_OF_MANY = 1 << 13, 1 << 17  # weight of what a thread takes at once: tens of microseconds or more


@njit
def _whole_chunks(args, row, slot):
    """Return the number of chunks before the slot's, if a token there sees all of them; else 0."""
    return 0 if args.windows[row] != 0 else slot // CHUNK


@njit
def _common_chunks(args, row, other, most):
    """Return how many of the first `most` chunks of two rows lie in the same pages."""
    left, right, page = args.table + args.table_stride * row, args.table + args.table_stride * other, 0
    while page << args.page_bits < most * CHUNK and left[page] == right[page]:
        page += 1
    return min(most, (page << args.page_bits) // CHUNK)


@njit
def prefix_at(args, state, token):
    """Return (end, num_chunks): the runs of [token, end) share the pages of their first `num_chunks` chunks.

    The runs are those of consecutive rows, as many as their queries fit into one set of columns. A single run shares 0
    chunks, and so does one of many queries.
    """
    row, run, slot = run_at(args, state, token, state.num_tokens)
    end, num_chunks, most = token + run, 0, 0 if is_for_many(args, run) else _whole_chunks(args, row, slot)
    last = token + MOST_COLUMNS * args.num_kv_heads // args.num_heads
    while most > 0 and end < state.num_tokens:
        other, run, slot = run_at(args, state, end, state.num_tokens)
        common = _common_chunks(args, row, other, min(most, _whole_chunks(args, other, slot)))
        if common == 0 or common < num_chunks or is_for_many(args, run) or end + run > last:
            break
        end, num_chunks, most = end + run, common, common
    return end, num_chunks


class _Span(NamedTuple):
    """Neighbouring tokens × chunks that all of them see.

    Chunks are numbered among those that the row sees: `nth_chunk`.
    """

    row: int
    slot: int  # of the first token
    token: int
    num_tokens: int
    first: int
    end: int


def make_attend_few(kv_type: str) -> Callable[..., None]:
    """Return the command for runs of few queries.

    It also serves all runs of a step whose chunks are divided among threads.

    It reads the cache and `q` or `queries`. If chunks are divided, it writes `partials`, f32 [heads, SPLIT_TOKENS,
    num_chunks, dim + 16], which `finish` merges, and sets `needs_merge` of its thread. Otherwise it writes `out`, f32
    [tokens, out_heads × dim], and the activation records at `quantized` if a head is whole blocks of 32.
    """
    attend_queries, attend_span = _make_attend_queries(kv_type, False), _make_attend_span(kv_type)

    @njit
    def attend_chunks(args, state, thread, share):
        item, token = 0, 0
        while token < state.num_tokens:
            end, num_shared = prefix_at(args, state, token)
            if num_shared > 0:
                span = _Span(state.rows[token], num_shared * CHUNK - 1, token, end - token, 0, num_shared)
                item = attend_span(span, args, state, thread, item, share)
            while token < end:
                row, run, slot = run_at(args, state, token, end)
                span = _Span(row, slot, token, run, num_shared, chunks_between(args, row, slot, slot + run - 1))
                item = attend_span(span, args, state, thread, item, share)
                token += run

    def attend_few(args, state, thread, num_threads):
        by_chunks = is_split(args, state, num_threads)
        nth_record(state.threads, thread).needs_merge = by_chunks or _heads_of_item(args) > 1
        total = weight_of_chunks(args, state) if by_chunks else weight_of_queries(args, state, False)
        begin_units(state, thread)
        share = take_share(state, thread, num_threads, total, _LEAST_OF_FEW)
        while share[0] < share[1]:
            if by_chunks:
                attend_chunks(args, state, thread, share)
            else:
                attend_queries(args, state, thread, share)
            share = take_share(state, thread, num_threads, total, _LEAST_OF_FEW)

    return attend_few


def _make_attend_span(kv_type: str) -> Any:
    """Return attend(span, args, state, thread, item, share), for steps whose chunks are divided among threads.

    It writes the partials of the thread's share of the span, and returns the item after the span. Items are counted as
    in `partition`.
    """
    partials = make_chunk_partials(kv_type, False)

    @njit
    def attend_span(span, args, state, thread, item, share):
        group, partial_bytes = args.num_heads // args.num_kv_heads, 4 * (args.dim + LANES)
        stride, scratch = partial_bytes * args.num_chunks, args.scratch + thread * args.scratch_bytes
        row, slot, (begin, stop), num_queries = span.row, span.slot, share, span.num_tokens * group
        last_slot = slot + span.num_tokens - 1
        for number in range(span.first, span.end):
            chunk = nth_chunk(args, row, slot, number)
            weight = weight_of_chunk(args, row, span.num_tokens, slot, number)
            for kv in range(args.num_kv_heads):
                left, right = queries_of_share(0, num_queries, weight, item, begin, stop)
                item += weight * num_queries
                for first in range(left, right, BUNDLE):
                    after = row, kv, chunk * CHUNK
                    if first + BUNDLE >= right and item < stop:
                        after = chunk_after(args, row, kv, chunk, last_slot)
                    query = (kv * state.num_tokens + span.token) * group + first
                    columns = Columns(row, slot, first, min(BUNDLE, right - first), args.queries + 4 * args.dim * query)
                    out = args.partials + stride * query + partial_bytes * chunk
                    partials(columns, args, kv, chunk, scratch, out, stride, after)
        return item

    return attend_span


def make_attend_many(kv_type: str) -> Callable[..., None]:
    """Return the command for runs of many queries, as in a prompt, if cached blocks are not f32.

    Blocks are widened first.

    It reads the cache and `q`. It writes `out`, f32 [tokens, out_heads × dim], and the activation records at
    `quantized` if a head is whole blocks of 32.
    """
    attend_queries = _make_attend_queries(kv_type, True)

    def attend_many(args, state, thread, num_threads):
        total = 0 if is_split(args, state, num_threads) else weight_of_queries(args, state, True)
        begin_units(state, thread)
        share = take_share(state, thread, num_threads, total, _LEAST_OF_MANY)
        while share[0] < share[1]:
            attend_queries(args, state, thread, share)
            share = take_share(state, thread, num_threads, total, _LEAST_OF_MANY)

    return attend_many


def _make_attend_queries(kv_type: str, for_many: bool) -> Any:
    """Return attend(args, state, thread, share), for steps whose queries are divided among threads.

    It computes the share of the runs of many queries (`for_many`), or of the other runs.
    """
    attend_columns = _make_attend_columns(kv_type, for_many)

    @njit
    def attend_queries(args, state, thread, share):
        group, (begin, stop), item, token = args.num_heads // args.num_kv_heads, share, 0, 0
        scratch = args.scratch + thread * args.scratch_bytes
        while item < stop:
            end, num_shared = prefix_at(args, state, token)
            row, run, slot = run_at(args, state, token, end)
            for kv in range(args.num_kv_heads if is_for_many(args, run) == for_many else 0):
                after = first_of(args, state, token, kv + 1)
                if kv + 1 == args.num_kv_heads:
                    after = first_of(args, state, min(end, state.num_tokens - 1), 0)
                for first in range(0, (end - token) * group, MOST_COLUMNS):
                    before = min((end - token) * group, first + MOST_COLUMNS)
                    left, right, item = share_of(args, state, token, first, before, item, begin, stop)
                    if left < right:
                        query = (kv * state.num_tokens + token) * group + left
                        columns = Columns(row, slot, left, right - left, args.queries + 4 * args.dim * query)
                        attend_columns(columns, args, state, token, kv, num_shared, after, scratch)
            token = end

    return attend_queries


def _make_attend_columns(kv_type: str, is_wide: bool) -> Any:
    """Return attend(columns, args, state, token, kv, num_shared, after, scratch): the outputs of one kv head's queries.

    The queries belong to the runs from `token` on. All these runs share their first `num_shared` chunks. It makes the
    queries, merges their partials chunk by chunk in the thread's `scratch`, and writes `out` and `quantized`. `after`
    is the (row, kv head, slot) that is read next.
    """
    store_queries, process_chunks = make_store_queries(kv_type), _make_process_chunks(kv_type, is_wide)

    @njit
    def attend_columns(columns, args, state, token, kv, num_shared, after, scratch):
        dim, group, size = args.dim, args.num_heads // args.num_kv_heads, 4 * (args.dim + LANES)
        left, right = columns.first, columns.first + columns.num
        store_queries(args, state, kv, token * group + left, token * group + right)
        results = scratch + args.scratch_bytes - (MOST_COLUMNS + left) * size  # of query 0
        if num_shared > 0:  # as if the tokens stood where the prefix ends
            slot = num_shared * CHUNK - 1 - left // group
            all_ = Columns(columns.row, slot, left, columns.num, columns.queries)
            process_chunks(all_, args, kv, (0, num_shared), (columns.row, kv, num_shared * CHUNK), scratch, results)
        first = left
        while first < right:
            ahead, queries = first // group, columns.queries + 4 * dim * (first - left)
            row, run, slot = run_at(args, state, token + ahead, token + (right + group - 1) // group)
            end = min(right, (ahead + run) * group)
            some = Columns(row, slot - ahead, first, end - first, queries)
            num_chunks = chunks_between(args, row, slot, slot - ahead + (end - 1) // group)
            following = after
            if end < right:
                following = state.rows[token + ahead + run], kv, num_shared * CHUNK
            process_chunks(some, args, kv, (num_shared, num_chunks), following, scratch, results)
            first = end
        for column in range(left, right):
            own, head = token + column // group, kv * group + column % group
            divide(results + column * size, args, own, head, _out_of_head(args, own, head))
            if dim % BLOCK == 0:
                _quantize_heads(args, state.num_tokens, own, head, 1)

    return attend_columns


def _make_process_chunks(kv_type: str, is_wide: bool) -> Any:
    """Return process(columns, args, kv, numbers, after, scratch, results), which merges chunks into results.

    `numbers` is (first, end) among the chunks that the row sees. `results` is the address of query 0's partial, f32
    [dim + 16] per query. Chunk 0 overwrites it, and later ones are merged. `after` is read after them, as for
    `partials`. If chunks are widened, each bundle of a chunk prefetches one region of the next chunk.
    """
    partials, widen_chunk = make_chunk_partials(kv_type, is_wide), make_widen_chunk(kv_type)

    @njit
    def process_chunks(columns, args, kv, numbers, after, scratch, results):
        dim, group, size = args.dim, args.num_heads // args.num_kv_heads, 4 * (args.dim + LANES)
        sums = scratch + args.scratch_bytes - (MOST_COLUMNS + BUNDLE) * size
        left, right = columns.first, columns.first + columns.num
        first_slot = columns.slot + left // group
        for number in range(numbers[0], numbers[1]):
            chunk = nth_chunk(args, columns.row, first_slot, number)
            if is_wide:
                parts, _ = parts_for(columns, args, chunk)
                widen_chunk(args, columns.row, kv, chunk, parts, scratch + SCORE_BYTES)
            for first in range(left, right, BUNDLE):
                following = columns.row, kv, chunk * CHUNK
                if is_wide or first + BUNDLE >= right:
                    following = after
                    if number + 1 < numbers[1]:
                        slot = nth_chunk(args, columns.row, first_slot, number + 1) * CHUNK
                        if is_wide:
                            ahead = (first - left) // BUNDLE * REGION * LANES
                            slot = min(slot + ahead, columns.slot + (right - 1) // group)
                        following = columns.row, kv, slot
                queries = columns.queries + 4 * dim * (first - left)
                some = Columns(columns.row, columns.slot, first, min(BUNDLE, right - first), queries)
                result = results + first * size if number == 0 else sums
                partials(some, args, kv, chunk, scratch, result, size, following)
                for i in range(0, some.num * size if number > 0 else 0, size):
                    merge(results + first * size + i, sums + i, dim)

    return process_chunks


@njit(inline="always")
def _out_of_head(args, token, head):
    return args.out + 4 * args.dim * (token * args.out_heads + args.first_head + head)


@njit
def _quantize_heads(args, tokens, token, head, count):
    """Quantise the outputs of `count` heads of a token, from `head` on, to activation records at `quantized`, if not 0.

    Reads f32 at `out`. The heads must begin and end at blocks of 32.
    """
    if args.quantized == 0:
        return
    num_records, record_bytes = args.out_heads * args.dim // BLOCK, record_size(args.form)
    first = (args.first_head + head) * args.dim // BLOCK
    for record in range(first, first + count * args.dim // BLOCK):
        at = args.out + 4 * (token * args.out_heads * args.dim + BLOCK * record)
        to = record_address(args.quantized, token, tokens, num_records, record, record_bytes)
        quantize_block(load_f32(at), load_f32(at + 4 * LANES), args.form, to)


@njit(inline="always")
def _heads_of_item(args):
    """Return the number of neighbouring heads whose blocks of 32 are their own."""
    return 1 if args.dim % BLOCK == 0 else args.num_heads


def finish(args, state, thread, num_threads):
    """Merge the partials of chunks that were divided among threads, and quantise heads that share blocks of 32.

    Reads `partials`, f32 [heads, SPLIT_TOKENS, num_chunks, dim + 16], in the order of the chunks. Writes `out`, f32
    [tokens, out_heads × dim], and the activation records at `quantized` if there are any.
    """
    tokens, dim, heads = state.num_tokens, args.dim, args.num_heads
    merges = is_split(args, state, num_threads)
    result, partial_bytes, group = simd.stack(_HEAD_BYTES), 4 * (dim + LANES), heads // args.num_kv_heads
    per_item = _heads_of_item(args)
    items = tokens * (heads // per_item) if merges or per_item > 1 else 0
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        token, first = item // (heads // per_item), item % (heads // per_item) * per_item
        row = state.rows[token]
        slot = slot_of(args, row, state.positions[token])
        if merges:
            num_first, num_skipped = chunks_seen(args, row, slot)
            for head in range(first, first + per_item):
                clear(result, dim)
                query = (head // group * tokens + token) * group + head % group
                for index in range(last_seen(args, row, slot) // CHUNK + 1 - num_skipped):
                    chunk = index if index < num_first else index + num_skipped
                    merge(result, args.partials + (query * args.num_chunks + chunk) * partial_bytes, dim)
                divide(result, args, token, head, _out_of_head(args, token, head))
        _quantize_heads(args, tokens, token, first, per_item)
