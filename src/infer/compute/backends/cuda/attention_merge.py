"""Parts of attention, merged: the largest score, the sum of weights, and the values times weights of some slots.

Scores are logarithms of base 2. A part's largest score is rounded up to an integer, so its factor in a merge is a power
of two and exact. Chunks are merged from the left, in a program's registers or by the last program of a tile.

After all chunks are merged, a query's result is finished: the sink of its head, its mean of values, its output gates,
and the store. A sink is one more logit of the softmax, without a value. It is added once, so its bits do not depend on
the path.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import store_quantized
from infer.compute.backends.cuda.epilogue import sigmoid, softplus
from infer.compute.backends.cuda.kv_blocks import Q8, QUANTIZED_UNIT

INFINITY = tl.constexpr(float("inf"))
AT_ONCE = tl.constexpr(4)  # chunks whose parts are loaded before the first of them is merged


class ChunkParts(NamedTuple):
    """Parts of the chunks of split tiles, by [slot, kv head]."""

    largests: Any  # [..., queries]
    sums: Any  # [..., queries]
    weighted: Any  # [..., queries, dims]


@triton.jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the part of no slots."""
    return (
        tl.full((ROWS,), -INFINITY, tl.float32),
        tl.full((ROWS,), 0.0, tl.float32),
        tl.full((ROWS, SIZE), 0.0, tl.float32),
    )


@triton.jit
def merged(largest, total, values, other_largest, other_total, other_values):
    """Return two parts of the same queries merged into one. Either may cover no slots."""
    both = tl.maximum(largest, other_largest)
    mine, other = tl.exp2(largest - finite(both)), tl.exp2(other_largest - finite(both))
    return both, total * mine + other_total * other, values * mine[:, None] + other_values * other[:, None]


@triton.jit
def finite(largest):
    """Return 0 for −inf, so that −inf minus it stays −inf and does not become NaN."""
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def store_part(
    parts, part, is_mine, largest, total, values, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr
):
    at = part.to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    i = tl.arange(0, SIZE)
    tl.store(parts.largests + at, largest, mask=is_mine)
    tl.store(parts.sums + at, total, mask=is_mine)
    tl.store(parts.weighted + at[:, None] * DIM + i[None, :], values, mask=is_mine[:, None] & (i < DIM)[None, :])


@triton.jit
def merged_parts(parts, part, step, count, is_mine, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr):
    """Return `count` parts, `step` apart from `part` on, merged from the left."""
    largest, total, values = nothing(QUERIES, SIZE)
    at_once: tl.constexpr = AT_ONCE if SIZE <= 256 else 1  # as many as the registers have room for
    for start in range(0, count, at_once):
        for index in tl.static_range(at_once):
            is_there = is_mine & (tl.zeros((QUERIES,), tl.int32) + start + index < count)
            at = (part + (start + index) * step).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
            i = tl.arange(0, SIZE)
            largest, total, values = merged(
                largest, total, values,
                tl.load(parts.largests + at, mask=is_there, other=-INFINITY),
                tl.load(parts.sums + at, mask=is_there, other=0.0),
                tl.load(
                    parts.weighted + at[:, None] * DIM + i[None, :],
                    mask=is_there[:, None] & (i < DIM)[None, :], other=0.0,
                ),
            )  # fmt: skip
    return largest, total, values


LOG2_E = tl.constexpr(1.4426950408889634)


class Results(NamedTuple):
    """Arguments of a layer's sinks and gates. Tensors that are not read are replaced by any existing one."""

    sinks: Any  # float32 [heads]
    gates: Any  # qkv
    WIDTH: tl.constexpr  # columns of qkv
    GATE_START: tl.constexpr
    HAS_SINKS: tl.constexpr
    CURVE: tl.constexpr  # of the gates; "" if there are none
    ARE_OF_HEADS: tl.constexpr  # one gate per head, otherwise one per element


@triton.jit
def mean_of(largest, total, values, lines, is_mine, results, NUM_HEADS: tl.constexpr, KV_TYPE: tl.constexpr):
    """Return values / total, or zeros for queries that saw no slot: those that do not count."""
    if results.HAS_SINKS:
        sink = tl.load(results.sinks + lines % NUM_HEADS, mask=is_mine, other=0.0) * LOG2_E
        total += tl.exp2(sink - finite(largest))
    mean = tl.div_rn(values, tl.where(total == 0, 1.0, total)[:, None])
    return mean * (1.0 / QUANTIZED_UNIT) if KV_TYPE >= Q8 else mean


@triton.jit
def gated(mean, lines, is_mine, results, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return mean [lines, SIZE] times the gate of each head or element."""
    if results.CURVE != "":
        tokens, heads, i = lines // NUM_HEADS, lines % NUM_HEADS, tl.arange(0, SIZE)
        at = results.gates + tokens * results.WIDTH + results.GATE_START
        if results.ARE_OF_HEADS:
            gate = tl.load(at + heads, mask=is_mine, other=0.0)[:, None]
        else:
            is_there = is_mine[:, None] & (i < DIM)[None, :]
            gate = tl.load((at + heads * DIM)[:, None] + i[None, :], mask=is_there, other=0.0)
        mean *= sigmoid(gate) if results.CURVE == "sigmoid" else softplus(gate)
    return mean


@triton.jit
def store_results(
    mean, out, left, lines, is_mine,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Store mean [LINES, SIZE] of heads of tokens. With LEAVES, also store it in LEAVES int8 planes."""
    i = tl.arange(0, SIZE)
    tl.store(out + lines[:, None] * DIM + i[None, :], mean, mask=is_mine[:, None] & (i < DIM)[None, :])
    if LEAVES:
        count: tl.constexpr = LINES * SIZE // 32
        at = lines[:, None] * (DIM // 32) + tl.arange(0, SIZE // 32)[None, :]
        is_block = is_mine[:, None] & (tl.arange(0, SIZE // 32) < DIM // 32)[None, :]
        at, is_block = tl.reshape(at, (count,)), tl.reshape(is_block, (count,))
        per_token: tl.constexpr = NUM_HEADS * DIM // 32
        value = tl.reshape(mean, (count, 32))
        store_quantized(left, value, at // per_token, at % per_token, per_token, is_block, LEAVES, count)
