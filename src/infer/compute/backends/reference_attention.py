"""Attention in plain torch, one row at a time. `backends.reference` has its ops too."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.compute.backends.reference_parts import gathered, normalize, softcapped
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, RopeTable
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS
from infer.compute.quantization.kv_layout import (
    LayerCache,
    Pages,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    key_parts,
    storable,
    value_parts,
)


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    q, k, v = split_heads(qkv.floats, heads)
    pages, kv_type = layer.pages, layer.kv_type
    q, for_sinks = rotate_queries(q, heads, pages, step)
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
        queries = near, near if for_sinks is q else for_sinks[mine]
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
    k = rotate(k, heads.k_norm, heads, pages, step)
    v = v if heads.v_eps is None else F.rms_norm(v, v.shape[-1:], eps=heads.v_eps)
    k, v = storable(k, v)
    keys, values = key_parts(layer.keys, kv_type), value_parts(layer.values, kv_type)
    for parts, new in ((keys, encode_keys(k, kv_type)), (values, encode_values(v, kv_type))):
        for part, stored in zip(parts, new, strict=True):
            part[:, *place(pages, step.rows, slots)] = stored.transpose(0, 1)


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
    near, for_sinks = (q.view(len(q), keys.shape[0], -1, q.shape[-1]) for q in queries)
    scores = torch.einsum("tkgd,kpd->kgtp", near, keys)
    if queries[1] is not queries[0]:
        scores = torch.where(are_sinks, torch.einsum("tkgd,kpd->kgtp", for_sinks, keys), scores)
    scores = softcapped(scores.mul(heads.scale), heads.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if heads.sinks is None:
        return scores.softmax(-1)
    sinks = heads.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def split_heads(qkv: Float[Tensor, "tokens out"], heads: Heads) -> list[Float[Tensor, "tokens some_heads dim"]]:
    """Return q, k and v. k and v are empty if the heads have none of their own."""
    num_new, dim = heads.num_kv_heads if heads.has_keys else 0, heads.head_dim
    counts = heads.num_heads, num_new, num_new
    return [
        qkv[:, start : start + count * dim].reshape(len(qkv), count, dim)
        for start, count in zip(heads.starts, counts, strict=True)
    ]


def output_gates(qkv: Float[Tensor, "tokens out"], heads: Heads) -> Float[Tensor, "tokens heads_dim"]:
    """Return the gates that multiply attention's outputs: sigmoid or softplus of the last columns of `qkv`."""
    num_gates = heads.num_heads * (1 if heads.are_gates_of_heads else heads.head_dim)
    gates = qkv[:, heads.gate_start :][:, :num_gates]
    gates = torch.sigmoid(gates) if heads.gate_curve == "sigmoid" else F.softplus(gates)
    return gates.repeat_interleave(heads.head_dim, 1) if heads.are_gates_of_heads else gates


def rotate_queries(
    q: Float[Tensor, "tokens heads dim"], heads: Heads, pages: Pages, step: Step
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens heads dim"]]:
    """Return the queries rotated and scaled for the window's keys, and for the sinks' keys."""
    near = for_sinks = rotate(q, heads.q_norm, heads, pages, step)
    if pages.last_position is not None:
        from_there = replace(step, positions=step.positions.clamp(max=pages.last_position))
        for_sinks = rotate(q, heads.q_norm, heads, pages, from_there)
    if heads.query_scales is None:
        return near, for_sinks
    scales = heads.query_scales[step.positions][:, None, None]
    scaled = near * scales
    return scaled, scaled if for_sinks is near else for_sinks * scales


def rotate(
    x: Float[Tensor, "tokens heads dim"], norm: Norm | None, heads: Heads, pages: Pages, step: Step
) -> Float[Tensor, "tokens heads dim"]:
    if norm is not None and not heads.are_norms_after:
        if norm.is_centred:
            plain = replace(norm, weight=torch.ones_like(norm.weight[: x.shape[-1]]))
            x = normalize(x, plain) * norm.weight.view(x.shape[1:]).to(x.dtype)
        else:
            x = normalize(x.flatten(1), norm).view_as(x) if len(norm.weight) > x.shape[-1] else normalize(x, norm)
    if heads.rope is not None:
        x = turn(x, heads.rope, pages, step)
    return normalize(x, norm) if norm is not None and heads.are_norms_after else x


def turn(
    x: Float[Tensor, "tokens heads dim"], rope: RopeTable, pages: Pages, step: Step
) -> Float[Tensor, "tokens heads dim"]:
    sets = pages.rope_sets[step.rows].clamp(max=len(rope.cos) - 1)
    cos, sin = (table[sets, step.positions, None].to(x.dtype) for table in (rope.cos, rope.sin))
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def place(
    pages: Pages, rows: Int[Tensor, "slots"], slots: Int[Tensor, "slots"]
) -> tuple[Int[Tensor, "slots"], Int[Tensor, "slots"], Int[Tensor, "slots"]]:
    """Return the page of each slot, its block within the page, and its position within the block."""
    blocks, lanes = slots % pages.page_tokens // BLOCK_POSITIONS, slots % BLOCK_POSITIONS
    return pages.table[rows, slots // pages.page_tokens], blocks, lanes


def visible(pages: Pages, row: int, slots: Int[Tensor, "tokens"], num_ahead: int = 0) -> Bool[Tensor, "tokens slots"]:
    """Return which of its row's slots each token sees, from the first slot on."""
    end = int(slots.max()) + 1 if num_ahead == 0 or pages.ends is None else int(pages.ends[row])
    held, own = torch.arange(end, device=slots.device), slots[:, None]
    seen, window = held <= own + num_ahead, int(pages.windows[row])
    if window == 0:
        return seen
    first = own - window + 1 if window > 0 else own - own % -window
    return seen & ((held < pages.sinks[row]) | (held >= first))
