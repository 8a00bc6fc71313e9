"""Rows of tokens in pages: what is forgotten gives its page to what comes, and what is the same is stored once.

What `attend` appends is provisional, `commit` keeps it, and what is committed alone decides what is forgotten: so a
rejected draft is dropped cleanly, whatever the cache stores or evicts. Layers that see the same slots are a group with
page tables and a pool of its own (`GroupRows`). Kernels read tables and windows whenever a step runs, so a recorded
step serves every state.

What a token sees is a rule of slots, whatever lies there besides: pages that no later token can see are given up
when a row's share of them or the pool is used up, and never for tokens that were only provisional.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from infer import ops
from infer.errors import InvalidRequestError, OutOfPagesError
from infer.kvcache.groups import make_groups, pool_sizes
from infer.kvcache.page_memory import PageMemory
from infer.kvcache.page_rows import GroupRows, page_keys
from infer.kvcache.pages import num_pages
from infer.kvcache.saved_rows import check_saved, load_tensors, saved_tensors
from infer.kvcache.settings import CacheSettings
from infer.operands.architecture import Layer
from infer.operands.step import Step
from infer.operands.weights import Heads
from infer.quantization.kv_formats import check_kv_type
from infer.system.available_memory import available_memory_bytes

SPARE_TOKENS = 64  # of a row that is saved, how many of the last may be taken back without reading all of it again
Positions = tuple[GroupRows, int, int]  # [start, end) in the layers of a group
Observer = Callable[[int, Tensor, Heads, Step], None]  # what `attend` was called with, after it


@final
class PagedCache:
    """`num_rows` rows of up to `capacity` tokens, which get at most `step_tokens` in one step, of a model made for
    `context`.

    A page holds `settings.page_tokens` tokens of all layers of a group. Each group has a pool of `pool_pages` of them
    (None: what all rows take when they are full), but no more than its rows can use: a window needs few. Raises
    InvalidRequestError where that is less than one full row takes.

    With INFER_POISON=1 in the environment, pages that are handed out are filled with NaN: for tests, as whatever is
    read and was never written then shows.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_rows: int,
        capacity: int,
        kv_type: str,
        device: torch.device,
        *,
        step_tokens: int,
        settings: CacheSettings | None = None,
        context: int | None = None,
        pool_pages: int | None = None,
    ) -> None:
        for layer in layers:
            check_kv_type(kv_type, layer.head_dim)
        self.settings, self.capacity, self.step_tokens = settings or CacheSettings(), capacity, step_tokens
        self.observer: Observer | None = None
        self._kv_type = kv_type
        self._lengths = [0] * num_rows
        self._keys: list[list[bytes]] = [[] for _ in range(num_rows)]  # of each row's whole pages, as far as known
        self._reserved = [0] * num_rows  # the position after the last that may be written
        page_tokens = self.settings.page_tokens
        groups = make_groups(layers, self.settings, capacity, step_tokens, context)
        sizes = pool_sizes(groups, num_rows, pool_pages, capacity)
        self.groups = [
            GroupRows(group, num_rows, capacity, page_tokens, size) for group, size in zip(groups, sizes, strict=True)
        ]
        self.memory = PageMemory(layers, self.groups, kv_type, page_tokens, device)
        if os.environ.get("INFER_POISON") == "1":
            self.memory.poison()

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row: the next token's position."""
        return self._lengths

    @property
    def num_bytes(self) -> int:
        """What keys and values take when every page has been written."""
        return self.memory.num_bytes

    # Pages, by group

    @property
    def pool_pages(self) -> Sequence[int]:
        """All there are."""
        return [rows.table.pool.num_pages for rows in self.groups]

    @property
    def free_pages(self) -> Sequence[int]:
        """Those that can be had: no row holds them."""
        return [rows.table.pool.num_available for rows in self.groups]

    def pages_of(self, num_tokens: int) -> Sequence[int]:
        """Those that so many tokens of one row lie in."""
        page_tokens = self.settings.page_tokens
        return [min(num_pages(num_tokens, page_tokens), rows.group.pages_per_row) for rows in self.groups]

    def pages_needed(self, row: int, num_tokens: int) -> Sequence[int]:
        """Those that `reserve` takes of `free_pages`, copies of shared ones among them. Where this is more than are
        free, a row with a window may do with fewer: see `can_reserve`."""
        return self._pages_needed(row, self._next(row, num_tokens), is_scarce=False)

    def can_reserve(self, row: int, num_tokens: int) -> bool:
        """Whether `reserve` would not raise."""
        least = self._pages_needed(row, self._next(row, num_tokens), is_scarce=True)
        has_pages = all(count <= free for count, free in zip(least, self.free_pages, strict=True))
        return has_pages and self._lengths[row] + num_tokens <= self.capacity

    def _next(self, row: int, num_tokens: int) -> list[Positions]:
        """Of a row's next tokens."""
        return [(rows, self._lengths[row], self._lengths[row] + num_tokens) for rows in self.groups]

    def _pages_needed(self, row: int, positions: Sequence[Positions], *, is_scarce: bool) -> list[int]:
        needed = dict.fromkeys(self.groups, 0)
        for rows, start, end in positions:
            slots = rows.slot_of(row, start), rows.slot_of(row, end)
            needed[rows] += rows.pages_needed(row, *slots, is_scarce=is_scarce)
        return list(needed.values())

    def _check_free(self, needed: Sequence[int]) -> None:
        for free, total, count in zip(self.free_pages, self.pool_pages, needed, strict=True):
            if count > free:
                raise OutOfPagesError(
                    f"the cache has {free} of its {total} pages left where {count} are needed: "
                    "wait until another answer has ended, or give the cache more pages"
                )

    def give_back_free(self) -> int:
        """Give the memory of free pages back to the system, as far as it can be, but for those whose content may be
        asked for again: how many bytes of keys and values were written there."""
        return self.memory.give_back_free()

    def is_long(self, row: int) -> bool:
        """Whether its positions turn by the rope factors of long sequences."""
        return bool(self.memory.rope_sets[row])

    def set_rope(self, row: int, *, is_long: bool) -> None:
        """Choose the rope factors of an empty row; it keeps them when it is emptied again.

        Raises InvalidRequestError, nothing changed, for a row that has tokens.
        """
        if self._lengths[row]:
            raise InvalidRequestError(f"only an empty row gets other rope factors, row {row} has tokens")
        self.memory.set_rope(row, int(is_long))

    def reset(self) -> None:
        """Empty every row, whatever a change that was left midway has made of it."""
        self.observer = None
        self._keys = [[] for _ in self._lengths]
        self._lengths[:] = self._reserved[:] = [0] * len(self._lengths)
        for rows in self.groups:
            rows.reset()
        self.memory.publish()

    def reserve(self, row: int, num_tokens: int) -> None:
        """Make room for a row's next tokens. Before the step, or the multi-step, that attends with them.

        Raises, nothing changed, InvalidRequestError where the row would hold more than `capacity`, and
        OutOfPagesError where the pools have too few pages left.
        """
        start = self._lengths[row]
        end = start + num_tokens
        if end > self.capacity:
            raise InvalidRequestError(f"a row holds {self.capacity} tokens, got {end}")
        if not all(rows.is_ready(row, rows.slot_of(row, start), num_tokens) for rows in self.groups):
            self.make_own(row, self._next(row, num_tokens))
        self._reserved[row] = max(self._reserved[row], end)
        self.memory.publish()

    def make_own(self, row: int, positions: Sequence[Positions]) -> None:
        """Make positions of a row its own, to be written: of pages that others share it gets copies.

        Raises OutOfPagesError, nothing changed.
        """
        self._check_free(self._pages_needed(row, positions, is_scarce=True))
        for rows, start, end in positions:
            if copies := rows.reserve(row, rows.slot_of(row, start), rows.slot_of(row, end)):
                sources, targets = zip(*copies, strict=True)
                self.memory.copy_pages(rows, targets, self.memory, sources)

    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        """Append the step's keys and values provisionally and attend over what each token may see.

        Raises InvalidRequestError, nothing written, for a position that is committed or was not reserved; a recorded
        step is not looked at.
        """
        if layer == 0 and not step.is_recorded:
            self._check_reserved(step)
        attended = ops.attend(qkv, heads, self.memory.layers[layer], step)
        if self.observer is not None:
            self.observer(layer, qkv, heads, step)
        return attended

    def _check_reserved(self, step: Step) -> None:
        """In integers, and once a step: kernels write where they are told."""
        for row, position in zip(step.rows.tolist(), step.positions.tolist(), strict=True):
            if not 0 <= row < len(self._lengths):
                raise InvalidRequestError(f"a step's rows must be in [0, {len(self._lengths)}), got {row}")
            if not self._lengths[row] <= position < self._reserved[row]:
                raise InvalidRequestError(
                    f"row {row} may get the positions [{self._lengths[row]}, {self._reserved[row]}), got {position}: "
                    "call cache.reserve(row, num_tokens) before each step, and cache.commit after it"
                )

    def commit(self, row: int, count: int) -> None:
        """Keep the first `count` of a row's tokens since its last commit and drop the others."""
        page_tokens, before = self.settings.page_tokens, self._lengths[row]
        self._lengths[row] = before + count
        if self._lengths[row] // page_tokens > before // page_tokens and self.is_short_of_memory():
            self._slide_all()

    def is_short_of_memory(self) -> bool:
        """Whether less is available than the policy's threshold, if it has one."""
        if (threshold := self.settings.memory_threshold_mb) is None:
            return False
        available = available_memory_bytes()
        return available is not None and available < threshold * 2**20

    def _slide_all(self) -> None:
        """Every row that still sees all of its text: what that lies in goes back to the system."""
        for rows in self.groups:
            for row, length in enumerate(self._lengths):
                if length and rows.can_compress(row):
                    rows.slide(row, length)
        self.memory.give_back_free()
        self.memory.publish()

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from position `length` on; 0 empties it.

        If what the next token must see is already forgotten, the row is emptied: `lengths` says what is left.
        """
        length = min(self._lengths[row], length)
        if length and self._can_continue(row, length):
            for rows in self.groups:
                rows.table.truncate(row, rows.slot_of(row, length))
        else:
            length = 0
            for rows in self.groups:
                rows.clear(row)
        self._lengths[row] = self._reserved[row] = length
        del self._keys[row][length // self.settings.page_tokens :]

    def _can_continue(self, row: int, position: int) -> bool:
        """Whether all that a token at this position sees is there."""
        return all(rows.can_continue(row, rows.slot_of(row, position)) for rows in self.groups)

    def end_answer(self, row: int) -> None:
        """No further token of this answer. Empties a row in which a longer prompt would not find what it needs."""
        if any(rows.group.is_late and not rows.can_compress(row) for rows in self.groups):
            self.truncate(row, 0)

    # What several rows begin with

    @property
    def shares_prefixes(self) -> bool:
        return self.settings.reuse_prefixes and not self.settings.evicts

    def has_new_pages(self, row: int) -> bool:
        """Whether `remember` would find whole pages of a row that it does not know yet."""
        return self.shares_prefixes and not self.is_long(row) and self._shareable_pages(row) > len(self._keys[row])

    def _shareable_pages(self, row: int) -> int:  # one row's are at most half of the largest pool
        return min(self._lengths[row] // self.settings.page_tokens, max(self.pool_pages) // 2)

    def remember(self, row: int, token_ids: Sequence[int], salt: bytes = b"") -> None:
        """The row's committed tokens are the first of these: others that begin so, with this salt, may share them."""
        if not self.has_new_pages(row):
            return
        page_tokens, known, count = self.settings.page_tokens, len(self._keys[row]), self._shareable_pages(row)
        self._keys[row] = page_keys(token_ids[: count * page_tokens], page_tokens, self._keys[row], salt)
        for index, key in enumerate(self._keys[row][known:], known):
            for rows in self.groups:
                rows.table.remember(row, index, key)

    def forget(self, row: int) -> None:
        """What the row has stored, no other row may begin with from now on."""
        for rows in self.groups:
            for page in rows.table.page_by_index(row).values():
                rows.table.pool.forget(page)
        self._keys[row] = []

    def adopt(self, row: int, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """Give an empty row what is stored, with this salt, for the first of these tokens; how many, and never the
        last. Takes no free page but cached ones. A row that is long gets nothing."""
        if not self.shares_prefixes or self._lengths[row] or self.is_long(row):
            return 0
        page_tokens = self.settings.page_tokens
        keys = page_keys(token_ids[:-1], page_tokens, salt=salt)
        for count in range(min(rows.num_found(keys) for rows in self.groups), 0, -1):
            found = [rows.has_pages(row, count * page_tokens, keys) for rows in self.groups]
            if None not in found:
                for rows, needed in zip(self.groups, found, strict=True):
                    rows.table.truncate(row, 0)
                    rows.table.adopt(row, needed or {})
                    rows.version += 1
                self._keys[row] = keys[:count]
                self._lengths[row] = self._reserved[row] = count * page_tokens
                self.memory.publish()
                break
        return self._lengths[row]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or held by those who say so, and all is there that
        a row's next token sees."""
        self.memory.check_integrity()
        for rows in self.groups:
            rows.table.check_integrity()
            for row, length in enumerate(self._lengths):
                assert rows.can_continue(row, rows.slot_of(row, length)), "what is seen is not there"

    # A row by itself: to save it, to load it, to go two ways from it

    @property
    def kind(self) -> str:
        """What is stored and how: a row goes from one cache to another only if they agree in this."""
        settings = self.settings
        if not settings.evicts:
            return f"paged {self._kv_type}"
        policy = f"{settings.eviction_policy} {settings.eviction_window} {settings.protected_prefix}"
        if settings.is_late:
            policy += f" {settings.memory_threshold_mb}"
        return f"paged {self._kv_type} {policy}"

    def export_row(self, row: int) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads slots *size"]]]:
        """Copies of what the row's committed tokens have stored, a few at a time, and as `states` what they see.

        All that the next token sees, and so much more that a few of the last tokens can be taken back.
        """
        length = self._lengths[row]
        earlier = range(max(0, length - min(SPARE_TOKENS, self.step_tokens)), length)
        first = next((position for position in earlier if self._can_continue(row, position)), length)
        yield from saved_tensors(self.groups, self.memory, row, first, length)

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int, *, is_long: bool = False) -> None:
        """Replace a row by `length` tokens that a cache of this kind exported, of a row that `is_long`.

        Raises, nothing changed, InvalidRequestError where they are not what `length` tokens store or do not fit, and
        OutOfPagesError where the pools have too few pages left.
        """
        if not 0 <= length <= self.capacity:
            raise InvalidRequestError(f"the cache holds {self.capacity} tokens, got {length}")
        saved = check_saved(self.groups, self.memory, tensors, length)
        indices = [rows.table.indices(group.slots) for rows, group in zip(self.groups, saved, strict=True)]
        self._check_free(
            [rows.table.num_missing(row, len(new)) for rows, new in zip(self.groups, indices, strict=True)]
        )
        self.truncate(row, 0)
        for rows, group, new in zip(self.groups, saved, indices, strict=True):
            rows.restore(row, group.state)
            rows.table.hold_new(row, new)
        self.memory.set_rope(row, int(is_long))
        self.memory.publish()
        load_tensors(self.groups, self.memory, row, saved, tensors)
        self._lengths[row] = self._reserved[row] = length

    def copy_row(self, row: int, source: Self, source_row: int) -> None:
        """Replace a row by the committed tokens of another, of this cache or of one of the same shape.

        Of this cache, what is stored is shared until one of the two writes to it: that takes no page. From another it
        is copied: raises OutOfPagesError, nothing changed.
        """
        if source is self and row == source_row:
            return
        length = source._lengths[source_row]
        if source is not self:
            self._copy_from(row, source, source_row, length)
        else:
            for rows in self.groups:
                rows.share(row, source_row, length)
        self._lengths[row] = self._reserved[row] = length
        self._keys[row] = list(source._keys[source_row])
        self.memory.set_rope(row, int(source.is_long(source_row)))
        self.memory.publish()

    def _copy_from(self, row: int, source: Self, source_row: int, length: int) -> None:
        held = [rows.table.page_by_index(source_row, rows.slot_of(source_row, length)) for rows in source.groups]
        self._check_free(
            [rows.table.num_missing(row, len(pages)) for rows, pages in zip(self.groups, held, strict=True)]
        )
        self.truncate(row, 0)
        for rows, theirs, pages in zip(self.groups, source.groups, held, strict=True):
            rows.restore(row, theirs.state(source_row))
            rows.table.hold_new(row, pages)
            mine = rows.table.page_by_index(row)
            self.memory.copy_pages(rows, [mine[index] for index in pages], source.memory, list(pages.values()))
