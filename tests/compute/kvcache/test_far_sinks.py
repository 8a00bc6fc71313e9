"""Beyond the context of a model: a token sees the first tokens as if it were at the context's end.

It sees its window from its own position."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer import LLM, InvalidRequestError, SamplingParams
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import make_groups
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention, Rope
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, RopeTable
from infer.compute.quantization.kv_layout import LayerCache
from layer_caches import attend_in_steps, make_layer
from path_cases import CONTEXT, varied_ids
from steps import join

NUM_HEADS, KV_HEADS, DIM = 6, 2, 32
LENGTH, LAST_POSITION = 400, 99
THETAS = 50.0 ** -torch.linspace(0, 1, DIM // 2)
ANGLES = torch.arange(LENGTH)[:, None] * THETAS
HEADS = Heads(NUM_HEADS, KV_HEADS, DIM, DIM**-0.5, RopeTable(ANGLES.cos()[None], ANGLES.sin()[None]), None, None)

# Sizes of a row's steps. The first tokens beyond the context are alone, with a few others, or amid many others.
WAYS = [[400], [90, 1, 3, 2, 1, 3, 1, 1, 4, 60, 1, 133, 100], [*[1] * 105, 4, 4, 100, *[2] * 10, 167]]
WAYS += [[97, 8, 260, *[1] * 35]]
QKV = torch.randn(LENGTH, (NUM_HEADS + 2 * KV_HEADS) * DIM, generator=torch.manual_seed(7))


def layer_of(
    kv_type: str, sinks: int, window: int, *, rows: int = 1, last_position: int | None = LAST_POSITION
) -> LayerCache:
    layer = make_layer(HEADS, rows, LENGTH, kv_type, window=window)
    pages = replace(layer.pages, sinks=torch.full((rows,), sinks), last_position=last_position)
    return replace(layer, pages=pages)


def attend_all(layer: LayerCache, sizes: Sequence[int]) -> Tensor:
    return attend_in_steps(HEADS, layer, QKV, sizes)


def by_distance(sinks: int, window: int) -> Tensor:
    """Return q · k by distance, in float64. Pairs of elements are complex numbers that rotate by the distance."""
    q, k, v = QKV.double().view(LENGTH, -1, DIM).split([NUM_HEADS, KV_HEADS, KV_HEADS], dim=1)
    k, v = (x.repeat_interleave(NUM_HEADS // KV_HEADS, dim=1) for x in (k, v))
    there, own = torch.arange(LENGTH), torch.arange(LENGTH)[:, None]
    distance = torch.where(there < sinks, own.clamp(max=LAST_POSITION), own) - there
    q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (q, k))
    scores = torch.zeros(NUM_HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for pair, theta in enumerate(THETAS.double()):
        turned = torch.polar(torch.ones_like(distance, dtype=torch.float64), theta * distance)
        scores += (q[:, None, :, pair] * k[None, :, :, pair].conj() * turned[..., None]).real.movedim(2, 0)
    seen = (there <= own) & ((there < sinks) | (there > own - window))
    weights = (scores * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("sinks", "window"), [(4, 20), (20, 41), (0, 30)])
def test_sinks_are_seen_from_no_further_than_the_end_of_the_context(sinks: int, window: int) -> None:
    wanted = by_distance(sinks, window)
    found = [attend_all(layer_of("f32", sinks, window), way) for way in WAYS]
    for way, each in zip(WAYS, found, strict=True):
        assert (each - wanted).abs().max() < 2e-5
        assert torch.equal(each, found[0]), f"bits depend on how tokens come: {way[:5]}"
    with ops.using("reference"):
        for way in WAYS[:2]:
            assert (attend_all(layer_of("f32", sinks, window), way) - wanted).abs().max() < 2e-5


def test_within_the_context_no_bit_changes_and_beyond_it_the_sinks_do() -> None:
    near, far = (
        attend_all(layer_of("f32", 4, 20, last_position=last_position), WAYS[1])
        for last_position in (None, LAST_POSITION)
    )
    assert torch.equal(near[: LAST_POSITION + 1], far[: LAST_POSITION + 1])
    assert ((near - far)[LAST_POSITION + 1 :].abs().amax(-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8", "q4"])
def test_stored_keys_are_seen_so_too(kv_type: str) -> None:
    found = [attend_all(layer_of(kv_type, 20, 41), way) for way in WAYS]
    assert all(torch.equal(each, found[0]) for each in found)
    with ops.using("reference"):
        wanted = attend_all(layer_of(kv_type, 20, 41), WAYS[0])
    assert (found[0] - wanted).abs().max() < 2e-5


def test_rows_on_both_sides_of_the_end_do_not_meet() -> None:
    """In one step, a row begins, a row crosses the end, and a row is far beyond it."""
    starts, counts, layer = (0, 98, 300), (3, 2, 3), layer_of("f32", 4, 20, rows=3)
    alone = attend_all(layer_of("f32", 4, 20), WAYS[0])
    for row in (1, 2):
        attend_in_steps(HEADS, layer, QKV, [starts[row]], row=row)
    for repeats in (1, 4):  # a few tokens, and many
        spans = [slice(start, start + count * repeats) for start, count in zip(starts, counts, strict=True)]
        parts = [Step.of([1] * (span.stop - span.start), span.start, row=row) for row, span in enumerate(spans)]
        found = ops.attend(Activations(torch.cat([QKV[span] for span in spans])), HEADS, layer, join(parts)).floats
        assert torch.equal(found, torch.cat([alone[span] for span in spans]))


# The context of a cache


def layer_with(window: int | None) -> Attention:
    return Attention(4, 2, 32, Rope(1e4, 32), 1.0, window)


def test_only_layers_that_a_policy_changes_have_an_end_and_only_where_rows_go_beyond() -> None:
    layers = [layer_with(None), layer_with(16)]
    sliding = CacheSettings(eviction_policy="sliding", eviction_window=40)
    assert [group.last_position for group in make_groups(layers, sliding, 1000, 16, context=200)] == [199, None]
    assert [group.last_position for group in make_groups(layers, sliding, 200, 16, context=200)] == [None, None]
    assert [group.last_position for group in make_groups(layers, CacheSettings(), 200, 16, context=200)] == [None, None]


def test_answers_beyond_the_context_do_not_depend_on_the_steps(llama: Path) -> None:
    """Any step size gives the same. Within the context the bits are those of a model that ends there."""
    llm = LLM(llama, max_seq_len=600, eviction_policy="sliding", eviction_window=40)
    token_ids = varied_ids(500)
    found = llm.logits(token_ids)
    inside = LLM(llama, eviction_policy="sliding", eviction_window=40)
    assert torch.equal(found[:CONTEXT], inside.logits(token_ids[:CONTEXT]))
    answer = llm.generate(token_ids[:300], SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)).token_ids
    wanted = llm.logits([*token_ids[:300], *answer])[299:-1, : llm.tokenizer.vocab_size].argmax(-1)
    assert answer == wanted.tolist()


def test_a_window_that_meets_the_sinks_within_the_context_is_refused(llama: Path) -> None:
    with pytest.raises(InvalidRequestError, match="eviction_window must be at most 128 if max_seq_len=600"):
        LLM(llama, max_seq_len=600, eviction_policy="sliding", eviction_window=129)
    LLM(llama, max_seq_len=600, eviction_policy="sliding", eviction_window=128)
    LLM(llama, max_seq_len=CONTEXT, eviction_policy="sliding", eviction_window=CONTEXT)
