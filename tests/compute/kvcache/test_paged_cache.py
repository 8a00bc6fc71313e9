"""The pages of rows in the paged cache: after cuts, in forks, in long windows and with a shared beginning."""

import torch

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.pages import PagePool
from infer.compute.operands.mixers import Attention

DIM, NUM_ROWS, CAPACITY, STEP, WINDOW = 16, 3, 150, 24, 20
LAYERS = [Attention(1, 1, DIM, None, DIM**-0.5, window) for window in (None, WINDOW)]
NO_EVICTION = CacheSettings(page_tokens=16, reuse_prefixes=True)
SLIDING = CacheSettings(page_tokens=16, eviction_policy="sliding", eviction_window=40, protected_prefix=5)


def make_cache(cache_settings: CacheSettings) -> PagedCache:
    return PagedCache(LAYERS, NUM_ROWS, CAPACITY, "f32", torch.device("cpu"), step_tokens=STEP, settings=cache_settings)


def num_held(pool: PagePool) -> int:
    return pool.num_pages - pool.num_available


def grow(cache: PagedCache, row: int, count: int) -> None:
    for start in range(0, count, STEP):
        size = min(STEP, count - start)
        cache.reserve(row, size)
        cache.commit(row, size)
        cache.check_integrity()


def test_a_long_row_has_the_pages_that_its_windows_need() -> None:
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


def test_a_fork_takes_no_page_until_one_of_the_two_continues() -> None:
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
    assert cache.adopt(1, token_ids) == 48  # its last token is computed again, with the token's page
    assert cache.adopt(2, [*token_ids[:40], 11]) == 32
    assert num_held(cache.groups[0].table.pool) == 4
    cache.truncate(0, 0)
    cache.truncate(1, 0)
    assert cache.adopt(1, [*token_ids, 1]) == 64
    cache.check_integrity()
