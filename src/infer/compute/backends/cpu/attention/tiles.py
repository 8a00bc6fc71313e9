"""Attention's two inner loops in registers: scores of queries × keys, and sums of softmax weights × values.

    keys of a block     [dim, 16 positions]: a score's sum over dim is one chain of FMAs in the lane of its position
    values of a block   [16 positions, dim]: an output's sum over positions is one chain in the lane of its dim

Neither order depends on how many columns, blocks or dims a tile computes, nor on whether blocks are read as they are
cached or widened. A tile is a number of columns (queries) × a number of vectors of 16 lanes. These are keys of 16
positions each, or values of 16 dims each.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention import quantized_tiles, registers
from infer.compute.backends.cpu.attention.cached_forms import Form
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.prefetch import LoopPrefetch, begin_region, make_loop_prefetch
from infer.compute.backends.cpu.records import CHUNK
from infer.compute.backends.cpu.simd import (
    F32,
    F32X16,
    I32X16,
    I64,
    Value,
    address,
    constant,
    multiply,
    offset,
    operation,
)

REGION = 4  # blocks that all columns process before the next: they stay in a core's first cache
STRIDE = 4 * CHUNK  # bytes from column to column of scores


def _for_each_region(
    b: Builder, total: Value, size: int, start: Value, region_bytes: Value, after: Value, asked: Value | None,
    emit: Callable[[Value, Value, Value, Value], None],
) -> None:  # fmt: skip
    """Emit the loop over regions of `size` blocks or positions, `total` in all. The last region may be shorter.

    `emit` gets the first unit of the region, its number of units, its address, and the address that it prefetches. That
    is the next region, or `after` for the last one. If `asked` is given, it is `after` + the region's number × `asked`
    bytes.
    """
    with cgutils.for_range(b, b.udiv(b.add(total, constant(I64, size - 1)), constant(I64, size))) as loop:
        first, at = multiply(b, loop.index, size), b.add(start, b.mul(loop.index, region_bytes))
        left = b.sub(total, first)
        is_last = b.icmp_signed("<=", left, constant(I64, size))
        count = b.select(is_last, left, constant(I64, size))
        following = b.select(is_last, after, b.add(at, region_bytes))
        emit(first, count, at, following if asked is None else b.add(after, b.mul(loop.index, asked)))


def _loop_prefetch(
    b: Builder, prefetch: Value, form: Form, cached: Form | None, vectors: int, width: int, columns: Value
) -> LoopPrefetch:
    """Return the emitter of the prefetch of one iteration of a tile's loop: as many bytes as the iteration reads.

    `prefetch` is the region's variable, as `begin_region` returns it. If blocks are widened, `cached` is their cached
    form, and a region prefetches one block of it in total.
    """
    num_bytes = vectors * form.depth * form.row_bytes
    if cached is not None:
        num_bytes = num_bytes * cached.dim_bytes // (REGION * form.dim_bytes)
    return make_loop_prefetch(b, prefetch, num_bytes, width, columns)


def make_score_run(form: Form, cached: Form | None = None) -> Any:
    """Return scores(columns, queries, dim, keys, num_blocks, out, after), for contiguous blocks of keys.

    It reads f32 [columns, dim] at `queries` and blocks of `form` at `keys`. It writes f32 [columns, 256] at `out`, the
    first 16 × `num_blocks` of each column. It prefetches the rest of the run, then the memory at `after`. Widened
    blocks are in the cache already. For them it prefetches only the memory at `after`, one cached block per region.
    """
    emit_tile = quantized_tiles.emit_scores if form.is_coded else emit_scores

    @operation(types.void, *(address,) * 7)
    def score_run(
        b: Builder, columns: Value, queries: Value, dim: Value, keys: Value, num_blocks: Value, out: Value, after: Value
    ) -> None:
        block_bytes = multiply(b, dim, form.dim_bytes)

        def region(first: Value, count: Value, at: Value, following: Value) -> None:
            prefetch, to = begin_region(b, following), b.add(out, multiply(b, first, 4 * LANES))

            def tiles(width: int, vectors: int, column: Value) -> None:
                numbers = [b.add(column, constant(I64, c)) for c in range(width)]
                q = [b.add(queries, multiply(b, b.mul(number, dim), 4)) for number in numbers]
                row = b.add(to, multiply(b, column, STRIDE))

                def tile(num_blocks: int, block: Value) -> None:
                    ahead = _loop_prefetch(b, prefetch, form, cached, num_blocks, width, columns)
                    own = b.add(at, b.mul(block, block_bytes))
                    blocks = [b.add(own, multiply(b, block_bytes, k)) for k in range(num_blocks)]
                    sums, scores = emit_tile(b, form, q, blocks, dim, ahead), b.add(row, multiply(b, block, 4 * LANES))
                    places = [
                        offset(b, scores, STRIDE * c + 4 * LANES * k) for c in range(width) for k in range(num_blocks)
                    ]
                    registers.store_variables(b, sums, places)

                registers.for_each_vector(b, count, vectors, tile)

            registers.for_each_tile(b, columns, tiles)

        asked = None if cached is None else multiply(b, dim, cached.dim_bytes)
        _for_each_region(b, num_blocks, REGION, keys, multiply(b, block_bytes, REGION), after, asked, region)

    return score_run


def emit_scores(
    b: Builder, form: Form, queries: Sequence[Value], blocks: Sequence[Value], dim: Value, ahead: LoopPrefetch
) -> list[Value]:
    """Emit a tile's scores, q · k, for keys of floats. Memory is only read.

    `queries` are addresses of f32 [dim], or of bf16 [dim] for `BF16_PAIRS`. `blocks` are addresses of keys [dim, 16].

    Returns:
        Variables of f32 × 16 positions, by query and block: index query × number of blocks + block.
    """
    sums, row_bytes = registers.variables(b, [constant(F32X16, 0.0)] * (len(queries) * len(blocks))), form.row_bytes
    with cgutils.for_range(b, b.udiv(dim, constant(I64, form.depth))) as loop:
        ahead()
        row, element = multiply(b, loop.index, form.depth * row_bytes), multiply(b, loop.index, 4)
        keys = [form.load_step(b, b.add(block, row), constant(I64, row_bytes)) for block in blocks]
        for column, query in enumerate(queries):
            registers.add_products(b, sums[column * len(keys) :], form.load_factor(b, b.add(query, element)), keys)
    return sums


def make_add_value_run(form: Form, cached: Form | None = None) -> Any:
    """Return add(columns, p, dim, values, num_positions, out, stride, after), for values that are contiguous in memory.

    It adds Σ p[column, position] × value[position] to `out`, f32 [columns, dim], whose columns are `stride` bytes
    apart. `p` is f32 [columns, 256], or bf16 with the same distance between columns, and `values` are blocks of `form`.
    It covers the whole vectors of dim, dim // 16 × 16. The sums start from the contents of out. It prefetches as
    `make_score_run` does.
    """
    emit_tile = quantized_tiles.emit_values if form.is_coded else emit_values

    @operation(types.void, *(address,) * 8)
    def add_value_run(
        b: Builder, columns: Value, p: Value, dim: Value, values: Value, num_positions: Value, out: Value,
        stride: Value, after: Value,
    ) -> None:  # fmt: skip
        def region(first: Value, count: Value, at: Value, following: Value) -> None:
            prefetch, p_at = begin_region(b, following), b.add(p, multiply(b, first, 4 // form.depth))

            def tiles(width: int, vectors: int, column: Value) -> None:
                numbers = [b.add(column, constant(I64, c)) for c in range(width)]
                weights_at = [b.add(p_at, multiply(b, number, STRIDE)) for number in numbers]
                rows = [b.add(out, b.mul(number, stride)) for number in numbers]

                def tile(num_vectors: int, vector: Value) -> None:
                    ahead = _loop_prefetch(b, prefetch, form, cached, num_vectors, width, columns)
                    to = [b.add(row, multiply(b, vector, 4 * LANES)) for row in rows]
                    emit_tile(b, form, weights_at, at, dim, vector, num_vectors, count, to, ahead)

                registers.for_each_vector(b, b.udiv(dim, constant(I64, LANES)), vectors, tile)

            registers.for_each_tile(b, columns, tiles)

        region_bytes = multiply(b, dim, form.dim_bytes * REGION)
        asked = None if cached is None else multiply(b, dim, cached.dim_bytes)
        _for_each_region(b, num_positions, REGION * LANES, values, region_bytes, after, asked, region)

    return add_value_run


def emit_values(
    b: Builder, form: Form, p: Sequence[Value], values: Value, dim: Value, vector: Value, num_vectors: int,
    num_positions: Value, out: Sequence[Value], ahead: LoopPrefetch,
) -> None:  # fmt: skip
    """Emit out[column] += Σ p × value over the positions, for values of floats [position, dim].

    The arguments are those of `quantized_tiles.emit_values`. With bf16 pairs, an iteration takes two positions.
    """
    places = [offset(b, to, 4 * LANES * v) for to in out for v in range(num_vectors)]
    sums = registers.variables(b, [simd.load_f32(b, place) for place in places])
    size, position_bytes = form.vector_bytes, multiply(b, dim, form.row_bytes // LANES)
    first, step_bytes = b.add(values, multiply(b, vector, size)), multiply(b, position_bytes, form.depth)

    def add(step: Value, mask: ir.Constant | None = None) -> None:
        row, element = b.add(first, b.mul(step, step_bytes)), multiply(b, step, 4)
        cached = [form.load_step(b, offset(b, row, size * v), position_bytes) for v in range(num_vectors)]
        cached = cached if mask is None else [b.and_(x, mask) for x in cached]
        for column, at in enumerate(p):
            registers.add_products(b, sums[column * num_vectors :], form.load_factor(b, b.add(at, element)), cached)

    num_steps = b.udiv(num_positions, constant(I64, form.depth))
    with cgutils.for_range(b, num_steps) as loop:
        ahead()
        add(loop.index)
    if form.depth == 2:  # the weight after the last position is 0, but its value may be anything
        with b.if_then(b.trunc(num_positions, ir.IntType(1))):
            add(num_steps, constant(I32X16, 0xFFFF))
    registers.store_variables(b, sums, places)


def make_float_value(form: Form) -> Any:
    """Return value(values, index), which loads element `index` of blocks of floats as an f32.

    It is for the dims after the last whole vector. Forms of codes or pairs have no such dims, and it returns 0 for
    them.
    """

    @operation(types.float32, address, types.int64)
    def float_value(b: Builder, values: Value, index: Value) -> Value:
        if form.is_coded or form.depth == 2:  # whose heads are whole vectors
            return constant(F32, 0.0)
        return form.load_element(b, b.add(values, multiply(b, index, form.row_bytes // LANES)))

    return float_value
