"""Layers with a state on a GPU, in Triton's interpreter: the definition's results, and bits that depend on no path."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import ConvCache
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import ConvWeights
from test_delta_net import NETS, definition, make_cache, make_projected, make_weights, run
from test_recurrent_rows import NET, NET_WEIGHTS, PAGE, TAPS, Rows, go_on_at_random, make

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_twins import assert_left_in_planes
from infer.compute.backends.cuda.activations import Twin
from infer.compute.backends.cuda.float_planes import BF16_PLANES, F16_PLANES

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.slow(cases=1)]


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


@pytest.mark.slow
def test_rows_of_convolutions_go_on_as_one_text_whatever_happens_to_them() -> None:
    go_on_at_random(Rows(make(), "cuda"), 1, 300 if IS_WHOLE else 70)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
