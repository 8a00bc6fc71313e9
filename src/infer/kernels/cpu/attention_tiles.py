"""Attention's two inner loops in registers: scores of query columns against blocks of 16 positions, and p × values.

Keys of a block lie transposed, [dim, 16 positions]: a score's sum over dim is one chain of FMAs in its own lane.
Values lie [position, dim]: an output element's sum over positions is one chain in its own lane.
Neither order depends on how many columns, blocks or dims are done at once.
"""

from typing import Any

from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import LANES
from infer.kernels.cpu.records import CACHE_BYTES
from infer.kernels.cpu.simd import F32, F32X16, I16X16, I64, Value, constant, load


def _load_cached(b: Builder, kind: str, where: Value) -> Value:
    if kind == "F32":
        return load(b, where, F32X16, 4)
    bits = load(b, where, I16X16, 2)
    return simd.widen_f16(b, bits) if kind == "F16" else simd.widen_bf16(b, bits)


def _broadcast(b: Builder, where: Value) -> Value:
    return simd.splat(b, load(b, where, F32, 4))


def _variables(b: Builder, count: int) -> list[Value]:
    zero = constant(F32X16, 0.0)
    slots = [cgutils.alloca_once(b, F32X16) for _ in range(count)]
    for slot in slots:
        b.store(zero, slot)
    return slots


@intrinsic(prefer_literal=True)
def score_tile(
    context: Any, kind: Any, columns: Any, blocks: Any, queries: Any, keys: Any, dim: Any, out: Any, stride: Any
) -> Any:
    """out[column × stride + block × 64 bytes] = queries[column] · keys of 16 positions, for columns × blocks."""
    name, width, count = kind.literal_value, columns.literal_value, blocks.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, queries, keys, dim, out, stride = arguments
        sums = _variables(b, width * count)
        row_bytes = LANES * CACHE_BYTES[name]
        query_bytes, block_bytes = b.mul(dim, constant(I64, 4)), b.mul(dim, constant(I64, row_bytes))
        query_at = [b.add(queries, b.mul(query_bytes, constant(I64, c))) for c in range(width)]
        keys_at = [b.add(keys, b.mul(block_bytes, constant(I64, k))) for k in range(count)]
        with cgutils.for_range(b, dim) as loop:
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

    return types.void(kind, columns, blocks, *(types.int64,) * 5), emit


@intrinsic(prefer_literal=True)
def value_tile(
    context: Any,
    kind: Any,
    columns: Any,
    vectors: Any,
    probabilities: Any,
    stride: Any,
    values: Any,
    dim: Any,
    num_positions: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[column × out_stride + 16 vector lanes] = Σ of probabilities[column × stride] × values, over positions."""
    name, width, count = kind.literal_value, columns.literal_value, vectors.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, probabilities, stride, values, dim, num_positions, out, out_stride = arguments
        sums = _variables(b, width * count)
        size = CACHE_BYTES[name]
        value_bytes = b.mul(dim, constant(I64, size))
        at = [b.add(probabilities, b.mul(stride, constant(I64, c))) for c in range(width)]
        with cgutils.for_range(b, num_positions) as loop:
            row = b.add(values, b.mul(loop.index, value_bytes))
            cached = [_load_cached(b, name, simd.offset(b, row, LANES * size * v)) for v in range(count)]
            for column in range(width):
                p = _broadcast(b, b.add(at[column], b.mul(loop.index, constant(I64, 4))))
                for vector in range(count):
                    total = sums[column * count + vector]
                    b.store(simd.fma(b, p, cached[vector], b.load(total)), total)
        for column in range(width):
            row = b.add(out, b.mul(out_stride, constant(I64, column)))
            for vector in range(count):
                simd.store_f32(b, simd.offset(b, row, 64 * vector), b.load(sums[column * count + vector]))
        return context.get_dummy_value()

    return types.void(kind, columns, vectors, *(types.int64,) * 7), emit
