"""The tensors of a cache: the pages of each layer, the tables with which kernels find them, and saved rows.

The memory of all pages is reserved in one allocation, but the system provides it only when it is written. A page
contains the data of all layers of its group for its tokens, one layer after the other. About 60 tokens of a small
model, or a few tokens of a large one, fill one huge page of the system.

`saved_tensors` returns one row as tensors by name: the content stored in each layer, and the row's rules of
visibility as `states`. Only slots that a next token attends to are included.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.groups import page_bytes
from infer.compute.kvcache.page_rows import GroupRows, RowState
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Mixer
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, num_blocks
from infer.compute.quantization.kv_layout import LayerCache, Pages, key_parts, value_parts
from infer.errors import InvalidRequestError

CachedLayer = LayerCache | ConvCache | DeltaNetCache
_NAN = 0xFF  # in every byte: NaN in every float type, and codes whose scales are NaN


@final
class PageMemory:
    """Memory and page tables of all groups.

    Kernels read `layers`. They see changes to a group's tables only after `publish`.
    """

    def __init__(
        self,
        layers: Sequence[Mixer],
        groups: Sequence[GroupRows],
        kv_type: str,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self._groups, self._kv_type, self._page_tokens = groups, kv_type, page_tokens
        self._backend, self._device = ops.backend_of(device), device
        self.rope_sets = np.zeros(len(groups[0].shifts), np.int64)
        rope_sets = torch.tensor(self.rope_sets, device=device)  # shared by all groups
        self._tables = [_tables_of(rows, rope_sets) for rows in groups]
        sizes = [page_bytes(layer, kv_type, page_tokens) for layer in layers]
        self._memories = [
            self._backend.zeros((rows.table.num_pages, sum(sizes[index] for index in rows.group.layers)), torch.uint8)
            for rows in groups
        ]
        by_index = dict[int, CachedLayer]()
        for rows, tables, memory in zip(groups, self._tables, self._memories, strict=True):
            first = 0
            for index in rows.group.layers:
                own, first = memory[:, first : first + sizes[index]], first + sizes[index]
                by_index[index] = self._make_layer(layers[index], own, tables)
        self.layers = [by_index[index] for index in range(len(layers))]

    def _make_layer(self, layer: Mixer, memory: UInt8[Tensor, "pages bytes"], tables: Pages) -> CachedLayer:
        """Return a layer's cache in its part of each page."""
        if isinstance(layer, Attention):
            blocks = layer.num_kv_heads, num_blocks(self._page_tokens)
            border = math.prod(blocks) * key_block_bytes(self._kv_type, layer.head_dim)
            keys, values = (
                part.view(len(memory), *blocks, -1).transpose(0, 1) for part in (memory[:, :border], memory[:, border:])
            )
            return LayerCache(self._kv_type, keys, values, tables)
        if isinstance(layer, GatedDeltaNet):
            return DeltaNetCache.of_memory(memory, layer, tables)
        inputs = memory.view(torch.float32).view(len(memory), self._page_tokens, layer.num_channels)
        return ConvCache(inputs, tables)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache after every page has been written."""
        return sum(memory.nbytes for memory in self._memories)

    def set_rope(self, row: int, index: int) -> None:
        """Choose the row's rope, 0 for short sequences or 1 for long ones, and publish it to the kernels."""
        if self.rope_sets[row] != index:
            self.rope_sets[row] = index
            with self._backend.threads():
                _copy_array(self.rope_sets, self._tables[0].rope_sets)

    def publish(self) -> None:
        """Publish the tables of changed rows, and new windows, to the kernels. torch copies them with one thread."""
        for rows, tables in zip(self._groups, self._tables, strict=True):
            for first, count in _runs(sorted(rows.changed)):
                _copy_array(rows.table.table[first : first + count], tables.table[first : first + count])
            rows.changed.clear()
            if rows.has_new_rules:
                _copy_array(rows.shifts, tables.shifts)
                _copy_array(rows.sinks, tables.sinks)
                _copy_array(rows.windows, tables.windows)
                rows.has_new_rules = False

    def parts(self, rows: GroupRows) -> Iterator[tuple[str, Shaped[Tensor, "heads pages blocks lanes *size"]]]:
        """Yield the stored tensors of a group's layers by name, as views."""
        for index in rows.group.layers:
            layer = self.layers[index]
            if isinstance(layer, LayerCache):
                for number, part in enumerate(key_parts(layer.keys, self._kv_type)):
                    yield f"{index}.keys.{number}", part
                for number, part in enumerate(value_parts(layer.values, self._kv_type)):
                    yield f"{index}.values.{number}", part
                continue
            yield f"{index}.inputs", _in_blocks(layer.inputs[:, None])
            if isinstance(layer, DeltaNetCache):
                yield f"{index}.keys", _in_blocks(layer.keys.transpose(2, 3))
                yield f"{index}.updates", _in_blocks(layer.updates)
                yield f"{index}.decays", _in_blocks(layer.decays)

    def states(self, rows: GroupRows) -> Iterator[tuple[str, Shaped[Tensor, "pages *size"]]]:
        """Yield the states at the starts of pages, for a group's layers that have states, by name, as views."""
        for index in rows.group.layers:
            layer = self.layers[index]
            if isinstance(layer, DeltaNetCache):
                yield f"{index}.states", layer.states

    def place(
        self, rows: GroupRows, row: int, slots: Int64[Tensor, "*slots"]
    ) -> tuple[Int64[Tensor, "*slots"], Int64[Tensor, "*slots"], Int64[Tensor, "*slots"]]:
        """Return the page of each slot of a row, the block in that page, and the slot's position in the block."""
        pages = torch.from_numpy(rows.table.table[row])[slots // self._page_tokens]
        blocks, lanes = slots % self._page_tokens // BLOCK_POSITIONS, slots % BLOCK_POSITIONS
        return pages.to(self._device), blocks.to(self._device), lanes.to(self._device)

    def copy_pages(self, rows: GroupRows, targets: Sequence[int], sources: Sequence[int]) -> None:
        memory = self._memories[self._groups.index(rows)]
        self._backend.to_host(memory, sources)
        memory[list(targets)] = memory[list(sources)]
        self._backend.to_device(memory, targets)

    def page_bytes(self, rows: GroupRows) -> int:
        """Return the bytes of a page of all layers of the group."""
        return self._memories[self._groups.index(rows)].shape[1]

    def read_page(self, rows: GroupRows, page: int) -> bytes:
        """Return a copy of a page's content."""
        memory = self._memories[self._groups.index(rows)]
        self._backend.to_host(memory, [page])
        return memory[page].cpu().numpy().tobytes()

    def write_page(self, rows: GroupRows, page: int, content: memoryview) -> None:
        """Replace a page by content that `read_page` returned."""
        memory = self._memories[self._groups.index(rows)]
        target, source = memory[page], np.frombuffer(content, np.uint8)
        if target.device.type == "cpu":
            target.numpy()[...] = source
        else:
            target.copy_(torch.from_numpy(source.copy()))
        self._backend.to_device(memory, [page])

    def keep_slots(self, rows: GroupRows, row: int, slots_by_layer: dict[int, Int64[Tensor, "kv_heads kept"]]) -> None:
        """Move the kept slots into the row's first slots. Each head keeps its own slots."""
        pages = list(rows.table.page_by_index(row).values())
        self.to_host(rows, pages)
        for index in rows.group.layers:
            layer, slots = self.layers[index], slots_by_layer[index]
            assert isinstance(layer, LayerCache)
            into = self.place(rows, row, torch.arange(slots.shape[1]))
            where = self.place(rows, row, slots.cpu())
            heads = torch.arange(len(slots), device=slots.device)[:, None]
            for part in (*key_parts(layer.keys, self._kv_type), *value_parts(layer.values, self._kv_type)):
                part[:, *into] = part[heads, *where]
        self.to_device(rows, pages)

    def clear_pages(self, rows: GroupRows, pages: Sequence[int]) -> None:
        """Set pages to 0 on the host. Call `to_device` after writing to these pages."""
        self._memories[self._groups.index(rows)][list(pages)] = 0

    def to_host(self, rows: GroupRows, pages: Sequence[int]) -> None:
        """Make pages readable on the host. Call before the host reads these pages."""
        self._backend.to_host(self._memories[self._groups.index(rows)], pages)

    def to_device(self, rows: GroupRows, pages: Sequence[int]) -> None:
        """Make pages that the host has written visible to the device. Call after the host has written these pages."""
        self._backend.to_device(self._memories[self._groups.index(rows)], pages)

    def give_back_free(self) -> int:
        """Return the memory of free pages to the system, and return the number of bytes.

        The content of these pages is lost.
        """
        num_bytes = 0
        for rows, memory in zip(self._groups, self._memories, strict=True):
            for first, count in _runs(rows.table.pool.forget_written()):
                self._backend.give_back(memory, first, count)
                num_bytes += memory[first : first + count].nbytes
        return num_bytes

    def poison(self) -> None:
        """From now on, fill every page with NaN when it is taken, so that a read of an unwritten slot returns NaN."""
        for rows, memory in zip(self._groups, self._memories, strict=True):
            rows.table.on_take = partial(_poison_page, self._backend, memory)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the kernels' tables equal the current tables."""
        for rows, tables in zip(self._groups, self._tables, strict=True):
            assert (tables.table.cpu().numpy() == rows.table.table).all(), "kernels read another table"


def _poison_page(backend: ops.Backend, memory: UInt8[Tensor, "pages bytes"], page: int) -> None:
    memory[page] = _NAN
    backend.to_device(memory, [page])


def _in_blocks(x: Shaped[Tensor, "pages heads tokens *size"]) -> Shaped[Tensor, "heads pages blocks lanes *size"]:
    """Return a view of the stored data per token, in the shape that keys and values have."""
    num_pages, num_heads, num_tokens = x.shape[:3]
    blocks = num_tokens // BLOCK_POSITIONS, BLOCK_POSITIONS
    view: Tensor = x.as_strided(
        (num_heads, num_pages, *blocks, *x.shape[3:]),
        (x.stride(1), x.stride(0), x.stride(2) * BLOCK_POSITIONS, *x.stride()[2:]),
        x.storage_offset(),
    )
    return view


def _tables_of(rows: GroupRows, rope_sets: Int64[Tensor, "rows"]) -> Pages:
    arrays = (rows.table.table, rows.shifts, rows.sinks, rows.windows)
    table, shifts, sinks, windows = (torch.tensor(array, device=rope_sets.device) for array in arrays)
    return Pages(rows.table.page_tokens, table, shifts, sinks, windows, rope_sets, rows.group.last_position)


def _copy_array(array: npt.NDArray[np.int64], tensor: Int64[Tensor, "*shape"]) -> None:
    """Copy an array into a tensor. On the host this avoids torch, whose overhead is large for so little data.

    A copy to a device does not wait. Pinning opens a context on the current device, which the caller sets.
    """
    if tensor.device.type == "cpu":
        tensor.numpy()[...] = array
    else:
        tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first page and the length of each run of consecutive pages, or rows, which must ascend."""
    for _, run in groupby(enumerate(pages), key=lambda pair: pair[1] - pair[0]):
        found = [page for _, page in run]
        yield found[0], len(found)


_STATES = "states"


class SavedGroup(NamedTuple):
    """Saved state of a row in the layers of one group."""

    state: RowState
    slots: Sequence[int]  # in the order in which they are stored


def saved_tensors(
    groups: Sequence[GroupRows], memory: PageMemory, row: int, first: int, length: int
) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads slots *size"]]]:
    """Yield copies of everything that is visible from positions `first` to `length`, a few tensors at a time."""
    states = [rows.state(row).cut(rows.slot_of(row, first), rows.state_tokens) for rows in groups]
    yield _STATES, torch.tensor(states, dtype=torch.int64)
    for rows, state in zip(groups, states, strict=True):
        slots = state.seen_from(max(first - state.shift, state.first), length - state.shift, rows.state_tokens)
        where = memory.place(rows, row, torch.tensor(slots, dtype=torch.int64))
        memory.to_host(rows, sorted(set(where[0].tolist())))
        for name, part in memory.parts(rows):
            yield name, part[:, *where]
        pages = _pages_of(rows, row, slots)
        for name, kept in memory.states(rows):
            yield name, kept[pages]


def check_saved(
    groups: Sequence[GroupRows], memory: PageMemory, tensors: Mapping[str, Tensor], length: int
) -> list[SavedGroup]:
    """Return the saved groups of a row of `length` tokens.

    Raises InvalidRequestError if the tensors do not match such a row.
    """
    states = _states(groups, tensors, length)
    saved = [
        SavedGroup(state, state.seen_from(state.first, length, rows.state_tokens))
        for rows, state in zip(groups, states, strict=True)
    ]
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name != _STATES}
    expected = {
        name: (part.dtype, (len(part), len(group.slots), *part.shape[4:]))
        for rows, group in zip(groups, saved, strict=True)
        for name, part in memory.parts(rows)
    }
    expected |= {
        name: (states.dtype, (len(rows.table.indices(group.slots)), *states.shape[1:]))
        for rows, group in zip(groups, saved, strict=True)
        for name, states in memory.states(rows)
    }
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        raise _unlike(length, f"{wrong[0]!r:.80}")
    return saved


def _states(groups: Sequence[GroupRows], tensors: Mapping[str, Tensor], length: int) -> list[RowState]:
    tensor = tensors.get(_STATES)
    if tensor is None or tensor.dtype != torch.int64 or tensor.shape != (len(groups), len(RowState._fields)):
        raise _unlike(length, repr(_STATES))
    states = [RowState(*values) for values in tensor.tolist()]
    for rows, state in zip(groups, states, strict=True):
        # A row that was saved while memory was short sees only a window.
        known = [rows.state_from_start(is_short=is_short) for is_short in (False, True)]
        if (
            state._replace(first=0) not in known
            or not 0 <= state.first <= length
            or len(rows.table.indices(state.seen_from(state.first, length, rows.state_tokens)))
            > rows.group.pages_per_row
        ):
            raise _unlike(length, str(state))
    return states


def _unlike(length: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the cache of {length} tokens does not fit this model's cache: {what}")


def load_tensors(
    groups: Sequence[GroupRows],
    memory: PageMemory,
    row: int,
    saved: Sequence[SavedGroup],
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy the tensors into the pages that the row holds for these slots."""
    for rows, group in zip(groups, saved, strict=True):
        where = memory.place(rows, row, torch.tensor(group.slots, dtype=torch.int64))
        pages = sorted(set(where[0].tolist()))
        memory.clear_pages(rows, pages)  # kernels read whole blocks and multiply invisible slots by 0
        for name, part in memory.parts(rows):
            part[:, *where] = tensors[name].to(part.device)
        for name, states in memory.states(rows):
            states[_pages_of(rows, row, group.slots)] = tensors[name].to(states.device)
        memory.to_device(rows, pages)


def _pages_of(rows: GroupRows, row: int, slots: Sequence[int]) -> Int64[Tensor, "pages"]:
    """Return the pages that contain a row's slots, in the order of the text."""
    return torch.from_numpy(rows.table.table[row][rows.table.indices(slots)])
