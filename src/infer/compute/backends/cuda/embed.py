"""Inputs of tokens: rows of a table of any type as float32, and the ops of `PerLayerInput`.

A padding token has id −1 and NaN values. The table of the layers' inputs is in the device's memory, because a recorded
step cannot read rows of a file.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cuda.activations import (
    Quantized,
    Twin,
    activations_of_all,
    add_normalized,
    divided_by_rms,
    room_for,
    store_quantized,
)
from infer.compute.backends.cuda.blocks import integers, matrix_of, number
from infer.compute.backends.cuda.epilogue import activated
from infer.compute.backends.cuda.layouts import PackedWeight
from infer.compute.backends.cuda.projection import multiply
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import PerLayerWeights, Projection, Weight

_BLOCKS = 32  # that a program has
_FLOATS = 1024


def embed(
    table: Weight,
    token_ids: Int[Tensor, "tokens"],
    scale: float,
    norm_eps: float | None = None,
) -> Float[Tensor, "tokens hidden"]:
    assert isinstance(table, PackedWeight)
    x = torch.empty(len(token_ids), table.in_features, device=token_ids.device)
    if table.layout.is_float and len(token_ids):
        embed_floats[len(token_ids), triton.cdiv(table.in_features, _FLOATS)](
            table.codes, token_ids, x, float(scale), table.in_features, SIZE=_FLOATS, num_warps=4, **EXACT
        )
    elif len(token_ids):
        matrix = matrix_of(table, torch.uint8)
        embed_rows[len(token_ids), triton.cdiv(matrix.num_blocks, _BLOCKS)](
            matrix, token_ids, x, float(scale), BLOCKS=_BLOCKS, num_warps=4, **EXACT
        )
    return x if norm_eps is None else divided_by_rms(x, norm_eps)


@triton.jit
def embed_floats(table, token_ids, x, scale, features, SIZE: tl.constexpr):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    row, mask = tl.load(token_ids + token), at < features
    value = tl.load(table + tl.maximum(row, 0) * features + at, mask=mask, other=0).to(tl.float32) * scale
    tl.store(x + token * features + at, tl.where(row < 0, float("nan"), value), mask=mask)


@triton.jit
def embed_rows(matrix, token_ids, x, scale, BLOCKS: tl.constexpr):
    """Embed tokens from a packed table. The values have the bits of `ggml_blocks.dequantize`."""
    token = tl.program_id(0).to(tl.int64)
    token_id, num_blocks = tl.load(token_ids + token), matrix.num_blocks
    row = tl.maximum(token_id, 0)
    blocks = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    inputs, mask = tl.arange(0, 32)[None, :], blocks < num_blocks
    read = tl.minimum(blocks, num_blocks - 1)
    at = row * num_blocks + read
    q = integers(matrix, at, inputs).to(tl.float32) - matrix.OFFSET
    if matrix.SCALES == 0:
        value = q * number(matrix.scales, at, mask)
        if matrix.HAS_MINIMUM:
            value += number(matrix.minima, at, mask)
    else:
        above = (row * (num_blocks // 8) + read // 8) * (2 if matrix.HAS_MINIMUM else 1)
        part = at * matrix.SCALES + inputs // 16 * (matrix.SCALES - 1)
        value = q * (number(matrix.supers, above, mask) * number(matrix.scales, part, mask))
        if matrix.HAS_MINIMUM:
            value -= number(matrix.supers, above + 1, mask) * number(matrix.minima, part, mask)
    value = tl.where(token_id < 0, float("nan"), value * scale)
    tl.store(x + token * num_blocks * 32 + blocks * 32 + inputs, value, mask=mask)


_GATE_BLOCKS = 8  # of 32 inputs, that a program has


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    inputs = embed(weights.table, token_ids, weights.table_scale)
    contexts = torch.empty_like(inputs)
    multiply(Activations(x), None, weights.projection, contexts)
    add_normalized(inputs.view(-1, weights.dim), contexts.view(-1, weights.dim), weights.norm)
    return inputs


def gate_inputs(
    x: Float[Tensor, "tokens hidden"],
    gate: Projection,
    activation: Activation,
    inputs: Float[Tensor, "tokens inputs"],
    first_column: int,
) -> Activations:
    num_tokens, features = len(x), gate.out_features
    first = first_column if gate.shares is None else first_column + gate.shares.own[0]
    y = torch.empty(num_tokens, features, device=x.device)
    twin = multiply(Activations(x), None, gate, y)
    if twin is None:
        return activations_of_all(y, None, gate.shares)
    left = room_for(y, twin.planes) if gate.shares is None else None
    gate_rows[num_tokens, triton.cdiv(features, _GATE_BLOCKS * 32)](
        y, inputs, Quantized(y, y, y) if left is None else left.in_bytes(), features, inputs.shape[1], first,
        ACTIVATION=activation, LEAVES=0 if left is None else twin.planes, BLOCKS=_GATE_BLOCKS, num_warps=4, **EXACT,
    )  # fmt: skip
    return activations_of_all(y, Twin(twin.planes, left), gate.shares)


@triton.jit(do_not_specialize=["first"])
def gate_rows(
    y, inputs, left, features, width, first, ACTIVATION: tl.constexpr, LEAVES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Replace y [tokens, features] by activation(y) × inputs from column `first` on; also store it in LEAVES planes."""
    token = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = at < features
    gate = tl.load(y + token * features + at, mask=mask, other=0.0)
    value = activated(gate, ACTIVATION) * tl.load(inputs + token * width + first + at, mask=mask, other=0.0)
    tl.store(y + token * features + at, value, mask=mask)
    if LEAVES:
        num_blocks = features // 32
        store_quantized(left, value, token + blocks * 0, blocks, num_blocks, blocks < num_blocks, LEAVES, BLOCKS)
