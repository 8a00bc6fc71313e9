"""Products of pairs: each token times the rows of each of its experts, which are stacked in one matrix.

A pair's sums are those of `matvec`, `matmul` and `dense`, so they do not depend on the other pairs of a step. With
GATE, the rows of a second stack are multiplied too: activation(first) × second.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import store_quantized
from infer.compute.backends.cuda.dense import store_tile, weight_sums
from infer.compute.backends.cuda.epilogue import biased, gated, sigmoid, store
from infer.compute.backends.cuda.matmul import row_sums, tile_sums


class Stacks(NamedTuple):
    """The experts from `first` to `end`: their rows of two matrices of one type. Without GATE, both are the same."""

    gate: Any  # a `Matrix`, or the weights if they are floats
    up: Any
    up_bias: Any  # the output has the first matrix's
    first: Any
    end: Any


@triton.jit(do_not_specialize=["num_pairs", "per_line"])
def expert_matvec(
    x, experts, stacks, y, left, num_pairs, per_line,
    PLANES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GATE: tl.constexpr, LEAVES: tl.constexpr,
    DP4A: tl.constexpr,
):  # fmt: skip
    """Store the products of some rows of an expert and one pair. `per_line` pairs have the same activations."""
    program, num_rows = tl.program_id(0), y.num_rows
    pair = (program % num_pairs).to(tl.int64)
    expert = tl.load(experts + pair)
    if (expert >= stacks.first) & (expert < stacks.end):
        rows = (program // num_pairs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        read = (expert - stacks.first).to(tl.int64) * num_rows + tl.minimum(rows, num_rows - 1)
        line = pair // per_line
        sums = biased(row_sums(x, line, stacks.gate, read, PLANES, ROWS, LANES, DP4A), y, read)
        if GATE != "":
            up = row_sums(x, line, stacks.up, read, PLANES, ROWS, LANES, DP4A)
            sums = gated(sums, _with_up_bias(up, stacks, y, read), GATE)
        store(y, pair * y.stride, rows, sums, rows < num_rows)
        if LEAVES:
            count: tl.constexpr = ROWS // 32
            blocks, num_blocks = (program // num_pairs).to(tl.int64) * count + tl.arange(0, count), num_rows // 32
            value = tl.reshape(sums, (count, 32))
            store_quantized(left, value, pair + blocks * 0, blocks, num_blocks, blocks < num_blocks, PLANES, count)


@triton.jit(do_not_specialize=["per_line"])
def expert_matmul(
    x, tiles, stacks, y, left, per_line,
    PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GATE: tl.constexpr,
    LEAVES: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    """Store the products of some rows of an expert and a tile of pairs."""
    tile, num_rows = tl.program_id(0).to(tl.int64), y.num_rows
    expert = tl.load(tiles.experts + tile)
    if (expert >= stacks.first) & (expert < stacks.end):
        places = tiles.pairs + tile * TOKENS
        pairs = tl.load(places + tl.arange(0, TOKENS)).to(tl.int64)
        rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        read = (expert - stacks.first).to(tl.int64) * num_rows + tl.minimum(rows, num_rows - 1)
        lines = tl.maximum(pairs, 0) // per_line
        sums = biased(tile_sums(x, lines, stacks.gate, read, PLANES, TOKENS, ROWS, LANES, DP4A), y, read[:, None])
        if GATE != "":
            up = tile_sums(x, lines, stacks.up, read, PLANES, TOKENS, ROWS, LANES, DP4A)
            sums = gated(sums, _with_up_bias(up, stacks, y, read[:, None]), GATE)
        mask = (pairs >= 0)[None, :] & (rows < num_rows)[:, None]
        store(y, 0, pairs[None, :] * y.stride + rows[:, None], sums, mask)
        if LEAVES:
            per_pair: tl.constexpr = ROWS // 32
            count: tl.constexpr = TOKENS * per_pair
            own = tl.arange(0, count)
            theirs = tl.load(places + own // per_pair).to(tl.int64)
            blocks, num_blocks = tl.program_id(1).to(tl.int64) * per_pair + own % per_pair, num_rows // 32
            is_there = (theirs >= 0) & (blocks < num_blocks)
            value = tl.reshape(tl.trans(sums), (count, 32))
            store_quantized(left, value, theirs, blocks, num_blocks, is_there, PLANES, count)


@triton.jit(do_not_specialize=["per_line"])
def expert_dense(
    x, tiles, stacks, y, left, per_line, num_inputs, num_blocks,
    PLANES: tl.constexpr, NUM_PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    IS_WHOLE: tl.constexpr, GATE: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Store the products of some rows of an expert, which are floats, and a tile of pairs."""
    tile, num_rows = tl.program_id(0).to(tl.int64), y.num_rows
    expert = tl.load(tiles.experts + tile)
    if (expert >= stacks.first) & (expert < stacks.end):
        width = num_inputs if PLANES == 0 else num_blocks * 32
        pairs = tl.load(tiles.pairs + tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        lines = tl.maximum(pairs, 0) // per_line
        planes, scales = x.codes + lines * (NUM_PLANES * width), x.scales + lines * num_blocks
        rows, first_row = tl.arange(0, ROWS), tl.program_id(1) * ROWS
        read = tl.minimum(rows, num_rows - 1 - first_row)
        start = (expert - stacks.first).to(tl.int64) * num_rows + first_row
        sums = weight_sums(
            planes, scales, stacks.gate + start * num_inputs, read, num_inputs, width,
            PLANES, NUM_PLANES, TOKENS, ROWS, DEPTH, IS_WHOLE,
        )  # fmt: skip
        sums = biased(sums, y, (start + read)[:, None])
        if GATE != "":
            up = weight_sums(
                planes, scales, stacks.up + start * num_inputs, read, num_inputs, width,
                PLANES, NUM_PLANES, TOKENS, ROWS, DEPTH, IS_WHOLE,
            )  # fmt: skip
            sums = gated(sums, _with_up_bias(up, stacks, y, (start + read)[:, None]), GATE)
        mask = (pairs >= 0)[None, :] & (first_row + rows < num_rows)[:, None]
        store(y, first_row, pairs[None, :] * y.stride + rows[:, None], sums, mask)
        if LEAVES:
            codes, scales, last_row = left.codes + first_row, left.scales + first_row // 32, num_rows - 1 - first_row
            store_tile(codes, scales, sums, pairs, pairs >= 0, num_rows, last_row, PLANES, TOKENS, ROWS)


@triton.jit
def _with_up_bias(value, stacks, y, rows):
    if y.HAS_BIAS:
        value += tl.load(stacks.up_bias + rows)
    return value


@triton.jit
def add_pairs(
    results, experts, weights, shared, shared_gates, residual, out, features, scale,
    CHOSEN: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sum of a token's pairs, in the order of the experts, and of the shared expert's result.

    With ADD the sum is added to the residual stream, and the whole is multiplied by `scale`.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there, own = at < features, token * features + at
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in range(token * CHOSEN, (token + 1) * CHOSEN):
        value = tl.load(results + pair * features + at, mask=is_there, other=0.0)
        if HAS_WEIGHTS:
            value = value * tl.load(weights + pair)
        total += value
    total = tl.where(tl.load(experts + token * CHOSEN) < 0, float("nan"), total)
    if HAS_SHARED:
        value = tl.load(shared + own, mask=is_there, other=0.0)
        if HAS_GATE:
            value = value * sigmoid(tl.load(shared_gates + token))
        total += value
    if ADD:
        total = (tl.load(residual + own, mask=is_there, other=0.0) + total) * scale
    tl.store(out + own, total, mask=is_there)
