"""A pool that can run out of pages: refusals change nothing, and a shared page is copied before it is written.

The memory of free pages can be returned to the system."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from extent import IS_SHORT, slow_except, usual_or_all
from infer import LLM
from infer.compute.kvcache import paged
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.snapkv import PromptCompression
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.quantization.kv_layout import key_parts, value_parts
from infer.errors import InvalidRequestError, OutOfPagesError
from path_cases import CONTEXT, EOS, make_folder, varied_ids
from refusals import check_refused

CPU = torch.device("cpu")
DIM, PAGE, STEP, WINDOW, CAPACITY, NUM_ROWS = 8, 16, 24, 40, 200, 5
WHOLE = Attention(1, 1, DIM, None, 1.0)
WINDOWED = Attention(1, 1, DIM, None, 1.0, WINDOW)
PREFIXES = CacheSettings(page_tokens=PAGE, reuse_prefixes=True)
SLIDING = CacheSettings(page_tokens=PAGE, eviction_policy="sliding", eviction_window=40, protected_prefix=5)
LATE = replace(SLIDING, memory_threshold_mb=1)
SNAPKV = CacheSettings(page_tokens=PAGE, eviction_policy="snapkv", eviction_window=48, protected_prefix=3)


def make(
    settings: CacheSettings = PREFIXES,
    pool_pages: int | None = None,
    layers: tuple[Attention, ...] = (WHOLE, WINDOWED),
    capacity: int = CAPACITY,
) -> PagedCache:
    sizes = {"step_tokens": STEP, "pool_pages": pool_pages}
    return PagedCache(layers, NUM_ROWS, capacity, "f32", CPU, settings=settings, **sizes)


def grow(cache: PagedCache, row: int, count: int) -> None:
    for start in range(0, count, STEP):
        size = min(STEP, count - start)
        cache.reserve(row, size)
        cache.commit(row, size)


def remembered(token_ids: list[int], pool_pages: int | None = None) -> PagedCache:
    """Return a cache without windows, whose row 0 has these tokens."""
    cache = make(pool_pages=pool_pages, layers=(WHOLE,))
    grow(cache, 0, len(token_ids))
    cache.remember(0, token_ids)
    return cache


def adopted(cache: PagedCache, row: int, token_ids: list[int]) -> int:
    """Return the number of tokens that a row has in pages that are found, if it is emptied first."""
    cache.truncate(row, 0)
    return cache.adopt(row, token_ids)


def parts_of(cache: PagedCache, index: int) -> list[Tensor]:
    layer = cache.memory.layers[index]
    return [*key_parts(layer.keys, "f32"), *value_parts(layer.values, "f32")]


class Model:
    """The expected content of each row: the number written for each (layer, position), in a plain dict."""

    def __init__(self, make_cache: Callable[[], PagedCache], seed: int) -> None:
        self.cache, self.make_fresh, self.random = (cache := make_cache()), make_cache, random.Random(seed)
        self.token_ids: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.written: list[dict[tuple[int, int], float]] = [{} for _ in range(NUM_ROWS)]
        self.parts = [[part.numpy() for part in parts_of(cache, index)] for index in range(len(cache.memory.layers))]
        self.remembered: list[list[int]] = []
        self.num_refused = 0

    def append(self, row: int) -> None:
        """Reserve slots, write them provisionally, and commit a part of them."""
        cache, start = self.cache, len(self.token_ids[row])
        count = self.random.randint(1, min(STEP, cache.capacity - start) or 1)
        needed, free, before = fewest(cache, row, count), cache.free_pages, snapshot(cache)
        is_short = any(least > own for least, own in zip(needed, free, strict=True))
        if start + count > cache.capacity or is_short:
            with pytest.raises(InvalidRequestError if start + count > cache.capacity else OutOfPagesError):
                cache.reserve(row, count)
            assert snapshot(cache) == before
            self.num_refused += start + count <= cache.capacity
            return
        cache.reserve(row, count)
        taken = [old - new for old, new in zip(free, cache.free_pages, strict=True)]
        assert all(each >= least for each, least in zip(taken, needed, strict=True))
        first = self.random.randrange(3)  # few different tokens, so that some rows begin alike
        new = [(first + index) % 3 for index in range(count)]
        for rows in cache.groups:
            where = cache.memory.place(rows, row, torch.arange(start, start + count) - int(rows.shifts[row]))
            for index in rows.group.layers:
                values = [self.content(row, new[: at + 1]) + index / 4 for at in range(count)]
                self.written[row] |= {(index, start + at): value for at, value in enumerate(values)}
                for part in self.parts[index]:
                    part[:, *where] = np.array(values, np.float32)[:, None]
        kept = self.random.choice([count, count, count // 2, 0])
        cache.commit(row, kept)
        self.token_ids[row] += new[:kept]

    def content(self, row: int, new: list[int]) -> int:
        """Return the content of a token and all earlier ones. Shared content is equal only if these tokens are."""
        return hash((*self.token_ids[row], *new)) % (1 << 20)

    def truncate(self, row: int) -> None:
        length = self.random.randint(0, len(self.token_ids[row]))
        self.cache.truncate(row, length)
        assert self.cache.lengths[row] in (length, 0)
        del self.token_ids[row][self.cache.lengths[row] :]

    def fork(self, row: int) -> None:
        source, before = self.random.randrange(NUM_ROWS), self.cache.free_pages
        self.cache.copy_row(row, source)
        self.copy(row, source)
        assert all(new >= old for old, new in zip(before, self.cache.free_pages, strict=True)), "a fork took a page"

    def remember(self, row: int) -> None:
        self.cache.remember(row, self.token_ids[row])
        self.remembered.append(list(self.token_ids[row]))

    def adopt(self, row: int) -> None:
        """Adopt the pages of a text that a row has now, or had when it was remembered."""
        wanted = [*self.random.choice([*self.token_ids, *self.remembered]), 1]
        count = adopted(self.cache, row, wanted)
        self.token_ids[row] = []
        contents, num_layers = [self.content(row, wanted[: at + 1]) for at in range(count)], len(self.parts)
        self.token_ids[row] = wanted[:count]
        self.written[row] = {
            (index, at): content + index / 4 for at, content in enumerate(contents) for index in range(num_layers)
        }

    def save_and_load(self, row: int) -> None:
        """Save a row into a cache that has nothing else in it, and load it from there."""
        source, before = self.random.randrange(NUM_ROWS), snapshot(self.cache)
        fresh, length = self.make_fresh(), len(self.token_ids[source])
        fresh.import_row(0, dict(self.cache.export_row(source)), length)
        fresh.check_integrity()
        try:
            self.cache.import_row(row, dict(fresh.export_row(0)), length)
        except OutOfPagesError:
            assert snapshot(self.cache) == before
            return
        self.copy(row, source)

    def copy(self, row: int, source: int) -> None:
        self.token_ids[row], self.written[row] = list(self.token_ids[source]), dict(self.written[source])

    def clear(self, row: int) -> None:
        self.cache.truncate(row, 0)
        self.token_ids[row] = []

    def give_back(self, row: int) -> None:
        self.cache.give_back_free()

    def check(self) -> None:
        self.cache.check_integrity()
        assert list(self.cache.lengths) == [len(token_ids) for token_ids in self.token_ids]
        for rows in self.cache.groups:
            for row, token_ids in enumerate(self.token_ids):
                state = rows.state(row)
                slots = np.array(state.seen_from(len(token_ids), len(token_ids)), np.int64)
                pages, at = rows.table.table[row, slots // PAGE], slots % PAGE
                for index in rows.group.layers:
                    expected = np.array([self.written[row][index, slot] for slot in slots.tolist()], np.float32)
                    for part in self.parts[index]:
                        assert (part[0, pages, at // 16, at % 16] == expected[:, None]).all(), (row, index)


def fewest(cache: PagedCache, row: int, count: int) -> list[int]:
    """Return the fewest free pages, per group, with which the row may reserve so many tokens."""
    start, end = cache.lengths[row], cache.lengths[row] + count
    return [rows.pages_needed(row, rows.slot_of(row, start), rows.slot_of(row, end)) for rows in cache.groups]


def snapshot(cache: PagedCache) -> tuple[object, ...]:
    held = [[rows.table.page_by_index(row) for row in range(len(cache.lengths))] for rows in cache.groups]
    return list(cache.lengths), cache.free_pages, held, [rows.table.table.tolist() for rows in cache.groups]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [(settings, (WHOLE, WINDOWED)) for settings in (PREFIXES, SLIDING, LATE)]
    + [(PREFIXES, (WINDOWED,)), (SLIDING, (WHOLE,)), (LATE, (WHOLE,))],
    ids=["prefixes", "sliding", "late", "only windows", "only sliding", "only late"],
)
def test_random_traces_with_too_few_pages_store_what_was_written(
    settings: CacheSettings, layers: tuple[Attention, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_POISON", "1")
    num_refused, num_traces = 0, 5 if IS_SHORT else usual_or_all(16, 300)
    for seed in range(num_traces):
        model = Model(partial(make, settings, 7 + seed % 4, layers, capacity=7 * PAGE), seed)
        monkeypatch.setattr(paged, "available_memory_bytes", partial(model.random.choice, [0, *[1 << 40] * 5]))
        verbs = [model.append] * 9 + [model.truncate, model.fork, model.remember, model.adopt, model.clear]
        verbs += [model.save_and_load, model.give_back]
        for _ in range(60):
            model.random.choice(verbs)(model.random.randrange(NUM_ROWS))
            model.check()
        num_refused += model.num_refused
    assert num_refused > 2 * num_traces


def num_held(cache: PagedCache) -> list[int]:
    return [total - free for total, free in zip(cache.pool_pages, cache.free_pages, strict=True)]


def test_a_long_row_has_the_pages_that_its_windows_need() -> None:
    cache = make(SLIDING, capacity=100_000)
    grow(cache, 0, 9_000)
    full, windowed = num_held(cache)
    assert full <= 1 + -(-(35 + STEP) // PAGE) + 1
    assert windowed <= -(-(WINDOW + STEP) // PAGE) + 1
    assert cache.num_bytes == sum(cache.pool_pages) * PAGE * 2 * 4 * DIM
    cache.check_integrity()


def test_a_row_cut_back_further_than_its_windows_reach_is_empty() -> None:
    cache = make()
    grow(cache, 0, 190)
    for length, expected in ((170, 170), (90, 0)):
        cache.truncate(0, length)
        assert cache.lengths[0] == expected
        cache.check_integrity()


def test_a_fork_takes_no_page_until_one_of_the_two_continues() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 40)
    cache.copy_row(1, 0)
    assert num_held(cache) == [3]
    grow(cache, 1, 1)
    assert num_held(cache) == [4]


def test_a_shared_beginning_is_stored_once() -> None:
    cache, token_ids = make(), [index % 10 for index in range(64)]
    assert cache.adopt(0, token_ids) == 0
    grow(cache, 0, 64)
    cache.remember(0, token_ids)
    assert cache.adopt(1, token_ids) == 48  # its last token is computed again, with the token's page
    assert (cache.adopt(2, [*token_ids[:40], 11]), num_held(cache)[0]) == (32, 4)
    cache.truncate(0, 0)
    assert adopted(cache, 1, [*token_ids, 1]) == 64
    cache.check_integrity()


def test_a_pool_has_the_pages_that_are_asked_for_and_no_more_than_rows_can_use() -> None:
    full, windowed = 13, 5  # pages of 200 tokens; of a window, a step and one
    assert make().pool_pages == [5 * full, 5 * windowed]
    assert make(pool_pages=40).pool_pages == [40, 25]
    assert make(pool_pages=20).pool_pages == [20, 20]
    assert make(pool_pages=1000).pool_pages == [5 * full, 5 * windowed]
    assert make(pool_pages=full).num_bytes == (full + full) * PAGE * 2 * 4 * DIM
    check_refused(lambda: make(pool_pages=12), "at least 13, the pages of one sequence of 200 tokens, got 12: ")


def test_a_refused_reserve_changes_no_group() -> None:
    cache = make(pool_pages=14)
    for row, count in enumerate((150, 32, 32)):
        grow(cache, row, count)
    before = snapshot(cache)
    assert (cache.free_pages, fewest(cache, 1, STEP)) == ([0, 14 - 5 - 4], [2, 2])
    check_refused(lambda: cache.reserve(1, 1), r"the cache needs 1 free pages, but has 0 of 14: wait", OutOfPagesError)
    assert snapshot(cache) == before
    cache.check_integrity()
    cache.truncate(0, 0)
    cache.reserve(1, 1)


def test_a_copy_of_a_shared_page_is_counted_and_can_be_refused() -> None:
    cache = make(pool_pages=13, layers=(WHOLE,))
    grow(cache, 0, 12 * PAGE - 4)
    cache.copy_row(1, 0)
    cache.copy_row(2, 0)
    assert (cache.free_pages, fewest(cache, 1, 1)) == ([1], [1])
    cache.reserve(1, 1)
    assert fewest(cache, 2, 1) == [1]
    with pytest.raises(OutOfPagesError):
        cache.reserve(2, 1)
    cache.truncate(1, 0)
    cache.truncate(0, 0)
    assert fewest(cache, 2, 1) == [0]  # no row shares it any more
    cache.reserve(2, 1)
    cache.check_integrity()


def test_a_row_frees_pages_behind_its_window_before_it_is_refused() -> None:
    cache = make(pool_pages=5, layers=(WINDOWED,))
    grow(cache, 0, 4 * PAGE)
    grow(cache, 1, PAGE)
    assert cache.free_pages == [0]
    with pytest.raises(OutOfPagesError):
        cache.reserve(0, PAGE + 1)
    cache.reserve(0, 1)  # the window has passed the first page
    cache.commit(0, 1)
    assert sorted(cache.groups[0].table.page_by_index(0)) == [1, 2, 3, 4]
    with pytest.raises(OutOfPagesError):
        cache.reserve(1, 1)
    cache.check_integrity()


def test_rows_from_elsewhere_are_refused_whole() -> None:
    other = make()
    grow(other, 0, 100)
    saved = {name: tensor.clone() for name, tensor in other.export_row(0)}
    cache = make(pool_pages=14)
    grow(cache, 0, 130)
    grow(cache, 1, 20)
    before = snapshot(cache)
    with pytest.raises(OutOfPagesError):
        cache.import_row(1, saved, 100)
    assert snapshot(cache) == before
    cache.import_row(0, saved, 100)  # its own pages suffice
    cache.check_integrity()


def test_a_page_that_a_loaded_row_has_in_part_is_never_found() -> None:
    """A saved row has only the part of a window that the next token sees, and this part may begin inside a page."""

    def append(cache: PagedCache, row: int, count: int) -> None:
        start = cache.lengths[row]
        cache.reserve(row, count)
        for rows in cache.groups:
            where = cache.memory.place(rows, row, torch.arange(start, start + count))
            for _, part in cache.memory.parts(rows):
                part[:, *where] = torch.arange(start, start + count).float()[:, None] + 1
        cache.commit(row, count)
        cache.remember(row, token_ids)

    token_ids, other, cache = [index % 3 for index in range(CAPACITY)], make(), make()
    for _ in range(8):
        append(other, 0, STEP)
    cache.import_row(0, dict(other.export_row(0)), 8 * STEP)
    cache.remember(0, token_ids)
    for _ in range(12):  # a row that computes the same has all of each page
        append(cache, 1, PAGE)
    windowed = cache.groups[1]
    for length in range(PAGE, 12 * PAGE, PAGE):
        found = adopted(cache, 2, token_ids[: length + 1])
        seen = torch.arange(max(0, found + 1 - WINDOW), found)
        where = cache.memory.place(windowed, 2, seen)
        for _, part in cache.memory.parts(windowed):
            assert torch.equal(part[0, *where][:, 0], seen.float() + 1)
    assert found == 11 * PAGE


def test_pages_that_a_fork_reserved_without_a_commit_are_not_shared() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 2 * PAGE)
    cache.reserve(0, STEP)
    cache.copy_row(1, 0)
    assert (fewest(cache, 0, STEP), fewest(cache, 1, STEP)) == ([0], [2])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="hardware: a system that tells what is resident")
def test_the_memory_of_free_pages_returns_to_the_system_and_other_pages_stay() -> None:
    settings = CacheSettings(page_tokens=256, reuse_prefixes=True)
    layers = [Attention(1, 4, 64, None, 1.0)] * 2
    cache = PagedCache(layers, 4, 4096, "f32", CPU, step_tokens=4096, settings=settings)
    for row in range(3):
        cache.reserve(row, 2048)
        cache.commit(row, 2048)
    for stored in (stored for layer in cache.memory.layers for stored in (layer.keys, layer.values)):
        stored[:, : 3 * 16] = 1
    cache.remember(1, [7] * 2048)
    for row in (0, 1):
        cache.truncate(row, 0)
    assert cache.give_back_free() == 2048 * 2 * 2 * 4 * 64 * 4
    assert cache.give_back_free() == 0  # the memory was already returned
    keys = cache.memory.layers[0].keys
    assert not keys[:, :8].any()
    assert keys[:, 16 : 16 + 8].all(), "cached"
    assert keys[:, 32 : 32 + 8].all(), "held"
    cache.check_integrity()


def test_consecutive_pages_are_given_back_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(layers=(WHOLE,))
    for row in (0, 1, 3):
        grow(cache, row, CAPACITY)
    for row in (0, 1, 3):
        cache.truncate(row, 0)
    calls: list[tuple[int, int]] = []
    backend = cache.memory._backend
    monkeypatch.setattr(backend, "give_back", lambda memory, first, count: calls.append((first, count)))
    cache.give_back_free()
    assert calls == [(0, 26), (39, 13)]


@pytest.fixture(scope="module", params=slow_except(["llama"], ["llama", "windows"]))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_folder(request.param, tmp_path_factory.mktemp(request.param)))


@torch.inference_mode()
def test_a_fork_that_cannot_be_compressed_is_unchanged(llm: LLM) -> None:
    """The pages into which slots move are copied first, and the pool has too few free pages for the copies."""
    model, prompt = llm.model, varied_ids(100)
    sizes = {"step_tokens": 512, "pool_pages": 7 + 6}  # the prompt's pages, and copies of them
    cache = PagedCache(model.architecture.attention, 3, CONTEXT, model.kv_type, CPU, settings=SNAPKV, **sizes)
    compression = PromptCompression(cache)
    cache.reserve(0, len(prompt))
    model.forward(Step.of(prompt), cache)
    cache.commit(0, len(prompt))
    cache.copy_row(1, 0)
    cache.reserve(2, 1)
    before = snapshot(cache)
    with pytest.raises(OutOfPagesError):
        compression.after_prompt(1, prompt, lambda step: model.forward(step, cache))
    assert snapshot(cache) == before
    cache.truncate(2, 0)
    compression.after_prompt(1, prompt, lambda step: model.forward(step, cache))
    cache.check_integrity()


@pytest.mark.parametrize("seed", slow_except([0], range(usual_or_all(4, 60))))
@torch.inference_mode()
def test_forks_compressed_in_any_order_answer_as_single_rows(llm: LLM, seed: int) -> None:
    """The pool is too small for all forks. After a refusal, a row is freed, and the call is repeated."""
    model, chance = llm.model, random.Random(seed)
    sizes = {"step_tokens": 64, "settings": SNAPKV}
    layers = model.architecture.attention
    cache = PagedCache(layers, 4, CONTEXT, model.kv_type, CPU, pool_pages=11, **sizes)
    compression = PromptCompression(cache)
    known: list[list[int]] = [[] for _ in range(4)]
    compressed_at: list[int | None] = [None] * 4  # tokens of the prompt

    def extend(row: int) -> None:
        new = [chance.randrange(EOS) for _ in range(chance.choice([1, 3, 50]))]
        if len(known[row]) + len(new) > CONTEXT or (len(new) > 3 and compressed_at[row] is not None):
            return
        logits = forward(cache, row, new)
        known[row] += new
        alone = PagedCache(layers, 1, CONTEXT, model.kv_type, CPU, **sizes)
        prompt_tokens = len(known[row]) - len(new) if compressed_at[row] is None else compressed_at[row]
        replay(alone, 0, known[row][:prompt_tokens])
        if compressed_at[row] is not None:
            compress(PromptCompression(alone), alone, 0, known[row][:prompt_tokens])
        assert logits.equal(replay(alone, 0, known[row][prompt_tokens:]))

    def replay(cache: PagedCache, row: int, token_ids: list[int]) -> Tensor:
        logits = torch.empty(0)
        for start in range(0, len(token_ids), 64):
            logits = forward(cache, row, token_ids[start : start + 64])
        return logits

    def forward(cache: PagedCache, row: int, chunk: list[int]) -> Tensor:
        cache.reserve(row, len(chunk))
        logits: Tensor = model.forward(Step.of(chunk, cache.lengths[row], row=row), cache)
        cache.commit(row, len(chunk))
        return logits

    def compress(compression: PromptCompression, cache: PagedCache, row: int, token_ids: list[int]) -> None:
        compression.after_prompt(row, token_ids, lambda step: model.forward(step, cache))

    def end_prompt(row: int) -> None:
        if known[row] and compressed_at[row] is None:
            compress(compression, cache, row, known[row])
            compressed_at[row] = len(known[row])

    def fork(row: int) -> None:
        source = chance.randrange(4)
        cache.copy_row(row, source)
        known[row], compressed_at[row] = list(known[source]), compressed_at[source]

    for _ in range(40):
        row, before = chance.randrange(4), snapshot(cache)
        try:
            chance.choice([extend, extend, extend, end_prompt, fork])(row)
        except OutOfPagesError:
            assert snapshot(cache) == before, "a refusal changes nothing"
            cache.truncate(row, 0)
            known[row], compressed_at[row] = [], None
        cache.check_integrity()
        assert list(cache.lengths) == [len(token_ids) for token_ids in known]
