"""Every op in plain torch: the definition of correct, on any device.

Written to be read. Weights are dequantised when they are used, and attention handles one row at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.backends.reference_recurrent import gated_delta_net as gated_delta_net
from infer.backends.reference_recurrent import short_conv as short_conv
from infer.operands.activation_values import Activations
from infer.operands.feed_forwards import Activation, Router
from infer.operands.group import Shares
from infer.operands.step import Step
from infer.operands.weights import (
    ConvertedWeight,
    ExpertWeights,
    Heads,
    Norm,
    ObservedWeight,
    PerLayerWeights,
    Projection,
    RopeTable,
    StoredWeight,
    TextInputWeights,
    UnreadWeight,
    Weight,
)
from infer.quantization.ggml_blocks import dequantize
from infer.quantization.kv_formats import BLOCK_POSITIONS
from infer.quantization.kv_layout import (
    LayerCache,
    Pages,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    key_parts,
    value_parts,
)
from infer.sampling import sampler
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def gated(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"], activation: Activation
) -> Float[Tensor, "*shape"]:
    if activation == "clamped_swiglu":
        return (up.clamp(-7, 7) + 1) * ACTIVATIONS["gelu_sigmoid"](gate.clamp(max=7))
    return ACTIVATIONS[activation](gate) * up


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


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    q, k, v = split_heads(qkv.floats, heads)
    pages, kv_type = layer.pages, layer.kv_type
    q, far = rotate_queries(q, heads, pages, step)
    slots = step.positions - pages.shifts[step.rows]
    all_keys, all_values = key_parts(layer.keys, kv_type), value_parts(layer.values, kv_type)
    if heads.has_keys:
        store_keys(k, v, heads, layer, step)

    out = torch.empty_like(q)
    for row in sorted(set(step.rows.tolist())):
        mine = step.rows == row
        seen = visible(pages, row, slots[mine], heads.num_ahead)
        held = seen.any(0).nonzero().flatten()  # the pages of what nobody sees may be another row's
        where = place(pages, torch.full_like(held, row), held)
        row_keys, row_values = (tuple(part[:, *where] for part in parts) for parts in (all_keys, all_values))
        decoded = decode_keys(row_keys, kv_type).to(q.dtype), decode_values(row_values, kv_type).to(q.dtype)
        are_sinks = held < pages.sinks[row]
        near = q[mine]
        queries = near, near if far is q else far[mine]
        out[mine] = attend_row(queries, *decoded, seen[:, held], are_sinks, heads)
    attended = out.flatten(1)
    if heads.gate_start is not None:
        attended = attended * output_gates(qkv.floats, heads)
    return Activations(gathered(attended, heads.shares))


def append_keys(kv: Activations, heads: Heads, layer: LayerCache, step: Step) -> None:
    k, v = kv.floats.view(len(kv.floats), 2, heads.num_kv_heads, heads.head_dim).unbind(1)
    store_keys(k, v, heads, layer, step)


def store_keys(
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    heads: Heads,
    layer: LayerCache,
    step: Step,
) -> None:
    pages, kv_type = layer.pages, layer.kv_type
    slots = step.positions - pages.shifts[step.rows]
    k = rotate(k, heads.k_norm, heads.rope, pages, step)
    v = v if heads.v_eps is None else F.rms_norm(v, v.shape[-1:], eps=heads.v_eps)
    keys, values = key_parts(layer.keys, kv_type), value_parts(layer.values, kv_type)
    for parts, new in ((keys, encode_keys(k, kv_type)), (values, encode_values(v, kv_type))):
        for part, stored in zip(parts, new, strict=True):
            part[:, *place(pages, step.rows, slots)] = stored.transpose(0, 1)


def output_gates(qkv: Float[Tensor, "tokens out"], heads: Heads) -> Float[Tensor, "tokens heads_dim"]:
    """Return the factor of each element of what the heads attend to."""
    num_gates = heads.num_heads * (1 if heads.are_gates_of_heads else heads.head_dim)
    gates = qkv[:, heads.gate_start :][:, :num_gates]
    gates = torch.sigmoid(gates) if heads.gate_curve == "sigmoid" else F.softplus(gates)
    return gates.repeat_interleave(heads.head_dim, 1) if heads.are_gates_of_heads else gates


def attention_weights(
    qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
) -> Float[Tensor, "kv_heads group tokens slots"]:
    q = split_heads(qkv, heads)[0]
    row, pages = int(step.rows[0]), layer.pages
    seen = visible(pages, row, step.positions - pages.shifts[row])
    slots = torch.arange(seen.shape[1], device=q.device)
    where = place(pages, torch.full_like(slots, row), slots)
    stored = tuple(part[:, *where] for part in key_parts(layer.keys, layer.kv_type))
    keys = decode_keys(stored, layer.kv_type).to(q.dtype)
    return attention_shares(rotate_queries(q, heads, pages, step), keys, seen, slots < pages.sinks[row], heads)


def split_heads(qkv: Float[Tensor, "tokens out"], heads: Heads) -> list[Float[Tensor, "tokens some_heads dim"]]:
    """Return q, k and v. k and v are empty if the heads have none of their own."""
    num_new, dim = heads.num_kv_heads if heads.has_keys else 0, heads.head_dim
    counts = heads.num_heads, num_new, num_new
    return [
        qkv[:, start : start + count * dim].reshape(len(qkv), count, dim)
        for start, count in zip(heads.starts, counts, strict=True)
    ]


def place(
    pages: Pages, rows: Int[Tensor, "slots"], slots: Int[Tensor, "slots"]
) -> tuple[Int[Tensor, "slots"], Int[Tensor, "slots"], Int[Tensor, "slots"]]:
    """Return the page of each slot, its block within the page, and its position within the block."""
    blocks, lanes = slots % pages.page_tokens // BLOCK_POSITIONS, slots % BLOCK_POSITIONS
    return pages.table[rows, slots // pages.page_tokens], blocks, lanes


def attend_row(
    queries: tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens heads dim"]],
    keys: Float[Tensor, "kv_heads positions dim"],
    values: Float[Tensor, "kv_heads positions dim"],
    seen: Bool[Tensor, "tokens positions"],
    are_sinks: Bool[Tensor, "positions"],
    heads: Heads,
) -> Float[Tensor, "tokens heads dim"]:
    shares = attention_shares(queries, keys, seen, are_sinks, heads)
    return torch.einsum("kgtp,kpd->tkgd", shares, values).flatten(1, 2)


def attention_shares(
    queries: tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens heads dim"]],
    keys: Float[Tensor, "kv_heads positions dim"],
    seen: Bool[Tensor, "tokens positions"],
    are_sinks: Bool[Tensor, "positions"],
    heads: Heads,
) -> Float[Tensor, "kv_heads group tokens positions"]:
    # Several query heads share one of keys and values.
    near, far = (q.view(len(q), keys.shape[0], -1, q.shape[-1]) for q in queries)
    scores = torch.einsum("tkgd,kpd->kgtp", near, keys)
    if queries[1] is not queries[0]:
        scores = torch.where(are_sinks, torch.einsum("tkgd,kpd->kgtp", far, keys), scores)
    scores = softcapped(scores.mul(heads.scale), heads.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if heads.sinks is None:
        return scores.softmax(-1)
    sinks = heads.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def rotate_queries(
    q: Float[Tensor, "tokens heads dim"], heads: Heads, pages: Pages, step: Step
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens heads dim"]]:
    """Return the queries rotated and scaled for the window's keys, and for the sinks' keys."""
    near = far = rotate(q, heads.q_norm, heads.rope, pages, step)
    if pages.furthest is not None:
        from_there = replace(step, positions=step.positions.clamp(max=pages.furthest))
        far = rotate(q, heads.q_norm, heads.rope, pages, from_there)
    if heads.query_scales is None:
        return near, far
    scales = heads.query_scales[step.positions][:, None, None]
    scaled = near * scales
    return scaled, scaled if far is near else far * scales


def softcapped(x: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    return x if cap is None else cap * torch.tanh(x / cap)


def visible(pages: Pages, row: int, slots: Int[Tensor, "tokens"], num_ahead: int = 0) -> Bool[Tensor, "tokens slots"]:
    """Return which of its row's slots each token sees, from the first slot on."""
    end = int(slots.max()) + 1 if num_ahead == 0 or pages.ends is None else int(pages.ends[row])
    held, own = torch.arange(end, device=slots.device), slots[:, None]
    seen, window = held <= own + num_ahead, int(pages.windows[row])
    if window == 0:
        return seen
    first = own - window + 1 if window > 0 else own - own % -window
    return seen & ((held < pages.sinks[row]) | (held >= first))


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
    x: Float[Tensor, "tokens hidden"], step: Step, second_starts: Int[Tensor, "rows"], weights: TextInputWeights
) -> Float[Tensor, "tokens hidden"]:
    if weights.types is not None:
        are_second = step.positions >= second_starts[step.rows]
        x = x + weights.types[are_second.long().clamp(max=len(weights.types) - 1)].to(x.dtype)
    if weights.positions is not None:
        x = x + weights.positions[step.positions].to(x.dtype)
    return normalize(x, weights.norm)


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Activations:
    gate, up = project(x if norm is None else normalize(x, norm), gate_up).chunk(2, dim=-1)
    return Activations(gathered(gated(gate, up, activation), gate_up.shares))


def norm_activate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection, activation: Activation
) -> Activations:
    y = project(x if norm is None else normalize(x, norm), projection)
    return Activations(gathered(ACTIVATIONS[activation](y), projection.shares))


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    table = weights.table
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


def project(x: Float[Tensor, "*rows in"], projection: Projection) -> Float[Tensor, "*rows out"]:
    y = torch.cat([multiplied(x, part) for part in projection.parts], dim=-1)
    return y if projection.bias is None else y + projection.bias.to(y.dtype)


def multiplied(x: Float[Tensor, "*rows in"], weight: Weight) -> Float[Tensor, "*rows out"]:
    if isinstance(weight, ObservedWeight):
        weight.on_input(x)
        weight = weight.source
    return F.linear(x, dense(weight).to(x.dtype))


def gathered(own: Float[Tensor, "rows own"], shares: Shares | None) -> Float[Tensor, "rows width"]:
    return own if shares is None else shares.gather(own)


def normalize(x: Float[Tensor, "*rows hidden"], norm: Norm) -> Float[Tensor, "*rows hidden"]:
    wide = x.float()
    if norm.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return (scaled if norm.bias is None else scaled + norm.bias.float()).to(x.dtype)


def rotate(
    x: Float[Tensor, "tokens heads dim"], norm: Norm | None, rope: RopeTable | None, pages: Pages, step: Step
) -> Float[Tensor, "tokens heads dim"]:
    if norm is not None:
        x = normalize(x.flatten(1), norm).view_as(x) if len(norm.weight) > x.shape[-1] else normalize(x, norm)
    if rope is None:
        return x
    sets = pages.rope_sets[step.rows].clamp(max=len(rope.cos) - 1)
    cos, sin = (table[sets, step.positions, None].to(x.dtype) for table in (rope.cos, rope.sin))
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def dense(weight: Weight) -> Float[Tensor, "out in"]:
    assert isinstance(weight, StoredWeight)
    return weight.data if weight.data.is_floating_point() else dequantize(weight.data, weight.type)
