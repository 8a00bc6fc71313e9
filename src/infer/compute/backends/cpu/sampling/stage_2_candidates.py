"""The sampler's second command: from the largest logit of each group to few candidates, or directly to a token.

A greedy row's token is the first that equals the largest. A row without filters takes the largest logit plus noise. A
token whose hash is too large for its group's largest logit to win is skipped by an integer comparison. Other rows keep
the tokens above a lower bound of what their filters keep (`filters`).
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.math_functions import exp_scalar
from infer.compute.backends.cpu.sampling.exact_math import (
    at_least,
    at_least_i64,
    at_most_unsigned,
    equal_to,
    gumbel_of,
    hash_tokens,
    ids_from,
    keep_bits,
    lowest_bit,
    splat_i64,
    store_i64x16,
    sum_i64,
    weights,
)
from infer.compute.backends.cpu.sampling.filters import (
    filter_scale,
    is_weighed,
    least_logit,
    least_weight,
    scaled,
    scaled_scalar,
    scaling,
)
from infer.compute.backends.cpu.sampling.stage_1_edit import (
    NOTHING,
    logits_of,
    masked_bits,
    masks_of,
    part,
    position_of,
)
from infer.compute.backends.cpu.simd import (
    load_f32,
    load_i64,
    load_scalar_f32,
    load_upto,
    max_f32,
    maximum,
    splat_f32,
    stack,
    store_f32,
)
from infer.compute.backends.cpu.thread_records import MAX_THREADS
from infer.compute.sampling import constants

_MAX_NOISE = np.float32(constants.MAX_NOISE)


@njit
def row_largest(args, row):
    """Return the largest logit of a row, from `maxima`. It is NaN if any group's largest is NaN."""
    maxima = args.maxima + args.num_groups * row
    most = splat_f32(NOTHING)
    for group in range(0, args.num_groups, LANES):
        most = maximum(most, load_upto(maxima + group, args.num_groups - group))
    return max_f32(most)


@njit(forceinline=True)
def key_of(seed, position):
    """Return the two 32-bit words of the noise's key, from the row's seed and the token's position."""
    key = _mix64(_mix64(np.uint64(seed)) + np.uint64(position))
    return np.int32(key & np.uint64(0xFFFFFFFF)), np.int32(key >> np.uint64(32))


@njit(forceinline=True)
def _mix64(x):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(forceinline=True)
def load_logits(args, logits, token, masks):
    """Load 16 logits as `scan` left them, −inf beyond the vocabulary. The last, incomplete vector is masked here."""
    room = args.vocab - token
    if room >= LANES:
        return load_f32(logits + token)
    x = load_upto(logits + token, room)
    if masks[0] != 0 or masks[1] != 0:
        x = keep_bits(x, masked_bits(masks, token))
    return x


@njit(forceinline=True)
def hash_bound(margin):
    """Return a bound as a u32 in an i32: a hash above it gives less noise than `margin`.

    −ln(−ln(1 − V)) ≥ margin needs V ≤ e^−margin. The bound is rounded up.
    """
    if margin <= 0:
        return np.int32(-1)
    share = np.float64(exp_scalar(-margin)) * 4294967296.0 * 1.0001 + 2.0
    return np.int32(np.uint32(min(share, 4294967295.0)))


@njit
def _first_equal(args, row, logits, first, end, largest, masks):
    """Return the lowest id in groups [first, end) whose logit is `largest`; −1 if there is none."""
    maxima = args.maxima + args.num_groups * row
    for group in range(first, end):
        if maxima[group] == largest:
            begin = LANES * args.group_vectors * group
            for token in range(begin, min(begin + LANES * args.group_vectors, args.vocab), LANES):
                mask = equal_to(load_logits(args, logits, token, masks), largest)
                if mask != 0:
                    return token + np.int64(lowest_bit(mask))
    return np.int64(-1)


@njit(forceinline=True)
def _margin(best, largest):
    """Return the noise that a logit of `largest` needs to reach `best`, less what the sum of the two may round up."""
    return (best - largest) - abs(best) * np.float32(5e-7)


@njit
def _search_group(args, logits, group, scale, key, masks, best, best_id, largest):
    """Return (best score, its id) among the best so far and this group's tokens. A score is a scaled logit plus noise.

    No logit of the group is above `largest`. Of equal scores the lowest id wins.
    """
    begin, (low, high) = LANES * args.group_vectors * group, key
    bound = hash_bound(_margin(best, largest))
    for token in range(begin, min(begin + LANES * args.group_vectors, args.vocab), LANES):
        h = hash_tokens(ids_from(np.int32(token)), low, high)
        if at_most_unsigned(h, bound) != 0:
            scores = scaled(load_logits(args, logits, token, masks), scale) + gumbel_of(h)
            score = max_f32(scores)
            if score >= best:
                found = token + np.int64(lowest_bit(equal_to(scores, score)))
                if score > best or found < best_id:
                    best, best_id = score, found
                    bound = hash_bound(_margin(best, largest))
    return best, best_id


@njit
def _search(args, row, logits, first, end, scale, key, masks):
    """Return (score, id) of the best token in groups [first, end): the largest scaled logit plus noise.

    The id may be −1.

    It is −1 if all logits are −inf. The group with the largest logit comes first, so that the other groups take less
    time.
    """
    maxima = args.maxima + args.num_groups * row
    start, largest = first, NOTHING
    for group in range(first, end):
        value = maxima[group]
        if value > largest:
            start, largest = group, value
    best, best_id = NOTHING, np.int64(-1)
    if largest == NOTHING:
        return best, best_id
    largest = scaled_scalar(largest, scale)
    best, best_id = _search_group(args, logits, start, scale, key, masks, best, best_id, largest)
    for group in range(first, end):
        value = maxima[group]
        if group != start and value > NOTHING:
            largest = scaled_scalar(value, scale)
            if _margin(best, largest) <= _MAX_NOISE:
                best, best_id = _search_group(args, logits, group, scale, key, masks, best, best_id, largest)
    return best, best_id


@njit
def _append(args, at, count, token, mask, x, w):
    """Append the lanes of mask as candidates, from `at + count` on, and return the new count.

    x has the values of 16 tokens from id `token` on. w is the address of their weights, i64 [16], or None. Writes
    `values`, `ids` and, with w, `weights`.
    """
    spill = stack(64)
    store_f32(spill, x)
    while mask != 0:
        lane = np.int64(lowest_bit(mask))
        args.values[at + count] = load_scalar_f32(spill + 4 * lane)
        args.ids[at + count] = np.int32(token + lane)
        if w is not None:
            args.weights[at + count] = load_i64(w + 8 * lane)
        mask &= mask - np.int32(1)
        count += 1
    return count


@njit
def _collect(args, row, logits, first, end, scale, masks, bound):
    """Append the tokens of groups [first, end) with a scaled logit of at least `bound` as candidates.

    Return their number.

    `bound` is finite. Writes `values` and `ids` from the thread's part of the row on.
    """
    maxima = args.maxima + args.num_groups * row
    group_size = LANES * args.group_vectors
    at, count = args.padded * row + group_size * first, np.int64(0)
    for group in range(first, end):
        if scaled_scalar(maxima[group], scale) >= bound:
            begin = group_size * group
            for token in range(begin, min(begin + group_size, args.vocab), LANES):
                x = scaled(load_logits(args, logits, token, masks), scale)
                mask = at_least(x, bound)
                if mask != 0:
                    count = _append(args, at, count, token, mask, x, None)
    return count


@njit
def _weigh(args, row, logits, first, end, scale, masks, bounds):
    """Append candidates like `_collect`, with their weights. Return (their number, the sum of all tokens' weights).

    `bounds` is (least scaled logit, the largest scaled logit, least weight) of a candidate.
    """
    maxima = args.maxima + args.num_groups * row
    group_size = LANES * args.group_vectors
    at, count, (bound, peak, lightest) = args.padded * row + group_size * first, np.int64(0), bounds
    total, spill = splat_i64(np.int64(0)), stack(128)
    for group in range(first, end):
        if maxima[group] > NOTHING:
            begin = group_size * group
            for token in range(begin, min(begin + group_size, args.vocab), LANES):
                x = scaled(load_logits(args, logits, token, masks), scale)
                w = weights(x, peak)
                total = total + w
                mask = at_least_i64(w, lightest) & at_least(x, bound)
                if mask != 0:
                    store_i64x16(spill, w)
                    count = _append(args, at, count, token, mask, x, spill)
    return count, sum_i64(total)


@njit
def _narrow_filtered(args, row, logits, first, end, thread, scale, masks, largest):
    """Collect the candidates of groups [first, end), and store their number and, for top-p, the sum of weights."""
    peak = scaled_scalar(largest, scale)
    bound, slot = least_logit(args, row, scale, peak), row * MAX_THREADS + thread
    if is_weighed(args, row):
        bounds = bound, peak, least_weight(args, row, scale, peak)
        count, total = _weigh(args, row, logits, first, end, scale, masks, bounds)
        args.totals[slot] = total
    else:
        count = _collect(args, row, logits, first, end, scale, masks, bound)
    args.num_candidates[slot] = count


def narrow(args, state, thread, num_threads):
    """Find the thread's best token of each row, or collect its candidates if the row has filters.

    Reads `logits`, `maxima` and the columns. A row without filters gets `found`, and `scores` unless it is greedy. A
    row with filters gets `values` and `ids` (and `weights`, if top-p counts all tokens) from the place on where the
    thread's part of the vocabulary begins, and `num_candidates` and `totals`. All are in the order of the ids.
    """
    first, end = part(args, thread, num_threads)
    for row in range(args.num_rows):
        if args.alive[row] == 0:
            continue
        logits = logits_of(args, row)
        largest, masks = row_largest(args, row), masks_of(args, row)
        temperature = args.temperature[row]
        slot = row * MAX_THREADS + thread
        if largest != largest or largest == NOTHING:  # `choose` knows what to do
            continue
        if temperature == 0:
            args.found[slot] = _first_equal(args, row, logits, first, end, largest, masks)
        elif args.is_filtered[row] != 0:
            scale = filter_scale(args, row, temperature, largest)
            _narrow_filtered(args, row, logits, first, end, thread, scale, masks, largest)
        else:
            key = key_of(args.seed[row], position_of(args, row))
            scale = scaling(temperature, largest)
            best, best_id = _search(args, row, logits, first, end, scale, key, masks)
            args.found[slot] = best_id
            args.scores[slot] = best
