"""Attention's two inner loops in registers: scores of query columns against blocks of 16 positions, and p × values.

Keys of a block lie transposed, [dim, 16 positions]: a score's sum over dim is one chain of FMAs in its own lane.
Values lie [position, dim]: an output element's sum over positions is one chain in its own lane.
Neither order depends on how many columns, blocks or dims are done at once.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.backends.cpu import simd
from infer.backends.cpu.ahead import Ahead
from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.quantized_tiles import emit_mix, emit_scores, emit_values
from infer.backends.cpu.simd import F32, F32X16, I16X16, I64, Value, constant, load
from infer.quantization.kv_formats import QUANTIZED, key_block_bytes, value_block_bytes

FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def _load_cached(b: Builder, kv_type: str, where: Value) -> Value:
    if kv_type == "f32":
        return load(b, where, F32X16, 4)
    bits = load(b, where, I16X16, 2)
    return simd.widen_f16(b, bits) if kv_type == "f16" else simd.widen_bf16(b, bits)


def _broadcast(b: Builder, where: Value) -> Value:
    return simd.splat(b, load(b, where, F32, 4))


def _variables(b: Builder, values: list[Value]) -> list[Value]:
    slots = [cgutils.alloca_once(b, F32X16) for _ in values]
    for slot, value in zip(slots, values, strict=True):
        b.store(value, slot)
    return slots


@intrinsic
def mix_32(context: Any, where: Any) -> Any:
    """`kv_blocks.mix` of 32 floats, in place."""

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        emit_mix(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic(prefer_literal=True)
def score_tile(
    context: Any,
    kv_type: Any,
    columns: Any,
    blocks: Any,
    queries: Any,
    keys: Any,
    dim: Any,
    out: Any,
    stride: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """out[column × stride + block × 64 bytes] = queries[column] · keys of 16 positions, for columns × blocks.

    Meanwhile memory from `ahead` on is asked for, `step` bytes with each dim: the blocks' values at most.
    """
    name, width, count = kv_type.literal_value, columns.literal_value, blocks.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, queries, keys, dim, out, stride, ahead, step = arguments
        asked = Ahead.begin(b, ahead, step, count * value_block_bytes(name, BLOCK) // BLOCK)
        if name in QUANTIZED:
            emit_scores(b, width, count, [queries, keys, dim, out, stride], asked)
            return context.get_dummy_value()
        sums = _variables(b, [constant(F32X16, 0.0)] * (width * count))
        row_bytes = LANES * FLOAT_BYTES[name]
        query_bytes, block_bytes = b.mul(dim, constant(I64, 4)), b.mul(dim, constant(I64, row_bytes))
        query_at = [b.add(queries, b.mul(query_bytes, constant(I64, c))) for c in range(width)]
        keys_at = [b.add(keys, b.mul(block_bytes, constant(I64, k))) for k in range(count)]
        with cgutils.for_range(b, dim) as loop:
            asked.ask(b)
            key_at = b.mul(loop.index, constant(I64, row_bytes))
            cached = [_load_cached(b, name, b.add(at, key_at)) for at in keys_at]
            for column in range(width):
                q = _broadcast(b, b.add(query_at[column], b.mul(loop.index, constant(I64, 4))))
                for block in range(count):
                    total = sums[column * count + block]
                    b.store(simd.fma(b, q, cached[block], b.load(total)), total)
        for column in range(width):
            row = b.add(out, b.mul(stride, constant(I64, column)))
            for block in range(count):
                simd.store_f32(b, simd.offset(b, row, 64 * block), b.load(sums[column * count + block]))
        return context.get_dummy_value()

    return types.void(kv_type, columns, blocks, *(types.int64,) * 7), emit


def _emit_float_values(b: Builder, name: str, width: int, count: int, operands: Sequence[Value], ahead: Ahead) -> None:
    probabilities, stride, values, dim, first_dim, num_positions, out, out_stride = operands
    out = b.add(out, b.mul(first_dim, constant(I64, 4)))
    sums_at = [
        simd.offset(b, b.add(out, b.mul(out_stride, constant(I64, column))), 64 * vector)
        for column in range(width)
        for vector in range(count)
    ]
    sums = _variables(b, [simd.load_f32(b, at) for at in sums_at])
    size = FLOAT_BYTES[name]
    value_bytes = b.mul(dim, constant(I64, size))
    first = b.add(values, b.mul(first_dim, constant(I64, size)))
    at = [b.add(probabilities, b.mul(stride, constant(I64, c))) for c in range(width)]
    with cgutils.for_range(b, num_positions) as loop:
        ahead.ask(b)
        row = b.add(first, b.mul(loop.index, value_bytes))
        cached = [_load_cached(b, name, simd.offset(b, row, LANES * size * v)) for v in range(count)]
        for column in range(width):
            p = _broadcast(b, b.add(at[column], b.mul(loop.index, constant(I64, 4))))
            for vector in range(count):
                total = sums[column * count + vector]
                b.store(simd.fma(b, p, cached[vector], b.load(total)), total)
    for where, total in zip(sums_at, sums, strict=True):
        simd.store_f32(b, where, b.load(total))


@intrinsic(prefer_literal=True)
def value_tile(
    context: Any,
    kv_type: Any,
    columns: Any,
    vectors: Any,
    probabilities: Any,
    stride: Any,
    values: Any,
    dim: Any,
    first_dim: Any,
    num_positions: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """out[column × out_stride + first_dim …] += Σ of probabilities[column × stride] × values, over positions.

    Meanwhile memory from `ahead` on is asked for, `step` bytes with each position: a key of these dims at most.
    """
    name, width, count = kv_type.literal_value, columns.literal_value, vectors.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *operands, ahead, step = arguments[3:]
        asked = Ahead.begin(b, ahead, step, count * key_block_bytes(name, BLOCK) // BLOCK)
        if name not in QUANTIZED:
            _emit_float_values(b, name, width, count, operands, asked)
        elif count % 2 == 0:  # a single vector is no record: a head of codes never comes to it
            emit_values(b, name, width, count // 2, operands, asked)
        return context.get_dummy_value()

    return types.void(kv_type, columns, vectors, *(types.int64,) * 10), emit


@intrinsic(prefer_literal=True)
def float_value(context: Any, kv_type: Any, values: Any, dim: Any, element: Any, position: Any) -> Any:
    """A single value of a run of blocks of floats."""
    name = kv_type.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        if name in QUANTIZED:  # whose heads have no rest
            return constant(F32, 0.0)
        _, values, dim, element, position = arguments
        index = b.add(b.mul(position, dim), element)
        where = b.add(values, b.mul(index, constant(I64, FLOAT_BYTES[name])))
        if name == "f32":
            return simd.load_scalar_f32(b, where)
        bits = simd.load_u16(b, where)
        return simd.f16_value(b, bits) if name == "f16" else simd.bf16_value(b, bits)

    return types.float32(kv_type, *(types.int64,) * 4), emit
