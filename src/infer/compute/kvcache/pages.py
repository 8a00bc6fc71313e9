"""Bookkeeping of pages, slots and rows: integers only, no torch.

A page is free, cached, or held by one or more rows. A cached page is held by no row, but its content has a key and can
be found again. A row of `PageTable` holds at most its share of pages. A pool with fewer pages than the sum of all
shares can run out. `num_needed` returns the demand before `reserve`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import numpy as np

from infer.errors import InferError, OutOfPagesError


@final
class PagePool:
    """Pages with a count of their holders.

    Free pages are taken before cached pages, and among these the least recently used one first.
    """

    def __init__(self, num_pages: int) -> None:
        self._counts = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))  # a dict is an ordered set
        self._cached: dict[int, None] = {}
        self._page_by_key: dict[bytes, int] = {}
        self._key_by_page: dict[int, bytes] = {}
        self._written = set[int]()  # pages written since `forget_written`, which use the system's memory

    @property
    def num_available(self) -> int:
        """Number of pages that `take` can return: free and cached pages."""
        return len(self._free) + len(self._cached)

    def take(self, *wished: int) -> int:
        """Take a page that no row holds, and return it: the first free page in `wished`, if any is free.

        Raises OutOfPagesError if all pages are held.
        """
        page = next((page for page in wished if page in self._free), None)
        if page is None:
            page = next(iter(self._free or self._cached), None)
        if page is None:
            raise OutOfPagesError(f"all {len(self._counts)} pages of the cache are in use")
        self._free.pop(page, None)
        self._cached.pop(page, None)
        self.forget(page)
        self._counts[page] = 1
        self._written.add(page)
        return page

    def hold(self, page: int) -> None:
        """Add one holder to a held or cached page."""
        self._cached.pop(page, None)
        self._counts[page] += 1

    def release(self, page: int) -> None:
        self._counts[page] -= 1
        if self._counts[page] == 0:
            (self._cached if page in self._key_by_page else self._free)[page] = None

    def forget_written(self) -> list[int]:
        """Return the free pages that were handed out since the last call, in ascending order."""
        pages = sorted(self._written & self._free.keys())
        self._written.difference_update(pages)
        return pages

    def is_writable(self, page: int) -> bool:
        """Return True if a held page has exactly one holder and cannot be found by a key."""
        return self._counts[page] == 1 and page not in self._key_by_page

    def is_shared(self, page: int) -> bool:
        return self._counts[page] > 1

    def remember(self, page: int, key: bytes) -> None:
        """Store the key of a held page's content, unless the page already has a key or another page has this key."""
        if key not in self._page_by_key and page not in self._key_by_page:
            self._page_by_key[key], self._key_by_page[page] = page, key

    def find(self, key: bytes) -> int | None:
        return self._page_by_key.get(key)

    def num_unheld(self, keys: Iterable[bytes]) -> int:
        """Return the number of keys without a held page."""
        pages = [self._page_by_key.get(key) for key in keys]
        return sum(page is None or page in self._cached for page in pages)

    def touch(self, key: bytes) -> bool:
        """Make a cached page the most recently used one. Return True if there is a page with this key."""
        page = self._page_by_key.get(key)
        if page in self._cached:
            del self._cached[page]
            self._cached[page] = None
        return page is not None

    def forget(self, page: int) -> None:
        """Remove the page's key, because its content is about to change."""
        if (key := self._key_by_page.pop(page, None)) is not None:
            del self._page_by_key[key]

    def check_integrity(self, holders: Sequence[int]) -> None:
        """Raise AssertionError unless every page has exactly one state and the holders that `holders` lists."""
        counts = [0] * len(self._counts)
        for page in holders:
            counts[page] += 1
        assert counts == self._counts, "the holders of a page are not the counted ones"
        held = {page for page, count in enumerate(counts) if count}
        states = [*self._free, *self._cached, *held]
        assert sorted(states) == list(range(len(counts))), "a page is in two states or in none"
        assert self._page_by_key == {key: page for page, key in self._key_by_page.items()}, "two pages have one key"
        assert all(page in self._key_by_page for page in self._cached), "a cached page without a key"
        assert not any(page in self._key_by_page for page in self._free), "a free page with a key"


@final
class PageTable:
    """The pages of every row, by the index of the page in the row. Kernels read `table`.

    A row keeps its first `num_fixed` pages. Of the others it holds the newest, as many as its share allows. A row
    prefers the pages of its own share of the pool, in order. The pages after the fixed ones form a ring. `on_take` is
    called with each page that is taken for writing; the page still has its old content.

    With `num_recent`, the data of one call must last only in the active page and in the last `num_recent` pages. The
    pages between them reuse the memory of these in turn, and the row does not hold them.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        page_tokens: int,
        pages_per_row: int,
        num_fixed: int = 0,
        *,
        pool_pages: int | None = None,
        num_recent: int | None = None,
    ) -> None:
        self.page_tokens, self.pages_per_row, self._num_fixed = page_tokens, pages_per_row, num_fixed
        self._num_recent = num_recent
        self.on_take: Callable[[int], None] = lambda page: None
        self.table = np.zeros((num_rows, num_pages(num_slots, page_tokens)), np.int64)
        self.num_pages = num_rows * pages_per_row if pool_pages is None else pool_pages  # of the pool
        self.reset()

    def reset(self) -> None:
        """Release all pages of all rows."""
        self.pool = PagePool(self.num_pages)
        self._held: list[dict[int, int]] = [{} for _ in range(len(self.table))]

    def reserve(self, row: int, start: int, end: int, first_seen: int) -> list[tuple[int, int]]:
        """Make slots [start, end) writable for the row. Return (from, to) for each page to copy first.

        Slots before `first_seen` will not be read again, except the fixed ones. Their pages are freed when the share or
        the pool is used up. Raises OutOfPagesError if the pool has fewer pages than `num_needed`; then some pages were
        taken.
        """
        held, copies, lasting = self._held[row], [], self._lasting(start, end)
        if self._num_recent is not None:  # one page before the last token's page stays, for undoing tokens
            self.drop_unseen(row, min(first_seen, start - start % self.page_tokens - self.page_tokens))
        for index in lasting:
            page = held.get(index)
            if page is not None and not self.pool.is_shared(page):
                self.pool.forget(page)
                continue
            self._make_room(row, first_seen, num_new=int(page is None))
            held[index] = self.table[row, index] = self._take(row, index)
            if page is not None:
                copies.append((page, held[index]))
                self.pool.release(page)
        for index in range(start // self.page_tokens, num_pages(end, self.page_tokens)):
            if index not in held:
                assert self._num_recent is not None
                again = lasting[-1] - (lasting[-1] - index) % self._num_recent
                self.table[row, index] = held[again]
        return copies

    def _lasting(self, start: int, end: int) -> Sequence[int]:
        """Return the indices of the pages in which the data of slots [start, end) lasts."""
        first, after = start // self.page_tokens, num_pages(end, self.page_tokens)
        if self._num_recent is None or after - first <= self._num_recent:
            return range(first, after)
        recent = range(after - self._num_recent, after)
        return [first, *recent] if start % self.page_tokens else recent

    def num_needed(self, row: int, start: int, end: int, first_seen: int) -> int:
        """Return the smallest number of free pages with which `reserve` succeeds if the row frees all unseen pages."""
        held, indices = self._held[row], self._lasting(start, end)
        num_new = sum(index not in held for index in indices)
        num_copies = sum(index in held and self.pool.is_shared(held[index]) for index in indices)
        return max(0, num_new + num_copies - self._num_exclusive(row, self._unseen(row, first_seen)))

    def num_missing(self, row: int, count: int) -> int:
        """Return the number of pages that `hold_new` takes for `count` indices, minus those that the row would free."""
        return max(0, count - self._num_exclusive(row, self._held[row]))

    def _num_exclusive(self, row: int, indices: Iterable[int]) -> int:
        """Return how many of these pages only this row holds."""
        return sum(not self.pool.is_shared(self._held[row][index]) for index in indices)

    def is_ready(self, row: int, start: int, end: int) -> bool:
        """Return True if slots [start, end) can be written in place.

        Their pages must belong to this row only, and must not have a key.
        """
        held, is_writable, page_tokens = self._held[row], self.pool.is_writable, self.page_tokens
        for index in range(start // page_tokens, (end - 1) // page_tokens + 1):
            page = held.get(index)
            if page is None or not is_writable(page):
                return False
        return True

    def _take(self, row: int, index: int) -> int:
        ring = self.pages_per_row - self._num_fixed
        if index >= self.pages_per_row:
            index = self._num_fixed + (index - self._num_fixed) % ring
        before = self._held[row].get(index - 1, -2)
        page = self.pool.take(row * self.pages_per_row + index, before + 1)
        self.on_take(page)
        return page

    def _make_room(self, row: int, first_seen: int, *, num_new: int) -> None:
        """Free the oldest pages that are no longer visible, while the share or the pool is used up."""
        for index in sorted(self._unseen(row, first_seen)):
            if len(self._held[row]) + num_new <= self.pages_per_row and self.pool.num_available:
                return
            self._drop(row, index)
        if len(self._held[row]) + num_new > self.pages_per_row:
            raise InferError(f"a row needs more than its {self.pages_per_row} pages: this is a fault of infer")

    def _unseen(self, row: int, first_seen: int) -> list[int]:
        """Return the indices of the row's pages before slot `first_seen`, without the fixed pages."""
        return [index for index in self._held[row] if self._num_fixed <= index < first_seen // self.page_tokens]

    def _drop(self, row: int, index: int) -> None:
        self.pool.release(self._held[row].pop(index))

    def drop_unseen(self, row: int, first_seen: int) -> None:
        """Free the row's pages before slot `first_seen`, except the fixed pages."""
        for index in self._unseen(row, first_seen):
            self._drop(row, index)

    def truncate(self, row: int, num_slots: int) -> None:
        kept = num_pages(num_slots, self.page_tokens)
        for index in [index for index in self._held[row] if index >= kept]:
            self._drop(row, index)

    def holds(self, row: int, first: int, end: int) -> bool:
        """Return True if the row has all slots [first, end)."""
        indices = range(first // self.page_tokens, num_pages(end, self.page_tokens))
        return first >= end or all(index in self._held[row] for index in indices)

    def page_by_index(self, row: int, num_slots: int | None = None) -> dict[int, int]:
        """Return the row's pages of its first `num_slots` slots, by index. None: all pages."""
        if num_slots is None:
            return dict(self._held[row])
        kept = num_pages(num_slots, self.page_tokens)
        return {index: page for index, page in self._held[row].items() if index < kept}

    def indices(self, slots: Iterable[int]) -> list[int]:
        """Return the indices of the pages that contain these slots, in ascending order."""
        return sorted({slot // self.page_tokens for slot in slots})

    def hold_new(self, row: int, indices: Iterable[int]) -> None:
        """Take new pages with these indices for an empty row."""
        for index in indices:
            self._held[row][index] = self.table[row, index] = self._take(row, index)

    def share(self, row: int, source_row: int, num_slots: int) -> None:
        """Replace a row's pages by the pages of another row's first slots. The first row that writes gets a copy."""
        self.truncate(row, 0)
        for index, page in self.page_by_index(source_row, num_slots).items():
            self._hold(row, index, page)

    def remember(self, row: int, index: int, key: bytes) -> None:
        if (page := self._held[row].get(index)) is not None:
            self.pool.remember(page, key)

    def adopt(self, row: int, key_by_index: Mapping[int, bytes]) -> None:
        """Add pages that `PagePool.find` has found to an empty row."""
        for index, key in key_by_index.items():
            page = self.pool.find(key)
            assert page is not None
            self._hold(row, index, page)

    def _hold(self, row: int, index: int, page: int) -> None:
        self.pool.hold(page)
        self._held[row][index] = self.table[row, index] = page

    def check_integrity(self) -> None:
        self.pool.check_integrity([page for held in self._held for page in held.values()])
        for row, held in enumerate(self._held):
            assert len(held) <= self.pages_per_row, "a row holds more than its share"
            assert len(set(held.values())) == len(held), "a row holds a page twice"
            assert all(self.table[row, index] == page for index, page in held.items()), "the table differs"


def num_pages(num_slots: int, page_tokens: int) -> int:
    return -(-num_slots // page_tokens)
