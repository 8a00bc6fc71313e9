"""Epilogue of a product before it is stored: bias, activation, gate × up, residual, softcap; in float32."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Output(NamedTuple):
    """Target of `num_rows` rows of a product: `out` [tokens, stride]. With ADD the product is added to its contents."""

    out: Any
    stride: Any
    num_rows: Any
    bias: Any  # `out` where HAS_BIAS is off
    softcap: Any
    HAS_BIAS: tl.constexpr
    ADD: tl.constexpr
    HAS_SOFTCAP: tl.constexpr
    ACTIVATION: tl.constexpr  # of the product itself, if it has no gate; or ""
    curve: Any  # the four values of xIELU; `out` for other activations

    @classmethod
    def of(
        cls, y: Tensor, num_rows: int, bias: Tensor | None, *,
        add: bool = False, softcap: float | None = None, activation: str = "", curve: Tensor | None = None,
    ) -> "Output":  # fmt: skip
        """Return the first `num_rows` columns of y as a target. `bias` begins with that of the first column."""
        return cls(
            y, y.stride(0), num_rows, y if bias is None else bias, softcap or 0.0,
            HAS_BIAS=tl.constexpr(bias is not None), ADD=tl.constexpr(add),
            HAS_SOFTCAP=tl.constexpr(softcap is not None), ACTIVATION=tl.constexpr(activation),
            curve=y if curve is None else curve,
        )  # fmt: skip


@triton.jit
def biased(value, y, rows):
    """Return the value plus the bias of `rows`, which must all exist, with the activation applied to the sum."""
    if y.HAS_BIAS:
        value += tl.load(y.bias + rows)
    if y.ACTIVATION == "xielu":
        value = xielu(value, y.curve)
    elif y.ACTIVATION != "":
        value = activated(value, y.ACTIVATION)
    return value


@triton.jit
def store(y, start, offsets, value, mask):
    """Store a value at `offsets` of its shape from `start`, both in numbers: a token has `y.stride`."""
    to = y.out + start + offsets
    if y.HAS_SOFTCAP:
        value = y.softcap * tanh(value / y.softcap)
    if y.ADD:
        value += tl.load(to, mask=mask, other=0)
    tl.store(to, value, mask=mask)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        y = (tl.clamp(up, -7.0, 7.0) + 1.0) * activated(tl.minimum(gate, 7.0), "gelu_sigmoid")
    else:
        y = activated(gate, ACTIVATION) * up
    return y


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu_tanh":  # x / 2 × (1 + tanh u) = x × sigmoid(2 u), u = sqrt(2 / π) (x + 0.044715 x³)
        y = x * sigmoid((x + x * x * x * 0.044715) * 1.5957691216057308)
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_sigmoid":
        y = x * sigmoid(x * 1.702)
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0, 0.0, x * x)
    return y


@triton.jit
def xielu(x, curve):
    """Return the activation. Near 0, e^m − 1 is a polynomial, because a difference would lose its digits."""
    m = tl.minimum(x, tl.load(curve + 3))
    p = m * 1.9875691500e-4 + 1.3981999507e-3
    p = p * m + 8.3334519073e-3
    p = p * m + 4.1665795894e-2
    p = p * m + 1.6666665459e-1
    p = p * m + 5.0000001201e-1
    falls = tl.load(curve + 1) * (tl.where(m > -0.34, p * m * m + m, tl.exp(m) - 1.0) - x)
    return tl.where(x > 0, tl.load(curve) * x * x, falls) + tl.load(curve + 2) * x


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + eˣ) = max(x, 0) + log(1 + t) for t = e^−|x|. log(1 + t) is 2 artanh(t / (2 + t)), as a series."""
    t = tl.exp(-tl.abs(x))
    part = t / (2.0 + t)  # at most 1 / 3
    square = part * part
    p = square * (1.0 / 17.0) + 1.0 / 15.0
    p = p * square + 1.0 / 13.0
    p = p * square + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    p = p * square + 1.0
    return tl.where(x < 0, 0.0, x) + 2.0 * part * p


@triton.jit
def tanh(x):
    """Return tanh(x): Cephes' odd polynomial if |x| < 0.625, else 1 − 2 / (e^2|x| + 1) with x's sign."""
    size, square = tl.abs(x), x * x
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square + -5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square + -3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(size + size) + 1.0)
    return tl.where(size < 0.625, p * square * x + x, tl.where(x < 0, -far, far))
