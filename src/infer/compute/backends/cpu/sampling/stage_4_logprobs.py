"""Log-probabilities of rows that ask for them, after the sampler, as `sampling.sampler.log_probabilities` defines them.

`score` processes a thread's part of the row's logits, and `merge` combines the parts. The sum of weights is a sum of
integers and the largest follow the total order, so neither depends on the number of parts.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.compile.record_types import nth_record
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.sampling.exact_math import (
    above,
    count_bits,
    equal_to,
    lowest_bit,
    splat_i64,
    sum_i64,
    weights,
)
from infer.compute.backends.cpu.sampling.stage_1_edit import part
from infer.compute.backends.cpu.simd import address_of, load_f32
from infer.compute.backends.cpu.thread_records import MAX_THREADS
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_units

_ALL_LANES = np.int32(0xFFFF)


@njit(forceinline=True)
def _is_asked(args, row):
    """Return True if the row needs log-probabilities. A row that failed has none."""
    if address_of(args.logprobs) == 0 or args.top_logprobs[row] < 0 or args.alive[row] == 0:
        return False
    return args.sampled[row] >= 0


@njit
def _insert(values, ids, count, most, value, token):
    """Insert a value and its token into a sorted list of up to `most` entries, in place. Return its length.

    `values` is f32 and `ids` i32. The largest comes first, and equal values stay in the order of insertion.
    """
    if count == most and (most == 0 or value <= values[most - 1]):
        return count
    at = min(count, most - 1)
    while at > 0 and values[at - 1] < value:
        values[at] = values[at - 1]
        ids[at] = ids[at - 1]
        at -= 1
    values[at] = value
    ids[at] = np.int32(token)
    return min(count + 1, most)


@njit
def _score(args, row, thread, num_threads):
    (first, end), group_size = part(args, thread, num_threads), LANES * args.group_vectors
    base, begin, slot = args.padded * row, group_size * first, MAX_THREADS * row + thread
    scored, values, ids = args.scored + base, args.values + base + begin, args.ids + base + begin
    token, most = args.sampled[row], args.top_logprobs[row]
    logit, peak = scored[token], args.peaks[MAX_THREADS * row]
    total, ahead, count, least = splat_i64(np.int64(0)), np.int64(0), np.int64(0), np.float32(np.inf)
    for at in range(begin, group_size * end, LANES):
        x = load_f32(scored + at)
        total = total + weights(x, peak)
        before = np.int32((1 << min(max(token - at, 0), LANES)) - 1)  # of equal logits, those with lower ids
        ahead += count_bits(above(x, logit) | (equal_to(x, logit) & before))
        mask = above(x, least) if count == most else _ALL_LANES
        while mask != 0:
            found = at + np.int64(lowest_bit(mask))
            count = _insert(values, ids, count, most, scored[found], found)
            if count == most:
                least = values[most - 1]
            mask &= mask - np.int32(1)
    args.totals[slot] = sum_i64(total)
    args.ahead[slot] = ahead
    args.num_candidates[slot] = count


@njit
def _merge(args, row, num_threads):
    record = nth_record(args.logprobs, (args.num_generated + args.entry) * args.num_rows + row)
    base, most = args.padded * row, args.top_logprobs[row]
    total, ahead, count = np.int64(0), np.int64(0), np.int64(0)
    for thread in range(num_threads):
        slot, (first, _) = MAX_THREADS * row + thread, part(args, thread, num_threads)
        begin = base + LANES * args.group_vectors * first
        for i in range(begin, begin + args.num_candidates[slot]):
            value, token = args.values[i], args.ids[i]
            count = _insert(record.logits, record.ids, count, most, value, token)
        total += args.totals[slot]
        ahead += args.ahead[slot]
    record.logit, record.largest = args.scored[base + args.sampled[row]], args.peaks[MAX_THREADS * row]
    record.total, record.rank = total, ahead + 1


def score(args, state, thread, num_threads):
    """Process the thread's part of the rows that ask for log-probabilities.

    Reads `scored`, f32 [rows, padded vocabulary], `sampled` and `peaks[0]`. Writes `totals`, `ahead` and
    `num_candidates`, [rows, MAX_THREADS], and the largest logits of the part in `values` and `ids`, largest first.
    """
    for row in range(args.num_rows):
        if _is_asked(args, row):
            _score(args, row, thread, num_threads)


def merge(args, state, thread, num_threads):
    """Combine the parts of each row into its record of `logprobs`, `sample_records.LOGPROB`. Threads take rows."""
    begin_units(state, thread)
    begin, end = take_units(state, thread, num_threads, args.num_rows)
    while begin < end:
        for row in range(begin, end):
            if _is_asked(args, row):
                _merge(args, row, num_threads)
        begin, end = take_units(state, thread, num_threads, args.num_rows)
