"""Pages are taken, shared, freed and found again. `test_page_pool` has random traces over them."""

import pytest

from infer.compute.kvcache.pages import PageTable
from infer.errors import InferError

PAGE = 16


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
    assert table.reserve(1, 40, 41, 0) == [(2, 6)]
    assert table.table.tolist() == [[0, 1, 2, 0], [0, 1, 6, 0]]
    assert table.reserve(0, 40, 41, 0) == []
    table.check_integrity()


def test_a_freed_page_is_found_until_it_is_needed() -> None:
    table = PageTable(1, 64, PAGE, 4)
    table.reserve(0, 0, 32, 0)
    for index, key in enumerate((b"a", b"b")):
        table.remember(0, index, key)
    table.truncate(0, 0)
    assert table.pool.num_available == 4
    assert table.pool.find(b"b") == 1
    table.adopt(0, {0: b"a"})
    table.check_integrity()
    assert table.reserve(0, 16, 64, 0) == []  # the last free page is remembered for b
    assert table.pool.find(b"b") is None
    assert table.pool.find(b"a") == 0
