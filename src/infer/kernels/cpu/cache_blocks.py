"""Blocks of 16 cached positions: a position put into one, scores against a run of blocks, p × values of a run.

`infer.kv_blocks` defines what the bytes mean; nothing else in this package knows. A run is blocks one behind the
other in memory. The order of every float sum is that of the positions (or dims) alone: a run may be cut into shorter
ones, and columns, blocks and dims taken several at once, without changing a bit.
"""

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from infer.kernels.cpu import simd
from infer.kernels.cpu.attention_tiles import FLOAT_BYTES, float_value, score_tile, value_tile
from infer.kernels.cpu.layouts import LANES
from infer.kernels.cpu.records import CHUNK
from infer.kernels.cpu.simd import load_scalar_f32, store_scalar_f32
from infer.kv_types import key_block_bytes, value_block_bytes


@intrinsic(prefer_literal=True)
def key_bytes(context: Any, kv_type: Any, dim: Any) -> Any:
    """`kv_types.key_block_bytes` for kernels."""
    return types.int64(kv_type, types.int64), _bytes_of(key_block_bytes, kv_type.literal_value)


@intrinsic(prefer_literal=True)
def value_bytes(context: Any, kv_type: Any, dim: Any) -> Any:
    return types.int64(kv_type, types.int64), _bytes_of(value_block_bytes, kv_type.literal_value)


def _bytes_of(block_bytes: Callable[[str, int], int], kv_type: str) -> Any:
    per_32 = block_bytes(kv_type, 32)

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.udiv(b.mul(arguments[1], simd.constant(simd.I64, per_32)), simd.constant(simd.I64, 32))

    return emit


@njit(inline="always")
def _put(at, size, is_f16, value):  # type: ignore[no-untyped-def]
    if size == 4:
        store_scalar_f32(at, value)
    elif is_f16:
        simd.store_u16(at, simd.f16_bits(value))
    else:
        simd.store_u16(at, simd.bf16_bits(value))


def make_put_key(kv_type: str) -> Any:
    """put(block, lane, dim, x): the key of `dim` floats at x becomes the block's position `lane`."""
    size, is_f16 = FLOAT_BYTES[kv_type], kv_type == "f16"

    @njit
    def put(block, lane, dim, x):  # type: ignore[no-untyped-def]
        for i in range(dim):
            _put(block + (i * LANES + lane) * size, size, is_f16, load_scalar_f32(x + 4 * i))

    return put


def make_put_value(kv_type: str) -> Any:
    """put(block, lane, dim, x), as for keys."""
    size, is_f16 = FLOAT_BYTES[kv_type], kv_type == "f16"

    @njit
    def put(block, lane, dim, x):  # type: ignore[no-untyped-def]
        for i in range(dim):
            _put(block + (lane * dim + i) * size, size, is_f16, load_scalar_f32(x + 4 * i))

    return put


@njit(inline="always")
def block_scores(kv_type, columns, q, dim, keys, num_blocks, out):  # type: ignore[no-untyped-def]
    """Scores of `columns` queries at q against a run of blocks of keys, as [column, 256]."""
    at, block_bytes = 0, key_bytes(kv_type, dim)
    at_once = 2 if columns == 8 else 4  # as many sums as fit the registers
    while num_blocks - at >= at_once:
        score_tile(kv_type, columns, at_once, q, keys + at * block_bytes, dim, out + 4 * LANES * at, 4 * CHUNK)
        at += at_once
    while num_blocks - at > 0:
        score_tile(kv_type, columns, 1, q, keys + at * block_bytes, dim, out + 4 * LANES * at, 4 * CHUNK)
        at += 1


@njit(inline="always")
def add_values(kv_type, columns, p, dim, values, num_positions, out, out_stride):  # type: ignore[no-untyped-def]
    """out[column] += Σ p × values over the first `num_positions` of a run; p lies as [column, 256].

    The sum goes on from what out holds: one chain of additions over positions, however they are cut into runs.
    """
    at, vectors, stride = 0, 2 if columns == 8 else 4, 4 * CHUNK
    while dim - at >= vectors * LANES:
        value_tile(kv_type, columns, vectors, p, stride, values, dim, at, num_positions, out, out_stride)
        at += vectors * LANES
    while dim - at >= LANES:
        value_tile(kv_type, columns, 1, p, stride, values, dim, at, num_positions, out, out_stride)
        at += LANES
    while at < dim:
        for column in range(columns):
            to = out + column * out_stride + 4 * at
            total = load_scalar_f32(to)
            for i in range(num_positions):
                total += load_scalar_f32(p + stride * column + 4 * i) * float_value(kv_type, values, dim, at, i)
            store_scalar_f32(to, total)
        at += 1
