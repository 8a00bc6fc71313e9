"""Rows of tokens in pages. The page of evicted tokens is reused, and equal prefixes are stored once.

Tokens that `attend` appends are provisional until `commit` keeps them. Only committed tokens decide which tokens are
evicted. So a rejected draft is dropped cleanly with every storage format and eviction policy. Layers that attend to the
same slots form a group with its own page tables and pool (`GroupRows`). Kernels read tables and windows whenever a step
runs, so a recorded step is valid for every state.

A token's visibility is a rule on slots, independent of what else is stored. Pages that no later token can see are freed
when a row's share of pages or the pool is used up. They are never freed for tokens that are only provisional.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import make_groups, pool_sizes
from infer.compute.kvcache.page_memory import CachedLayer, PageMemory, check_saved, load_tensors, saved_tensors
from infer.compute.kvcache.page_rows import GroupRows, page_keys, possible_prefixes
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention, Mixer
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights, DeltaNetWeights, Heads
from infer.compute.quantization.kv_formats import check_kv_type
from infer.compute.quantization.kv_layout import LayerCache
from infer.errors import InvalidRequestError, OutOfPagesError
from infer.system.available_memory import available_memory_bytes

SPARE_TOKENS = 64  # last tokens of a saved row that can be undone without computing the rest again
Positions = tuple[GroupRows, int, int]  # [start, end) in the layers of a group
Observer = Callable[[int, Tensor, Heads, Step], None]  # (layer, q k v, heads, step) of a call of `attend`, after it


class PagedCache:
    """Cache of keys and values with `num_rows` rows of up to `capacity` tokens, for a model made for `context` tokens.

    One step appends at most `step_tokens` tokens to a row. A page holds `settings.page_tokens` tokens of all layers of
    a group. Each group has a pool of `pool_pages` pages, but no more than its rows can use: a window needs few. If
    `pool_pages` is None, the pool is large enough for all rows when full. Raises InvalidRequestError if a pool is too
    small for one full row.

    For tests: with INFER_POISON=1 in the environment, pages are filled with NaN when they are handed out. A read of an
    unwritten slot then becomes visible.
    """

    def __init__(
        self,
        layers: Sequence[Mixer],
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
            if isinstance(layer, Attention):
                check_kv_type(kv_type, layer.head_dim)
        self.settings, self.capacity, self.step_tokens = settings or CacheSettings(), capacity, step_tokens
        self.observer: Observer | None = None
        self.on_remember: Callable[[bytes], None] | None = None  # called with the key of each computed page
        self.num_matched = 0  # tokens of the last prompt of `adopt` that match if missing states are ignored
        self._kv_type = kv_type
        self.lengths = [0] * num_rows  # the number of committed tokens of each row: the next token's position
        self._keys: list[list[bytes]] = [[] for _ in range(num_rows)]  # the known keys of each row's whole pages
        self._reserved = [0] * num_rows  # the position after the last writable one
        page_tokens = self.settings.page_tokens
        groups = make_groups(layers, self.settings, capacity, step_tokens, context)
        self.pool_pages = pool_sizes(groups, num_rows, pool_pages, capacity)
        self.groups = [
            GroupRows(group, num_rows, capacity, page_tokens, size)
            for group, size in zip(groups, self.pool_pages, strict=True)
        ]
        self.shares_prefixes = self.settings.reuse_prefixes and not self.settings.evicts
        # Number of tokens between two places at which a step may keep a state for other rows; 0 if it keeps none.
        has_states = any(group.is_recurrent for group in groups)
        self.checkpoint_tokens = page_tokens if has_states and self.shares_prefixes else 0
        self.memory = PageMemory(layers, self.groups, kv_type, page_tokens, device)
        if os.environ.get("INFER_POISON") == "1":
            self.memory.poison()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values once every page has been written."""
        return self.memory.num_bytes

    # Pages, by group

    @property
    def free_pages(self) -> Sequence[int]:
        """Number of pages that no row holds, per group."""
        return [rows.table.pool.num_available for rows in self.groups]

    def pages_of(self, num_tokens: int) -> Sequence[int]:
        """Return the number of pages, per group, that `num_tokens` tokens of one row need."""
        page_tokens = self.settings.page_tokens
        return [min(num_pages(num_tokens, page_tokens), rows.group.pages_per_row) for rows in self.groups]

    def shortage(self, row: int, positions: Sequence[Positions]) -> str:
        """Return which pages are missing to make positions writable, or an empty string if there are enough."""
        needed = dict.fromkeys(self.groups, 0)
        for rows, start, end in positions:
            needed[rows] += rows.pages_needed(row, rows.slot_of(row, start), rows.slot_of(row, end))
        return self._shortage_of(needed.values())

    def _shortage_of(self, needed: Iterable[int]) -> str:
        for free, total, count in zip(self.free_pages, self.pool_pages, needed, strict=True):
            if count > free:
                return (
                    f"the cache needs {count} free pages, but has {free} of {total}: "
                    "wait until another answer has ended, or give the cache more pages"
                )
        return ""

    def give_back_free(self) -> int:
        """Return the memory of free pages to the system and return the number of bytes of keys and values freed.

        Pages whose content may be reused keep their memory.
        """
        return self.memory.give_back_free()

    def is_long(self, row: int) -> bool:
        """Return True if the row's positions use the rope factors of long sequences."""
        return bool(self.memory.rope_sets[row])

    def set_rope(self, row: int, *, is_long: bool) -> None:
        """Choose the rope factors of an empty row. The row keeps them when it is emptied again.

        Raises InvalidRequestError, with nothing changed, if the row has tokens.
        """
        if self.lengths[row]:
            raise InvalidRequestError(f"only an empty row can change its rope factors, but row {row} has tokens")
        self.memory.set_rope(row, int(is_long))

    def reset(self) -> None:
        """Empty every row, even after an interrupted change."""
        self.observer = None
        self._keys = [[] for _ in self.lengths]
        self.lengths[:] = self._reserved[:] = [0] * len(self.lengths)
        for rows in self.groups:
            rows.reset()
        self.memory.publish()

    def reserve(self, row: int, num_tokens: int) -> None:
        """Make room for a row's next tokens. Call before the step, or the multi-step, that attends with these tokens.

        Raises InvalidRequestError if the row would have more than `capacity` tokens, and OutOfPagesError if the pools
        have too few free pages. In both cases nothing is changed.
        """
        if what := self.try_reserve(row, num_tokens):
            raise OutOfPagesError(what)

    def try_reserve(self, row: int, num_tokens: int) -> str:
        """Like `reserve`, but return which pages are missing, or an empty string if the tokens were reserved."""
        start = self.lengths[row]
        end = start + num_tokens
        if end > self.capacity:
            raise InvalidRequestError(f"a row has room for {self.capacity} tokens, got {end}")
        if not all(rows.is_ready(row, start, num_tokens) for rows in self.groups):
            positions = [(rows, start, end) for rows in self.groups]
            if what := self.make_own(row, positions):
                return what
        self._reserved[row] = max(self._reserved[row], end)
        self.memory.publish()
        return ""

    def make_own(self, row: int, positions: Sequence[Positions]) -> str:
        """Make positions of a row writable. Pages that other rows share are replaced by copies.

        Return an empty string, or which pages are missing. In that case nothing is changed.
        """
        if what := self.shortage(row, positions):
            return what
        for rows, start, end in positions:
            if copies := rows.reserve(row, rows.slot_of(row, start), rows.slot_of(row, end)):
                sources, targets = zip(*copies, strict=True)
                self.memory.copy_pages(rows, targets, sources)
        return ""

    def attend(self, layer: int, qkv: Activations, heads: Heads, step: Step) -> Activations:
        """Append the step's keys and values provisionally and attend over the tokens that each token may see.

        Raises InvalidRequestError, with nothing written, for a position that is committed or was not reserved. A
        recorded step is not checked.
        """
        own = self._own_of(layer, step)
        assert isinstance(own, LayerCache)
        attended = ops.attend(qkv, heads, own, step)
        if self.observer is not None and heads.has_keys:
            self.observer(layer, qkv.floats, heads, step)
        return attended

    def mix(
        self, layer: int, projected: Activations, weights: ConvWeights | DeltaNetWeights, step: Step
    ) -> Activations:
        """Append the step's tokens to a layer's state provisionally and mix them with it. Raises as `attend` does."""
        own = self._own_of(layer, step)
        if isinstance(own, ConvCache) and isinstance(weights, ConvWeights):
            return ops.short_conv(projected, weights, own, step)
        assert isinstance(own, DeltaNetCache)
        assert isinstance(weights, DeltaNetWeights)
        return ops.gated_delta_net(projected, weights, own, step)

    def _own_of(self, layer: int, step: Step) -> CachedLayer:
        """Return a layer's cache, after the first layer has checked the step."""
        if layer == 0 and not step.is_recorded:
            self._check_reserved(step)
        return self.memory.layers[layer]

    def _check_reserved(self, step: Step) -> None:
        """Raise InvalidRequestError if a row or a position of the step was not reserved.

        The check runs on integers, once per step. Kernels write to the given positions without a check.
        """
        for row, position in zip(step.rows.tolist(), step.positions.tolist(), strict=True):
            if not 0 <= row < len(self.lengths):
                raise InvalidRequestError(f"a step's rows must be in [0, {len(self.lengths)}), got {row}")
            if not self.lengths[row] <= position < self._reserved[row]:
                raise InvalidRequestError(
                    f"positions of row {row} must be in [{self.lengths[row]}, {self._reserved[row]}), got {position}: "
                    "call cache.reserve(row, num_tokens) before each step, and cache.commit after it"
                )

    def commit(self, row: int, count: int) -> None:
        """Keep the first `count` of a row's tokens since its last commit and drop the others."""
        page_tokens, before = self.settings.page_tokens, self.lengths[row]
        self.lengths[row] = before + count
        if self.lengths[row] // page_tokens > before // page_tokens and self.is_short_of_memory():
            self._slide_all()

    def is_short_of_memory(self) -> bool:
        """Return True if less memory is available than the policy's threshold, if it has one."""
        if (threshold := self.settings.memory_threshold_mb) is None:
            return False
        available = available_memory_bytes()
        return available is not None and available < threshold * 2**20

    def _slide_all(self) -> None:
        """Apply the sliding window to every row that still attends to its full context.

        Return the freed memory to the system.
        """
        for rows in self.groups:
            for row, length in enumerate(self.lengths):
                if length and rows.can_compress(row):
                    rows.slide(row, length)
        self.memory.give_back_free()
        self.memory.publish()

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from position `length` on. A length of 0 empties the row.

        If the next token would need tokens that are already forgotten, the row is emptied. `lengths` reports the
        result.
        """
        length = min(self.lengths[row], length)
        if length and self._can_continue(row, length):
            for rows in self.groups:
                rows.table.truncate(row, rows.slot_of(row, length))
        else:
            length = 0
            for rows in self.groups:
                rows.clear(row)
        self.lengths[row] = self._reserved[row] = length
        del self._keys[row][length // self.settings.page_tokens :]

    def _can_continue(self, row: int, position: int) -> bool:
        """Return True if the row has every slot that a token at this position attends to."""
        return all(rows.can_continue(row, rows.slot_of(row, position)) for rows in self.groups)

    def end_answer(self, row: int) -> None:
        """Mark an answer as complete. Empties the row if a longer prompt could not continue from it."""
        if any(rows.group.is_late and not rows.can_compress(row) for rows in self.groups):
            self.truncate(row, 0)

    # Prefixes of several rows

    def has_new_pages(self, row: int) -> bool:
        """Return True if the row has new whole pages for `remember`."""
        return self.shares_prefixes and not self.is_long(row) and self._shareable_pages(row) > len(self._keys[row])

    def _shareable_pages(self, row: int) -> int:  # at most half of the largest pool, per row
        return min(self.lengths[row] // self.settings.page_tokens, max(self.pool_pages) // 2)

    def remember(self, row: int, token_ids: Sequence[int], salt: bytes = b"") -> None:
        """Make the row's committed tokens available to other rows with the same prefix and salt.

        The committed tokens are the first of `token_ids`.
        """
        if not self.has_new_pages(row):
            return
        page_tokens, known, count = self.settings.page_tokens, len(self._keys[row]), self._shareable_pages(row)
        self._keys[row] = page_keys(token_ids[: count * page_tokens], page_tokens, self._keys[row], salt)
        for index, key in enumerate(self._keys[row][known:], known):
            for rows in self.groups:
                rows.remember(row, index, key)
            if self.on_remember is not None:
                self.on_remember(key)

    def forget(self, row: int) -> None:
        """Empty a row, and make its stored content unavailable as a prefix of other rows."""
        for rows in self.groups:
            for page in rows.table.page_by_index(row).values():
                rows.table.pool.forget(page)
        self.truncate(row, 0)

    def adopt(self, row: int, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """Give an empty row the stored pages of the longest known prefix of these tokens, and return the number of
        tokens.

        The pages must have been stored with the same salt. The last token is never included. Cached pages are taken,
        and held pages are shared, but no free page is taken. A row with long rope factors gets nothing. In a cache with
        states, `num_matched` is the length of the prefix that would be adopted if all of its states were stored.
        """
        self.num_matched = 0
        if not self.shares_prefixes or self.lengths[row] or self.is_long(row):
            return 0
        page_tokens = self.settings.page_tokens
        keys = page_keys(token_ids[:-1], page_tokens, salt=salt)
        is_there = [rows.has_page for rows in self.groups]
        if self.checkpoint_tokens:
            pairs = zip(self.groups, is_there, strict=True)
            self.num_matched = min(rows.num_found(keys, is_own) for rows, is_own in pairs) * page_tokens
        for count, needed in possible_prefixes(self.groups, keys, is_there):
            for rows, own in zip(self.groups, needed, strict=True):
                rows.table.truncate(row, 0)
                rows.table.adopt(row, own)
                rows.changed.add(row)
            self._keys[row] = keys[:count]
            self.lengths[row] = self._reserved[row] = count * page_tokens
            self.memory.publish()
            break
        return self.lengths[row]

    def check_integrity(self) -> None:
        """Raise AssertionError if the page accounting is wrong.

        Every page must be free, cached, or held by the rows that list it. Each row must have every slot that its next
        token attends to.
        """
        self.memory.check_integrity()
        for rows in self.groups:
            rows.table.check_integrity()
            for row, length in enumerate(self.lengths):
                assert rows.can_continue(row, rows.slot_of(row, length)), "a visible slot is missing"

    # Saving, loading and copying a row

    @property
    def kind(self) -> str:
        """Storage format and eviction policy. A row can move to another cache only if both have the same kind."""
        settings = self.settings
        if not settings.evicts:
            return f"paged {self._kv_type}"
        policy = f"{settings.eviction_policy} {settings.eviction_window} {settings.protected_prefix}"
        if settings.is_late:
            policy += f" {settings.memory_threshold_mb}"
        return f"paged {self._kv_type} {policy}"

    def export_row(self, row: int) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads slots *size"]]]:
        """Yield copies of the tensors of the row's committed tokens, a few at a time, and its visibility as `states`.

        They include everything that the next token attends to, and enough to undo a few of the last tokens.
        """
        length = self.lengths[row]
        earlier = range(max(0, length - min(SPARE_TOKENS, self.step_tokens)), length)
        first = next((position for position in earlier if self._can_continue(row, position)), length)
        yield from saved_tensors(self.groups, self.memory, row, first, length)

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int, *, is_long: bool = False) -> None:
        """Replace a row by `length` tokens that a cache of this kind exported from a row with this `is_long`.

        Raises InvalidRequestError if the tensors do not match `length` tokens or do not fit, and OutOfPagesError if the
        pools have too few free pages. In both cases nothing is changed.
        """
        if not 0 <= length <= self.capacity:
            raise InvalidRequestError(f"a row has room for {self.capacity} tokens, got {length}")
        saved = check_saved(self.groups, self.memory, tensors, length)
        indices = [rows.table.indices(group.slots) for rows, group in zip(self.groups, saved, strict=True)]
        if what := self._shortage_of(
            rows.table.num_missing(row, len(new)) for rows, new in zip(self.groups, indices, strict=True)
        ):
            raise OutOfPagesError(what)
        self.truncate(row, 0)
        for rows, group, new in zip(self.groups, saved, indices, strict=True):
            rows.restore(row, group.state)
            rows.table.hold_new(row, new)
        self.memory.set_rope(row, int(is_long))
        self.memory.publish()
        load_tensors(self.groups, self.memory, row, saved, tensors)
        self.lengths[row] = self._reserved[row] = length

    def copy_row(self, row: int, source: int) -> None:
        """Replace a row by the committed tokens of another row.

        Both rows share pages until one of them writes, so no page is taken.
        """
        if row == source:
            return
        length = self.lengths[source]
        for rows in self.groups:
            rows.share(row, source, length)
        self.lengths[row] = self._reserved[row] = length
        self._keys[row] = list(self._keys[source])
        self.memory.set_rope(row, int(self.is_long(source)))
        self.memory.publish()
