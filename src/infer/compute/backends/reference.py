"""Every op in plain torch: the definition of correct, on any device.

Written to be read. Weights are dequantised when they are used. Mixers are defined in `reference_attention` and
`reference_recurrent`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.reference_attention import append_keys as append_keys
from infer.compute.backends.reference_attention import attend as attend
from infer.compute.backends.reference_attention import attention_weights as attention_weights
from infer.compute.backends.reference_parts import activated, dense, gated, gathered, multiplied, project, softcapped
from infer.compute.backends.reference_parts import normalize as normalize
from infer.compute.backends.reference_recurrent import gated_delta_net as gated_delta_net
from infer.compute.backends.reference_recurrent import short_conv as short_conv
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation, Router
from infer.compute.operands.step import Step
from infer.compute.operands.weights import (
    ConvertedWeight,
    ExpertWeights,
    Norm,
    ObservedWeight,
    PerLayerWeights,
    Projection,
    StoredWeight,
    TextInputWeights,
    UnreadWeight,
    Weight,
)
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History


def prepare(projection: Projection, device: torch.device, precision: str = "exact") -> Projection:
    """Return the projection with its weights on `device`. Activations are floats here, whatever the precision."""

    def move(weight: Weight) -> StoredWeight:
        assert isinstance(weight, StoredWeight | UnreadWeight | ConvertedWeight)
        whole = weight.rows(0, weight.out_features)
        return StoredWeight(whole.type, whole.shape, whole.data.to(device))

    bias = None if projection.bias is None else projection.bias.to(device)
    return replace(projection, parts=tuple(map(move, projection.parts)), bias=bias)


def embed(
    table: Weight, token_ids: Int[Tensor, "tokens"], scale: float, norm_eps: float | None = None
) -> Float[Tensor, "tokens hidden"]:
    """Return the tokens' rows × scale. With `norm_eps`, each is then divided by its root mean square."""
    assert isinstance(table, StoredWeight)
    x = dense(StoredWeight(table.type, (len(token_ids), table.in_features), table.data[token_ids])) * scale
    return x if norm_eps is None else normalize(x.float(), Norm(torch.ones(x.shape[1], device=x.device), norm_eps))


def norm_project(x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection) -> Activations:
    y = project(x if norm is None else normalize(x, norm), projection)
    return Activations(gathered(y, projection.shares))


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Activations,
    projection: Projection,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    y = gathered(project(x.floats, projection), projection.shares)
    return (residual + (y if post_norm is None else normalize(y, post_norm))) * scale


def project_add_norm(
    residual: Float[Tensor, "tokens hidden"], x: Activations, projection: Projection, norm: Norm
) -> Float[Tensor, "tokens hidden"]:
    return normalize(residual + project(x.floats, projection), norm)


def add_text_inputs(
    x: Float[Tensor, "tokens hidden"], step: Step, second_starts: Int[Tensor, "rows"] | None, weights: TextInputWeights
) -> Float[Tensor, "tokens hidden"]:
    if weights.types is not None:
        assert second_starts is not None
        are_second = step.positions >= second_starts[step.rows]
        x = x + weights.types[are_second.long().clamp(max=len(weights.types) - 1)].to(x.dtype)
    if weights.positions is not None:
        x = x + weights.positions[step.positions].to(x.dtype)
    return x if weights.norm is None else normalize(x, weights.norm)


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Activations:
    gate, up = project(x if norm is None else normalize(x, norm), gate_up).chunk(2, dim=-1)
    return Activations(gathered(gated(gate, up, activation), gate_up.shares))


def norm_activate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection, activation: Activation
) -> Activations:
    y = project(x if norm is None else normalize(x, norm), projection)
    return Activations(gathered(activated(y, activation, projection.curve), projection.shares))


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    table = weights.table
    assert isinstance(table, StoredWeight | UnreadWeight)
    rows = torch.cat([dense(table.rows(token, token + 1)) for token in token_ids.tolist()]).to(x.device)
    contexts = project(x, weights.projection).view(len(x), -1, weights.dim)
    return normalize(contexts, weights.norm).flatten(1) + rows.to(x.dtype) * weights.table_scale


def gate_inputs(
    x: Float[Tensor, "tokens hidden"],
    gate: Projection,
    activation: Activation,
    inputs: Float[Tensor, "tokens inputs"],
    first_column: int,
) -> Activations:
    first = first_column if gate.shares is None else first_column + gate.shares.own[0]
    own = inputs[:, first : first + gate.out_features]
    return Activations(gathered(gated(project(x, gate), own, activation), gate.shares))


def add_experts(
    residual: Float[Tensor, "tokens hidden"],
    norm: Norm | None,
    experts: ExpertWeights,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    norms = experts.norms
    shared_x = residual if norm is None else normalize(residual, norm)
    router_x, x = (
        (shared_x, shared_x)
        if norms is None
        else (normalize(residual, norms.router), normalize(residual, norms.experts))
    )
    logits = project(router_x.float(), experts.router_logits)
    chosen, weights = route(logits, experts.router, experts.correction)
    if experts.expert_scales is not None:
        weights = weights * experts.expert_scales[chosen]
    y = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        factors = weights[tokens, places, None].to(y.dtype)
        given = x[tokens] * factors if experts.router.weighs_inputs else x[tokens]
        gate, up = (of_expert(given, each, expert, experts.router) for each in (experts.gate, experts.up))
        hidden = gathered(gated(gate, up, experts.activation), experts.gate.shares)
        result = gathered(of_expert(hidden, experts.down, expert, experts.router), experts.down.shares)
        y[tokens] += result if experts.router.weighs_inputs else result * factors
    y = y if norms is None else normalize(y, norms.post_experts)
    if experts.shared is not None:
        shared = project(
            norm_gate(shared_x, None, experts.shared.gate_up, experts.activation).floats, experts.shared.down
        )
        shared = gathered(shared, experts.shared.down.shares)
        if experts.shared.gate is not None:
            shared = shared * torch.sigmoid(project(shared_x.float(), experts.shared.gate)).to(shared.dtype)
        y = y + (shared if norms is None else normalize(shared, norms.post_shared))
    return (residual + (y if post_norm is None else normalize(y, post_norm))) * scale


def route(
    logits: Float[Tensor, "tokens experts"], router: Router, correction: Float[Tensor, "experts"] | None
) -> tuple[Int[Tensor, "tokens chosen"], Float[Tensor, "tokens chosen"]]:
    """Return the numbers of each token's experts in ascending order, and their weights."""
    scores = logits
    if router.scores == "softmax":
        scores = logits.softmax(-1)
    elif router.scores == "sigmoid":
        scores = logits.sigmoid()
    order = (scores if correction is None else scores + correction).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : router.num_chosen].sort(dim=-1).values
    weights = scores.gather(-1, chosen)
    if router.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif router.scores == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if router.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + router.floor)
    return chosen, weights * router.scale


def of_expert(
    x: Float[Tensor, "rows in"], stacked: Projection, expert: int, router: Router
) -> Float[Tensor, "rows out"]:
    num_rows = stacked.out_features // router.num_experts
    rows = range(expert * num_rows, (expert + 1) * num_rows)
    y = torch.cat([multiplied(x, part) for part in parts_within(stacked, rows)], dim=-1)
    return y if stacked.bias is None else y + stacked.bias[rows.start : rows.stop].to(y.dtype)


def parts_within(stacked: Projection, rows: range) -> Iterator[Weight]:
    """Yield the parts of a projection that have some of these rows, cut to the rows."""
    start = 0
    for part in stacked.parts:
        assert isinstance(part, StoredWeight | ObservedWeight)
        first, end = max(rows.start - start, 0), min(rows.stop - start, part.out_features)
        if first < end:
            yield part.rows(first, end)
        start += part.out_features


def head(
    x: Float[Tensor, "tokens hidden"],
    logit_indices: Int[Tensor, "logits"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "logits vocab"]:
    logits = softcapped(project(normalize(x[logit_indices], norm), projection).float(), softcap)
    return gathered(logits, projection.shares)


def choose_tokens(
    logits: Float[Tensor, "rows vocab"],
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Int[Tensor, "rows words"] | None = None,
) -> Int[Tensor, "rows"]:
    return sampler.choose_tokens(logits, columns, history, positions, allowed)
