"""Logits as integers: keys for their order, and weights for their probabilities.

A key is an int32 that compares as the logit does, −0 as +0. MIN is below every key and marks absent tokens. The total
order is: logit descending, then id ascending.

A weight is that of `sampling.integer_probs`: eᵈ × 2⁴², from the same float64 operations in the same order. Kernels that
use it are compiled with `enable_fp_fusion=False`.
"""

import triton
import triton.language as tl

from infer.compute.sampling import constants

MIN = tl.constexpr(-(1 << 31))
MAX_ID = tl.constexpr((1 << 31) - 1)

LOWEST = tl.constexpr(constants.LOWEST)
LOG2_E = tl.constexpr(constants.LOG2_E)
ROUNDER = tl.constexpr(constants.ROUNDER)
LN2_HIGH = tl.constexpr(constants.LN2_HIGH_64)
LN2_LOW = tl.constexpr(constants.LN2_LOW_64)
TAYLOR = tl.constexpr(constants.TAYLOR)
EXPONENT = tl.constexpr(1023 + constants.WEIGHT_BITS)


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
def weights(logits, largest):
    d = tl.maximum(logits.to(tl.float64) - largest.to(tl.float64), LOWEST)
    n = (d * LOG2_E + ROUNDER) - ROUNDER
    r = (d - n * LN2_HIGH) - n * LN2_LOW
    p = r * TAYLOR[0] + TAYLOR[1]
    for i in tl.static_range(2, 12):
        p = p * r + TAYLOR[i]
    scale = ((n.to(tl.int64) + EXPONENT) << 52).to(tl.float64, bitcast=True)
    return ((p * scale + ROUNDER) - ROUNDER).to(tl.int64)


@triton.jit
def goal_of(total, top_p):
    """Return the total weight to reach for `top_p`; it is at least enough to keep the largest token."""
    return tl.maximum((top_p - 1e-7) * total.to(tl.float64), 0.5)
