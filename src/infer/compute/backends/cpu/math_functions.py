"""Curves of vectors of 16 values: exp, tanh, erf, and the activations that gate an MLP."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.simd import (
    F32X16,
    I32,
    I32X16,
    ROUNDER,
    Value,
    constant,
    f32x16,
    fma,
    operation,
    splat_f32,
)


def _c(value: float) -> Value:
    return constant(F32X16, value)


def _polynomial(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Return the polynomial's value. The coefficient of the highest power comes first."""
    total = _c(coefficients[0])
    for coefficient in coefficients[1:]:
        total = fma(b, total, x, _c(coefficient))
    return total


_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST_POWER, _HIGHEST_POWER = -87.33654, 88.37626


@operation(f32x16, f32x16)
def exp(b: Builder, x: Value) -> Value:
    """Return e^x to 2 ulp; 0 below −87.3, and e^88.3 above 88.3."""
    return exp_up_to_0(b, b.select(b.fcmp_ordered(">", x, _c(_HIGHEST_POWER)), _c(_HIGHEST_POWER), x))


@operation(f32x16, f32x16)
def exp_up_to_0(b: Builder, x: Value) -> Value:
    """Return `exp` of values that are at most 88.3: 2^n p(r), r = x − n ln 2 (Cephes' polynomial)."""
    shifted = b.fadd(b.fmul(x, _c(1.44269504088896341)), _c(ROUNDER))
    n = b.fsub(shifted, _c(ROUNDER))
    r = fma(b, n, _c(-0.693359375), x)
    r = fma(b, n, _c(2.12194440e-4), r)
    p = b.fadd(fma(b, _polynomial(b, r, _EXP), b.fmul(r, r), r), _c(1.0))
    exponent = b.shl(b.sub(b.bitcast(shifted, I32X16), constant(I32X16, 0x4B400000)), constant(I32X16, 23))
    result = b.bitcast(b.add(b.bitcast(p, I32X16), exponent), F32X16)
    return b.select(b.fcmp_unordered(">=", x, _c(_LOWEST_POWER)), result, _c(0.0))  # a NaN stays one


@operation(f32x16, f32x16)
def log_1p(b: Builder, y: Value) -> Value:
    """Return log(1 + y) to 2 ulp, for y between 0 and 1: 2 artanh(s) by its series, s = y / (2 + y) ≤ 1/3."""
    s = b.fdiv(y, b.fadd(y, _c(2.0)))
    square, double = b.fmul(s, s), b.fadd(s, s)
    series = _polynomial(b, square, tuple(1 / power for power in range(17, 1, -2)))
    return fma(b, b.fmul(series, square), double, double)


@operation(f32x16, f32x16, f32x16, f32x16, f32x16, f32x16)
def _bent(b: Builder, x: Value, rising: Value, falling: Value, slope: Value, most: Value) -> Value:
    """Return xIELU. Near 0, e^m − 1 is a polynomial, because a difference would lose its digits."""
    m = b.select(b.fcmp_ordered("<", x, most), x, most)
    near = fma(b, _polynomial(b, m, _EXP), b.fmul(m, m), m)
    grown = b.select(b.fcmp_ordered(">", m, _c(-0.34)), near, b.fsub(exp_up_to_0(b, m), _c(1.0)))
    falls = b.fmul(falling, b.fsub(grown, x))
    bend = b.select(b.fcmp_ordered(">", x, _c(0.0)), b.fmul(b.fmul(rising, x), x), falls)
    return b.fadd(bend, b.fmul(slope, x))


@operation(types.float32, types.float32)
def exp_scalar(b: Builder, x: Value) -> Value:
    return b.extract_element(exp(b, simd.splat(b, x)), constant(I32, 0))


_TANH_NEAR = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_ERF_NEAR = (-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
_ERF_FAR = (
    -1.72853470e-5,
    3.83197126e-4,
    -3.88396438e-3,
    2.42546219e-2,
    -1.06777877e-1,
    -6.34846687e-1,
    -1.28717512e-1,
)


@operation(f32x16, f32x16)
def tanh(b: Builder, x: Value) -> Value:
    """Return tanh(x) to 3 ulp: Cephes' odd polynomial if |x| < 0.625, else 1 − 2 / (e^2|x| + 1) with x's sign."""
    size, square = simd.absolute(b, x), b.fmul(x, x)
    near = fma(b, b.fmul(_polynomial(b, square, _TANH_NEAR), square), x, x)
    far = b.fsub(_c(1.0), b.fdiv(_c(2.0), b.fadd(exp(b, b.fadd(size, size)), _c(1.0))))
    far = b.select(b.fcmp_ordered("<", x, _c(0.0)), b.fneg(far), far)
    return b.select(b.fcmp_unordered("<", size, _c(0.625)), near, far)  # a NaN stays one


@operation(f32x16, f32x16)
def erf(b: Builder, x: Value) -> Value:
    """Return erf(x) to 2 ulp, by N. Juffa's minimax.

    It is an odd polynomial if |x| < 0.927734375, else 1 − e^p(|x|) with x's sign.
    """
    size, square = simd.absolute(b, x), b.fmul(x, x)
    near = _polynomial(b, square, _ERF_NEAR)
    near = fma(b, near, x, x)
    bounded = b.select(b.fcmp_ordered("<", size, _c(4.0)), size, _c(4.0))  # from there on it is 1
    far = fma(b, _polynomial(b, bounded, _ERF_FAR), bounded, b.fneg(bounded))
    far = b.fsub(_c(1.0), exp(b, far))
    far = b.select(b.fcmp_ordered("<", x, _c(0.0)), b.fneg(far), far)
    return b.select(b.fcmp_unordered("<", size, _c(0.927734375)), near, far)  # a NaN stays one


@njit(forceinline=True)
def sigmoid(x):
    one = splat_f32(np.float32(1))
    return one / (one + exp(splat_f32(np.float32(0)) - x))


@njit(forceinline=True)
def softplus(x):
    """Return log(1 + e^x) to 3 ulp: max(x, 0) + log(1 + y) for y = e^−|x|."""
    return simd.maximum(x, splat_f32(np.float32(0))) + log_1p(exp(splat_f32(np.float32(0)) - simd.absolute(x)))


@njit(forceinline=True)
def softcapped(x, cap):
    return splat_f32(cap) * tanh(x / splat_f32(cap))


@njit(forceinline=True)
def silu(x):
    return x * sigmoid(x)


@njit(forceinline=True)
def gelu_tanh(x):
    """Return x / 2 × (1 + tanh u) = x × sigmoid(2 u), u = sqrt(2 / π) (x + 0.044715 x³)."""
    cube = x * x * x * splat_f32(np.float32(0.044715))
    return x * sigmoid((x + cube) * splat_f32(np.float32(2 * 0.7978845608028654)))


@njit(forceinline=True)
def gelu(x):
    half, root = splat_f32(np.float32(0.5)), splat_f32(np.float32(0.7071067811865476))
    return x * half * (splat_f32(np.float32(1)) + erf(x * root))


@njit(forceinline=True)
def gelu_sigmoid(x):
    return x * sigmoid(x * splat_f32(np.float32(1.702)))


@njit(forceinline=True)
def relu(x):
    return simd.maximum(x, splat_f32(np.float32(0)))


@njit(forceinline=True)
def relu_squared(x):
    return relu(x) * relu(x)


@njit(forceinline=True)
def xielu(x, curve):
    """Return the activation with the four values of `Projection.curve`."""
    return _bent(x, splat_f32(curve[0]), splat_f32(curve[1]), splat_f32(curve[2]), splat_f32(curve[3]))


@njit(forceinline=True)
def clamped_swiglu(gate, up):
    """Return (up + 1) × gate × sigmoid(1.702 gate), with gate at most 7 and up between −7 and 7, as in gpt-oss."""
    limit, one = splat_f32(np.float32(7)), splat_f32(np.float32(1))
    up = simd.clamp(up, splat_f32(np.float32(-7)), limit)
    return (up + one) * gelu_sigmoid(simd.clamp(gate, splat_f32(np.float32(-np.inf)), limit))


def _times_up(curve: Any) -> Callable[[Any, Any], Any]:
    @njit(forceinline=True)
    def gated(gate, up):
        return curve(gate) * up

    return cast(Callable[[Any, Any], Any], gated)


# activation(gate, up) of each `Activation`
GATED: dict[str, Callable[[Any, Any], Any]] = {
    curve.__name__: _times_up(curve) for curve in (silu, gelu_tanh, gelu, gelu_sigmoid, relu, relu_squared)
} | {clamped_swiglu.__name__: clamped_swiglu}
