"""A layer of experts on the CPU: its definition for each type, and bits that depend only on the token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE, slow_except
from infer.compute import ops
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.backends.cpu.recording import record
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.weights import ExpertNorms, ExpertWeights, Norm, Projection, SharedExpert, StoredWeight
from layer_caches import threads
from test_cpu_kernels import CPU, TYPES, assert_near, make_weight

HIDDEN, INNER, EXPERTS, CHOSEN = 256, 256, 9, 3
NORM = Norm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6)
ROUTER = Router(EXPERTS, CHOSEN, "softmax", is_normalized=True)
WEIGHTED = replace(ROUTER, scores="sigmoid_of_chosen", is_normalized=False, weighs_inputs=True)
SOME_TYPES = ["BF16", "F32", "F8_E4M3", "IQ1_M", "IQ3_XXS", "MXFP4", "Q4_K", "Q8_0"]  # products in each form
ROUTERS = [ROUTER, replace(ROUTER, is_normalized=False, scale=2.5)]
ROUTERS += [replace(ROUTER, scores="sigmoid", floor=1e-20, scale=1.8, has_correction=True)]
ROUTERS += [replace(ROUTER, scores="softmax_of_chosen", is_normalized=False), WEIGHTED, Router(40, 8, "softmax")]
ROUTERS += [Router(1, 1, "softmax")]


def make_stacked(type_: str, rows: int, columns: int, count: int, label: str, *, has_bias: bool) -> Projection:
    parts = tuple(make_weight(type_, rows, columns, seed) for seed in range(count))
    bias = torch.randn(rows * count, generator=torch.Generator().manual_seed(5)) * 0.1 if has_bias else None
    return Projection(parts, bias, label=label, is_stack=True)


def make_experts(
    type_: str, *, up: str = "", down: str = "", router: Router = ROUTER, has_bias: bool = False, shared: int = 0
) -> ExpertWeights:
    count, generator = router.num_experts, torch.Generator().manual_seed(3)
    logits = torch.randn(count, HIDDEN, generator=generator) * 0.1
    parts: Any = None
    if shared:
        gate_up = Projection((make_weight(type_, shared, HIDDEN, 50), make_weight(type_, shared, HIDDEN, 51)))
        row = StoredWeight("F32", (1, HIDDEN), torch.randn(1, HIDDEN, generator=generator) * 0.1)
        parts = SharedExpert(gate_up, Projection((make_weight(type_, HIDDEN, shared, 52),)), Projection((row,)))
    return ExpertWeights(
        router=router,
        router_logits=Projection((StoredWeight("F32", (count, HIDDEN), logits),), label="L0.router"),
        correction=torch.randn(count, generator=generator) if router.has_correction else None,
        gate=make_stacked(type_, INNER, HIDDEN, count, "L0.gate", has_bias=has_bias),
        up=make_stacked(up or type_, INNER, HIDDEN, count, "L0.up", has_bias=has_bias),
        down=make_stacked(down or type_, HIDDEN, INNER, count, "L0.down", has_bias=has_bias),
        activation="silu",
        shared=parts,
    )


def prepared(experts: ExpertWeights, backend: str = "cpu", precision: ops.Precision = "exact") -> ExpertWeights:
    def each(owner: Any, *names: str) -> Any:
        given = {name: getattr(owner, name) for name in names}
        ready = {name: ops.prepare(part, CPU, precision) for name, part in given.items() if part is not None}
        return replace(owner, **ready)

    with ops.using(backend):
        shared = None if experts.shared is None else each(experts.shared, "gate_up", "down", "gate")
        found: ExpertWeights = each(replace(experts, shared=shared), "router_logits", "gate", "up", "down")
        return found


def make_x(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def both(
    experts: ExpertWeights, num_tokens: int, post_norm: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    x = make_x(num_tokens)
    actual = cpu.add_experts(x.clone(), NORM, prepared(experts), post_norm, scale)
    expected = reference.add_experts(x, NORM, prepared(experts, "reference"), post_norm, scale)
    return actual - scale * x, expected - scale * x


def with_norms(experts: ExpertWeights) -> ExpertWeights:
    """Return experts with the norms of Gemma 4, whose experts are parallel to an MLP."""
    generator = torch.Generator().manual_seed(9)
    weights = (torch.rand(HIDDEN, generator=generator) + 0.5 for _ in range(4))
    scales = torch.rand(experts.router.num_experts, generator=generator) + 0.5
    assert experts.shared is not None
    shared = replace(experts.shared, gate=None)
    norms = ExpertNorms(*(Norm(weight, NORM.eps) for weight in weights))
    return replace(experts, norms=norms, expert_scales=scales, shared=shared)


@pytest.mark.parametrize("type_", slow_except(["F32"], TYPES if IS_WHOLE else SOME_TYPES))
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_of_each_type_agree_with_reference(type_: str, num_tokens: int) -> None:
    actual, expected = both(make_experts(type_), num_tokens)
    # Experts of one bit are small compared with the stream, and the sum is rounded like the stream.
    assert_near(actual, expected, 2e-3, max(float(expected.abs().max()), 5e-7 / 2e-3))


@pytest.mark.slow(cases=7)
@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: f"{router.scores}-{router.num_experts}")
@pytest.mark.parametrize("shared", [0, 96])
def test_routers_agree_with_reference(router: Router, shared: int) -> None:
    assert_near(*both(make_experts("F32", router=router, shared=shared), 21), 2e-5)


@pytest.mark.parametrize(
    ("gate", "up"), slow_except([("F32", "F32")], [("F32", "F32"), ("Q8_0", "Q8_0"), ("Q4_K", "BF16")])
)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_weighted_inputs_agree_with_reference(gate: str, up: str, num_tokens: int) -> None:
    weighted = make_experts(gate, up=up, router=WEIGHTED)
    actual, expected = both(weighted, num_tokens)
    assert_near(actual, expected, 2e-3)
    of_results, _ = both(replace(weighted, router=replace(WEIGHTED, weighs_inputs=False)), num_tokens)
    assert (actual - of_results).abs().max() > 0.1 * actual.abs().max()


def test_weighted_experts_are_chosen_by_logits_whose_sigmoids_are_equal() -> None:
    experts = make_experts("F32", router=WEIGHTED)
    far = StoredWeight("F32", (EXPERTS, HIDDEN), experts.router_logits.parts[0].data * 1000)
    experts = replace(experts, router_logits=Projection((far,), label="L0.router"))
    by_logits, expected = both(experts, 21)
    assert_near(by_logits, expected, 2e-5)
    by_sigmoids, _ = both(replace(experts, router=replace(WEIGHTED, scores="sigmoid")), 21)
    assert (by_logits - by_sigmoids).abs().max() > 0.1 * by_logits.abs().max()


@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize("post_norm", [None, NORM])
@pytest.mark.parametrize("shared", [0, 96])
def test_a_norm_of_the_sum_and_a_scale_agree_with_reference(shared: int, post_norm: Norm | None, scale: float) -> None:
    assert_near(*both(make_experts("F32", shared=shared), 21, post_norm, scale), 2e-5)


@pytest.mark.parametrize("type_", slow_except(["F32"], ["F32", "Q8_0"]))
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_with_norms_of_their_own_agree_with_reference(type_: str, num_tokens: int) -> None:
    assert_near(*both(with_norms(make_experts(type_, shared=96)), num_tokens, NORM, 0.7), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "up", "down", "has_bias"),
    [("Q4_K", "Q8_0", "BF16", False), ("BF16", "BF16", "Q8_0", True), ("Q8_0", "F32", "Q4_K", True)],
)
def test_matrices_of_mixed_types_and_biases_agree_with_reference(gate: str, up: str, down: str, has_bias: bool) -> None:
    assert_near(*both(make_experts(gate, up=up, down=down, has_bias=has_bias), 19), 2e-3)


@pytest.mark.parametrize(
    ("type_", "precision"),
    slow_except([("F32", "exact")], [("F32", "exact"), ("BF16", "exact"), ("Q4_K", "exact"), ("Q8_0", "fast")]),
)
def test_a_token_has_equal_bits_in_any_batch_chunk_and_number_of_threads(type_: str, precision: ops.Precision) -> None:
    plain, x = make_experts(type_, shared=256), make_x(70)
    weighted = make_experts(type_, shared=256, router=WEIGHTED)
    for own, post_norm in ((plain, None), (with_norms(plain), NORM), (weighted, None)):
        experts = prepared(own, precision=precision)
        together = cpu.add_experts(x.clone(), NORM, experts, post_norm)
        for size in (1, 7, 32):
            parts = [cpu.add_experts(part.clone(), NORM, experts, post_norm) for part in x.split(size)]
            assert torch.equal(torch.cat(parts), together)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        assert torch.equal(cpu.add_experts(x[order].clone(), NORM, experts, post_norm), together[order])
        for num_threads in (1, 3):
            with threads(num_threads):
                assert torch.equal(cpu.add_experts(x.clone(), NORM, experts, post_norm), together)


def test_equal_scores_choose_the_lower_numbers() -> None:
    experts = make_experts("F32")
    rows = StoredWeight("F32", (EXPERTS, HIDDEN), torch.zeros(EXPERTS, HIDDEN))
    tied = replace(experts, router_logits=Projection((rows,)))
    chosen, weights = reference.route(torch.zeros(2, EXPERTS), ROUTER, None)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 1 / 3))
    assert_near(*both(tied, 5), 2e-5)


def test_an_expert_that_no_token_chooses_is_not_read() -> None:
    experts, x = make_experts("F32"), make_x(30)
    with ops.using("reference"):
        logits = reference.project(reference.normalize(x, NORM), experts.router_logits)
    chosen, _ = reference.route(logits, ROUTER, None)
    broken, token = StoredWeight("F32", (HIDDEN, INNER), torch.full((HIDDEN, INNER), torch.nan)), 4
    parts = [part if index in chosen[token] else broken for index, part in enumerate(experts.down.parts)]
    spoilt = replace(experts, down=replace(experts.down, parts=tuple(parts)))
    found = [cpu.add_experts(x[token : token + 1].clone(), NORM, prepared(each), None) for each in (spoilt, experts)]
    assert torch.equal(*found)


def test_a_token_of_nan_does_not_affect_others() -> None:
    experts, x = prepared(make_experts("F32", shared=64)), make_x(20)
    expected = cpu.add_experts(x.clone(), NORM, experts, None)
    x[7, 3] = torch.nan
    found = cpu.add_experts(x.clone(), NORM, experts, None)
    assert found[7].isnan().all()
    assert torch.equal(torch.cat([found[:7], found[8:]]), torch.cat([expected[:7], expected[8:]]))


def test_a_recorded_layer_reads_each_expert_once_for_all_its_tokens() -> None:
    experts = prepared(make_experts("F32", shared=64))
    with record(64, 1) as recording:
        x = recording.tensor("x", 64, HIDDEN)
        cpu.add_experts(x, NORM, experts, None)
    labels = [command.label for command in recording.commands]
    assert [label for label in labels if "experts" in label] == ["L0.gate.experts F32", "L0.down.experts F32"]


@pytest.mark.parametrize(("rows", "has_bias"), [(24, False), (24, True), (7, True), (1, False)])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_of_any_width_agree_with_reference(rows: int, has_bias: bool, num_tokens: int) -> None:
    """Each begins with a group of rows, and the rest of its last group is padding."""
    experts = make_experts("F32", has_bias=has_bias)
    gate, up = (make_stacked("F32", rows, HIDDEN, EXPERTS, name, has_bias=has_bias) for name in ("L0.gate", "L0.up"))
    down = make_stacked("F32", HIDDEN, rows, EXPERTS, "L0.down", has_bias=has_bias)
    actual, expected = both(replace(experts, gate=gate, up=up, down=down), num_tokens)
    assert_near(actual, expected, 2e-5, max(float(expected.abs().max()), 0.05))  # the sum is rounded like the stream
