"""Claims about layers of experts on a GPU, in Triton's interpreter: the definition, and bits that depend on a token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer.compute.backends import reference
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.weights import ExpertWeights, Norm
from test_cpu_kernels import assert_near
from test_expert_kernels import HIDDEN, NORM, ROUTERS, WEIGHTED, make_experts, make_x, prepared, with_norms

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends import cuda
from infer.compute.backends.cuda import experts as cuda_experts
from infer.compute.backends.cuda.expert_choice import TILE, choose, tiles_of

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.slow(cases=1)]
TYPES = ("Q4_0", "Q6_K", "MXFP4", "IQ4_XS", "F16", "BF16", "F32") if IS_WHOLE else ("Q6_K", "MXFP4", "F16", "F32")


def on_cuda(experts: ExpertWeights, x: Tensor, post_norm: Norm | None = None, scale: float = 1.0) -> Tensor:
    return cuda.add_experts(x.clone(), NORM, prepared(experts, "cuda"), post_norm, scale) - scale * x


def both(experts: ExpertWeights, num_tokens: int, post_norm: Norm | None = None, scale: float = 1.0) -> Any:
    x = make_x(num_tokens)
    expected = reference.add_experts(x, NORM, prepared(experts, "reference"), post_norm, scale)
    return on_cuda(experts, x, post_norm, scale), expected - scale * x


@pytest.mark.slow
@pytest.mark.parametrize("type_", TYPES)
def test_experts_of_each_type_agree_with_the_definition_for_few_pairs_and_for_tiles(type_: str) -> None:
    for num_tokens in (1, 20):
        assert_near(*both(make_experts(type_, has_bias=type_ == "MXFP4"), num_tokens), 2e-3)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: f"{router.scores}-{router.num_experts}")
def test_routers_agree_with_the_definition(router: Router) -> None:
    assert_near(*both(make_experts("F32", router=router, shared=96), 5), 2e-5)


def test_experts_are_chosen_by_scores_and_then_by_their_numbers() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    logits[:, 10:20] = logits[:, 30:31]
    logits[5, 3] = float("nan")
    router = Router(40, 8, "softmax", is_normalized=True, scale=1.5)
    found = choose(logits, router, None, None)
    chosen, weights = reference.route(logits[:5], router, None)
    assert torch.equal(found.experts[:5].long(), chosen)
    assert_near(found.weights[:5], weights, 1e-6)
    assert found.experts[5].tolist() == [-1] * 8, "a token that is NaN has no experts"
    assert found.counts.tolist() == torch.bincount(chosen.flatten(), minlength=40).tolist()


def test_tiles_hold_each_pair_once_beside_others_of_its_expert() -> None:
    chosen = torch.randint(0, 7, (50, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    chosen[4] = -1
    counts = torch.bincount(chosen[chosen >= 0].long(), minlength=9).int()
    tiles = tiles_of(cuda_experts.Choice(chosen, torch.zeros(50, 3), counts))
    is_used = tiles.pairs >= 0
    assert sorted(tiles.pairs[is_used].tolist()) == [pair for pair in range(150) if chosen.flatten()[pair] >= 0]
    owners = tiles.experts[:, None].expand(-1, TILE)[is_used]
    assert torch.equal(owners, chosen.flatten()[tiles.pairs[is_used].long()])
    assert not is_used[tiles.experts < 0].any()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("activation", ["clamped_swiglu", "gelu_tanh"])
def test_activations_agree_with_the_definition(activation: Any) -> None:
    assert_near(*both(replace(make_experts("Q8_0", has_bias=True), activation=activation), 3), 2e-3)
