"""Weights that are no plain integers: codes that a table gives values to, and scales that are powers of two."""

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types

from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.simd import F32, F32X16, I8, I32, I32X16, Value, constant, load, operation


def look_up(b: Builder, instruction_set: str, codes: Value, table: list[int]) -> Value:
    """Each byte of `codes`, from 0 to 15, becomes that entry of the table, from 0 to 255."""
    width, name = {
        "amx": (64, "llvm.x86.avx512.pshuf.b.512"),
        "avx512vnni": (64, "llvm.x86.avx512.pshuf.b.512"),
        "avxvnni": (32, "llvm.x86.avx2.pshuf.b"),
        "avx2": (32, "llvm.x86.avx2.pshuf.b"),
        "neon": (16, "llvm.aarch64.neon.tbl1.v16i8"),
        "portable": (64, ""),
    }[instruction_set]
    whole, part = ir.VectorType(I8, 64), ir.VectorType(I8, width)
    codes = b.bitcast(codes, whole)
    if not name:
        values = constant(whole, 0)
        for code, entry in enumerate(table):
            is_code = b.icmp_unsigned("==", codes, constant(whole, code))
            values = b.select(is_code, constant(whole, entry), values)
        return b.bitcast(values, I32X16)
    shuffle = b.module.declare_intrinsic(name, (), ir.FunctionType(part, [part, part]))
    entries = ir.Constant(part, [table[lane % 16] for lane in range(width)])
    parts = []
    for start in range(0, 64, width):
        lanes = ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
        parts.append(b.call(shuffle, [entries, b.shuffle_vector(codes, codes, lanes)]))
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * width), list(range(2 * width)))
        parts = [b.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        width *= 2
    return b.bitcast(parts[0], I32X16)


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
