"""Log-probabilities of rows that ask for them, after the sampler: what `sampling.sampler.log_probabilities` counts.

`score` goes over a thread's part of the row's logits, `merge` puts the parts together. The sum of weights is one of
integers and the largest are in the total order, so neither depends on how many parts there are.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.backends.cpu import simd
from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.records import LOGPROB, MAX_THREADS
from infer.backends.cpu.sample_math import above, add_i64, count_bits, equal_to, lowest_bit, splat_i64, sum_i64, weights
from infer.backends.cpu.sample_scan import part
from infer.backends.cpu.simd import (
    load_f32,
    load_i64,
    load_scalar_f32,
    load_u32,
    store_i32,
    store_i64,
    store_scalar_f32,
    store_u32,
)
from infer.backends.cpu.state import field_offset
from infer.backends.cpu.units import begin_units, take_units

_BYTES = LOGPROB.itemsize
_LOGITS, _IDS, _LOGIT = (field_offset(LOGPROB, name) for name in ("logits", "ids", "logit"))
_LARGEST, _TOTAL, _RANK = (field_offset(LOGPROB, name) for name in ("largest", "total", "rank"))
_ALL_LANES = np.int32(0xFFFF)


@njit(forceinline=True)
def _is_asked(args, row):  # type: ignore[no-untyped-def]
    """Whether there are log-probabilities to find: a row that failed has none."""
    if args.logprobs == 0 or load_i64(args.top_logprobs + 8 * row) < 0 or load_i64(args.alive + 8 * row) == 0:
        return False
    return load_i64(args.sampled + 8 * row) >= 0


@njit
def _insert(values, ids, count, most, value, token):  # type: ignore[no-untyped-def]
    """Into a list of up to `most`, the largest first and equals in the order in which they come: how many it has."""
    if count == most and (most == 0 or value <= load_scalar_f32(values + 4 * (most - 1))):
        return count
    at = min(count, most - 1)
    while at > 0 and load_scalar_f32(values + 4 * (at - 1)) < value:
        store_scalar_f32(values + 4 * at, load_scalar_f32(values + 4 * (at - 1)))
        store_u32(ids + 4 * at, load_u32(ids + 4 * (at - 1)))
        at -= 1
    store_scalar_f32(values + 4 * at, value)
    store_i32(ids + 4 * at, np.int32(token))
    return min(count + 1, most)


@njit
def _score(args, row, thread, num_threads):  # type: ignore[no-untyped-def]
    (first, end), group_size = part(args, thread, num_threads), LANES * args.group_vectors
    base, begin, slot = args.padded * row, group_size * first, MAX_THREADS * row + thread
    scored, values, ids = args.scored + 4 * base, args.values + 4 * (base + begin), args.ids + 4 * (base + begin)
    token, most = load_i64(args.sampled + 8 * row), load_i64(args.top_logprobs + 8 * row)
    logit, peak = load_scalar_f32(scored + 4 * token), load_scalar_f32(args.peaks + 4 * MAX_THREADS * row)
    total, ahead, count, least = splat_i64(np.int64(0)), np.int64(0), np.int64(0), np.float32(np.inf)
    for at in range(begin, group_size * end, LANES):
        x = load_f32(scored + 4 * at)
        total = add_i64(total, weights(x, peak))
        before = np.int32((1 << min(max(token - at, 0), LANES)) - 1)  # of equal logits, those with lower ids
        ahead += count_bits(above(x, logit) | (equal_to(x, logit) & before))
        mask = above(x, least) if count == most else _ALL_LANES
        while mask != 0:
            found = at + np.int64(lowest_bit(mask))
            count = _insert(values, ids, count, most, load_scalar_f32(scored + 4 * found), found)
            if count == most:
                least = load_scalar_f32(values + 4 * (most - 1))
            mask &= mask - np.int32(1)
    store_i64(args.totals + 8 * slot, sum_i64(total))
    store_i64(args.ahead + 8 * slot, ahead)
    store_i64(args.num_candidates + 8 * slot, count)


@njit
def _merge(args, row, num_threads):  # type: ignore[no-untyped-def]
    record = args.logprobs + _BYTES * ((args.num_generated + args.entry) * args.num_rows + row)
    base, most = args.padded * row, load_i64(args.top_logprobs + 8 * row)
    total, ahead, count = np.int64(0), np.int64(0), np.int64(0)
    for thread in range(num_threads):
        slot, (first, _) = MAX_THREADS * row + thread, part(args, thread, num_threads)
        begin = base + LANES * args.group_vectors * first
        for i in range(begin, begin + load_i64(args.num_candidates + 8 * slot)):
            value, token = load_scalar_f32(args.values + 4 * i), load_u32(args.ids + 4 * i)
            count = _insert(record + _LOGITS, record + _IDS, count, most, value, token)
        total += load_i64(args.totals + 8 * slot)
        ahead += load_i64(args.ahead + 8 * slot)
    logit = load_scalar_f32(args.scored + 4 * (base + load_i64(args.sampled + 8 * row)))
    store_scalar_f32(record + _LOGIT, logit)
    store_scalar_f32(record + _LARGEST, load_scalar_f32(args.peaks + 4 * MAX_THREADS * row))
    store_i64(record + _TOTAL, total)
    store_i64(record + _RANK, ahead + 1)


def make_score() -> Callable[..., None]:
    def score(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        for row in range(args.num_rows):
            if _is_asked(args, row):
                _score(args, row, thread, num_threads)

    return score


def make_merge() -> Callable[..., None]:
    def merge(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], simd.address_of(state_at)
        begin_units(state, thread)
        row, end = take_units(state, thread, num_threads, args.num_rows)
        while row < end:
            if _is_asked(args, row):
                _merge(args, row, num_threads)
            row += 1
            if row == end:
                row, end = take_units(state, thread, num_threads, args.num_rows)

    return merge
