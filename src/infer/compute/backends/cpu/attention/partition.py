"""Division of attention among threads: the queries and chunks of a step that each thread computes.

The weight of a query, or of a query and a chunk, is the number of slots it is multiplied with. Threads take equal sums
of weights, in the order of the step. Results do not depend on any of this.
"""

from numba import njit

from infer.compute.backends.cpu.attention.cache_slots import chunks_seen, last_seen, num_seen, parts_of_chunk, slot_of
from infer.compute.backends.cpu.attention.partials import seen_of_run
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.records import CHUNK, MOST_COLUMNS, SPLIT_TOKENS

_FEWEST_QUERIES = 12  # of a thread: the columns of one or two tiles


@njit
def run_at(args, state, token, end):
    """Return (row, number of its tokens from this one on and before `end`, the slot of the first)."""
    row, run = state.rows[token], 1
    while token + run < end and state.rows[token + run] == row:
        run += 1
    return row, run, slot_of(args, row, state.positions[token])


@njit
def chunks_between(args, row, first_slot, last_slot):
    """Return how many chunks the tokens from one slot to another see something of."""
    return last_seen(args, row, last_slot) // CHUNK + 1 - chunks_seen(args, row, first_slot)[1]


@njit
def nth_chunk(args, row, first_slot, number):
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
    """Return the weight of a query of a run and the nth chunk that the run sees."""
    chunk, last_slot = nth_chunk(args, row, slot, number), slot + run - 1
    gap, first, end = parts_of_chunk(*seen_of_run(args, row, chunk, slot, last_slot))
    return max(LANES, gap + end - first)


@njit
def weight_of_chunks(args, state):
    """Return the sum of weights over the queries and chunks of a step."""
    total, token = 0, 0
    while token < state.num_tokens:
        row, run, slot = run_at(args, state, token, state.num_tokens)
        for number in range(chunks_between(args, row, slot, slot + run - 1)):
            total += weight_of_chunk(args, row, run, slot, number) * run * args.num_heads
        token += run
    return total


@njit
def weight_of_query(args, row, slot, right):
    """Return the weight of each of a run's queries before `right` that are computed together."""
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
def mine(left, right, weight, item, begin, stop):
    """Return the range of the queries [left, right) that begin in a thread's share, [begin, stop) of the weights.

    The queries' weights begin at `item`.
    """
    return max(left, left - (item - begin) // weight), min(right, left - (item - stop) // weight)


@njit
def mine_of_row(state, left, right, weight, item, begin, stop):
    """Return `mine`, but whole tiles if there are many tokens: two threads with parts of one tile would both read its
    keys.
    """
    if state.num_tokens <= SPLIT_TOKENS:
        return mine(left, right, weight, item, begin, stop)
    num_tiles = (right - left + _FEWEST_QUERIES - 1) // _FEWEST_QUERIES
    first, end = mine(0, num_tiles, weight * _FEWEST_QUERIES, item, begin, stop)
    return left + first * _FEWEST_QUERIES, min(right, left + end * _FEWEST_QUERIES)


@njit
def share_of(args, state, token, first, end, item, begin, stop):
    """Return (left, right, the item after them): `mine_of_row` of queries [first, end) of the runs from a token on."""
    group, left, right = args.num_heads // args.num_kv_heads, end, end
    while first < end:
        ahead = first // group
        row, run, slot = run_at(args, state, token + ahead, token + (end + group - 1) // group)
        of_run = min(end, (ahead + run) * group)
        weight = weight_of_query(args, row, slot - ahead, of_run)
        some_left, some_right = mine_of_row(state, first, of_run, weight, item, begin, stop)
        if some_left < some_right:
            left, right = min(left, some_left), some_right
        item, first = item + weight * (of_run - first), of_run
    return left, right, item


@njit
def first_of(args, state, token, kv):
    """Return the (row, kv head, slot) that a head of a run reads first."""
    row = state.rows[token]
    return row, kv, nth_chunk(args, row, slot_of(args, row, state.positions[token]), 0) * CHUNK


@njit
def chunk_after(args, row, kv, chunk, last_slot):
    """Return the (row, kv head, slot) after a chunk, if chunks are divided among threads."""
    slot = chunk * CHUNK
    if kv + 1 < args.num_kv_heads:
        return row, kv + 1, slot
    return (row, 0, slot + CHUNK) if slot + CHUNK <= last_slot else (row, kv, slot)
