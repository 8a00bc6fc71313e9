"""Scales that are powers of two."""

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types

from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.simd import F32, F32X16, I8, I32, I32X16, Value, constant, load, operation


def load_exponent(b: Builder, where: Value) -> Value:
    """2^(e − 128) of 16 bytes e, as MXFP4 has them: the two least are subnormal."""
    return _exponent_value(b, b.zext(load(b, where, ir.VectorType(I8, LANES), 16), I32X16), I32X16, F32X16)


@operation(types.float32, types.uint8)
def exponent_value(b: Builder, exponent: Value) -> Value:
    return _exponent_value(b, b.zext(exponent, I32), I32, F32)


def _exponent_value(b: Builder, exponent: Value, wide_int: ir.Type, wide: ir.Type) -> Value:
    normal = b.shl(b.sub(exponent, constant(wide_int, 1)), constant(wide_int, 23))
    subnormal = b.shl(constant(wide_int, 0x00200000), b.and_(exponent, constant(wide_int, 1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", exponent, constant(wide_int, 2)), subnormal, normal), wide)
