"""Division of attention's work among threads: the queries and chunks of a step that each thread computes.

A run is a row's neighbouring tokens in a step. Its queries per kv head are numbered [token, query head of the group].
The weight of a query, or of a query and a chunk, is the number of slots that it is multiplied with. Items of work are
counted in weights, in the order of the step. A thread takes a share [begin, stop) of this count. Results do not depend
on any of this.
"""

from numba import njit

from infer.compute.backends.cpu.attention.cache_slots import chunks_seen, last_seen, num_seen, parts_of_chunk, slot_of
from infer.compute.backends.cpu.attention.partials import seen_of_run
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.records import CHUNK, MOST_COLUMNS, SPLIT_TOKENS

_FEWEST_QUERIES = 12  # of a thread: the columns of one or two tiles


@njit
def run_at(args, state, token, end):
    """Return (row, number of tokens, slot of the first) of the run that begins at `token`, up to the token `end`."""
    row, run = state.rows[token], 1
    while token + run < end and state.rows[token + run] == row:
        run += 1
    return row, run, slot_of(args, row, state.positions[token])


@njit
def chunks_between(args, row, first_slot, last_slot):
    """Return the number of chunks of which the tokens from `first_slot` to `last_slot` of a row see some slot."""
    return last_seen(args, row, last_slot) // CHUNK + 1 - chunks_seen(args, row, first_slot)[1]


@njit
def nth_chunk(args, row, first_slot, number):
    """Return the number of the nth chunk in the cache row that tokens from `first_slot` on see."""
    num_first, num_skipped = chunks_seen(args, row, first_slot)
    return number if number < num_first else number + num_skipped


@njit
def is_split(args, state, num_threads):
    """Return True if chunks, not queries, are divided among threads.

    If a thread's share were less than a few queries, it would read most keys for little work. A single chunk is never
    divided, so its queries are.
    """
    if num_threads == 1 or state.num_tokens > SPLIT_TOKENS:
        return False
    total, largest, most_chunks, token = 0, 0, 0, 0
    while token < state.num_tokens:
        row, run, slot = run_at(args, state, token, state.num_tokens)
        weight = num_seen(args, row, slot + run - 1)
        total, largest = total + weight * run * args.num_heads, max(largest, weight)
        most_chunks = max(most_chunks, chunks_between(args, row, slot, slot + run - 1))
        token += run
    return most_chunks > 1 and largest * _FEWEST_QUERIES * num_threads > total


@njit
def is_for_many(args, run):
    """Return True if `attend_many` takes the queries of a run of this many tokens."""
    return args.fewest_for_many != 0 and run * (args.num_heads // args.num_kv_heads) >= args.fewest_for_many


@njit
def weight_of_chunk(args, row, run, slot, number):
    """Return the weight of one query of a run and the nth chunk that the run sees: slots, in whole blocks of 16."""
    chunk, last_slot = nth_chunk(args, row, slot, number), slot + run - 1
    gap, first, end = parts_of_chunk(*seen_of_run(args, row, chunk, slot, last_slot))
    return max(LANES, gap + end - first)


@njit
def weight_of_chunks(args, state):
    """Return the sum of weights over all queries and chunks of a step: the work if chunks are divided among threads."""
    total, token = 0, 0
    while token < state.num_tokens:
        row, run, slot = run_at(args, state, token, state.num_tokens)
        for number in range(chunks_between(args, row, slot, slot + run - 1)):
            total += weight_of_chunk(args, row, run, slot, number) * run * args.num_heads
        token += run
    return total


@njit
def weight_of_query(args, row, slot, right):
    """Return the number of slots that query `right` − 1 of a run sees.

    It is the weight of each query that is computed together with that one.
    """
    return num_seen(args, row, slot + (right - 1) // (args.num_heads // args.num_kv_heads))


@njit
def weight_of_queries(args, state, for_many):
    """Return the sum of weights over the queries of the runs that `attend_many` takes, or of the others."""
    total, token, group = 0, 0, args.num_heads // args.num_kv_heads
    while token < state.num_tokens:
        row, run, slot = run_at(args, state, token, state.num_tokens)
        if is_for_many(args, run) == for_many:
            for left in range(0, run * group, MOST_COLUMNS):
                right = min(run * group, left + MOST_COLUMNS)
                total += weight_of_query(args, row, slot, right) * (right - left) * args.num_kv_heads
        token += run
    return total


@njit
def queries_of_share(left, right, weight, item, begin, stop):
    """Return the queries [first, end) of [left, right) that begin in a thread's share [begin, stop) of the weights.

    Each query has the weight `weight`, and the weights of the first one begin at `item`.
    """
    return max(left, left - (item - begin) // weight), min(right, left - (item - stop) // weight)


@njit
def tiled_queries_of_share(state, left, right, weight, item, begin, stop):
    """Return `queries_of_share`, rounded to tiles of 12 queries if the step has many tokens.

    Otherwise two threads with parts of one tile would both read its keys.
    """
    if state.num_tokens <= SPLIT_TOKENS:
        return queries_of_share(left, right, weight, item, begin, stop)
    num_tiles = (right - left + _FEWEST_QUERIES - 1) // _FEWEST_QUERIES
    first, end = queries_of_share(0, num_tiles, weight * _FEWEST_QUERIES, item, begin, stop)
    return left + first * _FEWEST_QUERIES, min(right, left + end * _FEWEST_QUERIES)


@njit
def share_of(args, state, token, first, end, item, begin, stop):
    """Return (left, right, item): a thread's queries [left, right) among [first, end), and the item after all of them.

    The queries are those of one kv head, of the runs from `token` on, with query 0 at `token`. [begin, stop) is the
    thread's share, and `item` the weight before query `first`. If the thread has none of them, left = right = end.
    """
    group, left, right = args.num_heads // args.num_kv_heads, end, end
    while first < end:
        ahead = first // group
        row, run, slot = run_at(args, state, token + ahead, token + (end + group - 1) // group)
        of_run = min(end, (ahead + run) * group)
        weight = weight_of_query(args, row, slot - ahead, of_run)
        some_left, some_right = tiled_queries_of_share(state, first, of_run, weight, item, begin, stop)
        if some_left < some_right:
            left, right = min(left, some_left), some_right
        item, first = item + weight * (of_run - first), of_run
    return left, right, item


@njit
def first_of(args, state, token, kv):
    """Return the (row, kv head, slot) that the run at `token` reads first for a kv head, to be prefetched."""
    row = state.rows[token]
    return row, kv, nth_chunk(args, row, slot_of(args, row, state.positions[token]), 0) * CHUNK


@njit
def chunk_after(args, row, kv, chunk, last_slot):
    """Return the (row, kv head, slot) that follows a chunk when chunks are divided among threads, to be prefetched."""
    slot = chunk * CHUNK
    if kv + 1 < args.num_kv_heads:
        return row, kv + 1, slot
    return (row, 0, slot + CHUNK) if slot + CHUNK <= last_slot else (row, kv, slot)
