"""Rows of layers with a state, or with keys of an earlier layer, continue as one text after any operations."""

import copy
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from extent import usual_or_all
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import check_layers, make_groups, page_bytes, pool_sizes
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import ConvWeights, DeltaNetWeights, Norm
from infer.engine.runner.runner import make_cache
from infer.errors import InvalidRequestError, ModelError, OutOfPagesError
from infer.models.families import make_architecture
from infer.models.transformer import Transformer
from test_families import load
from tiny import GEMMA4, Tiny, make_tiny

CPU = torch.device("cpu")
CHANNELS, TAPS, CAPACITY, NUM_ROWS, PAGE = 24, 4, 700, 4, 16
CONV, NET = ShortConv(CHANNELS, TAPS), GatedDeltaNet(1, 2, 16, 16, TAPS)
SETTINGS = CacheSettings(page_tokens=PAGE, reuse_prefixes=True)
BACKENDS = ["cpu", "reference"]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = ConvWeights(numbers(TAPS, CHANNELS, seed=1), numbers(CHANNELS, seed=2))
ROW_OF_TOKEN = numbers(50, 3 * CHANNELS, seed=3)  # result of a layer's projection for each token
TAP_ROWS, BIAS, DECAY = numbers(TAPS, NET.num_channels, seed=4), numbers(2, seed=5), -numbers(2, seed=6).exp()
NET_WEIGHTS = DeltaNetWeights(NET, TAP_ROWS, BIAS, DECAY, Norm(torch.ones(16), 1e-6))
NET_ROW_OF_TOKEN = numbers(50, NET.num_channels + NET.value_features + 4, seed=7)


def make(
    pool_pages: int | None = None, step_tokens: int = 512, recurrent: ShortConv | GatedDeltaNet = CONV
) -> PagedCache:
    layers, sizes = [recurrent, Attention(1, 1, 8, None, 1.0)], {"step_tokens": step_tokens, "pool_pages": pool_pages}
    return PagedCache(layers, NUM_ROWS, CAPACITY, "f32", CPU, settings=SETTINGS, **sizes)


def expected(token_ids: Sequence[int]) -> Tensor:
    """Return the results of a whole text, by torch's convolution in float64."""
    b, c, u = ROW_OF_TOKEN[list(token_ids)].double().chunk(3, dim=-1)
    inputs = torch.cat([torch.zeros(TAPS - 1, CHANNELS, dtype=torch.float64), b * u]).T[None]
    assert WEIGHTS.bias is not None
    taps, bias = WEIGHTS.taps.T[:, None].double(), WEIGHTS.bias.double()
    return c * torch.nn.functional.conv1d(inputs, taps, bias, groups=CHANNELS)[0].T


class Rows:
    """The texts of a cache's rows. Each step's results are compared with those of the whole text."""

    projected, weights = ROW_OF_TOKEN, cast("ConvWeights | DeltaNetWeights", WEIGHTS)

    def __init__(self, cache: PagedCache, backend: str) -> None:
        self.cache, self.backend = cache, backend
        self.texts: list[list[int]] = [[] for _ in range(NUM_ROWS)]

    def step(self, new_by_row: dict[int, list[int]], kept: Callable[[int], int] = lambda count: count) -> Tensor:
        starts = [self.cache.lengths[row] for row in new_by_row]
        for row, new in new_by_row.items():
            self.cache.reserve(row, len(new))
        step = Step.of_chunks([Chunk(row, new) for row, new in new_by_row.items()], starts)
        found = self.mix(step)
        wanted = [self.expected(self.texts[row] + new)[len(self.texts[row]) :] for row, new in new_by_row.items()]
        self.compare(found, torch.cat(wanted))
        for row, new in new_by_row.items():
            count = kept(len(new))
            self.cache.commit(row, count)
            self.texts[row] += new[:count]
        return found

    def mix(self, step: Step) -> Tensor:
        projected = Activations(self.projected[step.tokens].contiguous())
        with ops.using(self.backend):
            return self.cache.mix(0, projected, self.weights, step).floats

    def expected(self, text: Sequence[int]) -> Tensor:
        return expected(text)

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


class StateRows(Rows):
    """Rows of a gated delta net. Their results have the bits of the whole text in one step of a new cache."""

    projected, weights = NET_ROW_OF_TOKEN, NET_WEIGHTS

    def expected(self, text: Sequence[int]) -> Tensor:
        alone = StateRows(make(step_tokens=CAPACITY, recurrent=NET), self.backend)
        alone.cache.reserve(0, len(text))
        return alone.mix(Step.of(text))

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        assert torch.equal(found, wanted)


@pytest.mark.slow(cases=3, rest=8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 48, 49, 64, 200, 600])
def test_results_and_bits_do_not_depend_on_the_chunks(backend: str, size: int) -> None:
    text = torch.randint(0, 50, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Rows(make(step_tokens=600), backend).step({0: text})
    rows = Rows(make(step_tokens=600), backend)
    parts = [rows.step({2: text[start : start + size]}) for start in range(0, 600, size)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("backend", "seed"), [("cpu", 0), ("cpu", 1), ("reference", 2)])
def test_rows_continue_as_one_text_after_any_operations(backend: str, seed: int) -> None:
    go_on_at_random(Rows(make(), backend), seed, 120 if backend == "reference" else 300)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_states_continue_as_one_text_after_any_operations(seed: int) -> None:
    go_on_at_random(StateRows(make(recurrent=NET), "cpu"), seed, 200)


def go_on_at_random(rows: Rows, seed: int, num_times: int) -> None:
    chosen, cache, known = random.Random(seed), rows.cache, list[list[int]]()
    num_adopted = num_continued = 0
    for _ in range(num_times):
        row, what = chosen.randrange(NUM_ROWS), chosen.choice("sssstfrraae")
        text = rows.texts[row]
        if what == "s":  # a step of several rows, of which some drafts are dropped
            sizes = {each: chosen.choice([1, 1, 3, 20, 150]) for each in chosen.sample(range(NUM_ROWS), 2)}
            fits = {each: size for each, size in sizes.items() if len(rows.texts[each]) + size <= CAPACITY}
            new = {each: chosen.choices(range(2), k=size) for each, size in fits.items()}
            if new:
                is_draft = max(map(len, new.values())) <= 20 and chosen.random() < 0.3
                rows.step(new, (lambda count: chosen.randint(0, count)) if is_draft else (lambda count: count))
        elif what == "t":
            length = max(0, len(text) - chosen.choice([0, 1, 5, PAGE, 100]))
            cache.truncate(row, length)
            assert cache.lengths[row] in (length, 0)
            num_continued += 0 < length == cache.lengths[row]
            del text[cache.lengths[row] :]
        elif what == "f":
            source = chosen.randrange(NUM_ROWS)
            cache.copy_row(row, source)
            rows.texts[row] = list(rows.texts[source])
        elif what == "r":
            cache.remember(row, text)
            known.append(list(text))
        elif what == "a" and known:
            wanted = [*chosen.choice(known), 0]
            cache.truncate(row, 0)
            count = cache.adopt(row, wanted)
            rows.texts[row] = wanted[:count]
            num_adopted += count > 0
        elif what == "e":
            saved = dict(cache.export_row(row))
            other = (row + 1) % NUM_ROWS
            cache.import_row(other, saved, len(text))
            rows.texts[other] = list(text)
        cache.check_integrity()
    assert num_adopted
    assert num_continued


def test_a_long_step_takes_few_pages_and_keeps_the_last_two_borders() -> None:
    rows = Rows(make(step_tokens=600), "cpu")
    cache, text = rows.cache, [index % 7 for index in range(600)]
    attention, recurrent = (group.table for group in cache.groups)
    rows.step({0: text})
    assert (len(attention.page_by_index(0)), sorted(recurrent.page_by_index(0))) == (38, [35, 36, 37])
    cache.remember(0, text)
    for length, found in ((600, 592), (592, 576), (576, 0)):
        cache.truncate(1, 0)
        assert cache.adopt(1, text[:length]) == found
    rows.step({0: [1] * 9, 1: [2]})
    assert sorted(recurrent.page_by_index(0)) == [36, 37, 38]


def test_the_memory_for_states_is_as_asked_for_and_enough_for_a_row() -> None:
    net = GatedDeltaNet(2, 4, 64, 64, 4)
    size = page_bytes(net, "f32", 64)
    for megabytes, expected_pages in ((None, 16), (3, (3 << 20) // size), (9, (9 << 20) // size)):
        settings = CacheSettings(state_memory_mb=megabytes)
        assert pool_sizes(make_groups([net], settings, CAPACITY, 512), NUM_ROWS, None, CAPACITY) == [expected_pages]
    needed = -(-5 * size >> 20)
    with pytest.raises(InvalidRequestError, match=f"must be at least {needed}, the states of one sequence, got 1"):
        make_groups([net], CacheSettings(state_memory_mb=1), CAPACITY, 512)
    with pytest.raises(InvalidRequestError, match="state_memory_mb=5 needs a model with states, and this one has none"):
        check_layers(CacheSettings(state_memory_mb=5), [Attention(1, 1, 8, None, 1.0)])


def test_pages_that_a_step_reads_are_no_other_row_s() -> None:
    """The pool is as small as possible. A row that grows takes no page that another row of the step still reads."""
    rows = Rows(make(pool_pages=44), "cpu")
    cache = rows.cache
    assert cache.pool_pages == [44, 16]
    for _ in range(3):
        rows.step({0: [1] * 100, 1: [2] * 100})
    with pytest.raises(OutOfPagesError):
        rows.step({0: [1] * 100, 1: [2] * 100})
    cache.check_integrity()


TINY_SHARED = next(tiny for tiny in GEMMA4 if tiny.name == "gemma4_shared")
CONFIG = TINY_SHARED.config.to_dict()


class ModelRows(Rows):
    """Rows of a whole model. Their residual streams have the bits of the whole text in one step of a new cache."""

    def __init__(self, model: Transformer, step_tokens: int = 512) -> None:
        self.model = model
        super().__init__(make_cache(model, CAPACITY, NUM_ROWS, settings=SETTINGS, step_tokens=step_tokens), "cpu")
        self.of_text = functools.cache(self._of_text)

    def mix(self, step: Step) -> Tensor:
        return self.model.residual(step, self.cache).clone()

    def expected(self, text: Sequence[int]) -> Tensor:
        return self.of_text(tuple(text))

    def _of_text(self, text: tuple[int, ...]) -> Tensor:
        alone = make_cache(self.model, CAPACITY, settings=SETTINGS, step_tokens=CAPACITY)
        alone.reserve(0, len(text))
        return self.model.residual(Step.of(list(text)), alone).clone()

    def compare(self, found: Tensor, wanted: Tensor) -> None:
        assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder: Path = tmp_path_factory.mktemp("shared")
    longer = copy.deepcopy(TINY_SHARED.config)
    longer.max_position_embeddings = CAPACITY
    make_tiny(Tiny("gemma4_shared", longer), folder)
    return load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(usual_or_all(1, 4)))
@torch.inference_mode()
def test_rows_of_a_model_with_shared_keys_continue_as_one_text(model: Transformer, seed: int) -> None:
    go_on_at_random(ModelRows(model), seed, 120)


@pytest.mark.slow
def test_only_layers_with_keys_of_their_own_have_pages(model: Transformer) -> None:
    attention = model.architecture.attention
    assert [layer.shared_from for layer in attention] == [None, None, None, 1, 1, 2, 2]
    held: PagedCache = make_cache(model, 64)
    assert len(held.memory.layers) == 3
    assert [index for index in model.architecture.cache_indices if index is not None] == [0, 1, 2, 1, 1, 2, 2]


@pytest.mark.slow
def test_shared_keys_need_a_layer_of_their_kind() -> None:
    assert isinstance(make_architecture(CONFIG).layers[-1].mixer, Attention)
    with pytest.raises(ModelError, match=r"num_kv_shared_layers=5 leaves no layer with keys of kind full_attention"):
        make_architecture(CONFIG | {"num_kv_shared_layers": 5})
    with pytest.raises(ModelError, match=r"num_kv_shared_layers must be from 0 to 6, got 7"):
        make_architecture(CONFIG | {"num_kv_shared_layers": 7})
