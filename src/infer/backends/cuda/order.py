"""The total order: logit descending, then id ascending. Pivots in it are found by bisection; nothing is sorted.

A logit's key is an int32 that compares as the logit does, −0 as +0. MIN is below every key and marks absent tokens. The
tokens that a filter keeps are the first of the order. So "the fewest largest tokens that reach a goal" are given by one
pivot and, among the tokens equal to it, one id. Top-k counts tokens and top-p adds weights, by the same search.
"""

import triton
import triton.language as tl

MIN = tl.constexpr(-(1 << 31))
MAX_ID = tl.constexpr((1 << 31) - 1)


@triton.jit
def key_of(x):
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def logit_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def best_of(scores, ids):
    """Return the largest score and the smallest id that has it."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, ids, MAX_ID))


@triton.jit
def pivot_of(keys, amounts, goal, low):
    """Return the lowest key that is kept.

    It is the smallest t, at least `low`, such that the tokens above t do not reach the goal.
    """
    low, high = low.to(tl.int64), tl.max(keys).to(tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.sum(tl.where(keys > middle.to(tl.int32), amounts, 0))
        is_short = above.to(tl.float64) < goal
        high = tl.where(is_short, middle, high)
        low = tl.where(is_short, low, middle + 1)
    return low.to(tl.int32)


@triton.jit
def kept_of(keys, amounts, goal):
    """Return which tokens of a tile, in the order of their ids, are kept. Equal keys have equal amounts."""
    pivot = pivot_of(keys, amounts, goal, tl.min(tl.where(keys > MIN, keys, tl.max(keys))))
    above = tl.sum(tl.where(keys > pivot, amounts, 0)).to(tl.int64)
    is_equal = keys == pivot
    num_before = tl.cumsum(is_equal.to(tl.int32), 0) - 1
    amount = tl.max(tl.where(is_equal, amounts, 0)).to(tl.int64)
    is_short = (above + num_before.to(tl.int64) * amount).to(tl.float64) < goal
    return (keys > MIN) & ((keys > pivot) | (is_equal & is_short))
