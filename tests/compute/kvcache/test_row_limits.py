"""The limits of a cache: its settings, rows at their last and first slot, after a reset and after a load.

A user's own loop is refused if it reserves too few positions, because kernels do not check where they write.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import cases
from infer.compute.kvcache import cache_settings as settings_module
from infer.compute.kvcache import page_memory
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import check_layers
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.pages import PagePool
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.quantization.kv_formats import check_kv_type
from infer.engine.runner.runner import make_cache
from infer.errors import InvalidRequestError
from path_cases import Case as Request
from path_cases import World, by_definition
from refusals import check_refused
from test_loop_edges import LONG, prompt_of
from test_page_pool import CAPACITY, PAGE, SNAPKV, WHOLE, adopted, grow, make, remembered
from watched import run_python

FIRST, OTHER = [1] * PAGE, [2] * PAGE


def test_a_row_can_be_filled_to_its_last_slot() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, CAPACITY - 2)
    check_refused(lambda: cache.reserve(0, 3), "a row has room for 200 tokens, got 201")
    cache.reserve(0, 2)
    cache.commit(0, 2)
    cache.reserve(0, 0)
    check_refused(lambda: cache.reserve(0, 1), "a row has room for 200 tokens, got 201")


def test_a_second_reservation_takes_nothing_back() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 5)
    cache.reserve(0, 8)
    cache.reserve(0, 3)
    cache._check_reserved(Step.of([1] * 8, 5))
    with pytest.raises(InvalidRequestError, match=r"positions of row 0 must be in \[5, 13\), got 13"):
        cache._check_reserved(Step.of([1] * 9, 5))
    cache.commit(0, 3)
    cache.reserve(0, 1)
    cache._check_reserved(Step.of([1] * 5, 8))


def test_a_compressed_row_can_be_cut_only_to_its_kept_tokens() -> None:
    for length, expected in ((104, 104), (100, 100), (99, 0)):
        cache = make(SNAPKV, layers=(WHOLE,))
        grow(cache, 0, 100)
        for rows in cache.groups:
            rows.compress(0, 100, 40)
        grow(cache, 0, 8)
        cache.truncate(0, length)
        assert cache.lengths[0] == expected
        cache.check_integrity()


def test_after_a_reset_rows_have_the_keys_of_their_new_content() -> None:
    cache = remembered(FIRST + OTHER)
    cache.reset()
    assert cache.adopt(1, [*FIRST, *OTHER, 9]) == 0
    grow(cache, 0, 2 * PAGE)
    assert cache.has_new_pages(0)
    cache.remember(0, OTHER + FIRST)
    assert (cache.adopt(1, [*OTHER, *FIRST, 9]), adopted(cache, 1, [*FIRST, *OTHER, 9])) == (2 * PAGE, 0)
    cache.check_integrity()


@pytest.mark.parametrize(("first", "is_refused"), [(-1, True), (0, False), (50, False), (51, True), (1 << 40, True)])
def test_the_first_slot_of_a_saved_row_is_in_the_row(first: int, is_refused: bool) -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 50)
    saved: dict[str, Tensor] = {name: tensor.clone() for name, tensor in cache.export_row(0)}
    saved["states"][:, -1] = first
    refusal = pytest.raises(InvalidRequestError, match="does not fit this model's cache: RowState")
    with refusal if is_refused else nullcontext():
        cache.import_row(1, saved, 50)
    assert cache.lengths[1] == (0 if is_refused else 50)
    cache.check_integrity()


def test_a_page_of_two_contents_is_found_by_the_first_until_it_is_forgotten() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.remember(page, b"one")
    pool.remember(page, b"two")
    assert (pool.find(b"one"), pool.find(b"two")) == (page, None)
    pool.release(page)
    pool.hold(page)
    assert (pool.num_available, pool.take()) == (1, 1)
    pool.check_integrity([page, 1])
    pool.forget(page)
    pool.remember(page, b"two")
    assert (pool.find(b"one"), pool.find(b"two")) == (None, page)


def make_layer(head_dim: int = 64, window: int | None = None) -> Attention:
    return Attention(4, 2, head_dim, None, 0.125, window)


def test_the_settings_load_no_torch() -> None:
    code = "import sys, infer.compute.kvcache.cache_settings; print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


@cases(
    "values said",
    ({"kv_type": "q5"}, "kv_type must be one of auto, f32, f16, bf16, q8, q4, got 'q5'"),
    ({"eviction_policy": "lru"}, "eviction_policy must be one of none, sliding, snapkv, got 'lru'"),
    ({"eviction_window": 0}, "eviction_window must be a whole number of at least 1, got 0"),
    ({"eviction_window": True}, "eviction_window must be a whole number of at least 1, got True"),
    ({"protected_prefix": -1}, "protected_prefix must be a whole number of at least 0, got -1"),
    ({"memory_threshold_mb": 0}, "must be a whole number of at least 1, got 0"),
    ({"memory_threshold_mb": 2**40, "eviction_policy": "sliding"}, "_mb must be below this machine's"),
    ({"memory_threshold_mb": 0, "eviction_policy": "snapkv"}, "must be a whole number of at least 1, got 0"),
    ({"page_tokens": 48}, "page_tokens must be 16, 32, 64, 128 or 256, got 48"),
    ({"eviction_policy": "sliding", "eviction_window": 4}, "larger than protected_prefix=4, which it inclu"),
)
def test_bad_settings_are_refused_with_value_rule_and_fix(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        CacheSettings(**values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_may_not_have_what_its_heads_or_windows_forbid() -> None:
    check_layers(CacheSettings(kv_type="q8", eviction_policy="sliding"), [make_layer(), make_layer(window=8)])
    with pytest.raises(InvalidRequestError, match="needs a head size that 32 divides, got 80: use f16"):
        check_layers(CacheSettings(kv_type="q4"), [make_layer(80)])
    check_refused(lambda: check_kv_type("q5", 64), "kv_type must be one of f32, f16, bf16, q8, q4, got 'q5'")
    check_layers(CacheSettings(kv_type="f16"), [make_layer(80)])
    with pytest.raises(InvalidRequestError, match="every layer of this model has its own window or chunks: use none"):
        check_layers(CacheSettings(eviction_policy="sliding"), [make_layer(window=8)])
    check_layers(CacheSettings(), [make_layer(window=8)])


def test_a_threshold_needs_a_system_that_says_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "available_memory_bytes", lambda: None)
    with pytest.raises(InvalidRequestError, match="does not report its available memory"):
        CacheSettings(eviction_policy="sliding", memory_threshold_mb=1)


PROMPT = list(prompt_of(5))


@pytest.fixture
def cache(world: World) -> Iterator[PagedCache]:
    with torch.inference_mode():
        yield make_cache(world.model, 100, num_rows=2)


def run(world: World, cache: PagedCache, token_ids: list[int], start: int, row: int = 0) -> int:
    logits = world.model.forward(Step.of(token_ids, start, row=row), cache)
    return int(logits[0, : world.tokenizer.vocab_size].argmax())


def test_a_step_of_unreserved_positions_is_refused_and_nothing_is_written(world: World, cache: PagedCache) -> None:
    for num_reserved in (0, 4):
        cache.reserve(0, num_reserved)
        with pytest.raises(InvalidRequestError, match=r"of row 0 must be in \[0, \d\), got \d: call cache.res"):
            run(world, cache, PROMPT, 0)
    assert cache.lengths == [0, 0]


def test_a_position_reserved_for_one_row_is_not_reserved_for_another(world: World, cache: PagedCache) -> None:
    cache.reserve(0, 5)
    check_refused(lambda: run(world, cache, PROMPT, 0, row=1), r"positions of row 1 must be in \[0, 0\), got 0")
    check_refused(lambda: run(world, cache, PROMPT, 0, row=2), r"a step's rows must be in \[0, 2\), got 2")


def test_a_loop_that_forgets_to_reserve_or_to_commit_is_refused_immediately(world: World, cache: PagedCache) -> None:
    cache.reserve(0, 5)
    pending = run(world, cache, PROMPT, 0)
    cache.commit(0, 5)
    check_refused(lambda: run(world, cache, [pending], 5), r"\[5, 5\), got 5: call cache.reserve")
    cache.reserve(0, 1)
    for position in (4, 6):
        with pytest.raises(InvalidRequestError, match=rf"\[5, 6\), got {position}"):
            run(world, cache, [pending], position)


def test_a_loop_that_reserves_has_the_tokens_of_generate(world: World, cache: PagedCache) -> None:
    expected = by_definition(world, Request("", tuple(PROMPT), LONG)).token_ids
    sampled, pending = list[int](), PROMPT
    while len(sampled) < len(expected):
        cache.reserve(0, len(pending))
        sampled.append(run(world, cache, pending, cache.lengths[0]))
        cache.commit(0, len(pending))
        pending = sampled[-1:]
    assert sampled == expected


def test_kernels_get_only_the_tables_of_rows_whose_pages_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, copied, copy = make(layers=(WHOLE,)), list[tuple[int, ...]](), page_memory._copy_array
    monkeypatch.setattr(page_memory, "_copy_array", lambda array, to: (copied.append(array.shape), copy(array, to)))
    num_rows, pages = cache.groups[0].table.table.shape
    found = []
    for change in (lambda: grow(cache, 0, 3), lambda: grow(cache, 0, 3), lambda: grow(cache, 1, PAGE)):
        change()
        cache.check_integrity()
        found.append([shape for shape in copied if len(shape) == 2])
        copied.clear()
    assert num_rows > 1
    assert found == [[(num_rows, pages)], [], [(1, pages)]], "all rows are new to the first step"
