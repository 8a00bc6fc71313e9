"""The rows of a context whose model has two sets of rope factors: for sequences up to a length, and for longer ones.

A row has the set that its length asks for, for all its tokens. One that passes the border, or is cut back behind it, is
read again with the other set: whatever way it came to its tokens, what follows is the same.
"""

from collections.abc import Callable, Sequence
from typing import final

from infer.kvcache.paged import PagedCache

_MANY = 1 << 30

Reread = Callable[[int, Sequence[int]], None]  # (row, its tokens) → the cache of the emptied row


@final
class LongRows:
    """Keeps each row's tokens, which a cache cannot tell. `reread` runs them again in a row that was emptied."""

    def __init__(self, cache: PagedCache, border: int, reread: Reread) -> None:
        self._cache, self._border, self._reread = cache, border, reread
        self._token_ids: list[list[int]] = [[] for _ in cache.lengths]
        self._brought: list[Sequence[int]] = [()] * len(cache.lengths)
        self._least = [0] * len(cache.lengths)

    def max_drafts(self, row: int) -> int:
        """As many as stay on this side of the border, where the token before them does."""
        room = self._border - len(self._token_ids[row]) - 1
        return room if room >= 0 and not self._cache.is_long(row) else _MANY

    def max_chain(self, rows: Sequence[int]) -> int:
        """How many tokens each row can take before one of them passes the border."""
        for row in rows:
            self.reach(row, len(self._token_ids[row]) + 1)
        rooms = [self._border - len(self._token_ids[row]) for row in rows if not self._cache.is_long(row)]
        return min(rooms, default=_MANY)

    def reach(self, row: int, length: int) -> None:
        """The row is about to be `length` tokens long."""
        is_long = max(length, self._least[row]) > self._border
        if is_long != self._cache.is_long(row):
            self._use(row, is_long=is_long)

    def expect(self, row: int, length: int) -> None:
        """Until it is cut, the row counts as being so long at least: what is asked of its first tokens' logits is what
        they are in the whole."""
        self._least[row] = length

    def bring(self, row: int, token_ids: Sequence[int]) -> None:
        """What a step puts behind the row's tokens, provisionally."""
        self._brought[row] = token_ids

    def keep(self, row: int, count: int) -> None:
        self._token_ids[row] += self._brought[row][:count]
        self._brought[row] = ()

    def cut(self, row: int, length: int) -> None:
        del self._token_ids[row][length:]
        self._least[row] = 0
        if length <= self._border and self._cache.is_long(row):
            self._use(row, is_long=False)

    def restore(self, row: int, token_ids: Sequence[int]) -> None:
        """What a row holds that was copied or imported into the cache."""
        self._token_ids[row], self._least[row] = list(token_ids), 0

    def _use(self, row: int, *, is_long: bool) -> None:
        self._cache.truncate(row, 0)
        self._cache.set_rope(row, is_long=is_long)
        self._reread(row, self._token_ids[row])
