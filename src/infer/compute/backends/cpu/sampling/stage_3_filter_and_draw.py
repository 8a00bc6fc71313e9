"""The sampler's third command: filters on the candidates, noise, and the token. One row per thread at a time.

Log-probabilities of processed logits are of what the filters keep. If a row requests them, it is stored here.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.sampling.exact_math import (
    equal_to,
    gumbel_of,
    hash_tokens,
    keep_bits,
    load_ids,
    lowest_bit,
)
from infer.compute.backends.cpu.sampling.filters import (
    filter_scale,
    is_weighed,
    keep_filtered,
    scaled,
    scaled_scalar,
    scaling,
)
from infer.compute.backends.cpu.sampling.stage_1_edit import (
    NOTHING,
    is_below_minimum,
    logits_of,
    masked_bits,
    masks_of,
    part,
    position_of,
    scores_logits,
)
from infer.compute.backends.cpu.sampling.stage_2_candidates import key_of, load_logits, row_largest
from infer.compute.backends.cpu.simd import load_f32, max_f32, splat_f32, store_f32
from infer.compute.backends.cpu.thread_records import MAX_THREADS
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_units
from infer.compute.sampling import constants

_NOT_A_NUMBER, _NOTHING_ALLOWED = constants.NOT_A_NUMBER, constants.NOTHING_ALLOWED


@njit
def _best_found(args, row, is_greedy, num_threads):
    """Return the best id among those that the threads found for a row, or −1.

    Threads have parts of the vocabulary in order, so the first of equal scores has the lowest id.
    """
    best, best_id = NOTHING, np.int64(-1)
    for thread in range(num_threads):
        slot = row * MAX_THREADS + thread
        found, score = args.found[slot], args.scores[slot]
        if found >= 0 and (best_id < 0 or (not is_greedy and score > best)):
            best, best_id = score, found
    return best_id


@njit
def _gather(args, row, num_threads):
    """Move the threads' candidates together, in the order of their ids. Return (how many, sum of weights)."""
    base, count, total = args.padded * row, np.int64(0), np.int64(0)
    for thread in range(num_threads):
        slot, (first, _) = row * MAX_THREADS + thread, part(args, thread, num_threads)
        begin = base + LANES * args.group_vectors * first
        found = args.num_candidates[slot]
        if begin != base + count:
            for i in range(found):
                args.values[base + count + i] = args.values[begin + i]
                args.ids[base + count + i] = args.ids[begin + i]
                args.weights[base + count + i] = args.weights[begin + i]
        count += found
        total += args.totals[slot]
    return count, total


@njit
def _ends(args, row, masks):
    """Store the banned ends as candidates, because nothing else is left. Return (how many, the largest)."""
    base, count, largest, starts = args.padded * row, np.int64(0), NOTHING, args.end_starts + row
    if not is_below_minimum(args, row):
        return count, largest
    for entry in range(starts[0], starts[1]):
        token, value = args.end_ids[entry], args.ends[entry]
        begin = token // LANES * LANES
        is_allowed = (masked_bits(masks, begin) >> np.int32(token - begin)) & 1
        if value > NOTHING and is_allowed:
            args.values[base + count] = value
            args.ids[base + count] = np.int32(token)
            largest = max(largest, value)
            count += 1
    return count, largest


@njit
def _draw(args, row, count, scale, key):
    """Return the id of the largest value plus noise.

    Candidates are in the order of their ids; scale is the scaling that remains to be done.
    """
    values, ids = args.values + args.padded * row, args.ids + args.padded * row
    low, high = key
    best, best_id = NOTHING, np.int64(-1)
    for i in range(0, count, LANES):
        x = scaled(load_f32(values + i), scale)
        if count - i < LANES:
            x = keep_bits(x, np.int32((1 << (count - i)) - 1))
        scores = x + gumbel_of(hash_tokens(load_ids(ids + i), low, high))
        score = max_f32(scores)
        if score > best:
            best = score
            best_id = np.int64(ids[i + np.int64(lowest_bit(equal_to(scores, score)))])
    return best_id


@njit
def _keep_peak(args, row, num_threads):
    """Store the row's largest raw logit in `peaks[0]` of the row: the maximum of what the threads stored."""
    peaks = args.peaks + MAX_THREADS * row
    for thread in range(num_threads):
        peaks[0] = max(peaks[0], peaks[thread])


@njit
def _keep_row(args, row, largest, scale):
    """Store all of the row's logits, as the scan left them but scaled, in `scored`, and the largest in `peaks[0]`."""
    logits, scored, masks = logits_of(args, row), args.scored + args.padded * row, masks_of(args, row)
    for token in range(0, args.padded, LANES):
        store_f32(scored + token, scaled(load_logits(args, logits, token, masks), scale))
    args.peaks[MAX_THREADS * row] = scaled_scalar(largest, scale)


@njit
def _keep_candidates(args, row, count, scale):
    """Store the candidates' scaled logits in `scored`, −inf for all other tokens, and the largest in `peaks[0]`."""
    base, scored, largest = args.padded * row, args.scored + args.padded * row, NOTHING
    for token in range(0, args.padded, LANES):
        store_f32(scored + token, splat_f32(NOTHING))
    for i in range(base, base + count):
        value = scaled_scalar(args.values[i], scale)
        scored[np.int64(args.ids[i])] = value
        largest = max(largest, value)
    args.peaks[MAX_THREADS * row] = largest


@njit
def _choose_candidate(args, row, count, total, largest, temperature):
    """Return the token among the candidates, whose values are scaled for the filters."""
    peak = scaled_scalar(largest, filter_scale(args, row, temperature, largest))
    count = keep_filtered(args, row, count, total, peak)
    key = key_of(args.seed[row], position_of(args, row))
    scale = np.float32(0), np.float32(1)
    if args.temperature_last[row] != 0:
        scale = scaling(temperature, largest)
    if scores_logits(args, row, True):
        _keep_candidates(args, row, count, scale)
    return _draw(args, row, count, scale, key)


@njit
def _choose_end(args, row, temperature):
    """Return a token among the banned ends of a row in which nothing else is allowed, or the code for no token."""
    count, largest = _ends(args, row, masks_of(args, row))
    values, ids = args.values + args.padded * row, args.ids + args.padded * row
    if count == 0:
        return np.int64(_NOTHING_ALLOWED)
    scale = filter_scale(args, row, temperature if temperature != 0 else np.float32(1), largest)
    if temperature == 0 and scores_logits(args, row, True):
        _keep_candidates(args, row, count, scale)
    for i in range(count):
        value = values[i]
        if temperature == 0 and value == largest:
            return np.int64(ids[i])
        values[i] = scaled_scalar(value, scale)
    return _choose_candidate(args, row, count, np.int64(0), largest, temperature)


@njit
def _choose_token(args, row, num_threads):
    """Return the row's token, or the code of its failure: a logit that is no number, or nothing allowed."""
    largest, temperature = row_largest(args, row), args.temperature[row]
    if scores_logits(args, row, False):
        _keep_peak(args, row, num_threads)
    if largest != largest:
        return np.int64(_NOT_A_NUMBER)
    if largest == NOTHING:
        return _choose_end(args, row, temperature)
    if args.is_filtered[row] == 0:
        if scores_logits(args, row, True):
            _keep_row(args, row, largest, scaling(temperature if temperature != 0 else np.float32(1), largest))
        return _best_found(args, row, temperature == 0, num_threads)
    count, total = _gather(args, row, num_threads)
    if not is_weighed(args, row):
        total = np.int64(0)
    return _choose_candidate(args, row, count, total, largest, temperature)


def choose(args, state, thread, num_threads):
    """Store the token of each row in `sampled`, i64 [rows], or the code of the row's failure. Threads take rows.

    Reads what `narrow` has found. Overwrites the row's candidates: gathered, filtered and scaled. A row that asks for
    processed log-probabilities also gets `scored`, f32 [padded vocabulary], and `peaks[0]`.
    """
    begin_units(state, thread)
    begin, end = take_units(state, thread, num_threads, args.num_rows)
    while begin < end:
        for row in range(begin, end):
            if args.alive[row] != 0:
                args.sampled[row] = _choose_token(args, row, num_threads)
        begin, end = take_units(state, thread, num_threads, args.num_rows)
