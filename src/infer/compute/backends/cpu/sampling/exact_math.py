"""The sampler's arithmetic on vectors of 16 tokens: the bits of `sampling.noise`.

Nothing is fused or reassociated, and the constants are the same. Masks are the low 16 bits of an int32, bit i for lane
i.
"""

import operator
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.simd import (
    F32,
    F32X16,
    I16,
    I32,
    I32X16,
    I64,
    NUMBERS,
    Value,
    Vector,
    address,
    constant,
    f32x16,
    i32x16,
    load,
    operation,
    splat,
    store,
)
from infer.compute.sampling import constants

F64X16, I64X16 = ir.VectorType(ir.DoubleType(), LANES), ir.VectorType(I64, LANES)
i64x16 = Vector("i64x16", I64X16)


@operation(i32x16, types.int32)
def ids_from(b: Builder, first: Value) -> Value:
    return b.add(splat(b, first), NUMBERS)


@operation(i32x16, types.CPointer(types.int32))
def load_ids(b: Builder, where: Value) -> Value:
    return load(b, where, I32X16, 4)


def _lanes_that(vector: types.Type, scalar: types.Type, compare: str, relation: str) -> Any:
    """Return lanes(x, bound), which returns the mask of the lanes of x that satisfy the relation to the bound."""

    def lanes(b: Builder, x: Value, bound: Value) -> Value:
        return b.zext(b.bitcast(getattr(b, compare)(relation, x, splat(b, bound)), I16), I32)

    return operation(types.int32, vector, scalar)(lanes)


at_least = _lanes_that(f32x16, types.float32, "fcmp_ordered", ">=")
above = _lanes_that(f32x16, types.float32, "fcmp_ordered", ">")
equal_to = _lanes_that(f32x16, types.float32, "fcmp_ordered", "==")
at_least_i64 = _lanes_that(i64x16, types.int64, "icmp_signed", ">=")
at_most_unsigned = _lanes_that(i32x16, types.int32, "icmp_unsigned", "<=")


@operation(types.int32, types.int32)
def lowest_bit(b: Builder, x: Value) -> Value:
    """Return the index of the lowest 1 of x, which is not 0."""
    return b.cttz(x, ir.Constant(ir.IntType(1), 1))


count_bits = operation(types.int32, types.int32)(lambda b, x: b.ctpop(x))


@operation(f32x16, f32x16, types.int32)
def keep_bits(b: Builder, x: Value, mask: Value) -> Value:
    """Return x in the lanes whose bit is set, and −inf elsewhere."""
    lanes = b.bitcast(b.trunc(mask, I16), ir.VectorType(ir.IntType(1), LANES))
    return b.select(lanes, x, constant(F32X16, float("-inf")))


@operation(f32x16, f32x16, f32x16, types.float32)
def keep_finite(b: Builder, before: Value, after: Value, limit: Value) -> Value:
    """Return `after` clamped to ±limit, but −inf in the lanes in which `before` is −inf."""
    low, high = splat(b, b.fneg(limit)), splat(b, limit)
    bounded = b.select(b.fcmp_ordered("<", after, low), low, b.select(b.fcmp_ordered(">", after, high), high, after))
    return b.select(b.fcmp_ordered("==", before, constant(F32X16, float("-inf"))), before, bounded)


# Noise


def _mix32(b: Builder, x: Value) -> Value:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = b.mul(b.xor(x, b.lshr(x, constant(I32X16, shift))), constant(I32X16, factor))
    return b.xor(x, b.lshr(x, constant(I32X16, 16)))


@operation(i32x16, i32x16, types.int32, types.int32)
def hash_tokens(b: Builder, ids: Value, low: Value, high: Value) -> Value:
    """Return the 32-bit hash of each of 16 token ids, i32 × 16, with the two words of the row's key."""
    return _mix32(b, b.add(_mix32(b, b.xor(ids, splat(b, low))), splat(b, high)))


@operation(f32x16, i32x16)
def gumbel_of(b: Builder, h: Value) -> Value:
    """Return Gumbel noise −ln(−ln(1 − V)) of 16 hashes, f32 × 16. V is the hash as a number between 0 and 1."""
    c = lambda value: constant(F32X16, value)  # noqa: E731
    unsigned = lambda word: b.fadd(b.uitofp(word, F32X16), c(0.5))  # noqa: E731
    exponent, fraction = _split(b, b.fmul(unsigned(b.not_(h)), c(2.0**-32)))
    is_near_one = b.fcmp_ordered("==", exponent, c(0.0))
    fraction = b.select(is_near_one, b.fmul(unsigned(h), c(-(2.0**-32))), fraction)
    return b.fneg(_log(b, *_split(b, b.fneg(_log(b, exponent, fraction)))))


def _split(b: Builder, x: Value) -> tuple[Value, Value]:
    bits = b.add(b.bitcast(x, I32X16), constant(I32X16, constants.ONE_BITS - constants.SQRT_HALF_BITS))
    exponent = b.sub(b.ashr(bits, constant(I32X16, 23)), constant(I32X16, 127))
    mantissa = b.add(b.and_(bits, constant(I32X16, 0x7FFFFF)), constant(I32X16, constants.SQRT_HALF_BITS))
    return b.sitofp(exponent, F32X16), b.fsub(b.bitcast(mantissa, F32X16), constant(F32X16, 1.0))


def _log(b: Builder, exponent: Value, fraction: Value) -> Value:
    c = lambda value: constant(F32X16, value)  # noqa: E731
    first, second, *others = constants.LOG_COEFFICIENTS
    polynomial = b.fadd(b.fmul(fraction, c(first)), c(second))
    for coefficient in others:
        polynomial = b.fadd(b.fmul(polynomial, fraction), c(coefficient))
    square = b.fmul(fraction, fraction)
    tail = b.fadd(b.fmul(b.fmul(polynomial, fraction), square), b.fmul(exponent, c(constants.LN2_LOW_32)))
    tail = b.fsub(tail, b.fmul(square, c(0.5)))
    return b.fadd(b.fadd(fraction, tail), b.fmul(exponent, c(constants.LN2_HIGH_32)))


# Weights


@operation(i64x16, f32x16, types.float32)
def weights(b: Builder, x: Value, largest: Value) -> Value:
    """Return e^(x − largest) × 2⁴², rounded to the nearest integer, i64 × 16. Sums of such weights are exact."""
    c = lambda value: constant(F64X16, value)  # noqa: E731
    d = b.fsub(b.fpext(x, F64X16), b.fpext(splat(b, largest), F64X16))
    d = b.select(b.fcmp_ordered("<", d, c(constants.LOWEST)), c(constants.LOWEST), d)
    shifted = b.fadd(b.fmul(d, c(constants.LOG2_E)), c(constants.ROUNDER))
    n = b.fsub(shifted, c(constants.ROUNDER))
    r = b.fsub(b.fsub(d, b.fmul(n, c(constants.LN2_HIGH_64))), b.fmul(n, c(constants.LN2_LOW_64)))
    p = c(constants.TAYLOR[0])
    for coefficient in constants.TAYLOR[1:]:
        p = b.fadd(b.fmul(p, r), c(coefficient))
    # The low bits of `shifted` are n: shifted into the exponent's place they make a power of two.
    exponent = b.add(b.bitcast(shifted, I64X16), constant(I64X16, 1023 + constants.WEIGHT_BITS))
    scale = b.bitcast(b.shl(exponent, constant(I64X16, 52)), F64X16)
    rounded = b.fadd(b.fmul(p, scale), c(constants.ROUNDER))
    return b.sub(b.bitcast(rounded, I64X16), b.bitcast(c(constants.ROUNDER), I64X16))


operation(i64x16, i64x16, i64x16, key=operator.add)(lambda b, x, y: b.add(x, y))
splat_i64 = operation(i64x16, types.int64)(lambda b, x: splat(b, x))


@operation(types.int64, i64x16)
def sum_i64(b: Builder, x: Value) -> Value:
    total = constant(I64, 0)
    for lane in range(LANES):
        total = b.add(total, b.extract_element(x, constant(I32, lane)))
    return total


@operation(types.void, address, i64x16)
@operation(types.void, types.CPointer(types.int64), i64x16)
def store_i64x16(b: Builder, where: Value, x: Value) -> None:
    store(b, where, x, 8)


bits_of = operation(types.uint32, types.float32)(lambda b, x: b.bitcast(x, I32))
float_of = operation(types.float32, types.uint32)(lambda b, bits: b.bitcast(bits, F32))
