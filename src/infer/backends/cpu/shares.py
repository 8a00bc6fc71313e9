"""Which queries and chunks of a step are whose: how threads share attention out.

The weight of a (query, chunk) is how many slots they are multiplied with. Results do not depend on any of this.
"""

from numba import njit

from infer.backends.cpu.cache_slots import chunks_seen, parts_of_chunk, slot_of
from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.partials import seen_of_run
from infer.backends.cpu.records import CHUNK, SPLIT_TOKENS
from infer.backends.cpu.simd import load_i64

_FEWEST_QUERIES = 12  # of a thread


@njit
def run_at(args, state, token):  # type: ignore[no-untyped-def]
    """(row, how many tokens from here on are of it, the slot of the first)."""
    row, run = load_i64(state.rows + 8 * token), 1
    while token + run < state.num_tokens and load_i64(state.rows + 8 * (token + run)) == row:
        run += 1
    return row, run, slot_of(args, row, load_i64(state.positions + 8 * token))


@njit
def chunks_between(args, row, first_slot, last_slot):  # type: ignore[no-untyped-def]
    """How many chunks tokens from one slot to another see something of."""
    return last_slot // CHUNK + 1 - chunks_seen(args, row, first_slot)[1]


@njit
def nth_chunk(args, row, first_slot, number):  # type: ignore[no-untyped-def]
    num_first, num_skipped = chunks_seen(args, row, first_slot)
    return number if number < num_first else number + num_skipped


@njit
def weight_of_chunk(args, row, run, slot, number):  # type: ignore[no-untyped-def]
    """How many slots of its nth chunk a query of a run is multiplied with."""
    chunk, last_slot = nth_chunk(args, row, slot, number), slot + run - 1
    gap, first, end = parts_of_chunk(*seen_of_run(args, row, chunk, slot, last_slot))
    return max(LANES, gap + end - first)


@njit
def weight_of_run(args, row, run, slot):  # type: ignore[no-untyped-def]
    """The same of all chunks."""
    total = 0
    for number in range(chunks_between(args, row, slot, slot + run - 1)):
        total += weight_of_chunk(args, row, run, slot, number)
    return total


@njit
def weight_of_few(args, state, num_threads):  # type: ignore[no-untyped-def]
    """(the sum over (query, chunk), whether threads share out chunks, not queries); (0, no) of many tokens.

    A thread's share that were less than a few queries would have it read most keys for hardly anything.
    """
    total, largest, token = 0, 0, 0
    while token < state.num_tokens and state.num_tokens <= SPLIT_TOKENS:
        row, run, slot = run_at(args, state, token)
        weight = weight_of_run(args, row, run, slot)
        total, largest = total + weight * run * args.num_heads, max(largest, weight)
        token += run
    return total, num_threads > 1 and largest * _FEWEST_QUERIES * num_threads > total


@njit
def mine(left, right, weight, item, begin, stop):  # type: ignore[no-untyped-def]
    """Which of the queries [left, right) begin in a thread's share, [begin, stop) of the weights; theirs begin at
    item."""
    return max(left, left - (item - begin) // weight), min(right, left - (item - stop) // weight)


@njit
def stretch(args, row, slot, left, right):  # type: ignore[no-untyped-def]
    """(slot of the first query's token, how many chunks the queries see)."""
    group = args.num_heads // args.num_kv_heads
    first_slot = slot + left // group
    if left >= right:
        return first_slot, 0
    return first_slot, chunks_between(args, row, first_slot, slot + (right - 1) // group)


@njit
def chunk_after(args, kv, chunk, first_chunk, last_slot, is_split):  # type: ignore[no-untyped-def]
    """The (kv head, chunk) after this one. The last chunk is seldom whole, and counts as none."""
    has_head, has_chunk = kv + 1 < args.num_kv_heads, (chunk + 2) * CHUNK <= last_slot + 1
    if has_head and (is_split or not has_chunk):
        return kv + 1, (chunk if is_split else first_chunk)
    if has_chunk:
        return (0 if is_split else kv), chunk + 1
    return kv, chunk
