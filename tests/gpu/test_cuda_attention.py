"""Claims about attention on a GPU, in Triton's interpreter: what `reference` means, and bits that depend on no path."""

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
from infer.compute.quantization.kv_layout import LayerCache, Pages
from layer_caches import make_layer
from unseen_values import VALUE, Span, check_unseen

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends import cuda
from infer.compute.backends.cuda import attention, attention_items
from infer.compute.backends.cuda.activations import Twin, quantized, twin_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")
CAPACITY = 640
ANGLES = torch.arange(1100)[:, None] / 50.0 ** torch.linspace(0, 1, 12)
TWO_SETS = RopeTable(torch.stack([ANGLES.cos(), ANGLES.sin()]), torch.stack([ANGLES.sin(), ANGLES.cos()]))


@cache
def make_heads(num_heads: int = 4, kv_heads: int = 2, dim: int = 32, **options: Any) -> Heads:
    return Heads(num_heads, kv_heads, dim, dim**-0.5, TWO_SETS, None, None, **options)


def make_qkv(heads: Heads, count: int, seed: int = 0) -> Tensor:
    features = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return torch.randn(count, features, generator=torch.manual_seed(seed))


def filled(heads: Heads, kv_type: str = "f32", start: int = 0, **pages: Any) -> LayerCache:
    """Row 1 has `start` tokens; every other byte is not finite. `pages` are values of row 1."""
    layer = make_layer(heads, 2, CAPACITY, kv_type, fill=0x7E if kv_type in ("q8", "q4") else 0xFF)
    own = {name: value if name == "furthest" else torch.tensor([0, value]) for name, value in pages.items()}
    layer = replace(layer, pages=replace(layer.pages, **own))
    if start:
        step = Step.of([1] * start, int(layer.pages.shifts[1]), row=1)
        reference.attend(Activations(make_qkv(heads, start, seed=7)), heads, layer, step)
    return layer


def check(heads: Heads, sizes: Sequence[int], kv_type: str = "f32", start: int = 0, **pages: Any) -> None:
    """So many tokens at a time, after `start` others."""
    ours, theirs = (filled(heads, kv_type, start, **pages) for _ in range(2))
    at = start + pages.get("shifts", 0)
    for size in sizes:
        qkv, step = make_qkv(heads, size, at), Step.of([1] * size, at, row=1)
        found, expected = (
            cuda.attend(Activations(qkv), heads, ours, step).floats,
            reference.attend(Activations(qkv), heads, theirs, step).floats,
        )
        assert float((found - expected).abs().max()) < 1e-5
        at += size
    if kv_type not in ("f32", "f16"):  # what a code is rounded to, hardly ever depends on the last bit
        assert (ours.keys != theirs.keys).float().mean() < 1e-3
        assert (ours.values != theirs.values).float().mean() < 1e-3


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(("sizes", "start"), [((4, 2, 32), 290), ((3, 1, 96), 20)])
def test_attention_is_what_the_reference_says(kv_type: str, sizes: tuple[int, int, int], start: int) -> None:
    check(make_heads(*sizes), [1, 17] if start > 256 else [3], kv_type, start)


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 256, 257])
def test_tokens_at_the_borders_of_blocks_tiles_and_chunks(length: int) -> None:
    check(make_heads(2, 1, 28), [1, 1], start=length - 1)


@pytest.mark.parametrize(
    "pages",
    [
        {"windows": 1},
        {"windows": 40},
        {"windows": 20, "sinks": 4},
        {"windows": 300, "sinks": 20},
        {"windows": 10, "sinks": 300},
        {"shifts": 90},
        {"rope_sets": 1},
        {"windows": 30, "sinks": 4, "furthest": 250, "shifts": 3},
        {"windows": 30, "sinks": 270, "furthest": 280},
    ],
    ids=str,
)
def test_windows_sinks_shifts_and_sets_are_the_references(pages: dict[str, int]) -> None:
    check(make_heads(2, 1, 32), [1, 17, 1], start=310, **pages)


def test_sinks_that_are_far_are_seen_mixed_where_keys_are_stored_so() -> None:
    check(make_heads(2, 1, 32), [1, 17], "q8", start=100, windows=30, sinks=20, furthest=60)


@pytest.mark.parametrize("norms", ["head", "whole"])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_norms_softcaps_and_heads_without_rotation(norms: str, softcap: float | None) -> None:
    heads, generator = make_heads(3, 1, 24, softcap=softcap), torch.manual_seed(3)
    q, k = (Norm(torch.rand(24 * (n if norms == "whole" else 1), generator=generator) + 0.5, 1e-5) for n in (3, 1))
    check(replace(heads, q_norm=q, k_norm=k), [3])
    check(replace(heads, rope=None, k_norm=k), [3])


def at_once(heads: Heads, layer: LayerCache, qkv: Tensor, start: int, sizes: Sequence[int]) -> Tensor:
    found, at = [], 0
    for size in sizes:
        step = Step.of([1] * size, start + at, row=1)
        found.append(cuda.attend(Activations(qkv[at : at + size]), heads, layer, step).floats)
        at += size
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kv_type", "pages"), [("f32", {}), ("q8", {"windows": 40, "sinks": 3}), ("f16", {"windows": 30, "furthest": 200})]
)
def test_bits_depend_on_no_chunk_of_a_prompt(kv_type: str, pages: dict[str, int]) -> None:
    heads, start, count = make_heads(2, 1, 32), 247, 18
    qkv = make_qkv(heads, count)
    whole = at_once(heads, filled(heads, kv_type, start, **pages), qkv, start, [count])
    assert torch.isfinite(whole).all()
    for sizes in ([1, 16, 1], [2, 1, 1, 3, 11]):
        assert torch.equal(at_once(heads, filled(heads, kv_type, start, **pages), qkv, start, sizes), whole)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(("kv_type", "window"), [*((kv_type, 0) for kv_type in KV_TYPES), ("f16", 2)])
def test_a_wrong_position_changes_no_token_that_does_not_see_it(kv_type: str, window: int) -> None:
    check_unseen(cuda.attend, kv_type, 32, Span(6, 3, window), [[6], [2, 4]], [(VALUE, 1e5), (VALUE, math.nan)])


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


@pytest.mark.parametrize(("sizes", "planes"), [((6, 2, 32), 2), ((2, 1, 96), 1)])
def test_attention_leaves_what_the_next_product_takes(sizes: tuple[int, int, int], planes: int) -> None:
    """Few tokens and many, one of them none."""
    heads = make_heads(*sizes)
    for count in (2, 18):
        qkv, step = make_qkv(heads, count), Step.of([1] * count, row=1)
        step.rows[-1] = -1
        attended = cuda.attend(Activations(qkv, Twin(planes)), heads, filled(heads), step)
        twin = twin_of(attended)
        assert twin.quantized is not None
        assert twin.planes == planes
        for left, made in zip(twin.quantized, quantized(attended.floats, None, planes), strict=True):
            assert torch.equal(left[:-1], made[:-1])
        assert twin.quantized.scales[-1].isnan().all()


def test_pages_are_those_of_the_layout() -> None:
    """A kernel reads what `Pages` says: none of its fields may be forgotten."""
    known = {"page_tokens", "table", "shifts", "sinks", "windows", "rope_sets", "furthest"}
    refused = {"ends"}  # of attention without a mask, by `unusual_layers`
    assert set(Pages.__dataclass_fields__) == known | refused
    assert attention.KV_TYPES == KV_TYPES
