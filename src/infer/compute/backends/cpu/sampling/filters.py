"""Temperature, and the filters: top-k, top-p and min-p of candidates, and bounds of what they keep.

A row's candidates are any superset of the tokens that its filters keep. Stage 2 collects the tokens above two bounds,
and stage 3 applies the filters to them. So a filter without a bound is correct, if its row has no top-p without top-k:
then the weight of all tokens counts, which stage 2 adds.

Selection is exact and needs no sort. A float's bits are folded so that a larger value has a smaller key, and cut into
four bytes. A histogram of each byte counts the values that agree in the bytes before. It finds the byte at which the
sum of weights reaches the goal. The list is read four times, whatever its contents.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.sampling.exact_math import (
    bits_of,
    float_of,
    keep_finite,
    splat_i64,
    store_i64x16,
    sum_i64,
    weights,
)
from infer.compute.backends.cpu.sampling.stage_1_edit import LARGEST, NOTHING
from infer.compute.backends.cpu.simd import load_f32, load_i64, load_upto, splat_f32, stack, store_i64

_BUCKETS = 256
_SIGN = np.uint32(0x80000000)
_ALL = np.uint32(0xFFFFFFFF)


@njit(forceinline=True)
def key_of_value(x):
    """Return a u32 key of an f32 that is smaller for a larger value. Both zeros have the same key."""
    bits = bits_of(x + np.float32(0))
    return bits if bits & _SIGN else bits ^ np.uint32(0x7FFFFFFF)


@njit(forceinline=True)
def value_of(key):
    return float_of(key if key & _SIGN else key ^ np.uint32(0x7FFFFFFF))


@njit
def find_threshold(values, weights, count, goal):
    """Return (key of the value at which the weights of the largest values reach `goal`, their sum before that value).

    `values` is f32 [count]. `weights` is i64 [count], or None if each value weighs 1. If the whole sum stays below the
    goal, the key is the last one.
    """
    histogram, prefix, mask, before = stack(8 * 256), np.uint32(0), np.uint32(0), np.int64(0)
    for level in range(4):
        shift = np.uint32(24 - 8 * level)
        for bucket in range(_BUCKETS):
            store_i64(histogram + 8 * bucket, 0)
        for i in range(count):
            key = key_of_value(values[i])
            if key & mask == prefix:
                at = histogram + 8 * np.int64((key >> shift) & np.uint32(255))
                store_i64(at, load_i64(at) + (1 if weights is None else weights[i]))
        bucket = 0
        while bucket < _BUCKETS and np.float64(before + load_i64(histogram + 8 * bucket)) < goal:
            before += load_i64(histogram + 8 * bucket)
            bucket += 1
        if bucket == _BUCKETS:
            return _ALL, before
        prefix |= np.uint32(bucket) << shift
        mask |= np.uint32(255) << shift
    return prefix, before


@njit
def keep_largest(values, ids, weights, count, goal):
    """Keep the fewest largest values whose weights reach `goal`, in their order, and return how many are kept.

    It changes `values`, f32 [count], `ids`, i32, and `weights`, i64 or None, in place. Of equal values the first are
    kept.
    """
    threshold, before = find_threshold(values, weights, count, goal)
    kept = np.int64(0)
    for i in range(count):
        value = values[i]
        key = key_of_value(value)
        if key < threshold or (key == threshold and np.float64(before) < goal):
            w = np.int64(1) if weights is None else weights[i]
            if key == threshold:
                before += w
            values[kept] = value
            ids[kept] = ids[i]
            if weights is not None:
                weights[kept] = w
            kept += 1
    return kept


@njit(forceinline=True)
def scaling(temperature, largest):
    """Return (shift, divisor) of a row's temperature.

    If the largest logit would overflow, all are shifted by it first.
    """
    if abs(largest / temperature) > LARGEST:
        return largest, temperature
    return np.float32(0), temperature


@njit(forceinline=True)
def scaled(x, scale):
    """Return 16 logits divided by the temperature. Finite ones stay finite. `scale` is the result of `scaling`."""
    shift, divisor = scale
    if divisor == 1:
        return x
    moved = x - splat_f32(shift) if shift != 0 else x
    return keep_finite(x, moved / splat_f32(divisor), LARGEST)


@njit(forceinline=True)
def scaled_scalar(x, scale):
    shift, divisor = scale
    if divisor == 1 or x == NOTHING:
        return x
    return min(max((x - shift) / divisor, -LARGEST), LARGEST)


@njit(forceinline=True)
def filter_scale(args, row, temperature, largest):
    """Return the scaling of a row's logits before the filters: none if the temperature comes last."""
    if args.temperature_last[row] != 0:
        return np.float32(0), np.float32(1)
    return scaling(temperature, largest)


@njit(forceinline=True)
def is_weighed(args, row):
    """Return True if top-p counts the weight of all tokens, which stage 2 has to add."""
    return args.top_p[row] < 1 and args.top_k[row] == 0


@njit
def least_logit(args, row, scale, peak):
    """Return a finite lower bound of the scaled logits that the row's filters keep. `peak` is the largest.

    For top-k it is the k-th largest of the groups' largest, and for min-p its threshold.
    """
    bound, k = -LARGEST, args.top_k[row]
    if k != 0 and k <= args.num_groups:
        threshold, _ = find_threshold(args.maxima + args.num_groups * row, None, args.num_groups, k)
        bound = max(bound, scaled_scalar(value_of(threshold), scale))
    if k == 0 or args.top_p[row] == 1:  # else top-p is of what top-k keeps, min-p's losses included
        bound = max(bound, peak + np.float32(args.min_p[row]))
    return bound


@njit
def least_weight(args, row, scale, peak):
    """Return a weight below which no token is kept: all such tokens together weigh less than what top-p drops."""
    maxima = args.maxima + args.num_groups * row
    total = splat_i64(np.int64(0))
    for group in range(0, args.num_groups, LANES):
        x = load_upto(maxima + group, args.num_groups - group)
        total = total + weights(scaled(x, scale), peak)
    dropped = (1.0 - args.top_p[row]) * np.float64(sum_i64(total))
    return np.int64(0.999 * dropped / np.float64(args.vocab))


@njit
def _weigh(values, weighed, count, peak):
    """Store the weights of `count` values in `weighed`, i64 [count, padded to 16], and return their sum."""
    total = np.int64(0)
    for i in range(0, count, LANES):
        store_i64x16(weighed + i, weights(load_f32(values + i), peak))
    for i in range(count):
        total += weighed[i]
    return total


@njit
def keep_filtered(args, row, count, total, peak):
    """Apply steps 7 to 9 to the row's `count` candidates in place, and return how many stay.

    `total` is the sum of the weights of all tokens, or 0 if the candidates are not weighed yet.
    """
    base = args.padded * row
    values, ids, weighed = args.values + base, args.ids + base, args.weights + base
    k, top_p = args.top_k[row], args.top_p[row]
    if k != 0 and count > k:
        count = keep_largest(values, ids, None, count, k)
    if top_p < 1:
        if total == 0:
            total = _weigh(values, weighed, count, peak)
        count = keep_largest(values, ids, weighed, count, (top_p - 1e-7) * np.float64(total))
    lowest = peak + np.float32(args.min_p[row])
    kept = np.int64(0)
    for i in range(count):
        value = values[i]
        if value >= lowest:
            values[kept] = value
            ids[kept] = ids[i]
            kept += 1
    return kept
