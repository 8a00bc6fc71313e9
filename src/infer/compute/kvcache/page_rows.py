"""The rows of one group in integers: the rule of visibility, and the pages that it needs.

A token's slot is its position minus its row's shift. From slot t, a slot s ≤ t is visible if s < sinks or s > t −
window. If the window is 0, all slots s ≤ t are visible. A window of −n means chunks of n slots: s ≥ t − t mod n is
visible. A compressed row has the kept part of its prompt in its first slots. It can continue only after these slots.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, Self, final

import numpy as np

from infer.compute.kvcache.groups import PageGroup
from infer.compute.kvcache.pages import PageTable
from infer.compute.operands.limits import RECENT_PAGES

_KEY_BYTES = 16
IsThere = Callable[[bytes], bool]  # called with a page's key


class RowState(NamedTuple):
    """The rule of visibility of a row's tokens.

    `first` is the lowest slot that the next token may have. It is above 0 for a row that was compressed, and for a row
    that was loaded with only the slots that its last tokens see.
    """

    shift: int
    sinks: int
    window: int
    first: int

    def seen(self, slot: int, state_tokens: int = 0) -> tuple[range, range]:
        """Return the slots before `slot` that a token at `slot` sees: the sinks, and the window.

        With `state_tokens`, the window reaches back to the last state before the slot. A state follows every
        `state_tokens`.
        """
        if self.window < 0:
            first = slot - slot % -self.window
        else:
            first = max(0, slot + 1 - self.window) if self.window else 0
        if state_tokens:
            first = min(first, max(0, slot - 1) // state_tokens * state_tokens)
        return range(min(self.sinks, first)), range(first, slot)

    def seen_from(self, slot: int, end: int, state_tokens: int = 0) -> list[int]:
        """Return the slots before `end` that are visible from `slot` or from any later slot."""
        sinks, window = self.seen(slot, state_tokens)
        return [*sinks, *range(window.start, end)]

    def cut(self, slot: int, state_tokens: int = 0) -> Self:
        """Return the state of a copy of the row that has only the slots visible to tokens from `slot` on."""
        return self if self.seen(slot, state_tokens)[1].start == 0 else self._replace(first=max(self.first, slot))


@final
class GroupRows:
    """Page table and visibility rules of the rows of one group.

    `changed` are the rows whose pages changed since their tables were published. `has_new_rules` is True if shifts,
    sinks or windows changed.
    """

    def __init__(self, group: PageGroup, num_rows: int, num_slots: int, page_tokens: int, pool_pages: int) -> None:
        self.group, self.changed, self.has_new_rules = group, set[int](), False
        shape = (num_rows, num_slots, page_tokens, group.pages_per_row, group.num_fixed)
        self.table = PageTable(*shape, pool_pages=pool_pages, num_recent=RECENT_PAGES if group.is_recurrent else None)
        self.state_tokens = page_tokens if group.has_states else 0
        self._window = -group.chunk if group.chunk is not None else group.window or 0
        self._rules = np.zeros((4, num_rows), np.int64)  # the fields of the rows' states
        self.shifts, self.sinks, self.windows, self._firsts = self._rules
        for row in range(num_rows):
            self.clear(row)

    def reset(self) -> None:
        """Empty all rows, even after an interrupted change."""
        self.table.reset()
        for row in range(len(self.shifts)):
            self.clear(row)

    def clear(self, row: int) -> None:
        self.table.truncate(row, 0)
        self.restore(row, self.state_from_start(is_short=False))

    def state_from_start(self, *, is_short: bool) -> RowState:
        """Return the state of an empty row.

        Without `is_short`, the row sees everything that its policy allows. With it, the row is one that was short of
        memory when it grew.
        """
        if self.group.is_late and not is_short:
            return RowState(shift=0, sinks=0, window=0, first=0)
        return RowState(shift=0, sinks=self.group.sinks, window=self._window, first=0)

    def state(self, row: int) -> RowState:
        return RowState(*self._rules[:, row].tolist())

    def restore(self, row: int, state: RowState) -> None:
        self._rules[:, row] = state
        self.changed.add(row)
        self.has_new_rules = True

    def slot_of(self, row: int, position: int) -> int:
        return position - int(self.shifts.item(row))

    def slide(self, row: int, length: int) -> None:
        """From now on, show tokens after `length` slots only sinks and window, and free the other pages."""
        self.restore(row, self.state_from_start(is_short=True))
        self.table.drop_unseen(row, self.seen(row, length)[1].start)

    def seen(self, row: int, slot: int) -> tuple[range, range]:
        """Return the slots before `slot` that a token of the row at `slot` sees: the sinks, and the window."""
        return self.state(row).seen(slot, self.state_tokens)

    def can_compress(self, row: int) -> bool:
        """Return True if the row still sees all of its prompt, but its policy will restrict it later."""
        return self.group.is_late and not self.windows[row]

    def compress(self, row: int, length: int, num_kept: int) -> None:
        """Reduce the row's `length` slots to the first `num_kept`. Later tokens use the sliding window."""
        self.table.truncate(row, num_kept)
        shift = self.shifts.item(row) + length - num_kept
        self.restore(row, RowState(shift, self.group.sinks, self._window, num_kept))

    def reserve(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """Call `PageTable.reserve` for tokens with the slots [start, end), and return the copies to make."""
        if self.table.is_ready(row, start, end):
            return []
        self.changed.add(row)
        return self.table.reserve(row, start, end, self.seen(row, start)[1].start)

    def is_ready(self, row: int, position: int, count: int) -> bool:
        return self.table.is_ready(row, slot := position - self.shifts.item(row), slot + count)

    def pages_needed(self, row: int, start: int, end: int) -> int:
        """Return `PageTable.num_needed` for tokens with the slots [start, end)."""
        if self.table.is_ready(row, start, end):
            return 0
        return self.table.num_needed(row, start, end, self.seen(row, start)[1].start)

    def can_continue(self, row: int, slot: int) -> bool:
        """Return True if the row has every slot that a token at this slot sees."""
        return slot >= int(self._firsts[row]) and all(
            self.table.holds(row, part.start, part.stop) for part in self.seen(row, slot)
        )

    @property
    def sees_all(self) -> bool:
        """True if a new row sees all slots before its own."""
        return not self.state_from_start(is_short=False).window

    def num_found(self, keys: Sequence[bytes], is_there: IsThere) -> int:
        """Return an upper bound of the number of a row's first pages from which a row could continue.

        In a group with a window or chunks, some of these pages may be missing.
        """
        if not self.sees_all:
            return len(keys)
        return next((index for index, key in enumerate(keys) if not is_there(key)), len(keys))

    def pages_before(self, slot: int) -> list[int]:
        """Return the indices, in ascending order, of the pages that an empty row needs to continue at `slot`.

        `slot` must be the first slot of a page.
        """
        sinks, window = self.state_from_start(is_short=False).seen(slot, self.state_tokens)
        page_tokens, first = self.table.page_tokens, window.start // self.table.page_tokens
        return [*range(min(first, -(-sinks.stop // page_tokens))), *range(first, slot // page_tokens)]

    def has_page(self, key: bytes) -> bool:
        """Return True if the pool has a page with this key."""
        return self.table.pool.find(key) is not None

    def remember(self, row: int, index: int, key: bytes) -> None:
        """Store the key of a row's page if the row has all of its tokens. A loaded row may have only a part of them."""
        state = self.state(row)
        stored = state.seen(state.first, self.state_tokens)[1].start if state.first else 0
        if index * self.table.page_tokens >= stored:
            self.table.remember(row, index, key)

    def share(self, row: int, source_row: int, length: int) -> None:
        """Replace a row by the first `length` positions of another. Both share pages until one of the two writes."""
        state = self.state(source_row)
        self.table.share(row, source_row, length - state.shift)
        self.restore(row, state)


def possible_prefixes(
    groups: Sequence[GroupRows], keys: Sequence[bytes], is_there: Sequence[IsThere]
) -> Iterator[tuple[int, list[dict[int, bytes]]]]:
    """Yield the numbers of pages after which an empty row could continue, the largest first.

    With each number, yield the keys of the pages that each group needs for it, by index. `keys` are the keys of a
    prompt's pages, and `is_there` tells for each group if a page is available.
    """
    pairs = sorted(zip(groups, is_there, strict=True), key=lambda pair: pair[0].sees_all)  # short windows first
    count = min(rows.num_found(keys, is_own) for rows, is_own in pairs)
    while count:
        slot = count * groups[0].table.page_tokens
        needed = ((index, is_own) for rows, is_own in pairs for index in reversed(rows.pages_before(slot)))
        missing = next((index for index, is_own in needed if not is_own(keys[index])), None)
        if missing is None:
            yield count, [{index: keys[index] for index in rows.pages_before(slot)} for rows in groups]
        count = count - 1 if missing is None else missing  # each slot after a missing page up to this one needs it, too


def page_keys(
    token_ids: Sequence[int], page_tokens: int, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """Return one key per whole page of tokens.

    A key depends on the page's tokens, on all tokens before them, and on the salt. `known` are the first keys.
    """
    keys, num_pages = list(known), len(token_ids) // page_tokens
    ids = np.array(token_ids[len(keys) * page_tokens : num_pages * page_tokens], np.int64).reshape(-1, page_tokens)
    for page in ids:
        keys.append(blake2b((keys[-1] if keys else salt) + page.tobytes(), digest_size=_KEY_BYTES).digest())
    return keys
