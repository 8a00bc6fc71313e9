"""The paged cache against a model of it: whatever is appended, rejected, cut, forked, shared, saved and loaded, in any
order, a token attends to what the rule says it sees, and every page is accounted for.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from infer import ops
from infer.errors import InvalidRequestError
from infer.kvcache.cache_settings import CacheSettings
from infer.kvcache.paged import PagedCache
from infer.kvcache.pages import PagePool
from infer.operands.activation_values import Activations
from infer.operands.mixers import Attention
from infer.operands.step import Step
from infer.operands.weights import Heads

DIM, NUM_ROWS, CAPACITY, STEP, WINDOW = 16, 3, 150, 24, 20
HEADS = Heads(1, 1, DIM, DIM**-0.5, None, None, None)
LAYERS = [Attention(1, 1, DIM, None, DIM**-0.5, window) for window in (None, WINDOW)]
NO_EVICTION = CacheSettings(page_tokens=16, reuse_prefixes=True)
SLIDING = CacheSettings(page_tokens=16, eviction_policy="sliding", eviction_window=40, protected_prefix=5)


def make_cache(cache_settings: CacheSettings) -> PagedCache:
    return PagedCache(LAYERS, NUM_ROWS, CAPACITY, "f32", torch.device("cpu"), step_tokens=STEP, settings=cache_settings)


def qkv_of(token_ids: list[int], layer: int) -> Tensor:
    """Return q, k and v as if the lower layers made them from the token alone."""
    table = torch.randn(4, 50, 3 * DIM, generator=torch.manual_seed(3))
    return table[layer, token_ids]


def expected(token_ids: list[int], layer: int, sinks: int, window: int) -> Tensor:
    q, k, v = qkv_of(token_ids, layer).split(DIM, dim=1)
    slot, own = torch.arange(len(token_ids)), torch.arange(len(token_ids))[:, None]
    seen = (slot <= own) & ((slot < sinks) | (slot > own - (window or len(token_ids))))
    return (q @ k.T * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


class Machine(RuleBasedStateMachine):
    cache_settings = NO_EVICTION
    rows = st.integers(0, NUM_ROWS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(self.cache_settings)
        self.expected: list[list[int]] = [[] for _ in range(NUM_ROWS)]

    @rule(row=rows, first=st.integers(0, 9), count=st.integers(1, STEP), kept=st.sampled_from([STEP, STEP, 9, 0]))
    def append(self, row: int, first: int, count: int, kept: int) -> None:
        token_ids = [*self.expected[row], *((first + index) % 10 for index in range(count))][:CAPACITY]
        start = len(self.expected[row])
        new = token_ids[start:]
        self.cache.reserve(row, len(new))
        step = Step.of([1] * len(new), start, row=row)
        for layer in range(len(LAYERS)) if new else ():
            with ops.using("reference"):
                found = self.cache.attend(layer, Activations(qkv_of(new, layer)), HEADS, step).floats
            policy = (0, 0) if not self.cache_settings.evicts else (5, 35)
            sinks, window = (0, WINDOW) if layer else policy
            assert (found - expected(token_ids, layer, sinks, window)[start:]).abs().max() < 1e-5
        kept = min(kept, len(new))
        self.cache.commit(row, kept)
        self.expected[row] = token_ids[: start + kept]

    @rule(row=rows, count=st.integers(0, 40))
    def take_back(self, row: int, count: int) -> None:
        before = len(self.expected[row])
        length = max(0, before - count)
        self.cache.truncate(row, length)
        left = self.cache.lengths[row]
        assert left in (length, 0)
        if count == 0 or before <= WINDOW:  # nothing can be missing
            assert left == length
        del self.expected[row][left:]

    @rule(row=rows, source=rows)
    def fork(self, row: int, source: int) -> None:
        self.cache.copy_row(row, source)
        self.expected[row] = list(self.expected[source])

    @rule(row=rows, source=rows)
    def save_and_load(self, row: int, source: int) -> None:
        length, fresh = len(self.expected[source]), make_cache(self.cache_settings)
        if not self.cache_settings.evicts:  # what a window holds is as much for every length
            with pytest.raises(InvalidRequestError):
                fresh.import_row(0, dict(self.cache.export_row(source)), length + 1)
        fresh.import_row(0, dict(self.cache.export_row(source)), length)  # nothing else lies in it
        fresh.check_integrity()
        self.cache.import_row(row, dict(fresh.export_row(0)), length)
        self.expected[row] = list(self.expected[source])

    @rule(row=rows)
    def remember(self, row: int) -> None:
        self.cache.remember(row, self.expected[row])

    @rule(row=rows, source=rows, more=st.lists(st.integers(0, 9), max_size=3))
    def adopt(self, row: int, source: int, more: list[int]) -> None:
        token_ids = [*self.expected[source], *more]
        if not token_ids:
            return
        self.cache.truncate(row, 0)
        count = self.cache.adopt(row, token_ids)
        assert count < len(token_ids)
        assert count % 16 == 0
        self.expected[row] = token_ids[:count]

    @invariant()
    def all_is_there(self) -> None:
        self.cache.check_integrity()
        assert list(self.cache.lengths) == [len(token_ids) for token_ids in self.expected]


class SlidingMachine(Machine):
    cache_settings = SLIDING


TestPaged = Machine.TestCase
TestSliding = SlidingMachine.TestCase
for case in (TestPaged, TestSliding):
    case.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def num_held(pool: PagePool) -> int:
    return pool.num_pages - pool.num_available


def grow(cache: PagedCache, row: int, count: int) -> None:
    for start in range(0, count, STEP):
        size = min(STEP, count - start)
        cache.reserve(row, size)
        cache.commit(row, size)
        cache.check_integrity()


def test_a_long_row_holds_what_its_windows_need() -> None:
    cache = PagedCache(LAYERS, NUM_ROWS, 100_000, "f16", torch.device("cpu"), step_tokens=STEP, settings=SLIDING)
    grow(cache, 0, 9_000)
    full, windowed = (rows.table for rows in cache.groups)
    assert num_held(full.pool) <= 1 + -(-(35 + STEP) // 16) + 1
    assert num_held(windowed.pool) <= -(-(WINDOW + STEP) // 16) + 1
    assert cache.num_bytes == NUM_ROWS * (full.pages_per_row + windowed.pages_per_row) * 16 * 2 * 2 * DIM


def test_a_row_cut_back_further_than_its_windows_reach_is_empty() -> None:
    cache = make_cache(NO_EVICTION)
    grow(cache, 0, 140)
    cache.truncate(0, 120)
    assert cache.lengths[0] == 120
    cache.truncate(0, 60)
    assert cache.lengths[0] == 0
    cache.check_integrity()


def test_a_fork_takes_no_page_until_one_of_the_two_goes_on() -> None:
    cache = make_cache(NO_EVICTION)
    grow(cache, 0, 40)
    table = cache.groups[0].table
    cache.copy_row(1, 0)
    assert num_held(table.pool) == 3
    grow(cache, 1, 1)
    assert num_held(table.pool) == 4


def test_a_shared_beginning_is_stored_once() -> None:
    cache = make_cache(NO_EVICTION)
    token_ids = [index % 10 for index in range(64)]
    assert cache.adopt(0, token_ids) == 0
    grow(cache, 0, 64)
    cache.remember(0, token_ids)
    assert cache.adopt(1, token_ids) == 48  # its last token is computed again, and the page that it is in
    assert cache.adopt(2, [*token_ids[:40], 11]) == 32
    assert num_held(cache.groups[0].table.pool) == 4
    cache.truncate(0, 0)
    cache.truncate(1, 0)
    assert cache.adopt(1, [*token_ids, 1]) == 64
    cache.check_integrity()
