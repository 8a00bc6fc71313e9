"""The end of `attend_chunks` for a query: the sink of its head, its mean of values, its output gates, and the store.

A sink is one more logit of the softmax, without a value. It is added once, after all chunks are merged, so its bits do
not depend on the path.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import store_quantized
from infer.compute.backends.cuda.attention_merge import finite
from infer.compute.backends.cuda.epilogue import sigmoid, softplus
from infer.compute.backends.cuda.kv_blocks import Q8, QUANTIZED_UNIT

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
