"""`sampling.noise` on the GPU: the same operations in the same order, hence the same bits.

Kernels that use it are compiled with `enable_fp_fusion=False`. `rough_gumbel` is within ROUGH_ERROR of `gumbel_of` for
a quarter of the work. It finds the few tokens that can win, and the exact function decides among them.

Logits become integers: keys for their order, and weights for their probabilities. A key is an int32 that compares as
the logit does, −0 as +0. MIN is below every key and marks absent tokens. The total order is: logit descending, then id
ascending.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from infer.compute.sampling import constants

MIN = tl.constexpr(-(1 << 31))
MAX_ID = tl.constexpr((1 << 31) - 1)

LOWEST = tl.constexpr(constants.LOWEST)
LOG2_E = tl.constexpr(constants.LOG2_E)
ROUNDER = tl.constexpr(constants.ROUNDER)
LN2_HIGH_64 = tl.constexpr(constants.LN2_HIGH_64)
LN2_LOW_64 = tl.constexpr(constants.LN2_LOW_64)
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
    r = (d - n * LN2_HIGH_64) - n * LN2_LOW_64
    p = r * TAYLOR[0] + TAYLOR[1]
    for i in tl.static_range(2, 12):
        p = p * r + TAYLOR[i]
    scale = ((n.to(tl.int64) + EXPONENT) << 52).to(tl.float64, bitcast=True)
    return ((p * scale + ROUNDER) - ROUNDER).to(tl.int64)


@triton.jit
def goal_of(total, top_p):
    """Return the total weight to reach for `top_p`; it is at least enough to keep the largest token."""
    return tl.maximum((top_p - 1e-7) * total.to(tl.float64), 0.5)


LOG = tl.constexpr(constants.LOG_COEFFICIENTS)
LN2_HIGH = tl.constexpr(constants.LN2_HIGH_32)
LN2_LOW = tl.constexpr(constants.LN2_LOW_32)
SQRT_HALF_BITS = tl.constexpr(constants.SQRT_HALF_BITS)
ONE_BITS = tl.constexpr(constants.ONE_BITS)

ROUGH_ERROR = tl.constexpr(5e-4)
SMALL_HASH = tl.constexpr(1 << 26)  # below it V < 2⁻⁶, and −ln(1 − V) is V + V²/2 to 1 in 12,000
LN2 = tl.constexpr(0.6931471805599453)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def mix64(x):
    x = x + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hash_tokens(seed, position, token_ids):
    key = mix64(mix64(seed.to(tl.uint64)) + position.to(tl.uint64))
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    return mix32(mix32(token_ids.to(tl.uint32) ^ low) + high)


@triton.jit
def gumbel_of(h):
    """Return −ln(−ln(1 − V)), V = (h + ½) / 2³²."""
    minus_v = (h.to(tl.float32) + 0.5) * -(2.0**-32)
    exponent, fraction = _split(((~h).to(tl.float32) + 0.5) * 2.0**-32)
    fraction = tl.where(exponent == 0, minus_v, fraction)
    exponent, fraction = _split(-_log(exponent, fraction))
    return -_log(exponent, fraction)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32), mantissa - 1.0


@triton.jit
def _log(exponent, fraction):
    polynomial = fraction * LOG[0] + LOG[1]
    for i in tl.static_range(2, 9):
        polynomial = polynomial * fraction + LOG[i]
    square = fraction * fraction
    tail = polynomial * fraction * square + exponent * LN2_LOW - square * 0.5
    return fraction + tail + exponent * LN2_HIGH


@triton.jit
def rough_gumbel(h):
    is_small = h < SMALL_HASH
    share = (tl.where(is_small, h, ~h).to(tl.float32) + 0.5) * 2.0**-32  # V or 1 − V, whichever keeps its bits
    surprise = tl.where(is_small, tl.fma(share * 0.5, share, share), _rough_log2(share) * -LN2)
    return _rough_log2(surprise) * -LN2


@triton.jit
def _rough_log2(x):
    """Return log₂ x within 2⁻²², relative to the larger of it and 1."""
    if IS_INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        return libdevice.fast_log2f(x)
