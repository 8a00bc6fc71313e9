"""Checkpoint + architecture → `Transformer`, after every name and shape has been checked."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.errors import ModelError
from infer.model.rope import make_rope_table
from infer.model.tensors import check_tensors, expected_shapes
from infer.model.transformer import Block, Transformer
from infer.operands.architecture import Architecture, Layer, Rope
from infer.operands.weights import ConvertedWeight, FileWeight, Heads, Norm, Projection, RopeTable, StoredWeight
from infer.quantization.ggml_blocks import dequantize, quantize, quantize_fitted
from infer.quantization.ggml_types import BLOCK_TYPES

Weights = Mapping[str, FileWeight]
OnProgress = Callable[[int, int], None]  # (blocks done, blocks in all)

FloatsAs = Literal["auto", "bf16", "q8", "q4"]

_TYPE_BY_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def load_transformer(
    architecture: Architecture,
    weights: Weights,
    *,
    backend: ops.Backend,
    dtype: torch.dtype | None = None,
    keep_floats_as: FloatsAs = "auto",
    precision: ops.Precision = "exact",
    max_seq_len: int | None = None,
    on_progress: OnProgress | None = None,
) -> Transformer:
    """A model that runs. `dtype` None keeps each weight as its file stores it; otherwise all become dense in dtype.
    `keep_floats_as` quantises matrices that are stored as floats; what a file has quantised stays as it is.

    Raises ModelError that lists every missing, extra and misshapen tensor, twenty at most.
    """
    expected = expected_shapes(architecture)
    check_tensors(expected, weights)
    maker = _Maker(architecture, expected, weights, backend, dtype, keep_floats_as, precision)
    positions = max_seq_len or architecture.max_positions
    ropes = {layer.rope for layer in architecture.layers if layer.rope is not None}
    rope_tables = {rope: make_rope_table(rope, positions, backend.device) for rope in ropes}
    embedding = maker.projection("model.embed_tokens")
    head = embedding if architecture.tied_embeddings else maker.projection("lm_head")
    blocks = []
    for index, layer in enumerate(architecture.layers):
        blocks.append(maker.block(index, layer, rope_tables))
        if on_progress is not None:
            on_progress(index + 1, len(architecture.layers))
    beyond = min((long.beyond for long in architecture.long_ropes), default=positions)
    return Transformer(
        architecture=architecture,
        embedding=embedding,
        blocks=tuple(blocks),
        norm=maker.norm("model.norm", architecture.logit_scale),
        head=head,
        max_seq_len=positions,
        backend=backend,
        dtype=backend.activation_dtype(dtype),
        kv_type=backend.kv_type(dtype),
        rope_border=beyond if beyond < positions else None,
    )


@dataclass(frozen=True)
class _Maker:
    architecture: Architecture
    expected: Mapping[str, tuple[int, ...]]
    weights: Weights
    backend: ops.Backend
    dtype: torch.dtype | None
    keep_floats_as: FloatsAs
    precision: ops.Precision

    def block(self, index: int, layer: Layer, rope_tables: Mapping[Rope, RopeTable]) -> Block:
        at = f"model.layers.{index}."
        heads = Heads(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.attention_scale,
            rope=None if layer.rope is None else rope_tables[layer.rope],
            q_norm=self.norm(at + "self_attn.q_norm") if layer.qk_norm else None,
            k_norm=self.norm(at + "self_attn.k_norm") if layer.qk_norm else None,
            softcap=layer.softcap,
        )
        return Block(
            attention_norm=self.norm(at + "attention_norm") if layer.has_pre_norms else None,
            qkv=self.projection(at + "self_attn.q_proj", at + "self_attn.k_proj", at + "self_attn.v_proj"),
            heads=heads,
            output=self.projection(at + "self_attn.o_proj"),
            post_attention_norm=self.norm(at + "post_attention_norm") if layer.has_post_norms else None,
            mlp_norm=self.norm(at + "mlp_norm") if layer.has_pre_norms else None,
            gate_up=self.projection(at + "mlp.gate_proj", at + "mlp.up_proj"),
            activation=layer.activation,
            down=self.projection(at + "mlp.down_proj"),
            post_mlp_norm=self.norm(at + "post_mlp_norm") if layer.has_post_norms else None,
        )

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        weight = dense(self.weights[name + ".weight"]).to(self.backend.device, torch.float32)
        return Norm(weight * scale, self.architecture.norm_eps)

    def projection(self, *names: str) -> Projection:
        parts = tuple(self._weight(name + ".weight") for name in names)
        biases = [dense(self.weights[name + ".bias"]).float() for name in names if name + ".bias" in self.expected]
        whole = Projection(parts, torch.cat(biases) if biases else None)
        try:
            with ops.using(self.backend):
                return ops.prepare(whole, self.backend.device, self.precision)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            num_bytes = sum(part.num_bytes for part in parts)
            raise ModelError(f"no memory is left for the {num_bytes} bytes of {', '.join(names)}") from error

    def _weight(self, name: str) -> FileWeight | ConvertedWeight:
        weight = self.weights[name]
        if self.dtype is not None:
            return _as_dtype(weight, self.dtype)
        if self.keep_floats_as == "auto" or not BLOCK_TYPES[weight.type].is_float:
            return weight
        if self.keep_floats_as == "bf16" or weight.in_features % 32:
            return _as_dtype(weight, torch.bfloat16)
        # The embedding is the head as well, and a head of 4 bits costs more than it saves.
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        kind = "Q4_1" if self.keep_floats_as == "q4" and not is_table else "Q8_0"
        return ConvertedWeight(kind, weight, _to_q4 if kind == "Q4_1" else _to_q8)


def _to_q4(rows: StoredWeight) -> Tensor:
    return quantize_fitted(rows.data)


def _to_q8(rows: StoredWeight) -> Tensor:
    return quantize(rows.data, "Q8_0")


def _as_dtype(weight: FileWeight, dtype: torch.dtype) -> ConvertedWeight:
    return ConvertedWeight(_TYPE_BY_DTYPE[dtype], weight, lambda rows: dense(rows).to(dtype))


def dense(weight: FileWeight) -> Float[Tensor, "..."]:
    """The values of a tensor, in its file's float type or in float32."""
    return weight.data if BLOCK_TYPES[weight.type].is_float else dequantize(weight.data, weight.type)
