"""Mixers with a state in plain torch: short convolutions and gated delta nets. `backends.reference` has them too.

Written to be read: one row after another, or one token after another.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.operands.activation_values import Activations
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights, DeltaNetWeights

_EPS = 1e-6  # of the norms of q and k


class _Inputs(NamedTuple):
    """Inputs of the recurrence from some tokens: one q, k and v for each value head."""

    q: Float[Tensor, "tokens value_heads key_dim"]
    k: Float[Tensor, "tokens key_heads key_dim"]
    v: Float[Tensor, "tokens value_heads value_dim"]
    log_alphas: Float[Tensor, "tokens value_heads"]
    betas: Float[Tensor, "tokens value_heads"]


def short_conv(projected: Activations, weights: ConvWeights, layer: ConvCache, step: Step) -> Activations:
    b, c, u = projected.floats.chunk(3, dim=-1)
    return Activations(c * _convolved(b * u, weights, layer, step))


def _convolved(
    x: Float[Tensor, "tokens channels"], weights: ConvWeights, layer: ConvCache, step: Step
) -> Float[Tensor, "tokens channels"]:
    """Return the causal convolution of each channel, and keep x in the cache."""
    page_tokens, num_taps = layer.pages.page_tokens, len(weights.taps)
    bias = torch.zeros_like(x[0]) if weights.bias is None else weights.bias.to(x.dtype)
    y = bias.expand_as(x).clone()
    for row in sorted(set(step.rows.tolist()) - {-1}):
        mine = (step.rows == row).nonzero().flatten()
        start = int(step.positions[mine[0]])
        before = torch.arange(max(0, start - num_taps + 1), start, device=x.device)
        kept = layer.inputs[layer.pages.table[row, before // page_tokens], before % page_tokens].to(x.dtype)
        inputs = torch.cat([x.new_zeros(num_taps - 1 - len(before), x.shape[1]), kept, x[mine]])
        for tap, weight in enumerate(weights.taps.to(x.dtype)):
            y[mine] += weight * inputs[tap : tap + len(mine)]
        for token in mine.tolist():  # in order: pages of a long step may share memory
            position = int(step.positions[token])
            layer.inputs[layer.pages.table[row, position // page_tokens], position % page_tokens] = x[token].to(
                layer.inputs.dtype
            )
    return y


def gated_delta_net(projected: Activations, weights: DeltaNetWeights, layer: DeltaNetCache, step: Step) -> Activations:
    net, x = weights.net, projected.floats
    heads = net.num_value_heads
    qkv, z, b, a = torch.split(x, [net.num_channels, net.value_features, heads, heads], dim=-1)
    mixed = F.silu(_convolved(qkv, ConvWeights(weights.taps, None), ConvCache(layer.inputs, layer.pages), step))
    key_features = net.num_key_heads * net.key_dim
    q, k, v = torch.split(mixed, [key_features, key_features, net.value_features], dim=-1)
    inputs = _Inputs(
        _unit(q.view(len(x), -1, net.key_dim))[:, _key_heads(weights)] * net.key_dim**-0.5,
        _unit(k.view(len(x), -1, net.key_dim)),
        v.view(len(x), -1, net.value_dim),
        weights.decay.to(x.dtype) * F.softplus(a + weights.dt_bias.to(x.dtype)),
        torch.sigmoid(b) * net.beta_scale,
    )
    out = torch.zeros_like(inputs.v)
    for token, (row, position) in enumerate(zip(step.rows.tolist(), step.positions.tolist(), strict=True)):
        if row >= 0:  # otherwise a recorded step has no token here
            out[token] = _append(_Inputs(*(each[token] for each in inputs)), weights, layer, row, position)
    return Activations(_gated(out, z.view_as(out), weights).flatten(1))


def _append(token: _Inputs, weights: DeltaNetWeights, layer: DeltaNetCache, row: int, position: int) -> Tensor:
    """Add a token to its page, and return Sᵀq after it, for each value head."""
    page_tokens = layer.pages.page_tokens
    index, place = divmod(position, page_tokens)
    page, owners = layer.pages.table[row, index], _key_heads(weights)
    if place == 0:
        before = layer.pages.table[row, index - 1] if index else None
        layer.states[page] = 0 if before is None else _state_after(layer, before, owners)
    layer.keys[page, :, :, place] = token.k.to(layer.keys.dtype)
    layer.decays[page, :, place] = token.log_alphas.to(layer.decays.dtype)
    k = token.k[owners]
    u = token.betas[:, None] * (token.v - _read(k, layer, page, place, place, owners))
    layer.updates[page, :, place] = u.to(layer.updates.dtype)
    return _read(token.q, layer, page, place, place + 1, owners)


def _read(
    x: Float[Tensor, "value_heads key_dim"],
    layer: DeltaNetCache,
    page: Int[Tensor, ""],
    place: int,
    count: int,
    owners: Int[Tensor, "value_heads"],
) -> Float[Tensor, "value_heads value_dim"]:
    """Return Sᵀx at the token at `place`, with the first `count` updates of the page in S."""
    kept, decays = _decays(layer.decays[page, :, : place + 1].to(x.dtype))
    from_start = torch.einsum("hkv,hk->hv", layer.states[page].to(x.dtype), x)
    products = torch.einsum("hkt,hk->ht", layer.keys[page][owners, :, :count].to(x.dtype), x)
    shares = products * decays[:, :count]
    return kept * from_start + torch.einsum("ht,htv->hv", shares, layer.updates[page, :, :count].to(x.dtype))


def _state_after(
    layer: DeltaNetCache, page: Int[Tensor, ""], owners: Int[Tensor, "value_heads"]
) -> Float[Tensor, "value_heads key_dim value_dim"]:
    """Return S after the last token of a page."""
    kept, decays = _decays(layer.decays[page])
    added = torch.einsum("hkt,ht,htv->hkv", layer.keys[page][owners], decays, layer.updates[page])
    return kept[..., None] * layer.states[page] + added


def _decays(
    log_alphas: Float[Tensor, "value_heads tokens"],
) -> tuple[Float[Tensor, "value_heads 1"], Float[Tensor, "value_heads tokens"]]:
    """Return what is left after the last token of S at the start, and of each token's k uᵀ."""
    after = log_alphas.flip(1).cumsum(1).flip(1)  # from each token on; e^0 is left of the last one's own
    return torch.exp(after[:, :1]), torch.exp(F.pad(after[:, 1:], (0, 1)))


def _key_heads(weights: DeltaNetWeights) -> Int[Tensor, "value_heads"]:
    """Return the key head that each value head uses."""
    net = weights.net
    heads = torch.arange(net.num_value_heads, device=weights.decay.device)
    return heads % net.num_key_heads if net.are_heads_tiled else heads // (net.num_value_heads // net.num_key_heads)


def _unit(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _gated(
    x: Float[Tensor, "tokens heads dim"], z: Float[Tensor, "tokens heads dim"], weights: DeltaNetWeights
) -> Float[Tensor, "tokens heads dim"]:
    """Return norm(x) × silu(z)."""
    norm = weights.norm
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return scaled * norm.weight.to(x.dtype) * F.silu(z)
