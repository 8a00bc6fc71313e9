"""The rows of a context whose model has two sets of rope factors: for sequences up to a length, and for longer ones.

A row has the set that its length asks for, for all its tokens. One that passes the border, or is cut back behind it, is
read again with the other set: whatever way it came to its tokens, what follows is the same.
"""

from collections.abc import Callable, Sequence
from typing import final

_MANY = 1 << 30

Reread = Callable[[int, Sequence[int], bool], None]  # (row, its tokens, with the long set)


@final
class LongRows:
    """Keeps each row's tokens, which a cache cannot tell. `reread` replaces what the cache has of a row."""

    def __init__(self, num_rows: int, beyond: int, reread: Reread) -> None:
        self._beyond, self._reread = beyond, reread
        self._token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._brought: list[Sequence[int]] = [()] * num_rows
        self._is_long = [False] * num_rows
        self._least = [0] * num_rows

    def is_long(self, row: int) -> bool:
        return self._is_long[row]

    def max_drafts(self, row: int) -> int:
        """As many as stay on this side of the border, where the token before them does."""
        room = self._beyond - len(self._token_ids[row]) - 1
        return room if room >= 0 and not self._is_long[row] else _MANY

    def max_chain(self, rows: Sequence[int]) -> int:
        """How many tokens the rows can take together; 0 where they are on different sides of the border."""
        for row in rows:
            self.reach(row, len(self._token_ids[row]) + 1)
        if len({self._is_long[row] for row in rows}) > 1:
            return 0
        return _MANY if self._is_long[rows[0]] else min(self._beyond - len(self._token_ids[row]) for row in rows)

    def reach(self, row: int, length: int) -> None:
        """The row is about to be `length` tokens long."""
        is_long = max(length, self._least[row]) > self._beyond
        if is_long != self._is_long[row]:
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
        if length <= self._beyond and self._is_long[row]:
            self._use(row, is_long=False)

    def restore(self, row: int, token_ids: Sequence[int]) -> None:
        """What a cache that was filled by another context holds."""
        self._token_ids[row], self._is_long[row] = list(token_ids), len(token_ids) > self._beyond
        self._least[row] = 0

    def _use(self, row: int, *, is_long: bool) -> None:
        self._is_long[row] = is_long
        if self._token_ids[row]:
            self._reread(row, self._token_ids[row], is_long)
