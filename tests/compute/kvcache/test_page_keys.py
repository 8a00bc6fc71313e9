"""Pages are taken, shared and freed. A key finds the page of its own tokens, even after writes, cuts and forks."""

import random

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.page_rows import RowState, page_keys, possible_prefixes
from infer.compute.kvcache.pages import PagePool, PageTable
from infer.errors import InferError
from test_page_pool import PAGE, PREFIXES, SLIDING, WHOLE, WINDOWED, adopted, grow, make, remembered

FIRST, OTHER = [1] * PAGE, [2] * PAGE


def test_after_a_cut_within_a_page_new_pages_have_the_keys_of_the_new_text() -> None:
    cache = remembered(FIRST + OTHER)
    cache.copy_row(1, 0)  # keeps the old second page alive, and its key
    cache.truncate(0, PAGE + 4)
    new = FIRST + OTHER[:4] + [3] * (PAGE - 4) + [4] * PAGE
    grow(cache, 0, 2 * PAGE - 4)
    cache.remember(0, new)
    assert cache.adopt(2, [*new, 9]) == 3 * PAGE
    assert adopted(cache, 2, [*FIRST, *OTHER, *[4] * PAGE, 9]) == 2 * PAGE, "its third page was computed after others"
    cache.check_integrity()


def test_an_adopted_row_goes_on_with_the_keys_of_its_own_text() -> None:
    cache = remembered(FIRST)
    assert cache.adopt(1, [*FIRST, *OTHER]) == PAGE
    grow(cache, 1, PAGE)
    cache.remember(1, FIRST + OTHER)
    assert cache.adopt(2, [*FIRST, *OTHER, 9]) == 2 * PAGE
    cache.truncate(2, 0)
    cache.truncate(1, 0)
    grow(cache, 1, PAGE)  # other content, so the row's earlier tokens are of no use
    cache.remember(1, OTHER)
    assert cache.adopt(2, [*OTHER, 9]) == PAGE


def test_the_last_token_of_a_prompt_is_never_adopted() -> None:
    cache = remembered(FIRST + OTHER)
    for length, expected in ((PAGE, 0), (PAGE + 1, PAGE), (2 * PAGE, PAGE), (2 * PAGE + 1, 2 * PAGE)):
        assert adopted(cache, 1, [*FIRST, *OTHER, 9][:length]) == expected, length


def test_a_key_is_of_the_salt_and_of_all_tokens_before_the_pages_end() -> None:
    token_ids = list(range(3 * PAGE))
    keys = page_keys(token_ids, PAGE)
    assert len(set(keys)) == len(keys) == 3
    assert (page_keys(token_ids[: 3 * PAGE - 1], PAGE), page_keys(token_ids, PAGE, keys[:1])) == (keys[:2], keys)
    for place in range(0, len(token_ids), 5):
        changed = [*token_ids[:place], 999, *token_ids[place + 1 :]]
        found = page_keys(changed, PAGE)
        assert [mine == key for mine, key in zip(found, keys, strict=True)] == [
            index < place // PAGE for index in range(3)
        ]
    assert not set(page_keys(token_ids, PAGE, salt=b"ann")) & {*keys, *page_keys(token_ids, PAGE, salt=b"bob")}


def test_rows_remember_and_adopt_under_their_own_salt_alone() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, PAGE)
    cache.remember(0, FIRST, b"ann")
    assert (cache.adopt(1, [*FIRST, 9], b"bob"), cache.adopt(1, [*FIRST, 9])) == (0, 0)
    assert cache.adopt(1, [*FIRST, 9], b"ann") == PAGE


def test_an_evicted_page_is_not_found_and_can_be_stored_again() -> None:
    cache = remembered(FIRST)
    cache.forget(0)
    assert cache.adopt(1, [*FIRST, 9]) == 0
    grow(cache, 0, len(FIRST))
    cache.remember(0, FIRST)
    assert cache.adopt(1, [*FIRST, 9]) == PAGE


def test_one_row_is_remembered_for_at_most_half_of_the_pool() -> None:
    cache = remembered(list(range(12 * PAGE)), pool_pages=14)
    assert not cache.has_new_pages(0)
    assert cache.adopt(1, list(range(12 * PAGE))) == 7 * PAGE


def test_the_least_recently_used_cached_page_is_taken_first() -> None:
    pool = PagePool(3)
    for page in range(3):
        assert pool.take(page) == page
        pool.remember(page, bytes([page]))
    for page in (1, 0, 2):
        pool.release(page)
    pool.hold(1)  # found and released again, so it is the last one used
    pool.release(1)
    assert [pool.take() for _ in range(3)] == [0, 2, 1]
    assert [pool.find(bytes([page])) for page in range(3)] == [None] * 3


def test_a_second_page_of_the_same_content_is_free_when_it_is_released() -> None:
    pool = PagePool(2)
    for _ in range(2):
        pool.remember(pool.take(), b"key")
    pool.release(1)
    pool.release(0)
    assert (pool.find(b"key"), pool.num_available) == (0, 2)
    assert pool.take() == 1, "the free page, before the cached one"
    pool.check_integrity([1])


def test_a_held_page_is_forgotten_before_its_row_writes_to_it() -> None:
    table = PageTable(2, 4 * PAGE, PAGE, 4)
    assert table.reserve(0, 0, 2 * PAGE, 0) == []
    table.remember(0, 1, b"key")
    assert table.is_ready(0, 0, PAGE)
    assert not table.is_ready(0, 0, 2 * PAGE)
    assert table.reserve(0, PAGE + 3, PAGE + 4, 0) == []
    assert table.pool.find(b"key") is None
    assert table.is_ready(0, 0, 2 * PAGE)
    assert not table.is_ready(0, 0, 2 * PAGE + 1)


@pytest.mark.parametrize("window", [0, 1, 2, 5, 30, -1, -5, -16])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_a_token_sees_the_sinks_and_as_many_as_its_window_has_with_itself(window: int, sinks: int) -> None:
    state = RowState(shift=0, sinks=sinks, window=window, first=0)
    for slot in range(40):
        first_near = slot - slot % -window if window < 0 else slot + 1 - window if window else 0
        expected = {s for s in range(slot) if s < sinks or s >= first_near}
        first, rest = state.seen(slot)
        assert sorted([*first, *rest]) == sorted(expected), slot
        later = {s for at in range(slot, 45) for part in state.seen(at) for s in part if s < slot}
        assert set(state.seen_from(slot, slot)) == later, slot


def test_a_fresh_table_is_a_dense_cache() -> None:
    table = PageTable(2, 64, PAGE, 4)
    for end in (10, 40, 64):  # alternately, so that the next page of the pool is not the row's next page
        for row in (0, 1):
            assert table.reserve(row, 0, end, 0) == []
    assert table.table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_window_is_a_ring_behind_the_fixed_pages() -> None:
    table = PageTable(1, 160, PAGE, 4, num_fixed=1)
    for start in range(0, 160, PAGE):
        table.reserve(0, start, start + PAGE, max(0, start + 1 - 2 * PAGE))
        table.check_integrity()
    assert table.table.tolist() == [[0, 1, 2, 3, 1, 2, 3, 1, 2, 3]]
    assert [table.holds(0, start, start + PAGE) for start in range(0, 160, PAGE)] == [True, *[False] * 6, *[True] * 3]


def test_a_row_that_needs_more_than_its_share_is_a_fault() -> None:
    with pytest.raises(InferError, match="more than its 2 pages"):
        PageTable(1, 64, PAGE, 2).reserve(0, 0, 64, 0)


def test_a_row_that_writes_a_shared_page_gets_a_copy() -> None:
    table = PageTable(2, 64, PAGE, 4)
    table.reserve(0, 0, 40, 0)
    table.share(1, 0, 40)
    assert (table.reserve(1, 40, 41, 0), table.table.tolist()) == ([(2, 6)], [[0, 1, 2, 0], [0, 1, 6, 0]])
    assert table.reserve(0, 40, 41, 0) == []
    table.check_integrity()


def test_a_freed_page_is_found_until_it_is_needed() -> None:
    table = PageTable(1, 64, PAGE, 4)
    table.reserve(0, 0, 32, 0)
    for index, key in enumerate((b"a", b"b")):
        table.remember(0, index, key)
    table.truncate(0, 0)
    assert (table.pool.num_available, table.pool.find(b"b")) == (4, 1)
    table.adopt(0, {0: b"a"})
    table.check_integrity()
    assert table.reserve(0, 16, 64, 0) == []  # the last free page is remembered for b
    assert table.pool.find(b"b") is None
    assert table.pool.find(b"a") == 0


@pytest.mark.parametrize("settings", [PREFIXES, SLIDING], ids=["windows", "sinks"])
def test_possible_prefixes_are_those_of_which_no_needed_page_is_missing(settings: CacheSettings) -> None:
    groups = make(settings).groups
    assert len(groups) == 2
    choose = random.Random(4)
    for _ in range(200):
        keys = page_keys([choose.randrange(9) for _ in range(12 * PAGE)], PAGE)
        there = [{key for key in keys if choose.random() < choose.choice((0.6, 0.95, 1))} for _ in groups]
        needed = [[rows.pages_before(count * PAGE) for rows in groups] for count in range(13)]
        expected = [
            (count, [{index: keys[index] for index in own} for own in needed[count]])
            for count in range(12, 0, -1)
            if all(keys[index] in own for own, each in zip(there, needed[count], strict=True) for index in each)
        ]
        assert list(possible_prefixes(groups, keys, [own.__contains__ for own in there])) == expected


def test_a_prefix_whose_windows_are_gone_is_found_out_in_one_pass() -> None:
    groups = make(layers=(WHOLE, WINDOWED), capacity=1000 * PAGE).groups
    keys = page_keys([7] * 1000 * PAGE, PAGE)
    asked = list[bytes]()

    def is_there(key: bytes) -> bool:
        asked.append(key)
        return False

    windowed = [rows.sees_all for rows in groups].index(False)
    places = [is_there if index == windowed else (lambda key: True) for index in range(2)]
    assert not list(possible_prefixes(groups, keys, places))
    assert len(asked) <= len(keys)
