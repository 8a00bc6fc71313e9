"""Claims about the unusual parts of attention on a GPU, in Triton's interpreter, one layer at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm
from infer.compute.quantization.kv_layout import LayerCache

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends import cuda
from infer.compute.backends.cuda import attention_items
from infer.compute.backends.cuda.activations import Twin, quantized, twin_of
from test_cuda_attention import filled, make_heads

pytestmark = pytest.mark.usefixtures("quick_interpreter")
SINKS = torch.tensor([0.5, -300.0, 200.0, 3.0])  # some take nothing of a softmax, some almost all
SCALES = 1 + 0.3 * torch.log(1 + torch.arange(700) // 16)
GATES = [("sigmoid", False), ("softplus", True), ("softplus", False), ("sigmoid", True)]


def with_gates(heads: Heads, curve: str, are_of_heads: bool) -> Heads:
    start = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return replace(heads, gate_start=start, gate_curve=curve, are_gates_of_heads=are_of_heads)


def make_qkv(heads: Heads, count: int, seed: int = 0, extra: int = 0) -> Tensor:
    """Gates are up to 40 in size."""
    kv_heads = heads.num_kv_heads if heads.has_keys else 0
    features = (heads.num_heads + 2 * kv_heads) * heads.head_dim + extra
    gates = 0
    if heads.gate_start is not None:
        gates = heads.num_heads * (1 if heads.are_gates_of_heads else heads.head_dim)
    qkv = torch.randn(count, features + gates, generator=torch.manual_seed(seed))
    qkv[:, features:] *= 12
    return qkv


def check(
    heads: Heads, sizes: Sequence[int], kv_type: str = "f16", start: int = 20, extra: int = 0, **pages: Any
) -> None:
    """So many tokens at a time, after `start` others. One step for all of them has the same bits."""
    usual = replace(heads, qkv_starts=None, gate_start=None, has_keys=True)
    ours, theirs, whole = (filled(usual, kv_type, start, **pages) for _ in range(3))
    total, at, found = sum(sizes), 0, []
    qkv = make_qkv(heads, total, start, extra)
    for size in sizes:
        step, own = Step.of([1] * size, start + at, row=1), Activations(qkv[at : at + size])
        found.append(cuda.attend(own, heads, ours, step).floats)
        expected = reference.attend(own, heads, theirs, step).floats
        assert float((found[-1] - expected).abs().max()) < 2e-5
        at += size
    step = Step.of([1] * total, start, row=1)
    assert torch.equal(cuda.attend(Activations(qkv), heads, whole, step).floats, torch.cat(found))
    are_equal(ours, theirs, kv_type)


def are_equal(ours: LayerCache, theirs: LayerCache, kv_type: str) -> None:
    """Hardly ever does a rounded value depend on the last bit."""
    if kv_type != "f32":
        assert (ours.keys != theirs.keys).float().mean() < 1e-3
        assert (ours.values != theirs.values).float().mean() < 1e-3


@pytest.mark.parametrize(("kv_type", "softcap", "start"), [("f32", None, 20), ("q4", 2.0, 20), ("bf16", None, 290)])
def test_a_sink_is_one_more_logit_of_its_head(kv_type: str, softcap: float | None, start: int) -> None:
    check(make_heads(4, 2, 32, softcap=softcap, sinks=SINKS), [1, 5], kv_type, start)


def test_a_sink_is_added_once_however_a_context_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, start, found = make_heads(4, 2, 32, sinks=SINKS), 610, list[Tensor]()
    for programs in (1, 512):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        step = Step.of([1] * 3, start, row=1)
        found.append(cuda.attend(Activations(make_qkv(heads, 3)), heads, filled(heads, "f16", start), step).floats)
    assert torch.equal(*found)


@pytest.mark.parametrize(("curve", "are_of_heads"), GATES)
def test_gates_multiply_results(curve: str, are_of_heads: bool) -> None:
    check(with_gates(make_heads(3, 1, 24), curve, are_of_heads), [1, 6])


@pytest.mark.parametrize("planes", [1, 2])
def test_results_in_planes_have_been_multiplied_by_gates(planes: int) -> None:
    heads = with_gates(make_heads(4, 2, 32, sinks=SINKS), "sigmoid", are_of_heads=False)
    step = Step.of([1] * 3, row=1)
    step.rows[-1] = -1
    attended = cuda.attend(Activations(make_qkv(heads, 3), Twin(planes)), heads, filled(heads), step)
    twin = twin_of(attended)
    assert twin.quantized is not None
    for left, made in zip(twin.quantized, quantized(attended.floats, None, planes), strict=True):
        assert torch.equal(left[:-1], made[:-1])
    assert attended.floats[-1].isnan().all()
    assert twin.quantized.scales[-1].isnan().all()


@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_values_are_normalised_before_they_are_stored(kv_type: str) -> None:
    ones = Norm(torch.ones(32), 1e-6)
    check(replace(make_heads(4, 2, 32, v_eps=1e-6), q_norm=ones, k_norm=ones), [3], kv_type)


def test_keys_of_another_layer_are_read_and_none_is_written() -> None:
    heads = make_heads(4, 2, 32, has_keys=False)
    layer = filled(replace(heads, has_keys=True), "f16", 30)
    keys, values = layer.keys.clone(), layer.values.clone()
    step, own = Step.of([1] * 3, 27, row=1), Activations(make_qkv(heads, 3))
    found, expected = (each.attend(own, heads, layer, step).floats for each in (cuda, reference))
    assert float((found - expected).abs().max()) < 1e-5
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, values)


@pytest.mark.parametrize("pages", [{}, {"windows": 30, "sinks": 4, "furthest": 40}], ids=str)
def test_queries_are_scaled_by_their_position(pages: dict[str, int]) -> None:
    check(make_heads(2, 1, 32, query_scales=SCALES), [1, 3], "q8" if pages else "f16", 60, **pages)


@pytest.mark.parametrize(("chunk", "start"), [(23, 40), (64, 60), (300, 290), (1, 5), (17, 0), (300, 620)])
def test_a_token_sees_its_chunk(chunk: int, start: int) -> None:
    """Tiles and turns begin at other slots than chunks."""
    check(make_heads(2, 1, 32), [1, 17, 2], start=start, windows=-chunk)


def test_chunks_of_which_the_beginning_is_a_sink_and_positions_are_shifted() -> None:
    heads, start = make_heads(2, 1, 32, query_scales=SCALES), 100
    ours, theirs = (filled(heads, "f16", start, windows=-30, sinks=5, shifts=3) for _ in range(2))
    step, own = Step.of([1] * 6, start + 3, row=1), Activations(make_qkv(heads, 6))
    found, expected = cuda.attend(own, heads, ours, step).floats, reference.attend(own, heads, theirs, step).floats
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("kv_type", "dim", "pages"),
    [
        ("f16", 512, {}),
        ("bf16", 512, {}),
        ("q8", 512, {}),
        ("q4", 512, {}),
        ("f32", 320, {}),
        ("f16", 480, {"windows": 9, "sinks": 3, "furthest": 15}),
    ],
    ids=str,
)
def test_heads_may_have_512_dimensions(kv_type: str, dim: int, pages: dict[str, int]) -> None:
    check(make_heads(2, 1, dim, sinks=SINKS[:2]), [1, 2], kv_type, **pages)


def test_chunks_of_wide_heads_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, found = make_heads(2, 1, 512), list[Tensor]()
    for programs in (1, 512):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        own, step = Activations(make_qkv(heads, 2)), Step.of([1] * 2, 270, row=1)
        found.append(cuda.attend(own, heads, filled(heads, "f16", 270), step).floats)
    assert torch.equal(*found)


def test_a_rank_s_heads_are_columns_of_all_ranks_heads() -> None:
    """Four heads on two kv heads, of which this rank has the last two on the last."""
    whole, dim = with_gates(make_heads(4, 2, 32), "sigmoid", are_of_heads=False), 32
    own = make_heads(2, 1, 32, qkv_starts=(2 * dim, 5 * dim, 7 * dim), gate_start=10 * dim)
    layer, qkv, step = filled(make_heads(4, 2, 32), "f16"), make_qkv(whole, 5), Step.of([1] * 5, row=1)
    expected = cuda.attend(Activations(qkv), whole, layer, step).floats[:, 2 * dim :]
    found = cuda.attend(Activations(qkv), own, filled(make_heads(2, 1, 32), "f16"), step).floats
    assert torch.equal(found, expected)
