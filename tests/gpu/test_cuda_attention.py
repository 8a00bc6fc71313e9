"""Claims about attention on a GPU, in Triton's interpreter: what `reference` means, bits that depend on no path, and
an error as small as that of sums in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, RopeTable
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.compute.quantization.kv_layout import LayerCache, Pages, decode_keys, decode_values, key_parts, value_parts
from layer_caches import make_layer
from unseen_values import VALUE, Span, check_unseen

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_twins import assert_left_in_planes
from infer.compute.backends import cuda
from infer.compute.backends.cuda import attention, attention_items
from infer.compute.backends.cuda.activations import Twin, twin_of

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.slow(cases=1)]
CAPACITY = 640
ANGLES = torch.arange(1100)[:, None] / 50.0 ** torch.linspace(0, 1, 12)
TWO_SETS = RopeTable(torch.stack([ANGLES.cos(), ANGLES.sin()]), torch.stack([ANGLES.sin(), ANGLES.cos()]))
SINKS = torch.tensor([0.5, -300.0, 200.0, 3.0])  # some take nothing of a softmax, some almost all
SCALES = 1 + 0.3 * torch.log(1 + torch.arange(700) // 16)
GATES = [("sigmoid", False), ("softplus", True), ("softplus", False), ("sigmoid", True)]
DIM, CONTEXT = 32, 330
ONE_KV_HEAD = Heads(4, 1, DIM, DIM**-0.5, None, None, None)


@cache
def make_heads(num_heads: int = 4, kv_heads: int = 2, dim: int = 32, **options: Any) -> Heads:
    return Heads(num_heads, kv_heads, dim, dim**-0.5, TWO_SETS, None, None, **options)


def make_qkv(heads: Heads, count: int, seed: int = 0) -> Tensor:
    """Gates are up to 40 in size."""
    kv_heads = heads.num_kv_heads if heads.has_keys else 0
    features = (heads.num_heads + 2 * kv_heads) * heads.head_dim
    gates = 0
    if heads.gate_start is not None:
        gates = heads.num_heads * (1 if heads.are_gates_of_heads else heads.head_dim)
    qkv = torch.randn(count, features + gates, generator=torch.manual_seed(seed))
    qkv[:, features:] *= 12
    return qkv


def filled(heads: Heads, kv_type: str = "f32", start: int = 0, **pages: Any) -> LayerCache:
    """Row 1 has `start` tokens; every other byte is not finite. `pages` are values of row 1."""
    layer = make_layer(heads, 2, CAPACITY, kv_type, fill=0x7E if kv_type in ("q8", "q4") else 0xFF)
    own = {name: value if name == "last_position" else torch.tensor([0, value]) for name, value in pages.items()}
    layer = replace(layer, pages=replace(layer.pages, **own))
    if start:
        step = Step.of([1] * start, int(layer.pages.shifts[1]), row=1)
        reference.attend(Activations(make_qkv(heads, start, seed=7)), heads, layer, step)
    return layer


def check(heads: Heads, sizes: Sequence[int], kv_type: str = "f32", start: int = 0, **pages: Any) -> None:
    """So many tokens at a time, after `start` others. One step for all of them has the same bits."""
    usual = replace(heads, gate_start=None)
    ours, theirs, whole = (filled(usual, kv_type, start, **pages) for _ in range(3))
    at, found = start + pages.get("shifts", 0), list[Tensor]()
    qkv = make_qkv(heads, sum(sizes), at)
    for size, part in zip(sizes, qkv.split(list(sizes)), strict=True):
        step = Step.of([1] * size, at, row=1)
        found.append(cuda.attend(Activations(part), heads, ours, step).floats)
        expected = reference.attend(Activations(part), heads, theirs, step).floats
        assert float((found[-1] - expected).abs().max()) < 2e-5
        at += size
    assert torch.equal(at_once(heads, whole, qkv, start + pages.get("shifts", 0), [sum(sizes)]), torch.cat(found))
    if kv_type not in ("f32", "f16"):  # what a code is rounded to, hardly ever depends on the last bit
        assert (ours.keys != theirs.keys).float().mean() < 1e-3
        assert (ours.values != theirs.values).float().mean() < 1e-3


@pytest.mark.slow(rest=5)
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(("sizes", "start"), [((4, 2, 32), 290), ((3, 1, 96), 20)])
def test_attention_is_what_the_reference_says(kv_type: str, sizes: tuple[int, int, int], start: int) -> None:
    check(make_heads(*sizes), [1, 17] if start > 256 else [3], kv_type, start)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 256, 257])
def test_tokens_at_the_borders_of_blocks_tiles_and_chunks(length: int) -> None:
    check(make_heads(2, 1, 28), [1, 1], start=length - 1)


PAGES: list[dict[str, int]] = [
    *({"windows": 1}, {"windows": 40}, {"windows": 20, "sinks": 4}, {"windows": 300, "sinks": 20}, {"shifts": 90}),
    *({"windows": 10, "sinks": 300}, {"rope_sets": 1}, {"windows": 30, "sinks": 4, "last_position": 250, "shifts": 3}),
    {"windows": 30, "sinks": 270, "last_position": 280},
]


@pytest.mark.slow(rest=4)
@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_windows_sinks_shifts_and_sets_are_the_references(pages: dict[str, int]) -> None:
    check(make_heads(2, 1, 32), [1, 17, 1], start=310, **pages)


@pytest.mark.slow
def test_sinks_that_are_far_are_seen_mixed_where_keys_are_stored_so() -> None:
    check(make_heads(2, 1, 32), [1, 17], "q8", start=100, windows=30, sinks=20, last_position=60)


@pytest.mark.parametrize("norms", ["head", "whole"])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_norms_softcaps_and_heads_without_rotation(norms: str, softcap: float | None) -> None:
    heads, generator = make_heads(3, 1, 24, softcap=softcap), torch.manual_seed(3)
    q, k = (Norm(torch.rand(24 * (n if norms == "whole" else 1), generator=generator) + 0.5, 1e-5) for n in (3, 1))
    check(replace(heads, q_norm=q, k_norm=k), [3])
    check(replace(heads, rope=None, k_norm=k), [3])
    if norms == "head":
        check(replace(heads, q_norm=q, k_norm=k, are_norms_after=True), [3], last_position=2)


def at_once(heads: Heads, layer: LayerCache, qkv: Tensor, start: int, sizes: Sequence[int]) -> Tensor:
    found = []
    for size, part in zip(sizes, qkv.split(list(sizes)), strict=True):
        found.append(cuda.attend(Activations(part), heads, layer, Step.of([1] * size, start, row=1)).floats)
        start += size
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_type", "pages"),
    [("f32", {}), ("q8", {"windows": 40, "sinks": 3}), ("f16", {"windows": 30, "last_position": 200})],
)
def test_bits_depend_on_no_chunk_of_a_prompt(kv_type: str, pages: dict[str, int]) -> None:
    heads, start, count = make_heads(2, 1, 32), 247, 18
    qkv = make_qkv(heads, count)
    whole = at_once(heads, filled(heads, kv_type, start, **pages), qkv, start, [count])
    assert torch.isfinite(whole).all()
    for sizes in ([1, 16, 1], [2, 1, 1, 3, 11]):
        assert torch.equal(at_once(heads, filled(heads, kv_type, start, **pages), qkv, start, sizes), whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(("kv_type", "window"), [*((kv_type, 0) for kv_type in KV_TYPES), ("f16", 2)])
def test_a_wrong_position_changes_no_token_that_does_not_see_it(kv_type: str, window: int) -> None:
    check_unseen(cuda.attend, kv_type, 32, Span(6, 3, window), [[6], [2, 4]], [(VALUE, 1e5), (VALUE, math.nan)])


@pytest.mark.slow
@pytest.mark.parametrize(("kv_type", "pages"), [("bf16", {}), ("q4", {"windows": 400, "sinks": 70})])
def test_bits_depend_on_no_split(kv_type: str, pages: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for all chunks, one for each chunk, and one for two of them."""
    heads, start, count = make_heads(2, 1, 32), 610, 9
    qkv, found = make_qkv(heads, count), list[Tensor]()
    for programs, slots in ((1, 512), (512, 512), (2, 512), (512, 0)):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        monkeypatch.setattr(attention, "SLOTS", slots)
        layer = filled(heads, kv_type, start, **pages)
        found.append(at_once(heads, layer, qkv, start, [count]))
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("page_tokens", [16, 32, 256])
def test_bits_depend_on_no_size_of_pages(page_tokens: int) -> None:
    heads, start = make_heads(2, 1, 32), 270
    layer, qkv = filled(heads, "f16", start), make_qkv(heads, 2)
    expected = at_once(heads, layer, qkv, start, [2])
    layer = filled(heads, "f16", start)
    blocks = layer.pages.table.shape[1] * 4 // (page_tokens // 16) * (page_tokens // 16)
    keys, values = (
        x.reshape(1, 2, -1, x.shape[-1])[:, :, :blocks].reshape(1, -1, page_tokens // 16, x.shape[-1])
        for x in (layer.keys, layer.values)
    )
    table = torch.arange(keys.shape[1]).view(2, -1)
    pages = replace(layer.pages, page_tokens=page_tokens, table=table)
    assert torch.equal(at_once(heads, LayerCache("f16", keys, values, pages), qkv, start, [2]), expected)


def test_bits_depend_on_no_neighbour_and_on_no_page_and_a_token_that_is_none_changes_nothing() -> None:
    heads, start = make_heads(4, 2, 32), 250
    qkv = make_qkv(heads, 9)
    alone = at_once(heads, filled(heads, "f16", start), qkv[:3], start, [3])
    layer = filled(heads, "f16", start)
    order = torch.cat([layer.pages.table[:1], layer.pages.table[1:].flip(1)])
    keys, values = layer.keys.clone(), layer.values.clone()
    keys[:, order[1]], values[:, order[1]] = layer.keys[:, layer.pages.table[1]], layer.values[:, layer.pages.table[1]]
    moved = LayerCache("f16", keys, values, replace(layer.pages, table=order.contiguous()))
    before = moved.keys.clone()
    others = Step(
        *(torch.tensor(x) for x in ([1] * 9, [0, 1, 0, 0, 250, 251, 252, 0, 0], [0, 0, -1, -1, 1, 1, 1, -1, -1], [0]))
    )
    mixed = torch.cat([qkv[3:7], qkv[:3], qkv[7:]])
    found = cuda.attend(Activations(mixed), heads, moved, others).floats
    assert torch.equal(found[4:7], alone)
    assert found[[2, 3, 7, 8]].isnan().all()
    own = [*moved.pages.table[0, :1].tolist(), *moved.pages.table[1, 250 // 64 : 253 // 64 + 1].tolist()]
    untouched = [page for page in range(keys.shape[1]) if page not in own]
    assert torch.equal(moved.keys[:, untouched], before[:, untouched])


def test_a_row_whose_context_fits_one_chunk_has_the_bits_of_a_longer_table() -> None:
    heads = make_heads(2, 1, 28)
    long, short = filled(heads, "f32", 100), filled(heads, "f32", 100)
    table = short.pages.table[:, :2].contiguous()
    short = replace(short, pages=replace(short.pages, table=table))
    qkv = make_qkv(heads, 2)
    assert torch.equal(at_once(heads, long, qkv, 100, [2]), at_once(heads, short, qkv, 100, [1, 1]))


def check_planes(heads: Heads, count: int, planes: int) -> None:
    """Check what attention leaves for the next product. The last token is none."""
    step = Step.of([1] * count, row=1)
    step.rows[-1] = -1
    attended = cuda.attend(Activations(make_qkv(heads, count), Twin(planes)), heads, filled(heads), step)
    assert_left_in_planes(attended, planes, -1)
    assert attended.floats[-1].isnan().all()
    assert twin_of(attended).quantized.scales[-1].isnan().all()


@pytest.mark.parametrize(("sizes", "planes"), [((6, 2, 32), 2), ((2, 1, 96), 1)])
def test_attention_leaves_what_the_next_product_takes(sizes: tuple[int, int, int], planes: int) -> None:
    """Few tokens and many, one of them none."""
    for count in (2, 18):
        check_planes(make_heads(*sizes), count, planes)


def test_pages_are_those_of_the_layout() -> None:
    """A kernel reads what `Pages` says: none of its fields may be forgotten."""
    known = {"page_tokens", "table", "shifts", "sinks", "windows", "rope_sets", "last_position"}
    refused = {"ends"}  # of attention without a mask, by `unusual_parts`
    assert (set(Pages.__dataclass_fields__), attention.KV_TYPES) == (known | refused, KV_TYPES)


def with_gates(heads: Heads, curve: str, are_of_heads: bool) -> Heads:
    start = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return replace(heads, gate_start=start, gate_curve=curve, are_gates_of_heads=are_of_heads)


@pytest.mark.parametrize(("kv_type", "softcap", "start"), [("f32", None, 20), ("q4", 2.0, 20), ("bf16", None, 290)])
def test_a_sink_is_one_more_logit_of_its_head(kv_type: str, softcap: float | None, start: int) -> None:
    check(make_heads(4, 2, 32, softcap=softcap, sinks=SINKS), [1, 5], kv_type, start)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "start"), [((4, 2, 32), 610), ((2, 1, 512), 270)], ids=["sinks", "wide heads"])
def test_sinks_are_added_after_splits(sizes: tuple[int, int, int], start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, found = make_heads(*sizes, sinks=SINKS[: sizes[0]]), list[Tensor]()
    for programs in (1, 512):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        found.append(at_once(heads, filled(heads, "f16", start), make_qkv(heads, 3), start, [3]))
    assert torch.equal(*found)


@pytest.mark.parametrize(("curve", "are_of_heads"), GATES)
def test_gates_multiply_results(curve: str, are_of_heads: bool) -> None:
    check(with_gates(make_heads(3, 1, 24), curve, are_of_heads), [1, 6], "f16", 20)


@pytest.mark.parametrize("planes", [1, 2])
def test_results_in_planes_have_been_multiplied_by_gates(planes: int) -> None:
    check_planes(with_gates(make_heads(4, 2, 32, sinks=SINKS), "sigmoid", are_of_heads=False), 3, planes)


@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_values_are_normalised_before_they_are_stored(kv_type: str) -> None:
    ones = Norm(torch.ones(32), 1e-6)
    check(replace(make_heads(4, 2, 32, v_eps=1e-6), q_norm=ones, k_norm=ones), [3], kv_type, 20)


def test_keys_of_another_layer_are_read_and_none_is_written() -> None:
    heads = make_heads(4, 2, 32, has_keys=False)
    layer = filled(replace(heads, has_keys=True), "f16", 30)
    keys, values = layer.keys.clone(), layer.values.clone()
    step, own = Step.of([1] * 3, 27, row=1), Activations(make_qkv(heads, 3))
    found, expected = (each.attend(own, heads, layer, step).floats for each in (cuda, reference))
    assert float((found - expected).abs().max()) < 1e-5
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, values)


@pytest.mark.parametrize("pages", [{}, {"windows": 30, "sinks": 4, "last_position": 40}], ids=str)
def test_queries_are_scaled_by_their_position(pages: dict[str, int]) -> None:
    check(make_heads(2, 1, 32, query_scales=SCALES), [1, 3], "q8" if pages else "f16", 60, **pages)


@pytest.mark.parametrize(("chunk", "start"), [(23, 40), (64, 60), (300, 290), (1, 5), (17, 0), (300, 620)])
def test_a_token_sees_its_chunk(chunk: int, start: int) -> None:
    """Tiles and turns begin at other slots than chunks."""
    check(make_heads(2, 1, 32), [1, 17, 2], "f16", start, windows=-chunk)


def test_chunks_of_which_the_beginning_is_a_sink_and_positions_are_shifted() -> None:
    check(make_heads(2, 1, 32, query_scales=SCALES), [1, 5], "f16", 100, windows=-30, sinks=5, shifts=3)


WIDE: list[tuple[str, int, dict[str, int]]] = [
    *((kv_type, 512, {}) for kv_type in ("f16", "bf16", "q8", "q4")),
    *(("f32", 320, {}), ("f16", 480, {"windows": 9, "sinks": 3, "last_position": 15})),
]


@pytest.mark.parametrize(("kv_type", "dim", "pages"), WIDE, ids=str)
def test_heads_may_have_512_dimensions(kv_type: str, dim: int, pages: dict[str, int]) -> None:
    check(make_heads(2, 1, dim, sinks=SINKS[:2]), [1, 2], kv_type, 20, **pages)


def test_a_rank_s_heads_are_columns_of_all_ranks_heads() -> None:
    """Four heads on two kv heads, of which this rank has the last two on the last."""
    whole, dim = with_gates(make_heads(4, 2, 32), "sigmoid", are_of_heads=False), 32
    own = make_heads(2, 1, 32, qkv_starts=(2 * dim, 5 * dim, 7 * dim), gate_start=10 * dim)
    layer, qkv, step = filled(make_heads(4, 2, 32), "f16"), make_qkv(whole, 5), Step.of([1] * 5, row=1)
    expected = cuda.attend(Activations(qkv), whole, layer, step).floats[:, 2 * dim :]
    found = cuda.attend(Activations(qkv), own, filled(make_heads(2, 1, 32), "f16"), step).floats
    assert torch.equal(found, expected)


def context_of(kv_type: str, keys: Tensor, values: Tensor) -> LayerCache:
    """Return a cache of one row; its slots after the context are NaN."""
    layer = make_layer(ONE_KV_HEAD, 1, CONTEXT + 40, kv_type, fill=0x7E if kv_type in ("q8", "q4") else 0xFF)
    qkv = torch.cat([torch.zeros(CONTEXT, 4 * DIM), keys, values], dim=1)
    reference.attend(Activations(qkv), ONE_KV_HEAD, layer, Step.of([1] * CONTEXT))
    return layer


def in_float64(layer: LayerCache, q: Tensor) -> Tensor:
    """Return the attention of q [heads, dim] to the first CONTEXT + 1 slots."""
    keys = decode_keys(key_parts(layer.keys, layer.kv_type), layer.kv_type).flatten(0, -2)[: CONTEXT + 1]
    values = decode_values(value_parts(layer.values, layer.kv_type), layer.kv_type).flatten(0, -2)[: CONTEXT + 1]
    weights = torch.softmax(q.double() @ keys.double().T * ONE_KV_HEAD.scale, dim=-1)
    return (weights @ values.double()).flatten()


def errors(kv_type: str, q: Tensor, keys: Tensor, values: Tensor) -> tuple[float, float]:
    """Return the largest error of the kernels and of float32, relative to the largest value."""
    qkv, step, found = torch.cat([q.flatten(), keys[-1], values[-1]])[None], Step.of([1], CONTEXT), []
    for ops in (cuda, reference):
        layer = context_of(kv_type, keys, values)
        attended = ops.attend(Activations(qkv), ONE_KV_HEAD, layer, step).floats[0]
        expected = in_float64(layer, q)
        found.append(float((attended.double() - expected).abs().max() / expected.abs().max()))
    return found[0], found[1]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8", "q4"])
def test_the_error_is_that_of_float32(kv_type: str) -> None:
    worst, worst_of_float32 = 0.0, 0.0
    for seed in range(3):
        generator = torch.manual_seed(seed)
        q, keys, values = (torch.randn(n, DIM, generator=generator) for n in (4, CONTEXT, CONTEXT))
        ours, float32 = errors(kv_type, q * 3, keys, values)
        worst, worst_of_float32 = max(worst, ours), max(worst_of_float32, float32)
    assert worst < 1e-6
    assert worst <= 3 * worst_of_float32


SIZES = [(kv_type, scale, 1.0) for kv_type in ("f16", "bf16") for scale in (1e-6, 1e6)]
SIZES += [("q8", 1e3, 1.0), ("bf16", 1.0, 1e30), ("q8", 1.0, 1e6)]


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize(("kv_type", "scale", "size"), SIZES)
def test_numbers_of_any_size_are_multiplied_and_added_as_exactly(kv_type: str, scale: float, size: float) -> None:
    """Halves end at 65,504, and lose bits below 6e-5. Scales of quantised keys are halves, too."""
    q, keys, values = (torch.randn(n, DIM, generator=torch.manual_seed(5)) for n in (4, CONTEXT, CONTEXT))
    ours, float32 = errors(kv_type, q * scale, keys / scale if kv_type != "f16" else keys, values * size)
    assert ours <= max(3 * float32, 1e-6)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8"])
def test_many_small_weights_beside_a_large_one_keep_their_bits(kv_type: str) -> None:
    """The value of the largest weight is 0. The other weights are 2^-14 of it, so the result is their sum."""
    q, keys = torch.zeros(4, DIM), torch.zeros(CONTEXT, DIM)
    q[:, 0], keys[17, 0] = DIM**0.5, 14 * 0.6931471805599453
    values = torch.rand(CONTEXT, DIM, generator=torch.manual_seed(2)) + 0.5
    values[17] = 0
    ours, float32 = errors(kv_type, q, keys, values)
    assert ours <= max(3 * float32, 1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_query_that_is_not_finite_gives_nan_only_to_its_head() -> None:
    q, keys, values = (torch.randn(n, DIM, generator=torch.manual_seed(1)) for n in (4, CONTEXT, CONTEXT))
    q[1, 3] = float("nan")
    layer = context_of("f16", keys, values)
    qkv = torch.cat([q.flatten(), keys[-1], values[-1]])[None]
    attended = cuda.attend(Activations(qkv), ONE_KV_HEAD, layer, Step.of([1], CONTEXT)).floats.view(4, DIM)
    assert attended[1].isnan().all()
    assert torch.isfinite(attended[[0, 2, 3]]).all()
