"""Checkpoint + architecture → `Transformer`, after every name and shape has been checked."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.errors import ModelError
from infer.model.sharding import Range, head_starts, kv_heads_of, part_ranges, row_starts, rows_of
from infer.model.tensors import check_tensors, expected_shapes
from infer.model.transformer import Block, Transformer
from infer.operands.architecture import Architecture, Layer, Rope
from infer.operands.group import Group, Shares
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
    group: Group | None = None,
) -> Transformer:
    """Return a model that is ready to run. If a `group` runs the model together, return this rank's share.

    If `dtype` is None, each weight keeps the type of its file; otherwise all weights become dense in `dtype`.
    `keep_floats_as` quantises matrices that are stored as floats. Matrices that the file stores quantised stay
    unchanged.

    Raises ModelError that lists every missing, extra and misshapen tensor, twenty at most.
    """
    expected = expected_shapes(architecture)
    check_tensors(expected, weights)
    maker = _Maker(architecture, expected, weights, backend, dtype, keep_floats_as, precision, group)
    positions = max_seq_len or architecture.max_positions
    ropes = {layer.rope for layer in architecture.layers if layer.rope is not None}
    rope_tables = {rope: make_rope_table(rope, positions, backend.device) for rope in ropes}
    embedding = maker.projection("model.embed_tokens")
    head_name = "model.embed_tokens" if architecture.tied_embeddings else "lm_head"
    head = embedding if architecture.tied_embeddings and group is None else maker.by_rows(head_name)
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
        kv_type=backend.kv_type(dtype, weights["model.layers.0.self_attn.k_proj.weight"].type),
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
    group: Group | None

    def block(self, index: int, layer: Layer, rope_tables: Mapping[Rope, RopeTable]) -> Block:
        at = f"model.layers.{index}."
        qkv, heads = self._qkv(at, layer, None if layer.rope is None else rope_tables[layer.rope])
        return Block(
            attention_norm=self.norm(at + "attention_norm") if layer.has_pre_norms else None,
            qkv=qkv,
            heads=heads,
            output=self.by_rows(at + "self_attn.o_proj"),
            post_attention_norm=self.norm(at + "post_attention_norm") if layer.has_post_norms else None,
            mlp_norm=self.norm(at + "mlp_norm") if layer.has_pre_norms else None,
            gate_up=self._gate_up(at, layer),
            activation=layer.activation,
            down=self.by_rows(at + "mlp.down_proj"),
            post_mlp_norm=self.norm(at + "post_mlp_norm") if layer.has_post_norms else None,
        )

    def _qkv(self, at: str, layer: Layer, rope: RopeTable | None) -> tuple[Projection, Heads]:
        """Return this rank's share of the query, key and value projection, and its heads."""
        names, dim = [f"{at}self_attn.{which}_proj" for which in "qkv"], layer.head_dim
        heads = Heads(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=dim,
            scale=layer.attention_scale,
            rope=rope,
            q_norm=self.norm(at + "self_attn.q_norm") if layer.qk_norm else None,
            k_norm=self.norm(at + "self_attn.k_norm") if layer.qk_norm else None,
            softcap=layer.softcap,
        )
        if self.group is None:
            return self.projection(*names), heads
        starts = head_starts(layer, self.group.size)
        if starts is None:
            return self.by_rows(*names), heads
        shares = Shares(self.group, tuple(dim * start for start in starts))
        first, end = starts[self.group.rank], starts[self.group.rank + 1]
        kv_first, kv_end = kv_heads_of(layer, (first, end))
        heads = replace(heads, num_heads=end - first, num_kv_heads=kv_end - kv_first, shares=shares)
        if len({after - before for before, after in pairwise(starts)}) > 1:  # to gather costs less than to wait
            before_v = layer.num_heads + layer.num_kv_heads
            qkv_starts = dim * first, dim * (layer.num_heads + kv_first), dim * (before_v + kv_first)
            return self.by_rows(*names), replace(heads, qkv_starts=qkv_starts)
        ranges = [(dim * first, dim * end), *[(dim * kv_first, dim * kv_end)] * 2]
        return self.projection(*names, ranges=ranges), heads

    def _gate_up(self, at: str, layer: Layer) -> Projection:
        names = [f"{at}mlp.{which}_proj" for which in ("gate", "up")]
        if self.group is None:
            return self.projection(*names)
        shares = Shares(self.group, row_starts(layer.intermediate_size, self.group.size, are_blocks=True))
        return replace(self.projection(*names, ranges=[shares.own] * 2), shares=shares)

    def by_rows(self, *names: str) -> Projection:
        """Return this rank's rows of the matrices, stacked one below the other and divided by rows."""
        if self.group is None:
            return self.projection(*names)
        counts = tuple(self.expected[name + ".weight"][0] for name in names)
        shares = Shares(self.group, row_starts(sum(counts), self.group.size))
        return replace(self.projection(*names, ranges=part_ranges(counts, shares.own)), shares=shares)

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        weight = dense(self.weights[name + ".weight"]).to(self.backend.device, torch.float32)
        return Norm(weight * scale, self.architecture.norm_eps)

    def projection(self, *names: str, ranges: Sequence[Range] | None = None) -> Projection:
        """Return the prepared matrices. `ranges` gives the rows to take from each matrix; None: all rows."""
        if ranges is None:
            ranges = [(0, self.expected[name + ".weight"][0]) for name in names]
        some = [(name, rows) for name, rows in zip(names, ranges, strict=True) if rows[0] < rows[1]]
        parts = tuple(self._weight(name + ".weight", rows) for name, rows in some)
        biases = [self._bias(name + ".bias", rows) for name, rows in some if name + ".bias" in self.expected]
        whole = Projection(parts, torch.cat(biases) if biases else None)
        try:
            with ops.using(self.backend):
                return ops.prepare(whole, self.backend.device, self.precision)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            num_bytes = sum(part.num_bytes for part in parts)
            raise ModelError(f"no memory is left for the {num_bytes} bytes of {', '.join(names)}") from error

    def _bias(self, name: str, rows: Range) -> Tensor:
        return dense(self.weights[name]).float()[slice(*rows)]

    def _weight(self, name: str, rows: Range) -> FileWeight | ConvertedWeight:
        weight = rows_of(self.weights[name], rows)
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
    """Return the values of a tensor, in its file's float type or in float32."""
    return weight.data if BLOCK_TYPES[weight.type].is_float else dequantize(weight.data, weight.type)


def make_rope_table(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    """Return cos and sin for every position, each of shape `[sets, num_positions, half]`.

    Angles are products in float32, the arithmetic that the models were trained with.
    """
    cos, sin = zip(*(_cos_and_sin(own, num_positions) for own in rope.sets(num_positions)), strict=True)
    return RopeTable(torch.stack(cos).to(device), torch.stack(sin).to(device))


def _cos_and_sin(
    rope: Rope, num_positions: int
) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
