"""Layers with a state and layers of experts on a GPU, in Triton's interpreter: the definition's results, and bits that
depend on no path and on no other token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer.compute import ops
from infer.compute.backends import reference
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import ConvCache
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import ConvWeights, ExpertWeights, Norm
from test_cpu_kernels import assert_near
from test_delta_net import NETS, definition, make_cache, make_projected, make_weights, run
from test_expert_kernels import HIDDEN, NORM, ROUTERS, WEIGHTED, make_experts, make_x, prepared, with_norms
from test_recurrent_rows import NET, NET_WEIGHTS, PAGE, TAPS, Rows, go_on_at_random, make

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_twins import assert_left_in_planes
from infer.compute.backends import cuda
from infer.compute.backends.cuda import experts as cuda_experts
from infer.compute.backends.cuda.activations import BF16_PLANES, F16_PLANES, Twin, quantized
from infer.compute.backends.cuda.expert_choice import TILE, choose, tiles_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_interpreter")]


def long_text(length: int) -> list[int]:
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def in_steps(rows: Rows, text: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the results of a row's text in steps of some sizes, which repeat."""
    parts, start = list[Tensor](), 0
    while start < len(text):
        part = list(text[start : start + sizes[len(parts) % len(sizes)]])
        parts.append(rows.step({2: part}))
        start += len(part)
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[1], [TAPS - 2, PAGE], [5, 1, 30, 3, 2], [69]], ids=str)
def test_bits_of_a_convolution_do_not_depend_on_the_chunks(sizes: list[int]) -> None:
    text = long_text(70)
    whole = Rows(make(step_tokens=600), "cuda").step({0: text})
    assert torch.equal(in_steps(Rows(make(step_tokens=600), "cuda"), text, sizes), whole)


@pytest.mark.slow(rest=0)
def test_rows_of_convolutions_go_on_as_one_text_whatever_happens_to_them() -> None:
    go_on_at_random(Rows(make(), "cuda"), 1, 300 if IS_WHOLE else 70)


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("net", NETS if IS_WHOLE else NETS[:3])
def test_a_gated_delta_net_agrees_with_the_definition_and_chunks_change_no_bit(net: GatedDeltaNet) -> None:
    weights, projected = make_weights(net), make_projected(net, 40)
    caches = [make_cache(net, page_tokens=PAGE, is_ring=False) for _ in range(2)]
    whole = run(projected, weights, caches[0], [(0, 0, 40)], "cuda")
    torch.testing.assert_close(whole.double(), definition(projected, weights), rtol=1e-4, atol=2e-5)
    start = 0
    for count in (3, 1, 11, 2, 1, 14, 1, 7):
        found = run(projected[start : start + count], weights, caches[1], [(2, start, count)], "cuda")
        assert torch.equal(found, whole[start : start + count]), start
        start += count


def mix(cache: PagedCache, chunks: Sequence[tuple[int, Tensor]], num_padding: int = 0) -> Tensor:
    """Return the results of a step of rows and what their tokens are projected to. The rows do not keep the tokens."""
    starts = [cache.lengths[row] for row, _ in chunks]
    for row, part in chunks:
        cache.reserve(row, len(part))
    step = Step.of_chunks([Chunk(row, [0] * len(part)) for row, part in chunks], starts)
    projected = torch.cat([part for _, part in chunks])
    if num_padding:
        none = torch.full((num_padding,), -1)
        columns = (torch.cat([column, none]) for column in (step.tokens, step.positions, step.rows))
        step = Step(*columns, step.logit_indices, is_recorded=True)
        projected = torch.cat([projected, projected.new_full((num_padding, projected.shape[1]), float("nan"))])
    with ops.using("cuda"):
        return cache.mix(0, Activations(projected), NET_WEIGHTS, step).floats


@pytest.mark.slow(rest=0)
def test_rows_beside_each_other_padding_and_dropped_drafts_change_no_bit() -> None:
    """The longest step has more pages than last. The caches are NaN where nothing was written."""
    texts = [make_projected(NET, 140, seed) for seed in range(2)]
    alone, cache = make(step_tokens=140, recurrent=NET), make(step_tokens=140, recurrent=NET)
    for each in (alone, cache):
        each.memory.poison()
    expected = [mix(alone, [(row, text)]) for row, text in enumerate(texts)]
    for whole, text in zip(expected, texts, strict=True):
        torch.testing.assert_close(whole.double(), definition(text, NET_WEIGHTS), rtol=1e-4, atol=2e-5)
    wrong = make_projected(NET, 20, seed=9)
    starts = [0, 0]
    for counts, dropped in (((5, 90), 0), ((1, 1), 2), ((10, 5), 4), ((2, 1), 0), ((70, 1), 3), ((1, 15), 1)):
        parts = [text[start : start + count] for text, start, count in zip(texts, starts, counts, strict=True)]
        chunks = [(row + 1, torch.cat([part, wrong[:dropped]])) for row, part in enumerate(parts)]
        found = mix(cache, chunks, num_padding=3)
        assert found[-3:].isnan().all()
        for row, (count, whole) in enumerate(zip(counts, expected, strict=True)):
            first = row * (counts[0] + dropped)
            assert torch.equal(found[first : first + count], whole[starts[row] : starts[row] + count]), (starts, row)
            cache.commit(row + 1, count)
            starts[row] += count


def test_a_row_goes_on_in_pages_that_another_row_shares() -> None:
    text, other = make_projected(NET, 40), make_projected(NET, 5, seed=5)
    cache = make(recurrent=NET)
    mix(cache, [(0, text[:32])])
    cache.commit(0, 32)
    cache.copy_row(1, 0)
    found = mix(cache, [(0, text[32:]), (1, other)])
    for row, part in ((2, text), (3, torch.cat([text[:32], other]))):
        whole, first = mix(cache, [(row, part)])[32:], 8 * (row - 2)
        assert torch.equal(found[first : first + len(whole)], whole)


@pytest.mark.parametrize("form", [1, 2, BF16_PLANES.value, F16_PLANES.value])
def test_results_in_planes_are_what_the_next_product_would_make_of_them(form: int) -> None:
    step, net = Step.of([1, 2, 3]), NETS[0]
    cache = make_cache(net)
    taps = torch.randn(3, 96, generator=torch.Generator().manual_seed(3))
    inputs = torch.zeros(len(cache.inputs), cache.pages.page_tokens, 96)
    projected = [make_projected(net, 3), torch.randn(3, 288, generator=torch.Generator().manual_seed(4))]
    mixed, convolved = (Activations(each, Twin(form)) for each in projected)
    with ops.using("cuda"):
        assert_left_in_planes(ops.gated_delta_net(mixed, make_weights(net), cache, step), form)
        conv_cache = ConvCache(inputs, cache.pages)
        assert_left_in_planes(ops.short_conv(convolved, ConvWeights(taps, None), conv_cache, step), form)


TYPES = ("Q4_0", "Q6_K", "MXFP4", "IQ4_XS", "F16", "BF16", "F32") if IS_WHOLE else ("Q6_K", "MXFP4", "F16", "F32")


def on_cuda(experts: ExpertWeights, x: Tensor, post_norm: Norm | None = None, scale: float = 1.0) -> Tensor:
    return cuda.add_experts(x.clone(), NORM, prepared(experts, "cuda"), post_norm, scale) - scale * x


def both(experts: ExpertWeights, num_tokens: int, post_norm: Norm | None = None, scale: float = 1.0) -> Any:
    x = make_x(num_tokens)
    expected = reference.add_experts(x, NORM, prepared(experts, "reference"), post_norm, scale)
    return on_cuda(experts, x, post_norm, scale), expected - scale * x


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("type_", TYPES)
def test_experts_of_each_type_agree_with_the_definition_for_few_pairs_and_for_tiles(type_: str) -> None:
    for num_tokens in (1, 20):
        assert_near(*both(make_experts(type_, has_bias=type_ == "MXFP4"), num_tokens), 2e-3)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: f"{router.scores}-{router.num_experts}")
def test_routers_agree_with_the_definition(router: Router) -> None:
    assert_near(*both(make_experts("F32", router=router, shared=96), 5), 2e-5)


@pytest.mark.slow(cases=1)
def test_experts_are_chosen_by_scores_and_then_by_their_numbers() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    logits[:, 10:20] = logits[:, 30:31]
    logits[5, 3] = float("nan")
    router = Router(40, 8, "softmax", is_normalized=True, scale=1.5)
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(3))
    found, made = choose(logits, router, None, None, x, 2)
    chosen, weights = reference.route(logits[:5], router, None)
    assert torch.equal(found.experts[:5].long(), chosen)
    assert_near(found.weights[:5], weights, 1e-6)
    assert found.experts[5].tolist() == [-1] * 8, "a token that is NaN has no experts"
    assert made is not None
    for own, expected in zip(made, quantized(x, None, 2), strict=True):
        assert torch.equal(own, expected), "the same launch quantises the tokens"
    assert choose(logits, router, None, None, x, 0)[1] is None


@pytest.mark.slow(cases=1)
def test_tiles_hold_each_pair_once_beside_others_of_its_expert() -> None:
    chosen = torch.randint(0, 7, (50, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    chosen[4] = -1
    tiles = tiles_of(cuda_experts.Choice(chosen, torch.zeros(50, 3)), 9)
    is_used = tiles.pairs >= 0
    assert sorted(tiles.pairs[is_used].tolist()) == [pair for pair in range(150) if chosen.flatten()[pair] >= 0]
    owners = tiles.experts[:, None].expand(-1, TILE)[is_used]
    assert torch.equal(owners, chosen.flatten()[tiles.pairs[is_used].long()])
    assert not is_used[tiles.experts < 0].any()


@pytest.mark.parametrize("type_", ["Q4_K", "BF16"] if IS_WHOLE else ["Q4_K"])
def test_bits_of_a_token_depend_on_no_other(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(type_, shared=256)
    x = make_x(21)
    whole = on_cuda(experts, x)
    for start, end in ((0, 1), (3, 8), (20, 21)):
        assert torch.equal(on_cuda(experts, x[start:end]), whole[start:end])
    monkeypatch.setattr(cuda_experts, "MOST_PAIRS", 30)
    assert torch.equal(on_cuda(experts, x), whole), "pairs are computed some at a time"
    padded = torch.cat([x[:3], torch.full((2, HIDDEN), float("nan")), x[3:]])
    found = on_cuda(experts, padded)
    assert torch.equal(found[[0, 1, 2, *range(5, 23)]], whole)
    assert found[3:5].isnan().all(), "padding stays NaN"


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize(("up", "down"), [("Q8_0", "Q8_0"), ("Q4_0", "F16")])
def test_stacks_of_several_types_agree_with_the_definition(up: str, down: str) -> None:
    experts = make_experts("Q8_0", up=up, down=down, router=WEIGHTED)
    mixed = make_experts("Q4_1")
    gate = replace(experts.gate, parts=(*experts.gate.parts[:4], *mixed.gate.parts[4:]))
    for num_tokens in (2, 20):
        assert_near(*both(replace(experts, gate=gate), num_tokens), 2e-3)


def test_norms_and_scales_of_gemma_4_agree_with_the_definition() -> None:
    experts = with_norms(make_experts("Q8_0", shared=96))
    assert_near(*both(experts, 3, Norm(torch.linspace(2, 1, HIDDEN), 1e-6), 0.7), 2e-3)
    assert_near(*both(make_experts("Q8_0"), 3, None, 0.7), 2e-3)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("activation", ["clamped_swiglu", "gelu_tanh"])
def test_activations_agree_with_the_definition(activation: Any) -> None:
    assert_near(*both(replace(make_experts("Q8_0", has_bias=True), activation=activation), 3), 2e-3)
