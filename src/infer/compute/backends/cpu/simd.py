"""Vectors of 16 lanes as values in Numba code, so that a kernel reads like its equation and compiles to the same.

    f32x16, i32x16      the two vector types; + − × and comparison by `select_*` work on them in any `@njit` function
    address             a plain int64; every load and store names its type
    floats              a pointer to them, as `record_types` has it; vectors are loaded from either

An operation is a Python function that emits LLVM IR. A kernel calls it with values: `fma(a, b, c)`; another emitter
calls it with the builder first: `fma(b, x, y, z)`. LLVM splits the 16 lanes into the machine's registers. Nothing here
reassociates or contracts: the order of float operations is the order in the source, on every path.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from infer.compute.backends.cpu.isa import target_features
from infer.compute.backends.cpu.layouts import LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I8X16, I16X16, I32X16, F32X16 = (ir.VectorType(element, LANES) for element in (I8, I16, I32, F32))
I8X64 = ir.VectorType(I8, 64)
NUMBERS = ir.Constant(I32X16, list(range(LANES)))  # each lane's own

Value = Any  # an LLVM value; which one is in the name of its type above


class Vector(types.Type):  # type: ignore[misc]
    def __init__(self, name: str, llvm_type: ir.Type) -> None:
        super().__init__(name=name)
        self.llvm_type = llvm_type


f32x16, i32x16 = Vector("f32x16", F32X16), Vector("i32x16", I32X16)
address = types.int64
floats = types.CPointer(types.float32)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


def operation(result: types.Type, *parameters: types.Type, key: Any = None) -> Callable[[Any], Any]:
    """Return a decorator that makes an emitter callable from kernels under this signature (`key`: as that operator)."""

    def register(emit: Any) -> Any:
        name = emit if key is None else key

        template = type("Operation", (ConcreteTemplate,), {"key": name, "cases": [result(*parameters)]})
        infer_global(name, types.Function(template))

        def lower(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
            returned = emit(builder, *arguments)
            return context.get_dummy_value() if result is types.void else returned

        lower_builtin(name, *parameters)(lower)
        return emit

    return register


def constant(type_: ir.Type, value: float) -> ir.Constant:
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [value] * type_.count)
    return ir.Constant(type_, value)


def call(b: Builder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """Emit a call of the LLVM intrinsic of this name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(b.module.declare_intrinsic(f"llvm.{name}", (), kind), arguments)


# Memory


def pointer(b: Builder, where: Value, type_: ir.Type) -> Value:
    """Return a typed pointer from an address or from another pointer."""
    cast = b.bitcast if isinstance(where.type, ir.PointerType) else b.inttoptr
    return cast(where, type_.as_pointer())


def load(b: Builder, where: Value, type_: ir.Type, align: int = 1) -> Value:
    return b.load(pointer(b, where, type_), align=align, typ=type_)


def store(b: Builder, where: Value, value: Value, align: int = 1) -> None:
    b.store(value, pointer(b, where, value.type), align=align)


def load_first(b: Builder, where: Value, type_: ir.VectorType, count: int) -> Value:
    """Load the first `count` elements of a vector, without alignment. The others are zero, and are not read."""
    mask = ir.Constant(ir.VectorType(ir.IntType(1), type_.count), [index < count for index in range(type_.count)])
    name = f"masked.load.v{type_.count}{type_.element.intrinsic_name}.p0"
    return call(b, name, type_, pointer(b, where, type_), constant(I32, 1), mask, constant(type_, 0))


def offset(b: Builder, where: Value, num_bytes: int) -> Value:
    return b.add(where, constant(I64, num_bytes)) if num_bytes else where


def multiply(b: Builder, x: Value, factor: int) -> Value:
    return b.mul(x, constant(I64, factor))


def broadcast(b: Builder, where: Value) -> Value:
    return splat(b, load(b, where, F32, 4))


@operation(f32x16, address)
@operation(f32x16, floats)
def load_f32(b: Builder, where: Value) -> Value:
    return load(b, where, F32X16, 4)


@operation(types.void, address, f32x16)
@operation(types.void, floats, f32x16)
def store_f32(b: Builder, where: Value, x: Value) -> None:
    store(b, where, x, 4)


def _loading(kind: types.Type, type_: ir.Type, align: int = 1) -> Any:
    return operation(kind, address)(lambda b, where: load(b, where, type_, align))


def _storing(kind: types.Type, align: int = 1) -> Any:
    return operation(types.void, address, kind)(lambda b, where, x: store(b, where, x, align))


load_scalar_f32, store_scalar_f32 = _loading(types.float32, F32, 4), _storing(types.float32, 4)
load_scalar_f64, store_scalar_f64 = _loading(types.float64, F64, 8), _storing(types.float64, 8)
load_i64, store_i64 = _loading(types.int64, I64, 8), _storing(types.int64, 8)
load_u32, store_u32 = _loading(types.uint32, I32), _storing(types.uint32)
load_u16, store_u16 = _loading(types.uint16, I16), _storing(types.uint16)
load_u8, store_u8 = _loading(types.uint8, I8), _storing(types.uint8)
load_i8 = _loading(types.int8, I8)
load_i32, store_i32 = _loading(types.int32, I32, 4), _storing(types.int32, 4)


# 16 floats of a row, or fewer at its end: nothing after them is read or written


@njit(forceinline=True)
def load_upto(where, count):
    """Return the first `count` floats, and −inf in the lanes beyond."""
    return load_f32(where) if count >= LANES else _load_first(where, count)


@njit(forceinline=True)
def store_upto(where, count, x):
    """Store the first `count` lanes."""
    if count >= LANES:
        store_f32(where, x)
    else:
        _store_first(where, count, x)


@njit(forceinline=True)
def load_padded(where, count):
    """Return the first `count` floats, and 0 in the lanes beyond."""
    return load_f32(where) if count >= LANES else _load_first_or_zero(where, count)


@operation(f32x16, address, types.int64)
@operation(f32x16, floats, types.int64)
def _load_first(b: Builder, where: Value, count: Value) -> Value:
    return _masked_load(b, where, count, float("-inf"))


@operation(f32x16, address, types.int64)
def _load_first_or_zero(b: Builder, where: Value, count: Value) -> Value:
    return _masked_load(b, where, count, 0.0)


def _masked_load(b: Builder, where: Value, count: Value, beyond: float) -> Value:
    operands = pointer(b, where, F32X16), constant(I32, 4), first_lanes(b, count), constant(F32X16, beyond)
    return call(b, "masked.load.v16f32.p0", F32X16, *operands)


@operation(types.void, address, types.int64, f32x16)
def _store_first(b: Builder, where: Value, count: Value, x: Value) -> None:
    operands = x, pointer(b, where, F32X16), constant(I32, 4), first_lanes(b, count)
    call(b, "masked.store.v16f32.p0", ir.VoidType(), *operands)


def first_lanes(b: Builder, count: Value) -> Value:
    """Return a mask of the first `count` lanes."""
    return b.icmp_signed("<", NUMBERS, splat(b, b.trunc(count, I32)))


# Halves: bits in and out, of one or of a vector, by the machine's conversion where it has one


def has_half_conversion() -> bool:
    return not target_features().isdisjoint(("f16c", "neon"))


def _as_many(x: Value, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


@operation(types.float32, types.uint16)
def widen_f16(b: Builder, bits: Value) -> Value:
    wide_int, wide_float = _as_many(bits, I32), _as_many(bits, F32)
    if has_half_conversion():
        return b.fpext(b.bitcast(bits, _as_many(bits, F16)), wide_float)
    wide = b.zext(bits, wide_int)
    magnitude = b.shl(b.and_(wide, constant(wide_int, 0x7FFF)), constant(wide_int, 13))
    scaled = b.fmul(b.bitcast(magnitude, wide_float), constant(wide_float, 2.0**112))  # subnormals come out right
    special = b.icmp_unsigned(">=", magnitude, constant(wide_int, 0x7C00 << 13))
    magnitude = b.or_(magnitude, constant(wide_int, 0xFF << 23))
    scaled_bits = b.select(special, magnitude, b.bitcast(scaled, wide_int))
    sign = b.shl(b.and_(wide, constant(wide_int, 0x8000)), constant(wide_int, 16))
    return b.bitcast(b.or_(scaled_bits, sign), wide_float)


@operation(types.float32, types.uint16)
def widen_bf16(b: Builder, bits: Value) -> Value:
    wide_int = _as_many(bits, I32)
    return b.bitcast(b.shl(b.zext(bits, wide_int), constant(wide_int, 16)), _as_many(bits, F32))


E4M3_BY_HALF = 256  # quotient of an E4M3 number and its half, whose exponent has another bias


@operation(types.uint16, types.uint8)
def half_of_e4m3(b: Builder, code: Value) -> Value:
    """Return the f16 with the sign, exponent and mantissa bits of an E4M3 number, or of a vector of them.

    The number is E4M3_BY_HALF times the f16. NaN is not kept.
    """
    bits = _as_many(code, I16)
    return b.and_(b.shl(b.sext(code, bits), constant(bits, 7)), constant(bits, -0x4001))


@operation(types.uint16, types.float32)
def narrow_f16(b: Builder, x: Value) -> Value:
    """Return the bits of x as f16, rounded to nearest, ties to even. Beyond the largest f16 it is the largest.

    A NaN stays NaN. x is a float or a vector.
    """
    wide_int, bits, x = _as_many(x, I32), _as_many(x, I16), _saturated(b, x, 65504.0)
    if has_half_conversion():
        return b.bitcast(b.fptrunc(x, _as_many(x, F16)), bits)
    whole = b.bitcast(x, wide_int)
    sign = b.and_(b.lshr(whole, constant(wide_int, 16)), constant(wide_int, 0x8000))
    magnitude = b.and_(whole, constant(wide_int, 0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, constant(wide_int, 13)), constant(wide_int, 1))
    rounded = b.add(magnitude, b.add(odd, constant(wide_int, 0xFFF - (112 << 23))))
    normal = b.lshr(rounded, constant(wide_int, 13))
    # Adding 0.5 leaves a subnormal's 10 bits, rounded, at the end of the mantissa.
    tiny = b.fadd(b.bitcast(magnitude, x.type), constant(x.type, 0.5))
    tiny = b.sub(b.bitcast(tiny, wide_int), constant(wide_int, 0x3F000000))
    result = b.select(b.icmp_unsigned("<", magnitude, constant(wide_int, 113 << 23)), tiny, normal)
    nan = b.icmp_unsigned(">", magnitude, constant(wide_int, 0xFF << 23))
    result = b.select(nan, constant(wide_int, 0x7E00), result)
    return b.trunc(b.or_(result, sign), bits)


@operation(types.uint16, types.float32)
def narrow_bf16(b: Builder, x: Value) -> Value:
    """Return the bits of x as bf16, rounded to nearest, ties to even. Beyond the largest bf16 it is the largest.

    A NaN stays NaN. x is a float or a vector.
    """
    return _round_bf16(b, _saturated(b, x, (2 - 2.0**-7) * 2.0**127))


@operation(types.void, address, f32x16)
def store_bf16(b: Builder, where: Value, x: Value) -> None:
    """Store x rounded to nearest, ties to even. Beyond the largest number it is infinite. A NaN stays NaN."""
    store(b, where, _round_bf16(b, x), 2)


def _round_bf16(b: Builder, x: Value) -> Value:
    wide_int = _as_many(x, I32)
    whole = b.bitcast(x, wide_int)
    odd = b.and_(b.lshr(whole, constant(wide_int, 16)), constant(wide_int, 1))
    rounded = b.lshr(b.add(whole, b.add(odd, constant(wide_int, 0x7FFF))), constant(wide_int, 16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), constant(wide_int, 0x7FC0), rounded), _as_many(x, I16))


@operation(f32x16, address, f32x16)
def keep_bf16(b: Builder, where: Value, x: Value) -> Value:
    """Store x in bf16, rounded to nearest, ties to even, and return what is stored. It needs AVX512-BF16."""
    bits = call(b, "x86.avx512bf16.cvtneps2bf16.512", I16X16, x)  # LLVM takes BF16 as integers, too
    store(b, where, bits, 2)
    return widen_bf16(b, bits)


def _saturated(b: Builder, x: Value, largest: float) -> Value:
    """Return x, limited to [−largest, largest]."""
    low, high = constant(x.type, -largest), constant(x.type, largest)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


@operation(f32x16, address)
def load_f16(b: Builder, where: Value) -> Value:
    return widen_f16(b, load(b, where, I16X16, 2))


@operation(f32x16, types.float64, address)
def subtract_f64(b: Builder, x: Value, where: Value) -> Value:
    """Return x − each of 16 doubles, rounded to f32."""
    return b.fptrunc(b.fsub(splat(b, x), load(b, where, ir.VectorType(F64, LANES), 8)), F32X16)


# Arithmetic


def splat(b: Builder, x: Value) -> Value:
    single = b.insert_element(ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined), x, constant(I32, 0))
    return b.shuffle_vector(single, single, constant(I32X16, 0))


splat_f32 = operation(f32x16, types.float32)(lambda b, x: splat(b, x))
splat_i32 = operation(i32x16, types.int32)(lambda b, x: splat(b, x))


def choose_bits(b: Builder, mask: Value, x: Value, y: Value) -> Value:
    """Return the bits of x where the mask is set, and those of y elsewhere."""
    return b.xor(y, b.and_(b.xor(x, y), mask))


def has_byte_permutation() -> bool:
    """Return True if one instruction looks 64 bytes up in 64 or 128 others."""
    return "avx512vbmi" in target_features()


def has_fma() -> bool:
    return not target_features().isdisjoint(("fma", "neon"))


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x × y + z, rounded once if the machine can; elsewhere `llvm.fma` would be a library call per lane."""
    return call(b, "fma.v16f32", F32X16, x, y, z) if has_fma() else b.fadd(b.fmul(x, y), z)


def dot_bf16(b: Builder, total: Value, pairs: Value, others: Value) -> Value:
    """Return total + the products of two pairs in each lane, by AVX512-BF16. Pairs are i32 × 16, total is f32 × 16.

    Both numbers of a pair are BF16, the first in the low half. Each lane adds the product of the second numbers, and
    then that of the first numbers. Each addition is rounded once, to nearest. Subnormal numbers count as 0.
    """
    return call(b, "x86.avx512bf16.dpbf16ps.512", F32X16, total, pairs, others)


@operation(f32x16, f32x16)
def absolute(b: Builder, x: Value) -> Value:
    return call(b, "fabs.v16f32", F32X16, x)


@operation(f32x16, f32x16, f32x16)
def larger(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger; y if either is NaN. This is one instruction, while `maximum` takes four."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@operation(f32x16, f32x16, f32x16)
def maximum(b: Builder, x: Value, y: Value) -> Value:
    """Return the larger; NaN if either is NaN."""
    return b.select(b.fcmp_unordered("uno", x, x), x, larger(b, x, y))


@operation(f32x16, f32x16, f32x16, f32x16)
def clamp(b: Builder, x: Value, low: Value, high: Value) -> Value:
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


@operation(f32x16, f32x16)
def finite(b: Builder, x: Value) -> Value:
    """Return x, and 0 for elements that are infinite or NaN."""
    return b.select(b.fcmp_ordered("<", absolute(b, x), constant(F32X16, float("inf"))), x, constant(F32X16, 0.0))


_OPERATORS: dict[Any, dict[Any, str]] = {
    operator.add: {f32x16: "fadd", i32x16: "add"},
    operator.sub: {f32x16: "fsub", i32x16: "sub"},
    operator.mul: {f32x16: "fmul", i32x16: "mul"},
    operator.truediv: {f32x16: "fdiv"},
}
for _key, _methods in _OPERATORS.items():
    for _type, _method in _methods.items():
        operation(_type, _type, _type, key=_key)(lambda b, x, y, method=_method: getattr(b, method)(x, y))


def _reduce(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine lane i with lane i + 8, then i + 4, i + 2, i + 1: a fixed tree, so that sums have one order."""
    step = LANES // 2
    while step:
        order = ir.Constant(I32X16, [(lane + step) % LANES for lane in range(LANES)])
        x = combine(x, b.shuffle_vector(x, x, order))
        step //= 2
    return b.extract_element(x, constant(I32, 0))


@operation(types.float32, f32x16)
def sum_f32(b: Builder, x: Value) -> Value:
    return _reduce(b, x, b.fadd)


@operation(types.float32, f32x16)
def max_f32(b: Builder, x: Value) -> Value:
    return _reduce(b, x, lambda left, right: maximum(b, left, right))


ROUNDER = 1.5 * 2.0**23  # adding it leaves the nearest integer (ties to even) in the low bits


@operation(i32x16, f32x16)
def nearest_i32(b: Builder, x: Value) -> Value:
    """Return the nearest integer, ties to even, for |x| < 2²²."""
    return b.sub(b.bitcast(b.fadd(x, constant(F32X16, ROUNDER)), I32X16), constant(I32X16, 0x4B400000))


@operation(i32x16, i32x16)
def shift_round_8(b: Builder, x: Value) -> Value:
    """Return round(x / 256), i32 × 16. So x − 256 × the result fits a signed byte."""
    return b.ashr(b.add(x, constant(I32X16, 128)), constant(I32X16, 8))


@operation(types.void, address, i32x16)
def store_i8(b: Builder, where: Value, x: Value) -> None:
    store(b, where, b.trunc(x, I8X16), 1)


@operation(f32x16, types.int32, types.int32, f32x16)
def keep_lanes(b: Builder, first: Value, end: Value, x: Value) -> Value:
    """Return the lanes first ≤ i < end of x, and −infinity elsewhere."""
    inside = b.and_(b.icmp_signed(">=", NUMBERS, splat(b, first)), b.icmp_signed("<", NUMBERS, splat(b, end)))
    return b.select(inside, x, constant(F32X16, float("-inf")))


# Pointers


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    return types.int64(pointer), lambda context, b, signature, arguments: b.ptrtoint(arguments[0], I64)


@intrinsic(prefer_literal=True)
def stack(context: Any, num_bytes: Any) -> Any:
    """Return the address of this many bytes, a constant, in the caller's frame."""

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        with b.goto_entry_block():  # not alloca_once, which would clear it
            slot = b.alloca(ir.ArrayType(I8, num_bytes.literal_value))
        slot.align = 64
        return b.ptrtoint(slot, I64)

    return types.int64(num_bytes), emit
