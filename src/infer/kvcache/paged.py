"""Rows of tokens in pages: what is forgotten gives its page to what comes, and what is the same is stored once.

Layers that see the same slots are a group with page tables of its own (`rows.GroupRows`); their memory is reserved for
all its pages but taken from the system only where it is written. Kernels read tables and windows whenever a step runs,
so a recorded step serves every state.

What a token sees is a rule of slots, whatever lies there besides: pages that no later token can see are given up
when a row's share of them is needed again, and never for tokens that were only provisional.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self, final

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from infer import ops
from infer.architecture import Layer
from infer.errors import InvalidRequestError
from infer.kvcache.base import KVCache
from infer.kvcache.groups import make_groups
from infer.kvcache.page_memory import copy_array, make_layers, pages_of, poison_page
from infer.kvcache.page_rows import GroupRows, RowState, page_keys
from infer.kvcache.settings import OBSERVED_TOKENS, CacheSettings
from infer.kvcache.snapkv import choose_slots
from infer.operands.step import Step
from infer.operands.weights import Heads
from infer.quantization.kv_formats import BLOCK_POSITIONS, check_kv_type
from infer.quantization.kv_layout import key_parts, value_parts
from infer.system.available_memory import available_memory_bytes

SPARE_TOKENS = 64  # of a row that is saved, how many of the last may be taken back without reading all of it again
_STATES = "states"  # the tensor of a saved row that is not keys or values


@final
class PagedCache(KVCache):
    """`step_tokens` is how many tokens a row may get in one step, `context` how many the model was made for.

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
    ) -> None:
        for layer in layers:
            check_kv_type(kv_type, layer.head_dim)
        self._settings, self._kv_type, self._capacity = settings or CacheSettings(), kv_type, capacity
        self._backend = ops.backend_of(device)
        self._lengths = [0] * num_rows
        self._keys: list[list[bytes]] = [[] for _ in range(num_rows)]  # of each row's whole pages, as far as known
        self._reserved = [0] * num_rows  # the position behind the last that may be written
        self._num_spare = min(SPARE_TOKENS, step_tokens)
        groups = make_groups(layers, self._settings, capacity, step_tokens, context)
        page_tokens = self._settings.page_tokens
        self._groups = [GroupRows(group, num_rows, capacity, page_tokens) for group in groups]
        self._pages = [pages_of(rows, device) for rows in self._groups]
        self._published = [rows.version for rows in self._groups]
        self._layers = make_layers(layers, self._groups, self._pages, kv_type, device)
        if os.environ.get("INFER_POISON") == "1":
            for rows in self._groups:
                rows.table.on_take = partial(poison_page, [self._layers[i] for i in rows.group.layers], page_tokens)
        self._late_layers = {index for group in groups if group.is_late for index in group.layers}
        self._chosen: dict[int, Int64[Tensor, "kv_heads kept"]] | None = None  # by layer, while a prompt is observed

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    @property
    def _blocks_per_page(self) -> int:
        return self._settings.page_tokens // BLOCK_POSITIONS

    @property
    def num_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers)

    @property
    def _shares(self) -> bool:
        return self._settings.reuse_prefixes and not self._settings.evicts

    def reserve(self, row: int, num_tokens: int) -> None:
        end = self._lengths[row] + num_tokens
        if end > self._capacity:
            raise InvalidRequestError(f"a row holds {self._capacity} tokens, got {end}")
        self._reserved[row] = max(self._reserved[row], end)
        for rows in self._groups:
            start = self._lengths[row] - int(rows.shifts[row])
            for source, target in rows.reserve(row, start, start + num_tokens):
                self._copy_pages(rows, [target], self, [source])
        self._publish()

    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        if layer == 0:
            self._check_reserved(step)
        attended = ops.attend(qkv, heads, self._layers[layer], step)
        if self._chosen is not None and layer in self._late_layers:
            weights = ops.attention_weights(qkv, heads, self._layers[layer], step)
            self._chosen[layer] = choose_slots(weights, self._settings.protected_prefix, self._settings.eviction_window)
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

    def commit(self, num_accepted: Sequence[int]) -> None:
        for row, count in enumerate(num_accepted):
            if count:
                self.commit_row(row, count)

    def commit_row(self, row: int, num_accepted: int) -> None:
        page_tokens, before = self._settings.page_tokens, self._lengths[row]
        self._lengths[row] = before + num_accepted
        if self._lengths[row] // page_tokens > before // page_tokens and self._is_short_of_memory():
            self._slide_all()

    def _is_short_of_memory(self) -> bool:
        if (threshold := self._settings.memory_threshold_mb) is None:
            return False
        available = available_memory_bytes()
        return available is not None and available < threshold * 2**20

    def _slide_all(self) -> None:
        """Every row that still sees all of its text: what that lies in goes back to the system."""
        for rows in self._groups:
            for row in [row for row, length in enumerate(self._lengths) if length and rows.can_compress(row)]:
                pages = rows.slide(row, self._lengths[row])
                for index in rows.group.layers:
                    for memory in (self._layers[index].keys, self._layers[index].values):
                        for page in pages:
                            self._backend.give_back(memory, page * self._blocks_per_page, self._blocks_per_page)
        self._publish()

    def truncate(self, row: int, length: int) -> None:
        length = min(self._lengths[row], length)
        if length and self._can_continue(row, length):
            for rows in self._groups:
                rows.table.truncate(row, length - int(rows.shifts[row]))
        else:
            length = 0
            for rows in self._groups:
                rows.clear(row)
        self._lengths[row] = self._reserved[row] = length
        del self._keys[row][length // self._settings.page_tokens :]

    def _can_continue(self, row: int, position: int) -> bool:
        """Whether all that a token at this position sees is there."""
        return all(rows.can_continue(row, position - int(rows.shifts[row])) for rows in self._groups)

    @property
    def compresses_prompts(self) -> bool:
        return self._settings.keeps_whole_prompts

    def end_prompt(self, row: int) -> int:
        if self._settings.memory_threshold_mb is not None and not self._is_short_of_memory():
            return 0
        late = [rows for rows in self._groups if rows.can_compress(row)]
        if late and self._lengths[row] > self._settings.eviction_window:
            return OBSERVED_TOKENS
        for rows in late:
            rows.compress(row, self._lengths[row], self._lengths[row])
        self._publish()
        return 0

    @contextmanager
    def observing(self, row: int) -> Iterator[None]:
        self._chosen = {}
        try:
            yield
            for rows in self._groups:
                if rows.can_compress(row):
                    self._compress(rows, row, self._chosen)
        finally:
            self._chosen = None
        self._publish()

    def end_answer(self, row: int) -> None:
        if any(rows.group.is_late and not rows.can_compress(row) for rows in self._groups):
            self.truncate(row, 0)

    def _compress(self, rows: GroupRows, row: int, chosen: Mapping[int, Int64[Tensor, "kv_heads kept"]]) -> None:
        """Move what is kept into the row's first slots; each head keeps slots of its own."""
        num_kept = self._settings.eviction_window
        for source, target in rows.reserve(row, 0, num_kept):
            self._copy_pages(rows, [target], self, [source])
        into = self._place(rows, row, torch.arange(num_kept))
        for index in rows.group.layers:
            layer, slots = self._layers[index], chosen[index]
            blocks, lanes = self._place(rows, row, slots.cpu())
            heads = torch.arange(len(slots), device=slots.device)[:, None]
            for part in (*key_parts(layer.keys, self._kv_type), *value_parts(layer.values, self._kv_type)):
                part[:, *into] = part[heads, blocks, lanes]
        rows.compress(row, self._lengths[row], num_kept)

    def remember(self, row: int, token_ids: Sequence[int]) -> None:
        if not self._shares:
            return
        known = len(self._keys[row])
        self._keys[row] = page_keys(token_ids, self._settings.page_tokens, self._keys[row])
        for index, key in enumerate(self._keys[row][known:], known):
            for rows in self._groups:
                rows.table.remember(row, index, key)

    def forget(self, row: int) -> None:
        for rows in self._groups:
            for page in rows.table.page_by_index(row).values():
                rows.table.pool.forget(page)
        self._keys[row] = []

    def adopt(self, row: int, token_ids: Sequence[int]) -> int:
        if not self._shares or self._lengths[row]:
            return 0
        page_tokens = self._settings.page_tokens
        keys = page_keys(token_ids[:-1], page_tokens)
        for count in range(min(rows.num_found(keys) for rows in self._groups), 0, -1):
            found = [rows.has_pages(row, count * page_tokens, keys) for rows in self._groups]
            if None not in found:
                for rows, needed in zip(self._groups, found, strict=True):
                    rows.table.truncate(row, 0)
                    rows.table.adopt(row, needed or {})
                    rows.version += 1
                self._keys[row] = keys[:count]
                self._lengths[row] = self._reserved[row] = count * page_tokens
                self._publish()
                break
        return self._lengths[row]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or held by those who say so, and all is there that
        a row's next token sees."""
        for rows, pages in zip(self._groups, self._pages, strict=True):
            rows.table.check_integrity()
            assert (pages.table.cpu().numpy() == rows.table.table).all(), "kernels read another table"
            for row, length in enumerate(self._lengths):
                assert rows.can_continue(row, length - int(rows.shifts[row])), "what is seen is not there"

    # A row by itself

    @property
    def kind(self) -> str:
        settings = self._settings
        if not settings.evicts:
            return f"paged {self._kv_type}"
        policy = f"{settings.eviction_policy} {settings.eviction_window} {settings.protected_prefix}"
        if settings.is_late:
            policy += f" {settings.memory_threshold_mb}"
        return f"paged {self._kv_type} {policy}"

    def export_row(self, row: int) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads slots *size"]]]:
        """What tokens from some position on see, and as `states` what decides it."""
        length = self._lengths[row]
        earlier = range(max(0, length - self._num_spare), length)
        first = next((position for position in earlier if self._can_continue(row, position)), length)
        states = [rows.state(row).cut(first - int(rows.shifts[row])) for rows in self._groups]
        yield _STATES, torch.tensor(states, dtype=torch.int64)
        for rows, state in zip(self._groups, states, strict=True):
            slots = state.seen_from(max(first - state.shift, state.first), length - state.shift)
            where = self._place(rows, row, torch.tensor(slots, dtype=torch.int64))
            for name, part in self._parts(rows):
                yield name, part[:, *where]

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int) -> None:
        if not 0 <= length <= self._capacity:
            raise InvalidRequestError(f"the cache holds {self._capacity} tokens, got {length}")
        states = self._imported_states(tensors, length)
        slots = [state.seen_from(state.first, length) for state in states]
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name != _STATES}
        expected = self._shapes(slots)
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        if wrong:
            raise InvalidRequestError(f"the cache of {length} tokens does not look like this one's: {wrong[0]!r:.80}")
        self.truncate(row, 0)
        for rows, state, seen in zip(self._groups, states, slots, strict=True):
            rows.restore(row, state)
            rows.table.hold_new(row, rows.table.indices(seen))
        self._publish()
        for rows, seen in zip(self._groups, slots, strict=True):
            blocks, lanes = self._place(rows, row, torch.tensor(seen, dtype=torch.int64))
            touched = sorted(set(blocks.tolist()))
            for index in rows.group.layers:  # kernels take whole blocks, and what is not seen times 0
                self._layers[index].keys[:, touched] = 0
                self._layers[index].values[:, touched] = 0
            for name, part in self._parts(rows):
                part[:, blocks, lanes] = tensors[name].to(part.device)
        self._lengths[row] = self._reserved[row] = length

    def _imported_states(self, tensors: Mapping[str, Tensor], length: int) -> list[RowState]:
        """Raises InvalidRequestError where a row of so many tokens cannot have them."""
        tensor = tensors.get(_STATES)
        if tensor is None or tensor.dtype != torch.int64 or tensor.shape != (len(self._groups), len(RowState._fields)):
            raise InvalidRequestError(f"the cache of {length} tokens does not look like this one's: {_STATES!r}")
        states = [RowState(*values) for values in tensor.tolist()]
        for rows, state in zip(self._groups, states, strict=True):
            # One that was saved while memory was short sees no more than a window.
            known = [rows.state_from_start(is_short=is_short) for is_short in (False, True)]
            if (
                state._replace(first=0) not in known
                or not 0 <= state.first <= length
                or len(rows.table.indices(state.seen_from(state.first, length))) > rows.group.pages_per_row
            ):
                raise InvalidRequestError(f"the cache of {length} tokens does not look like this one's: {state}")
        return states

    def _shapes(self, slots: Sequence[Sequence[int]]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What is stored of so many slots of each group."""
        return {
            name: (part.dtype, (len(part), len(seen), *part.shape[3:]))
            for rows, seen in zip(self._groups, slots, strict=True)
            for name, part in self._parts(rows)
        }

    def copy_row(self, row: int, source: Self, source_row: int) -> None:
        """Of this cache, what is stored is shared until one of the two writes to it."""
        if source is self and row == source_row:
            return
        self.truncate(row, 0)
        for rows, theirs in zip(self._groups, source._groups, strict=True):
            if source is self:
                rows.table.share(row, source_row)
            else:
                held = theirs.table.page_by_index(source_row)
                rows.table.hold_new(row, held)
                mine = rows.table.page_by_index(row)
                self._copy_pages(rows, [mine[index] for index in held], source, list(held.values()))
            rows.copy(row, theirs, source_row)
        self._lengths[row] = self._reserved[row] = source._lengths[source_row]
        self._keys[row] = list(source._keys[source_row])
        self._publish()

    # Memory

    def _parts(self, rows: GroupRows) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads blocks lanes *size"]]]:
        """What is stored of a group's layers, by name, as views."""
        for index in rows.group.layers:
            layer = self._layers[index]
            for number, part in enumerate(key_parts(layer.keys, self._kv_type)):
                yield f"{index}.keys.{number}", part
            for number, part in enumerate(value_parts(layer.values, self._kv_type)):
                yield f"{index}.values.{number}", part

    def _place(
        self, rows: GroupRows, row: int, slots: Int64[Tensor, "*slots"]
    ) -> tuple[Int64[Tensor, "*slots"], Int64[Tensor, "*slots"]]:
        """The block of each slot of a row, and where in it the slot is."""
        page_tokens, table = self._settings.page_tokens, torch.from_numpy(rows.table.table[row])
        per_page = page_tokens // BLOCK_POSITIONS
        blocks = table[slots // page_tokens] * per_page + slots % page_tokens // BLOCK_POSITIONS
        device = self._layers[0].keys.device
        return blocks.to(device), (slots % BLOCK_POSITIONS).to(device)

    def _copy_pages(self, rows: GroupRows, targets: Sequence[int], source: Self, sources: Sequence[int]) -> None:
        per_page = self._blocks_per_page
        into, from_ = ([page * per_page + i for page in pages for i in range(per_page)] for pages in (targets, sources))
        for index in rows.group.layers:
            mine, theirs = self._layers[index], source._layers[index]
            mine.keys[:, into] = theirs.keys[:, from_]
            mine.values[:, into] = theirs.values[:, from_]

    def _publish(self) -> None:
        """Let kernels see the tables and windows as they are now."""
        for index, (rows, pages) in enumerate(zip(self._groups, self._pages, strict=True)):
            if self._published[index] != rows.version:
                arrays = (rows.table.table, rows.shifts, rows.sinks, rows.windows)
                for tensor, array in zip((pages.table, pages.shifts, pages.sinks, pages.windows), arrays, strict=True):
                    copy_array(array, tensor)
                self._published[index] = rows.version
