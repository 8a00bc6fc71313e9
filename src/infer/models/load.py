"""Checkpoint + architecture → `Transformer`, after every name and shape has been checked."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.architecture import Architecture, TextInputs
from infer.compute.operands.group import Group
from infer.compute.operands.limits import StepLimits
from infer.compute.operands.mixers import QueryScale, Rope
from infer.compute.operands.weights import Projection, RopeTable, TextInputWeights
from infer.models.layers import LoadedLayer, load_layer
from infer.models.layers.extra_inputs import LoadedStateInput, load_per_layer_weights
from infer.models.memory.memory_estimate import LoadSettings, loaded_types, type_of_keys
from infer.models.tensors import check_tensors, expected_shapes
from infer.models.transformer import Transformer
from infer.models.weight_loader import OnInput, WeightLoader, Weights

OnProgress = Callable[[int, int], None]  # (loaded layers, all layers)


def load_transformer(
    architecture: Architecture,
    weights: Weights,
    *,
    backend: ops.Backend,
    dtype: torch.dtype | None = None,
    keep_floats_as: str = "auto",
    precision: ops.Precision = "exact",
    max_seq_len: int | None = None,
    step_limits: StepLimits | None = None,
    on_progress: OnProgress | None = None,
    group: Group | None = None,
    on_input: OnInput | None = None,
    experts: ops.ExpertStore | None = None,
    shared: Transformer | None = None,
) -> Transformer:
    """Return a model that is ready to run. If a `group` runs the model together, return this rank's part.

    If `dtype` is None, each weight keeps the type of its file; otherwise all weights become dense in `dtype`.
    `keep_floats_as` quantises matrices that are stored as floats. Matrices that the file stores quantised stay
    unchanged. If `step_limits` is None, a step has the backend's limits. `on_input` is called with the name and the
    inputs of each matrix of a layer, before each product; only the reference backend calls it. With `experts`, experts
    are read from this store's file while the model runs. A head that drafts has the embedding and the projection to
    logits of `shared`.

    Raises ModelError that lists every missing, extra and misshapen tensor, at most twenty.
    """
    check_tensors(architecture, weights)
    backend.check_layers(architecture.layers)
    positions = max_seq_len or architecture.max_positions
    load = LoadSettings("auto" if dtype is None else str(dtype).removeprefix("torch."), keep_floats_as)
    loader = WeightLoader(
        network=architecture,
        expected=expected_shapes(architecture),
        weights=weights,
        backend=backend,
        types=loaded_types(architecture, weights, load),
        precision=precision,
        group=group,
        rope_tables={rope: make_rope_table(rope, positions, backend.device) for rope in architecture.ropes},
        query_scales={each: make_query_scales(each, positions, backend.device) for each in architecture.query_scales},
        on_input=on_input,
        experts=experts,
    )
    embedding, head = _ends(architecture, loader) if shared is None else (shared.embedding, shared.head)
    limits = step_limits or backend.step_limits
    layers = list[LoadedLayer]()
    with nullcontext() if experts is None else experts.loading():
        for index, (layer, place) in enumerate(zip(architecture.layers, architecture.cache_indices, strict=True)):
            layers.append(load_layer(layer, index, loader.of_layer(index), place))
            if on_progress is not None:
                on_progress(index + 1, len(architecture.layers))
    beyond = min((long.beyond for long in architecture.long_ropes), default=positions)
    return Transformer(
        architecture=architecture,
        embedding=embedding,
        per_layer=load_per_layer_weights(loader),
        layers=tuple(layers),
        state_input=LoadedStateInput.load(embedding, limits.tokens, loader) if architecture.has_state_input else None,
        text_inputs=None if architecture.text_inputs is None else load_text_inputs(architecture.text_inputs, loader),
        norm=loader.norm("model.norm", architecture.logit_scale) if architecture.has_last_norm else None,
        head=head,
        max_seq_len=positions,
        step_limits=limits,
        backend=backend,
        dtype=backend.activation_dtype(dtype),
        kv_type=backend.kv_type(dtype, type_of_keys(architecture, weights)),
        rope_border=beyond if beyond < positions else None,
        experts=experts,
    )


def _ends(architecture: Architecture, loader: WeightLoader) -> tuple[Projection, Projection]:
    """Return the embedding and the head. Tied ones are the same, unless ranks divide the rows of the head."""
    embedding = loader.projection("model.embed_tokens", label="embed")
    if architecture.tied_embeddings and loader.group is None:
        return embedding, embedding
    name = "model.embed_tokens" if architecture.tied_embeddings else "lm_head"
    return embedding, loader.by_rows(name, label="head")


def make_rope_table(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    """Return cos and sin for every position, each of shape `[sets, num_positions, half]`.

    Angles are products in float32, the arithmetic that the models were trained with.
    """
    cos, sin = zip(*(_cos_and_sin(own, num_positions) for own in rope.sets(num_positions)), strict=True)
    return RopeTable(torch.stack(cos).to(device), torch.stack(sin).to(device))


def make_query_scales(scale: QueryScale, num_positions: int, device: torch.device) -> Float[Tensor, "positions"]:
    """Return the factor for queries at every position."""
    periods = ((torch.arange(num_positions) + scale.offset) / scale.period).floor()
    return (1 + scale.growth * torch.log(1 + periods)).to(device)


def _cos_and_sin(
    rope: Rope, num_positions: int
) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def load_text_inputs(own: TextInputs, loader: WeightLoader) -> TextInputWeights:
    """Return the tables and the norm, in float32."""
    return TextInputWeights(
        positions=loader.vector("model.embed_positions.weight") if own.num_positions else None,
        types=loader.vector("model.embed_types.weight") if own.num_types else None,
        norm=loader.norm("model.embed_norm") if own.has_norm else None,
    )
