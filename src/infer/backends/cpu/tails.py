"""16 floats of a row, or fewer at its end: nothing after them is read or written."""

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core import cgutils

from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.simd import (
    F32X16,
    I32,
    I32X16,
    Value,
    address,
    constant,
    f32x16,
    floats,
    load_f32,
    operation,
    pointer,
    splat,
    store_f32,
)

_LANES = ir.VectorType(ir.IntType(1), LANES)


@njit(forceinline=True)
def load_upto(where, count):
    """The first `count` floats, −inf in the lanes beyond."""
    return load_f32(where) if count >= LANES else _load_first(where, count)


@njit(forceinline=True)
def store_upto(where, count, x):
    """The first `count` lanes."""
    if count >= LANES:
        store_f32(where, x)
    else:
        _store_first(where, count, x)


@operation(f32x16, address, types.int64)
@operation(f32x16, floats, types.int64)
def _load_first(b: Builder, where: Value, count: Value) -> Value:
    place, function = _masked(b, "load", where, F32X16, F32X16.as_pointer(), I32, _LANES, F32X16)
    return b.call(function, [place, constant(I32, 4), _first_lanes(b, count), constant(F32X16, float("-inf"))])


@operation(types.void, address, types.int64, f32x16)
def _store_first(b: Builder, where: Value, count: Value, x: Value) -> None:
    place, function = _masked(b, "store", where, ir.VoidType(), F32X16, F32X16.as_pointer(), I32, _LANES)
    b.call(function, [x, place, constant(I32, 4), _first_lanes(b, count)])


def _masked(b: Builder, name: str, where: Value, result: ir.Type, *parameters: ir.Type) -> tuple[Value, Value]:
    kind = ir.FunctionType(result, parameters)
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.{name}.v16f32.p0")
    return pointer(b, where, F32X16), function


def _first_lanes(b: Builder, count: Value) -> Value:
    lanes = ir.Constant(I32X16, list(range(LANES)))
    return b.icmp_signed("<", lanes, splat(b, b.trunc(count, I32)))
