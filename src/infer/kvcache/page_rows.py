"""What the rows of one group see and hold, in integers: the rule of visibility and the pages that it needs.

A token's slot is its position less its row's shift. From slot t the slots s ≤ t are seen with s < sinks or
s > t − window; all of them where the window is 0. A row that was compressed holds what was kept of its prompt in its
first slots, and goes on after them only.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Self, final

import numpy as np

from infer.kvcache.groups import Group
from infer.kvcache.pages import PageTable

_KEY_BYTES = 16


class RowState(NamedTuple):
    """What decides what a row's tokens see. `first` is the lowest slot that the next token may have: of a row that was
    compressed, or loaded with no more than its last tokens see.
    """

    shift: int
    sinks: int
    window: int
    first: int

    def seen(self, slot: int) -> tuple[range, range]:
        """What stands before a token at this slot and is seen by it: sinks, and the window."""
        first = max(0, slot + 1 - self.window) if self.window else 0
        return range(min(self.sinks, first)), range(first, slot)

    def seen_from(self, slot: int, end: int) -> list[int]:
        """The slots before `end` that are seen from `slot` or from a later one."""
        sinks, window = self.seen(slot)
        return [*sinks, *range(window.start, end)]

    def cut(self, slot: int) -> Self:
        """Of a copy of the row that holds what tokens from `slot` on see, and nothing else."""
        return self if self.seen(slot)[1].start == 0 else self._replace(first=max(self.first, slot))


@final
class GroupRows:
    """`version` changes with every change of what kernels read: the table, shifts, sinks and windows."""

    def __init__(self, group: Group, num_rows: int, num_slots: int, page_tokens: int, pool_pages: int) -> None:
        self.group, self.version = group, 0
        shape = (num_rows, num_slots, page_tokens, group.pages_per_row, group.num_fixed)
        self.table = PageTable(*shape, pool_pages=pool_pages)
        self.shifts, self.sinks, self.windows, self._firsts = np.zeros((4, num_rows), np.int64)
        for row in range(num_rows):
            self.clear(row)

    def reset(self) -> None:
        """As new, whatever a change that was left midway has made of it."""
        self.table.reset()
        for row in range(len(self.shifts)):
            self.clear(row)

    def clear(self, row: int) -> None:
        self.table.truncate(row, 0)
        self.restore(row, self.state_from_start(is_short=False))

    def state_from_start(self, *, is_short: bool) -> RowState:
        """Of a row that sees all its policy lets it see, or that was short of memory when it grew."""
        if self.group.is_late and not is_short:
            return RowState(shift=0, sinks=0, window=0, first=0)
        return RowState(shift=0, sinks=self.group.sinks, window=self._window, first=0)

    @property
    def _window(self) -> int:
        return self.group.window or 0

    def state(self, row: int) -> RowState:
        columns = (self.shifts, self.sinks, self.windows, self._firsts)
        return RowState(*(int(column[row]) for column in columns))

    def restore(self, row: int, state: RowState) -> None:
        self.shifts[row], self.sinks[row], self.windows[row], self._firsts[row] = state
        self.version += 1

    def slot_of(self, row: int, position: int) -> int:
        return position - int(self.shifts.item(row))

    def slide(self, row: int, length: int) -> None:
        """From now on tokens after `length` slots see sinks and window only: other pages are given up."""
        self.restore(row, self.state_from_start(is_short=True))
        self.table.drop_unseen(row, self._first_seen(row, length))

    def _first_seen(self, row: int, slot: int) -> int:
        """Of the window of a token at this slot."""
        return self.state(row).seen(slot)[1].start

    def can_compress(self, row: int) -> bool:
        """Whether the row still sees all of its prompt and is to see less after it."""
        return self.group.is_late and not self.windows[row]

    def compress(self, row: int, length: int, num_kept: int) -> None:
        """The row's `length` slots are now `num_kept`, and what comes after them slides."""
        self.table.truncate(row, num_kept)
        shift = self.shifts.item(row) + length - num_kept
        self.restore(row, RowState(shift, self.group.sinks, self._window, num_kept))

    def reserve(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """`PageTable.reserve`, for tokens with the slots [start, end)."""
        if self.table.is_ready(row, start, end):
            return []
        self.version += 1
        return self.table.reserve(row, start, end, self._first_seen(row, start))

    def is_ready(self, row: int, slot: int, count: int) -> bool:
        return self.table.is_ready(row, slot, slot + count)

    def pages_needed(self, row: int, start: int, end: int, *, is_scarce: bool) -> int:
        """`PageTable.num_needed`, for tokens with the slots [start, end)."""
        if self.table.is_ready(row, start, end):
            return 0
        return self.table.num_needed(row, start, end, self._first_seen(row, start), is_scarce=is_scarce)

    def can_continue(self, row: int, slot: int) -> bool:
        """Whether all that a token at this slot sees is there."""
        return slot >= int(self._firsts[row]) and all(
            self.table.holds(row, part.start, part.stop) for part in self.state(row).seen(slot)
        )

    def num_found(self, keys: Sequence[bytes]) -> int:
        """How many of a row's first pages may be there to adopt: no more are, but windows may lack some of them."""
        if self.group.window is not None:
            return len(keys)
        return next((index for index, key in enumerate(keys) if self.table.pool.find(key) is None), len(keys))

    def has_pages(self, row: int, slot: int, keys: Sequence[bytes]) -> dict[int, bytes] | None:
        """The keys of the pages that an empty row needs to go on at a slot where a page begins, if all are found."""
        page_tokens, needed = self.table.page_tokens, {}
        for part in self.state(row).seen(slot):
            for index in range(part.start // page_tokens, -(-part.stop // page_tokens) if part else 0):
                if self.table.pool.find(keys[index]) is None:
                    return None
                needed[index] = keys[index]
        return needed

    def share(self, row: int, source_row: int, length: int) -> None:
        """Replace a row by the first `length` positions of another: pages are shared until one of the two writes."""
        state = self.state(source_row)
        self.table.share(row, source_row, length - state.shift)
        self.restore(row, state)


def page_keys(
    token_ids: Sequence[int], page_tokens: int, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """A key for each whole page of tokens, of it and of all before it, and of the salt; `known` are the first keys."""
    keys = list(known)
    for start in range(len(keys) * page_tokens, len(token_ids) - page_tokens + 1, page_tokens):
        ids = np.array(token_ids[start : start + page_tokens], np.int64).tobytes()
        keys.append(blake2b((keys[-1] if keys else salt) + ids, digest_size=_KEY_BYTES).digest())
    return keys
