"""Operands of tensor cores: a float32 as the sum of two float16 or three bfloat16 numbers.

Products with keys and values in float16 or bfloat16 are exact, and sums are float32. So what is lost is what sums in
float32 lose. Two halves have 22 bits: 24 if both are far from the smallest half, 2^-24. So queries are scaled to
numbers of up to 2^15 and weights of a softmax, too. Three bfloat16 numbers have 24 bits and the range of float32.

Quantised keys and values have up to 23 bits. They are the sum of a half and of 2^-12 times another.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.kv_blocks import Q8, QUANTIZED_UNIT
from infer.compute.quantization.kv_formats import KV_TYPES

F32 = tl.constexpr(KV_TYPES.index("f32"))
BF16 = tl.constexpr(KV_TYPES.index("bf16"))
LOW = tl.constexpr(2.0**12)  # by which the lower half of a quantised number is multiplied
LARGEST_EXPONENT = tl.constexpr(15)  # of a half: 2^15 × 1.99 is finite


@triton.jit
def weight_shift(KV_TYPE: tl.constexpr):
    """Return the exponent of a softmax's largest weight. Weights may be multiplied by any power of two."""
    return 0.0 if (KV_TYPE == F32) | (KV_TYPE == BF16) else 1.0 * LARGEST_EXPONENT


@triton.jit
def query_factors(q, KV_TYPE: tl.constexpr):
    """Return a power of two for each query of q [rows, dims], and what makes products with scaled queries scores."""
    if (KV_TYPE == F32) | (KV_TYPE == BF16):
        one = tl.full((q.shape[0],), 1.0, tl.float32)
        return one, one
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        exponent = tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
        up = tl.minimum(LARGEST_EXPONENT - 1 + 127 + 127 - exponent, 253)
        down = ((254 - up) << 23).to(tl.float32, bitcast=True)
        return (up << 23).to(tl.float32, bitcast=True), down * (1.0 / QUANTIZED_UNIT) if KV_TYPE >= Q8 else down


@triton.jit
def parts_of(x, KV_TYPE: tl.constexpr):
    """Return the parts of x that are multiplied with keys or values of a type, the largest first."""
    if KV_TYPE == F32:
        return (x,)
    elif KV_TYPE == BF16:  # noqa: RET505 - constant conditions: only one of the three is compiled
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        high = x.to(tl.float16)
        return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def product(parts, y, total, KV_TYPE: tl.constexpr):
    """Return total + x y for the parts of x, and keys or values y as they were loaded. Small products come first."""
    if KV_TYPE == F32:
        return tl.dot(parts[0], y, total, input_precision="ieee")
    elif KV_TYPE == BF16:  # noqa: RET505 - constant conditions: only one of the four is compiled
        total = tl.dot(parts[2], y, total)
        total = tl.dot(parts[1], y, total)
        return tl.dot(parts[0], y, total)
    elif KV_TYPE >= Q8:
        high = y.to(tl.float16)
        low = ((y - high.to(tl.float32)) * LOW).to(tl.float16)
        total += tl.dot(parts[0], low) * (1.0 / LOW)
        total = tl.dot(parts[1], high, total)
        return tl.dot(parts[0], high, total)
    else:
        total = tl.dot(parts[1], y, total)
        return tl.dot(parts[0], y, total)
