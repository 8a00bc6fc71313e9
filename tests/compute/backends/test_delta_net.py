"""Gated delta nets: the definition against other libraries, the CPU against the definition, and constant bits."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from extent import IS_WHOLE
from infer.compute import ops
from infer.compute.backends.cpu.recording import record
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.kvcache.groups import page_bytes
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.architecture import Layer
from infer.compute.operands.limits import HOST_STEP
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import DeltaNetWeights, Norm, Projection, StoredWeight
from infer.compute.quantization.kv_layout import Pages
from infer.compute.quantization.quantisers import quantise
from infer.errors import UnsupportedModelError
from layer_caches import threads
from steps import join

Chunk = tuple[int, int, int]  # row, first position, tokens
PAGE, NUM_ROWS = 64, 3
SMALL = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, num_taps=4)
NETS = [SMALL, replace(SMALL, are_heads_tiled=True), replace(SMALL, beta_scale=2.0)]
NETS += [GatedDeltaNet(1, 3, key_dim=48, value_dim=16, num_taps=3)]
NETS += [GatedDeltaNet(2, 2, key_dim=32, value_dim=80, num_taps=2, are_heads_tiled=True)]
NETS += [GatedDeltaNet(1, 2, key_dim=128, value_dim=128, num_taps=4)]


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
    """Return a cache of NaN whose rows have `num_pages` pages each: three that repeat, or all different, unordered."""
    own = 3 if is_ring else num_pages
    order = torch.randperm(NUM_ROWS * own, generator=torch.Generator().manual_seed(2)).view(NUM_ROWS, own)
    table = order[:, torch.arange(num_pages) % own].contiguous()
    size = page_bytes(net, "f32", page_tokens)
    memory = torch.full((NUM_ROWS * own, size + 64), 0xFF, dtype=torch.uint8)[:, 32 : 32 + size]
    none = torch.zeros(NUM_ROWS, dtype=torch.int64)
    return DeltaNetCache.of_memory(memory, net, Pages(page_tokens, table, none, none, none, none))


def run(
    projected: Tensor, weights: DeltaNetWeights, cache: DeltaNetCache, chunks: Sequence[Chunk], backend: str = "cpu"
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
    q, k = (each.unflatten(1, (-1, dim)) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    repeats = heads // net.num_key_heads
    by_head = torch.arange(heads) % net.num_key_heads if net.are_heads_tiled else torch.arange(heads) // repeats
    q, k, v = q[:, by_head], k[:, by_head], v.unflatten(1, (heads, -1))
    alphas = torch.exp(weights.decay.double() * F.softplus(a + weights.dt_bias.double()))
    betas = torch.sigmoid(b) * net.beta_scale
    state, out = torch.zeros(heads, dim, net.value_dim).double(), torch.empty_like(v)
    for t in range(len(x)):
        state = state * alphas[t, :, None, None]
        u = betas[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * u[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / dim**0.5
    scaled = out / (out.square().mean(-1, keepdim=True) + weights.norm.eps).sqrt() * weights.norm.weight.double()
    return (scaled * F.silu(z.view_as(out))).flatten(1)


def whole(projected: Tensor, weights: DeltaNetWeights, backend: str = "cpu", *, is_ring: bool = True) -> Tensor:
    cache = make_cache(weights.net, is_ring=is_ring)
    return run(projected, weights, cache, [(0, 0, len(projected))], backend)


def in_chunks(projected: Tensor, weights: DeltaNetWeights, sizes: Sequence[int], row: int = 1) -> Tensor:
    """Return the results of a text in steps of some sizes, which repeat."""
    cache, found, start = make_cache(weights.net, -(-len(projected) // PAGE)), list[Tensor](), 0
    while start < len(projected):
        count = min(sizes[len(found) % len(sizes)], len(projected) - start)
        found.append(run(projected[start : start + count], weights, cache, [(row, start, count)]))
        start += count
    return torch.cat(found)


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_results_are_those_of_a_state_that_every_token_changes(net: GatedDeltaNet, backend: str) -> None:
    weights, projected = make_weights(net), make_projected(net, 150)
    found = whole(projected, weights, backend).double()
    torch.testing.assert_close(found, definition(projected, weights), rtol=1e-4, atol=2e-5)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("net", NETS[:2])
def test_the_reference_in_float64_is_exact(net: GatedDeltaNet) -> None:
    weights, projected = make_weights(net), make_projected(net, 200).double()
    cache = make_cache(net)
    names = ("inputs", "states", "keys", "updates", "decays")
    exact = replace(cache, **{name: getattr(cache, name).double() for name in names})
    for start, count in ((0, 63), (63, 70), (133, 67)):
        part = projected[start : start + count]
        found = run(part, weights, exact, [(2, start, count)], "reference")
        expected = definition(projected, weights)[start : start + count]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_the_definition_is_that_of_transformers() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    net, hidden, num_tokens = SMALL, 40, 150
    heads = {"num_key_heads": net.num_key_heads, "num_value_heads": net.num_value_heads}
    sizes = {"key_head_dim": net.key_dim, "value_head_dim": net.value_dim, "conv_kernel_dim": net.num_taps}
    linear = {f"linear_{name}": value for name, value in (heads | sizes).items()}
    config = Qwen3NextConfig(hidden_size=hidden, rms_norm_eps=1e-6, **linear)
    torch.manual_seed(0)
    module, weights = Qwen3NextGatedDeltaNet(config, 0).eval(), make_weights(net)
    module.out_proj = torch.nn.Identity()
    x = torch.randn(1, num_tokens, hidden)
    with torch.no_grad():
        module.conv1d.weight.copy_(weights.taps.T[:, None])
        module.dt_bias.copy_(weights.dt_bias)
        module.A_log.copy_((-weights.decay).log())
        module.norm.weight.copy_(weights.norm.weight)
        for projection in (module.in_proj_qkvz, module.in_proj_ba):
            projection.weight.mul_(30)  # gates and values that differ
        columns = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
        q, k, v, z, b, a = (each.reshape(num_tokens, -1) for each in columns)
        expected = module(x)[0]
    projected = torch.cat([q, k, v, z, b, a], dim=-1)
    assert a.std() > 1
    torch.testing.assert_close(definition(projected, weights).float(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(whole(projected, weights), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("size", range(1, 71) if IS_WHOLE else (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 70))
def test_bits_do_not_depend_on_the_chunks(size: int) -> None:
    weights, projected = make_weights(SMALL), make_projected(SMALL, 270)
    assert torch.equal(in_chunks(projected, weights, [size]), whole(projected, weights))


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("is_ring", [True, False])
def test_bits_do_not_depend_on_chunks_of_many_sizes(net: GatedDeltaNet, is_ring: bool) -> None:
    weights, projected = make_weights(net), make_projected(net, 400)
    expected = whole(projected, weights, is_ring=is_ring)
    assert torch.equal(in_chunks(projected, weights, [5, 1, 67, 2, 130, 3, 59, 64, 1]), expected)


@pytest.mark.parametrize("page_tokens", [16, 32, 128])
def test_pages_have_any_number_of_tokens(page_tokens: int) -> None:
    weights, projected = make_weights(SMALL), make_projected(SMALL, 300)
    found = run(projected, weights, make_cache(SMALL, page_tokens=page_tokens), [(0, 0, 300)])
    torch.testing.assert_close(found.double(), definition(projected, weights), rtol=1e-4, atol=2e-5)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("net", NETS[1:3])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_rows_of_a_step_have_the_bits_of_single_rows(net: GatedDeltaNet, num_threads: int) -> None:
    chosen, weights, cache = random.Random(num_threads), make_weights(net), make_cache(net)
    texts = [make_projected(net, 700, seed) for seed in range(NUM_ROWS)]
    expected, starts = [whole(text, weights) for text in texts], [0] * NUM_ROWS
    with threads(num_threads):
        for _ in range(20):
            chunks = [
                (row, starts[row], chosen.choice([1, 1, 2, 4, 5, 63, 64, 65, 100]))
                for row in chosen.sample(range(NUM_ROWS), chosen.randint(1, NUM_ROWS))
            ]
            chunks = [(row, start, min(count, 700 - start)) for row, start, count in chunks if start < 700]
            projected = [texts[row][start : start + count] for row, start, count in chunks]
            if chunks:
                found = run(torch.cat(projected), weights, cache, chunks)
                wanted = [expected[row][start : start + count] for row, start, count in chunks]
                assert torch.equal(found, torch.cat(wanted))
            for row, _, count in chunks:
                starts[row] += count
    assert min(starts) > 128


def test_dropped_tokens_leave_nothing() -> None:
    """Drafts are not accepted, and a text continues from an earlier position in its page."""
    weights, projected, others = make_weights(SMALL), make_projected(SMALL, 260), make_projected(SMALL, 260, seed=9)
    expected, cache = whole(projected, weights), make_cache(SMALL)
    start = 0
    for count, dropped in ((60, 4), (4, 60), (64, 1), (3, 61), (1, 3), (62, 2), (66, 64)):
        wrong = others[start : start + count + dropped].clone()
        wrong[:count] = projected[start : start + count]
        found = run(wrong, weights, cache, [(0, start, len(wrong))])
        assert torch.equal(found[:count], expected[start : start + count])
        start += count
    assert start == 260


def test_a_row_continues_in_pages_that_another_row_shares() -> None:
    weights, text, other = make_weights(SMALL), make_projected(SMALL, 200), make_projected(SMALL, 72, seed=5)
    cache = make_cache(SMALL, is_ring=False)
    cache.pages.table[1, :2] = cache.pages.table[0, :2]
    run(text[:128], weights, cache, [(0, 0, 128)])
    both = torch.cat([text[128:], other])
    found = run(both, weights, cache, [(0, 128, 72), (1, 128, 72)])
    for start, rest in ((0, text[128:]), (72, other)):
        assert torch.equal(found[start : start + 72], whole(torch.cat([text[:128], rest]), weights)[128:])


def test_a_text_of_8192_tokens_does_not_drift() -> None:
    """Errors of the last 1,000 tokens are as small as those of the first.

    Heads forget in 2, 1,000 and 100,000 tokens. They write little of each token (β is about 0.02), so that a later
    token does not correct an error of the state either.
    """
    num_tokens, heads = 8192, 3
    net = GatedDeltaNet(1, heads, key_dim=32, value_dim=32, num_taps=4)
    dt_bias, per_token = torch.log(torch.expm1(torch.ones(heads))), torch.tensor([0.5, 1e-3, 1e-5])
    weights, projected = replace(make_weights(net), dt_bias=dt_bias, decay=-per_token), make_projected(net, num_tokens)
    projected[:, -2 * heads : -heads] -= 4
    found = in_chunks(projected, weights, [HOST_STEP.tokens]).double()
    errors = (found - definition(projected, weights)).abs().unflatten(1, (heads, -1)).amax(-1)
    assert errors.max() <= 5e-5
    assert (errors[-1000:].mean(0) <= 2.5 * errors[:1000].mean(0)).all()


def test_gates_of_any_size_give_finite_results() -> None:
    """Gates keep all or forget all, and some channels are 0."""
    weights, projected = make_weights(SMALL), make_projected(SMALL, 140)
    heads = SMALL.num_value_heads
    projected[:, -heads:] *= 40
    projected[:, -2 * heads : -heads] *= 100
    projected[50:60, : SMALL.num_channels] = 0
    found = whole(projected, weights)
    torch.testing.assert_close(found.double(), definition(projected, weights), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rows_of_minus_one_are_no_tokens(backend: str) -> None:
    weights, projected = make_weights(SMALL), make_projected(SMALL, 80)
    expected = whole(projected, weights, backend)
    cache = make_cache(SMALL)
    run(projected[:70], weights, cache, [(2, 0, 70)], backend)
    kept = [cache.inputs, cache.states, cache.keys, cache.updates, cache.decays]
    before = [each.clone() for each in kept]
    run(projected[:6], weights, cache, [(-1, 0, 6)], backend)
    for old, new in zip(before, kept, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    padded = torch.cat([projected[70:], projected[:6]])
    found = run(padded, weights, cache, [(2, 70, 10), (-1, 0, 6)], backend)
    torch.testing.assert_close(found[:10], expected[70:], rtol=0, atol=1e-5 if backend == "reference" else 0)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("net", NETS)
def test_a_recorded_step_has_the_bits_of_a_single_one(net: GatedDeltaNet) -> None:
    """If a head consists of whole blocks, the recording quantises each head's result itself."""
    weights, projected = make_weights(net), make_projected(net, 200)
    seen = torch.randn(24, net.value_features, generator=torch.Generator().manual_seed(4))
    type_ = "F32" if net.value_features % 32 else "Q8_0"
    stored = StoredWeight(type_, tuple(seen.shape), seen if type_ == "F32" else quantise(seen, type_))
    output = ops.prepare(Projection((stored,)), torch.device("cpu"))
    expected_cache, cache = make_cache(net), make_cache(net)
    with record(70, 1) as recording:
        slots = recording.tensor("projected", 70, projected.shape[1])
        mixed = ops.gated_delta_net(Activations(slots), weights, cache, recording.step)
        found = ops.project_add(recording.tensor("x", 70, 24), mixed, output, None)
    table, start = DispatchTable(recording.commands), 0
    for count in (70, 1, 3, 64, 17):
        part = projected[start : start + count]
        slots[:count] = part
        found.zero_()
        recording.step.positions[:count] = torch.arange(start, start + count)
        recording.step.rows[:count] = 1
        recording.state["num_tokens"] = count
        thread_pool().run(table, recording.state)
        step = Step.of([0] * count, start, row=1)
        single = ops.gated_delta_net(Activations(part), weights, expected_cache, step)
        assert torch.equal(mixed.floats[:count], single.floats)
        assert torch.equal(found[:count], ops.project_add(torch.zeros(count, 24), single, output, None))
        start += count


REFUSED = [
    (GatedDeltaNet(1, 1, key_dim=24, value_dim=32, num_taps=4), "must be multiples of 16 on a CPU, got 24 and 32"),
    (GatedDeltaNet(1, 1, key_dim=16, value_dim=32, num_taps=17), "must have at most 16 taps on a CPU, got 17"),
]


@pytest.mark.parametrize(("net", "message"), REFUSED)
def test_shapes_without_kernels_are_refused_before_weights_are_read(net: GatedDeltaNet, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ops.backend_of(torch.device("cpu")).check_layers([Layer(net, None)])
    with pytest.raises(UnsupportedModelError, match=message):
        whole(make_projected(net, 2), make_weights(net))
