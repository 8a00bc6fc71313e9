"""Exact selection without a sort: the largest values of a list whose weights reach a goal, ties by their order.

A float's bits are folded so that a larger value has a smaller key, and cut into four bytes. A histogram of each byte
counts the values that agree in the bytes before. It finds the byte at which the sum of weights reaches the goal. The
list is read four times, whatever its contents.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.sampling.exact_math import bits_of, float_of
from infer.compute.backends.cpu.simd import load_i64, stack, store_i64

_BUCKETS = 256
_SIGN = np.uint32(0x80000000)
_ALL = np.uint32(0xFFFFFFFF)


@njit(forceinline=True)
def key_of_value(x):
    """Return a key that is smaller for a larger value; both zeros have one key."""
    bits = bits_of(x + np.float32(0))
    return bits if bits & _SIGN else bits ^ np.uint32(0x7FFFFFFF)


@njit(forceinline=True)
def value_of(key):
    return float_of(key if key & _SIGN else key ^ np.uint32(0x7FFFFFFF))


@njit
def find_threshold(values, weights, count, goal):
    """Return (key of the value at which the sum of weights of the largest reaches goal, the sum before that value).

    `weights` is None if each value weighs 1. If the whole sum stays below the goal, the key is the last one.
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
    """Keep the fewest largest values whose weights reach the goal, in their order, and return how many."""
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
