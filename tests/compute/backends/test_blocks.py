"""Pages are taken, shared, freed and found again, and the pool is consistent after every operation."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infer.compute.kvcache.pages import PageTable
from infer.errors import InferError

PAGE = 16
NUM_ROWS, CAPACITY = 3, 160


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


class Tables(RuleBasedStateMachine):
    """Compare tables with lists of page contents. A row has the content that was written to it, shared or not."""

    rows = st.integers(0, NUM_ROWS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_ROWS, CAPACITY, PAGE, CAPACITY // PAGE)
        self.content: dict[int, object] = {}  # the content of each page
        self.expected: list[list[object]] = [[] for _ in range(NUM_ROWS)]  # the contents of each row's pages
        self.lengths = [0] * NUM_ROWS
        self.num_written = 0

    @rule(row=rows, count=st.integers(1, 40))
    def write(self, row: int, count: int) -> None:
        start, end = self.lengths[row], min(CAPACITY, self.lengths[row] + count)
        for source, target in self.table.reserve(row, start, end, 0):
            self.content[target] = self.content[source]
        for index in range(start // PAGE, -(-end // PAGE)):
            self.num_written += 1
            page = self.table.page_by_index(row)[index]
            self.content[page] = self.num_written
            self.expected[row][index:] = [self.num_written]
        self.lengths[row] = end

    @rule(row=rows, length=st.integers(0, CAPACITY))
    def truncate(self, row: int, length: int) -> None:
        self.lengths[row] = min(length, self.lengths[row])
        self.table.truncate(row, self.lengths[row])
        del self.expected[row][-(-self.lengths[row] // PAGE) :]

    @rule(row=rows, source=rows)
    def fork(self, row: int, source: int) -> None:
        if row != source:
            self.table.share(row, source, self.lengths[source])
            self.lengths[row], self.expected[row] = self.lengths[source], list(self.expected[source])

    @rule(row=rows)
    def remember(self, row: int) -> None:
        for index in range(self.lengths[row] // PAGE):
            self.table.remember(row, index, repr(self.expected[row][index]).encode())

    @precondition(lambda self: 0 in self.lengths)
    @rule(source=rows)
    def adopt(self, source: int) -> None:
        row = self.lengths.index(0)
        keys = {index: repr(each).encode() for index, each in enumerate(self.expected[source])}
        found = {}
        for index, key in keys.items():
            if self.table.pool.find(key) is None:
                break
            found[index] = key
        self.table.truncate(row, 0)
        self.table.adopt(row, found)
        self.lengths[row], self.expected[row] = len(found) * PAGE, self.expected[source][: len(found)]

    @invariant()
    def rows_hold_what_was_written(self) -> None:
        self.table.check_integrity()
        for row, expected in enumerate(self.expected):
            assert [self.content[self.table.page_by_index(row)[index]] for index in range(len(expected))] == expected
            assert self.table.holds(row, 0, self.lengths[row])


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
