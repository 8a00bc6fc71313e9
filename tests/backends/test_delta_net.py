"""Gated delta nets: the definition against others, the CPU against the definition, and bits that nothing changes."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infer import ops
from infer.backends.cpu.threads.pool import set_num_threads
from infer.errors import InvalidRequestError
from infer.kvcache.page_sizes import page_bytes
from infer.operands.activation_values import Activations
from infer.operands.architecture import GatedDeltaNet
from infer.operands.delta_net_cache import DeltaNetCache
from infer.operands.step import Step
from infer.operands.weights import DeltaNetWeights, Norm
from infer.quantization.kv_layout import Pages
from steps import join

PAGE, NUM_ROWS = 64, 3
SMALL = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, num_taps=4)
NETS = [
    SMALL,
    replace(SMALL, are_heads_tiled=True),
    GatedDeltaNet(1, 3, key_dim=48, value_dim=16, num_taps=3),
    GatedDeltaNet(2, 2, key_dim=32, value_dim=80, num_taps=2, are_heads_tiled=True),
    GatedDeltaNet(1, 2, key_dim=128, value_dim=128, num_taps=4),
]


def make_weights(net: GatedDeltaNet, seed: int = 0) -> DeltaNetWeights:
    """Return weights with the ranges of a trained layer: gates that forget in 1 to 1,000 tokens."""
    generator, heads = torch.Generator().manual_seed(seed), net.num_value_heads
    steps = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3, generator=generator))
    return DeltaNetWeights(
        net=net,
        taps=torch.randn(net.num_taps, net.num_channels, generator=generator) * 0.5,
        dt_bias=torch.log(torch.expm1(steps)),
        decay=-torch.empty(heads).uniform_(1, 16, generator=generator),
        norm=Norm(torch.rand(net.value_dim, generator=generator) + 0.5, 1e-6),
    )


def make_projected(net: GatedDeltaNet, num_tokens: int, seed: int = 1) -> Tensor:
    columns = net.num_channels + net.value_features + 2 * net.num_value_heads
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(seed))


def make_cache(
    net: GatedDeltaNet, num_pages: int = 40, *, page_tokens: int = PAGE, is_ring: bool = True
) -> DeltaNetCache:
    """Return a cache of NaN whose rows have `num_pages` pages each: three in turn, or as many, in no order."""
    own = 3 if is_ring else num_pages
    order = torch.randperm(NUM_ROWS * own, generator=torch.Generator().manual_seed(2)).view(NUM_ROWS, own)
    table = order[:, torch.arange(num_pages) % own].contiguous()
    size = page_bytes(net, "f32", page_tokens)
    memory = torch.full((NUM_ROWS * own, size + 64), 0xFF, dtype=torch.uint8)[:, 32 : 32 + size]
    none = torch.zeros(NUM_ROWS, dtype=torch.int64)
    return DeltaNetCache.of_memory(memory, net, Pages(page_tokens, table, none, none, none, none))


def run(
    projected: Tensor,
    weights: DeltaNetWeights,
    cache: DeltaNetCache,
    chunks: Sequence[tuple[int, int, int]],
    backend: str,
) -> Tensor:
    """Return the results of a step of (row, first position, tokens)."""
    step = join([Step.of([0] * count, start, row=row) for row, start, count in chunks])
    with ops.using(backend):
        return ops.gated_delta_net(Activations(projected), weights, cache, step).floats


def definition(projected: Tensor, weights: DeltaNetWeights) -> Tensor:
    """Return the results of a whole text in float64, with a state that every token changes."""
    net, x = weights.net, projected.double()
    heads, dim = net.num_value_heads, net.key_dim
    qkv, z, b, a = x.split([net.num_channels, net.value_features, heads, heads], dim=-1)
    padded = torch.cat([torch.zeros(net.num_taps - 1, net.num_channels).double(), qkv]).T[None]
    taps = weights.taps.T[:, None].double()
    mixed = F.silu(F.conv1d(padded, taps, groups=net.num_channels)[0].T)
    q, k, v = mixed.split([net.num_key_heads * dim] * 2 + [net.value_features], dim=-1)
    q, k = (
        each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        for each in (q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)))
    )
    repeats = heads // net.num_key_heads
    q, k = (
        (each.repeat(1, repeats, 1) if net.are_heads_tiled else each.repeat_interleave(repeats, 1)) for each in (q, k)
    )
    v, alphas, betas = (
        v.unflatten(1, (heads, -1)),
        torch.exp(weights.decay.double() * F.softplus(a + weights.dt_bias.double())),
        torch.sigmoid(b),
    )
    state, out = torch.zeros(heads, dim, net.value_dim).double(), torch.empty_like(v)
    for t in range(len(x)):
        state = state * alphas[t, :, None, None]
        u = betas[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * u[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / dim**0.5
    scaled = out / (out.square().mean(-1, keepdim=True) + weights.norm.eps).sqrt() * weights.norm.weight.double()
    return (scaled * F.silu(z.view_as(out))).flatten(1)


def whole(projected: Tensor, weights: DeltaNetWeights, backend: str = "cpu", **options: bool) -> Tensor:
    return run(projected, weights, make_cache(weights.net, **options), [(0, 0, len(projected))], backend)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_results_are_those_of_a_state_that_every_token_changes(net: GatedDeltaNet, backend: str) -> None:
    weights, projected = make_weights(net), make_projected(net, 150)
    found = whole(projected, weights, backend).double()
    torch.testing.assert_close(found, definition(projected, weights), rtol=1e-4, atol=2e-5)
