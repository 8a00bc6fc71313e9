"""Floats as sums of 16-bit floats, which tensor cores multiply exactly and add in float32.

Forms of activations are numbers. 1 and 2 are planes of int8 (`activations`). A form of 16 bits has three planes of
bf16, or two planes of f16 with a scale per block. What remains after one plane is exact, so the next plane holds it.
"""

import triton
import triton.language as tl

BF16_PLANES = tl.constexpr(3)
F16_PLANES = tl.constexpr(4)  # the form's number
NUM_PLANES = {0: 1, 1: 1, 2: 2, BF16_PLANES.value: 3, F16_PLANES.value: 2}  # by form; 0: float32


@triton.jit
def store_planes(codes, value, tokens, inputs, width, mask, FORM: tl.constexpr):
    """Store a value in the planes of a form of 16 bits; for f16, the value is lifted.

    `tokens` and `inputs` broadcast to the value's shape. A plane of a token has `width` numbers.
    """
    count: tl.constexpr = 3 if FORM == BF16_PLANES else 2
    dtype: tl.constexpr = tl.bfloat16 if FORM == BF16_PLANES else tl.float16
    to = codes + tokens * (width * count) + inputs
    for _ in tl.static_range(count):
        part = value.to(dtype)
        tl.store(to, part, mask=mask)
        value -= part.to(tl.float32)
        to += width


@triton.jit
def lifted(value, AXIS: tl.constexpr):
    """Return value / scale and the scale of each block, whose values lie along `AXIS`.

    The scale is the power of two that brings the block's largest value to at least 2¹⁴ and below 2¹⁵.
    """
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS, keep_dims=True)
    exponent = tl.maximum(bits >> 23, 15)  # so that the scale is a normal number
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return value * inverse, ((exponent - 14) << 23).to(tl.float32, bitcast=True)
