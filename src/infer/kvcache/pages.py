"""Which page holds which slots of which row: integers only, no torch.

A page is free, or cached (nobody holds it, but its content has a key and may be asked for again), or held by one or
more rows. A row of `PageTable` holds at most its share of pages. A pool of fewer than all rows' shares can run out:
`num_needed` tells before `reserve`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import numpy as np

from infer.errors import InferError, OutOfPagesError


@final
class PagePool:
    """Counts who holds a page. Free ones are given before cached ones, of these the longest unused first."""

    def __init__(self, num_pages: int) -> None:
        self._counts = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))  # a dict is a set in order
        self._cached: dict[int, None] = {}
        self._page_by_key: dict[bytes, int] = {}
        self._key_by_page: dict[int, bytes] = {}
        self._written = set[int]()  # since `forget_written`: their memory is taken from the system

    @property
    def num_pages(self) -> int:
        return len(self._counts)

    @property
    def num_held(self) -> int:
        return len(self._counts) - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    def take(self, *wished: int) -> int:
        """A page that nobody holds: the first of the wished that is free, if any is. Raises OutOfPagesError."""
        page = next((page for page in wished if page in self._free), None)
        if page is None:
            page = next(iter(self._free or self._cached), None)
        if page is None:
            raise OutOfPagesError(f"all {len(self._counts)} pages of the cache are held")
        self._free.pop(page, None)
        self._cached.pop(page, None)
        self.forget(page)
        self._counts[page] = 1
        self._written.add(page)
        return page

    def hold(self, page: int) -> None:
        """One more holder, of a page that is held or cached."""
        self._cached.pop(page, None)
        self._counts[page] += 1

    def release(self, page: int) -> None:
        self._counts[page] -= 1
        if self._counts[page] == 0:
            (self._cached if page in self._key_by_page else self._free)[page] = None

    def forget_written(self) -> list[int]:
        """The free pages that were handed out since the last call, in ascending order."""
        pages = sorted(self._written & self._free.keys())
        self._written.difference_update(pages)
        return pages

    def is_writable(self, page: int) -> bool:
        """Of a held page: whether only one holds it, and nobody else finds it."""
        return self._counts[page] == 1 and page not in self._key_by_page

    def is_shared(self, page: int) -> bool:
        return self._counts[page] > 1

    def remember(self, page: int, key: bytes) -> None:
        """What a held page contains, unless another page is known to contain it."""
        if key not in self._page_by_key and page not in self._key_by_page:
            self._page_by_key[key], self._key_by_page[page] = page, key

    def find(self, key: bytes) -> int | None:
        return self._page_by_key.get(key)

    def forget(self, page: int) -> None:
        """The content is about to change."""
        if (key := self._key_by_page.pop(page, None)) is not None:
            del self._page_by_key[key]

    def check_integrity(self, holders: Sequence[int]) -> None:
        """Raises AssertionError unless every page is in exactly one state and held by whom `holders` lists."""
        counts = [0] * len(self._counts)
        for page in holders:
            counts[page] += 1
        assert counts == self._counts, "a page is held by others than those who count"
        held = {page for page, count in enumerate(counts) if count}
        states = [*self._free, *self._cached, *held]
        assert sorted(states) == list(range(len(counts))), "a page is in two states or in none"
        assert self._page_by_key == {key: page for page, key in self._key_by_page.items()}, "two pages have one key"
        assert all(page in self._key_by_page for page in self._cached), "a cached page without a key"
        assert not any(page in self._key_by_page for page in self._free), "a free page with a key"


@final
class PageTable:
    """The pages of every row, by the index of the page in the row. `table` is what kernels read.

    The first `num_fixed` pages of a row stay; of the others it holds the newest, as many as its share allows. Preferred
    pages of a row: its own share of the pool, one after the other, those after the fixed in a ring. `on_take` is told
    of each page that is handed out to be written, whose content is then what it was before.
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
    ) -> None:
        self.page_tokens, self.pages_per_row, self._num_fixed = page_tokens, pages_per_row, num_fixed
        self.on_take: Callable[[int], None] = lambda page: None
        self.table = np.zeros((num_rows, num_pages(num_slots, page_tokens)), np.int64)
        self._num_pages = num_rows * pages_per_row if pool_pages is None else pool_pages
        self.reset()

    def reset(self) -> None:
        """No row holds a page."""
        self.pool = PagePool(self._num_pages)
        self._held: list[dict[int, int]] = [{} for _ in range(len(self.table))]

    def reserve(self, row: int, start: int, end: int, first_seen: int) -> list[tuple[int, int]]:
        """Make slots [start, end) the row's own, to be written: (from, to) of the pages to be copied before.

        No slot before `first_seen` but the fixed ones will be read again: their pages are given up where the share or
        the pool is used up. Raises OutOfPagesError, a part of the pages taken, where the pool has fewer than
        `num_needed`.
        """
        held, copies = self._held[row], []
        for index in range(start // self.page_tokens, num_pages(end, self.page_tokens)):
            page = held.get(index)
            if page is not None and not self.pool.is_shared(page):
                self.pool.forget(page)
                continue
            self._make_room(row, first_seen, num_new=int(page is None))
            held[index] = self.table[row, index] = self._take(row, index)
            if page is not None:
                copies.append((page, held[index]))
                self.pool.release(page)
        return copies

    def num_needed(self, row: int, start: int, end: int, first_seen: int, *, is_scarce: bool) -> int:
        """How many pages `reserve` takes from the pool, less those that the row gives up for them.

        With `is_scarce` the row gives up all that are not seen: the fewest pages with which `reserve` succeeds.
        """
        held = self._held[row]
        indices = range(start // self.page_tokens, num_pages(end, self.page_tokens))
        num_new = sum(index not in held for index in indices)
        num_copies = sum(index in held and self.pool.is_shared(held[index]) for index in indices)
        unseen = sorted(self._unseen(row, first_seen))
        dropped = unseen if is_scarce else unseen[: max(0, len(held) + num_new - self.pages_per_row)]
        return max(0, num_new + num_copies - self._num_exclusive(row, dropped))

    def num_missing(self, row: int, count: int) -> int:
        """How many pages `hold_new` of so many takes from the pool, beyond those that the row gives up when emptied."""
        return max(0, count - self._num_exclusive(row, self._held[row]))

    def _num_exclusive(self, row: int, indices: Iterable[int]) -> int:
        """How many of these pages of the row no other row holds."""
        return sum(not self.pool.is_shared(self._held[row][index]) for index in indices)

    def is_ready(self, row: int, start: int, end: int) -> bool:
        """Whether slots [start, end) may be written as they are: the row's own, and not to be found by a key."""
        held, pool = self._held[row], self.pool
        for index in range(start // self.page_tokens, num_pages(end, self.page_tokens)):
            page = held.get(index)
            if page is None or not pool.is_writable(page):
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
        """Give up pages that are not seen any more, the oldest first, where the share or the pool is used up."""
        for index in sorted(self._unseen(row, first_seen)):
            if len(self._held[row]) + num_new <= self.pages_per_row and self.pool.num_available:
                return
            self._drop(row, index)
        if len(self._held[row]) + num_new > self.pages_per_row:
            raise InferError(f"a row needs more than its {self.pages_per_row} pages: this is a fault of infer")

    def _unseen(self, row: int, first_seen: int) -> list[int]:
        """The row's pages before slot `first_seen` but the fixed ones."""
        return [index for index in self._held[row] if self._num_fixed <= index < first_seen // self.page_tokens]

    def _drop(self, row: int, index: int) -> None:
        self.pool.release(self._held[row].pop(index))

    def drop_unseen(self, row: int, first_seen: int) -> None:
        """Give up the pages before slot `first_seen` but the fixed ones."""
        for index in self._unseen(row, first_seen):
            self._drop(row, index)

    def truncate(self, row: int, num_slots: int) -> None:
        kept = num_pages(num_slots, self.page_tokens)
        for index in [index for index in self._held[row] if index >= kept]:
            self._drop(row, index)

    def holds(self, row: int, first: int, end: int) -> bool:
        """Whether the slots [first, end) are all there."""
        indices = range(first // self.page_tokens, num_pages(end, self.page_tokens))
        return first >= end or all(index in self._held[row] for index in indices)

    def page_by_index(self, row: int, num_slots: int | None = None) -> dict[int, int]:
        """What the row holds of its first slots; None: of all."""
        if num_slots is None:
            return dict(self._held[row])
        kept = num_pages(num_slots, self.page_tokens)
        return {index: page for index, page in self._held[row].items() if index < kept}

    def indices(self, slots: Iterable[int]) -> list[int]:
        """Of the pages that slots lie in."""
        return sorted({slot // self.page_tokens for slot in slots})

    def hold_new(self, row: int, indices: Iterable[int]) -> None:
        """Pages with these indices for an empty row."""
        for index in indices:
            self._held[row][index] = self.table[row, index] = self._take(row, index)

    def share(self, row: int, source_row: int, num_slots: int) -> None:
        """Replace a row's pages by those of another's first slots; who writes to one first gets a copy."""
        self.truncate(row, 0)
        for index, page in self.page_by_index(source_row, num_slots).items():
            self._hold(row, index, page)

    def remember(self, row: int, index: int, key: bytes) -> None:
        if (page := self._held[row].get(index)) is not None:
            self.pool.remember(page, key)

    def adopt(self, row: int, key_by_index: Mapping[int, bytes]) -> None:
        """Hold pages that `pool.find` has found, in an empty row."""
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
            assert all(self.table[row, index] == page for index, page in held.items()), "the table tells otherwise"


def num_pages(num_slots: int, page_tokens: int) -> int:
    return -(-num_slots // page_tokens)
