"""The ops of `PerLayerInput`: all layers' inputs of a token, and the gate with which a layer takes its own.

The table of the inputs is in the device's memory. A recorded step cannot read rows of a file.
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
    room_for,
    store_quantized,
)
from infer.compute.backends.cuda.embed import embed
from infer.compute.backends.cuda.epilogue import activated
from infer.compute.backends.cuda.projection import multiply
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import PerLayerWeights, Projection

_BLOCKS = 8  # of 32 inputs, that a program has


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
    gate_rows[num_tokens, triton.cdiv(features, _BLOCKS * 32)](
        y, inputs, Quantized(y, y, y) if left is None else left.in_bytes(), features, inputs.shape[1], first,
        ACTIVATION=activation, LEAVES=0 if left is None else twin.planes, BLOCKS=_BLOCKS, num_warps=4, **EXACT,
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
