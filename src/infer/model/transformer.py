"""The forward pass: one for prefill, decode and verify, for every family.

A block is five calls into `ops`. Families differ only in values of `Architecture` and in optional weights here.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.kvcache.paged import PagedCache
from infer.operands.architecture import Activation, Architecture, Layer
from infer.operands.step import Step
from infer.operands.weights import Heads, Norm, Projection


@final
@dataclass(frozen=True)
class Block:
    """Attention and MLP around the residual stream."""

    attention_norm: Norm | None
    qkv: Projection
    heads: Heads
    output: Projection
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Projection
    activation: Activation
    down: Projection
    post_mlp_norm: Norm | None


@final
@dataclass(frozen=True)
class Transformer:
    architecture: Architecture
    embedding: Projection
    blocks: tuple[Block, ...]
    norm: Norm
    head: Projection
    max_seq_len: int  # positions that the rope tables cover
    backend: ops.Backend
    dtype: torch.dtype  # of the residual stream
    kv_type: str  # how its keys and values are stored where nothing else is asked for
    rope_border: int | None = None  # sequences of more tokens turn by the second set of rope factors; None: one set

    @property
    def device(self) -> torch.device:
        """Device of the model's tensors."""
        return self.backend.device

    @property
    def own_layers(self) -> list[Layer]:
        """Layers of the architecture, each with only the heads that this rank of a group has."""
        return [
            replace(layer, num_heads=block.heads.num_heads, num_kv_heads=block.heads.num_kv_heads)
            for layer, block in zip(self.architecture.layers, self.blocks, strict=True)
        ]

    def is_long(self, length: int) -> bool:
        """Return True if a sequence of `length` tokens uses the second set of rope factors, for all its tokens."""
        return self.rope_border is not None and length > self.rope_border

    def forward(self, step: Step, cache: PagedCache) -> Float[Tensor, "logits vocab"]:
        """Return float32 logits at `step.logit_indices`, and append the step's keys and values provisionally."""
        with ops.using(self.backend):
            x = self.residual(step, cache)
            return ops.head(x, step.logit_indices, self.norm, self.head, self.architecture.logit_softcap)

    def residual(self, step: Step, cache: PagedCache) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream after the last block, before the norm and the projection to logits."""
        with ops.using(self.backend):
            x = ops.embed(self.embedding.parts[0], step.tokens, self.architecture.embedding_scale).to(self.dtype)
            for layer, block in enumerate(self.blocks):
                qkv = ops.norm_project(x, block.attention_norm, block.qkv)
                attended = cache.attend(layer, qkv, block.heads, step)
                x = ops.project_add(x, attended, block.output, block.post_attention_norm)
                hidden = ops.norm_gate(x, block.mlp_norm, block.gate_up, block.activation)
                x = ops.project_add(x, hidden, block.down, block.post_mlp_norm)
            return x

    def final_norm(self, residual: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the normalised residual stream, which is the input of the projection to logits."""
        with ops.using(self.backend):
            return ops.normalize(residual, self.norm)
