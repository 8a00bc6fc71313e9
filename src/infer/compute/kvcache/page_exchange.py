"""Pages of prompts that a cache loads from a store and gives to it. For the thread that owns the cache.

A page from a store becomes a cached page that no row holds. So a row adopts it like the pages of other rows, or it is
evicted like them.
"""

from collections import deque
from collections.abc import Sequence, Set
from typing import final

from infer.compute.kvcache.page_rows import possible_prefixes
from infer.compute.kvcache.paged import PagedCache
from infer.compute.kvcache.prefix_store import PageName
from infer.errors import OutOfPagesError

_MOST_NEW = 4096  # most pages that wait to be stored


@final
class PageExchange:
    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.new_pages = deque[bytes](maxlen=_MOST_NEW)  # keys of computed pages, which another thread takes
        cache.on_remember = self.new_pages.append

    @property
    def num_groups(self) -> int:
        return len(self._cache.groups)

    def page_bytes(self, group: int) -> int:
        """Return the bytes of a page of a group's layers."""
        return self._cache.memory.page_bytes(self._cache.groups[group])

    def num_in_memory(self, keys: Sequence[bytes]) -> int:
        """Return how many of a prompt's first pages a row could adopt now. `keys` are those pages' keys."""
        is_there = [rows.has_page for rows in self._cache.groups]
        return next((count for count, _ in possible_prefixes(self._cache.groups, keys, is_there)), 0)

    def missing(self, keys: Sequence[bytes], stored: Set[PageName]) -> list[PageName]:
        """Return the stored pages to `put`, so that a row can adopt as much as possible of a prompt with these keys.

        They are in the order of the text, and there is room for all of them. The pages in memory become the most
        recently used ones.
        """
        groups = self._cache.groups

        def is_there(group: int, key: bytes) -> bool:
            return groups[group].has_page(key) or PageName(group, key) in stored

        pools = [rows.table.pool for rows in groups]
        any_place = [lambda key, group=group: is_there(group, key) for group in range(len(groups))]
        for _, needed in possible_prefixes(groups, keys, any_place):
            pairs = list(zip(pools, needed, strict=True))
            if all(pool.num_unheld(own.values()) <= pool.num_available for pool, own in pairs):
                wanted = [
                    (index, PageName(group, key))
                    for group, (pool, own) in enumerate(pairs)
                    for index, key in own.items()
                    if not pool.touch(key)
                ]
                return [name for _, name in sorted(wanted)]
        return []

    def put(self, name: PageName, content: memoryview) -> bool:
        """Make a page's content a cached page, unless it is in memory. Return False if there is no room."""
        rows = self._cache.groups[name.group]
        pool = rows.table.pool
        if pool.touch(name.key):
            return True
        try:
            page = pool.take()
        except OutOfPagesError:
            return False
        self._cache.memory.write_page(rows, page, content)
        pool.remember(page, name.key)
        pool.release(page)
        return True

    def copy(self, name: PageName) -> bytes | None:
        """Return a copy of a page's content, or None if it is no longer in memory."""
        rows = self._cache.groups[name.group]
        page = rows.table.pool.find(name.key)
        return None if page is None else self._cache.memory.read_page(rows, page)
