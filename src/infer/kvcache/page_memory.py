"""The tensors of a cache: the pages of each layer, and the tables by which kernels find them.

The memory of all pages is reserved at once but taken from the system only where it is written.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Self, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from infer import ops
from infer.kvcache.page_rows import GroupRows
from infer.operands.architecture import Layer
from infer.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, value_block_bytes
from infer.quantization.kv_layout import LayerCache, Pages, key_parts, value_parts

_NAN = 0xFF  # in each byte: NaN of every float type, and codes whose scales are


@final
class PageMemory:
    """`layers` is what kernels take. What a group's tables say is theirs to read after `publish`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        groups: Sequence[GroupRows],
        kv_type: str,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self._groups, self._kv_type, self._page_tokens, self._device = groups, kv_type, page_tokens, device
        self._backend = ops.backend_of(device)
        self.rope_sets = np.zeros(len(groups[0].shifts), np.int64)
        rope_sets = torch.tensor(self.rope_sets, device=device)  # one for all groups
        self._tables = [_tables_of(rows, rope_sets) for rows in groups]
        self._published = [rows.version for rows in groups]
        self.layers = self._make_layers(layers)

    def _make_layers(self, layers: Sequence[Layer]) -> list[LayerCache]:
        made, zeros = dict[int, LayerCache](), self._backend.zeros
        for rows, tables in zip(self._groups, self._tables, strict=True):
            num_blocks = rows.table.pool.num_pages * self._blocks_per_page
            for index in rows.group.layers:
                shape, dim = (layers[index].num_kv_heads, num_blocks), layers[index].head_dim
                keys = zeros((*shape, key_block_bytes(self._kv_type, dim)), torch.uint8)
                values = zeros((*shape, value_block_bytes(self._kv_type, dim)), torch.uint8)
                made[index] = LayerCache(self._kv_type, keys, values, tables)
        return [made[index] for index in range(len(layers))]

    @property
    def _blocks_per_page(self) -> int:
        return self._page_tokens // BLOCK_POSITIONS

    @property
    def num_bytes(self) -> int:
        """What keys and values take when every page has been written."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def set_rope(self, row: int, index: int) -> None:
        """Which of its two sets of rope factors a model has for the row. Published at once."""
        if self.rope_sets[row] != index:
            self.rope_sets[row] = index
            _copy_array(self.rope_sets, self._tables[0].rope_sets)

    def publish(self) -> None:
        """Let kernels see the tables and windows as they are now."""
        for index, (rows, tables) in enumerate(zip(self._groups, self._tables, strict=True)):
            if self._published[index] != rows.version:
                arrays = (rows.table.table, rows.shifts, rows.sinks, rows.windows)
                tensors = (tables.table, tables.shifts, tables.sinks, tables.windows)
                for tensor, array in zip(tensors, arrays, strict=True):
                    _copy_array(array, tensor)
                self._published[index] = rows.version

    def parts(self, rows: GroupRows) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads blocks lanes *size"]]]:
        """What is stored of a group's layers, by name, as views."""
        for index in rows.group.layers:
            layer = self.layers[index]
            for number, part in enumerate(key_parts(layer.keys, self._kv_type)):
                yield f"{index}.keys.{number}", part
            for number, part in enumerate(value_parts(layer.values, self._kv_type)):
                yield f"{index}.values.{number}", part

    def place(
        self, rows: GroupRows, row: int, slots: Int64[Tensor, "*slots"]
    ) -> tuple[Int64[Tensor, "*slots"], Int64[Tensor, "*slots"]]:
        """The block of each slot of a row, and where in it the slot is."""
        table = torch.from_numpy(rows.table.table[row])
        blocks = (
            table[slots // self._page_tokens] * self._blocks_per_page + slots % self._page_tokens // BLOCK_POSITIONS
        )
        return blocks.to(self._device), (slots % BLOCK_POSITIONS).to(self._device)

    def copy_pages(self, rows: GroupRows, targets: Sequence[int], source: Self, sources: Sequence[int]) -> None:
        into, from_ = self._blocks(targets), self._blocks(sources)
        for index in rows.group.layers:
            mine, theirs = self.layers[index], source.layers[index]
            mine.keys[:, into] = theirs.keys[:, from_]
            mine.values[:, into] = theirs.values[:, from_]

    def _blocks(self, pages: Sequence[int]) -> list[int]:
        per_page = self._blocks_per_page
        return [page * per_page + block for page in pages for block in range(per_page)]

    def keep_slots(self, rows: GroupRows, row: int, slots_by_layer: dict[int, Int64[Tensor, "kv_heads kept"]]) -> None:
        """Move what is kept into the row's first slots; each head keeps slots of its own."""
        for index in rows.group.layers:
            layer, slots = self.layers[index], slots_by_layer[index]
            into = self.place(rows, row, torch.arange(slots.shape[1]))
            blocks, lanes = self.place(rows, row, slots.cpu())
            heads = torch.arange(len(slots), device=slots.device)[:, None]
            for part in (*key_parts(layer.keys, self._kv_type), *value_parts(layer.values, self._kv_type)):
                part[:, *into] = part[heads, blocks, lanes]

    def clear_blocks(self, rows: GroupRows, blocks: Sequence[int]) -> None:
        for index in rows.group.layers:
            self.layers[index].keys[:, blocks] = 0
            self.layers[index].values[:, blocks] = 0

    def give_back_free(self) -> int:
        """The memory of pages that are free goes back to the system, and what they held is lost: how many bytes."""
        num_bytes, per_page = 0, self._blocks_per_page
        for rows in self._groups:
            pages = rows.table.pool.forget_written()
            for first, count in _runs(pages):
                for memory in self._tensors(rows):
                    self._backend.give_back(memory, first * per_page, count * per_page)
            num_bytes += sum(len(pages) * per_page * memory[:, 0].nbytes for memory in self._tensors(rows))
        return num_bytes

    def _tensors(self, rows: GroupRows) -> Iterator[Shaped[Tensor, "kv_heads blocks size"]]:
        for index in rows.group.layers:
            yield from (self.layers[index].keys, self.layers[index].values)

    def poison(self) -> None:
        """From now on pages are filled with NaN when they are handed out: whoever reads what was not written since
        gets it."""
        for rows in self._groups:
            rows.table.on_take = partial(self._poison_page, rows)

    def _poison_page(self, rows: GroupRows, page: int) -> None:
        first = page * self._blocks_per_page
        for memory in self._tensors(rows):
            memory[:, first : first + self._blocks_per_page] = _NAN

    def check_integrity(self) -> None:
        """Raises AssertionError unless kernels read the tables as they are."""
        for rows, tables in zip(self._groups, self._tables, strict=True):
            assert (tables.table.cpu().numpy() == rows.table.table).all(), "kernels read another table"


def _tables_of(rows: GroupRows, rope_sets: Int64[Tensor, "rows"]) -> Pages:
    arrays = (rows.table.table, rows.shifts, rows.sinks, rows.windows)
    table, shifts, sinks, windows = (torch.tensor(array, device=rope_sets.device) for array in arrays)
    return Pages(rows.table.page_tokens, table, shifts, sinks, windows, rope_sets, rows.group.furthest)


def _copy_array(array: npt.NDArray[np.int64], tensor: Int64[Tensor, "*shape"]) -> None:
    """On the host without torch, which takes long for so little."""
    if tensor.device.type == "cpu":
        tensor.numpy()[...] = array
    else:
        tensor.copy_(torch.from_numpy(array))


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the length of each run of consecutive pages, which are in ascending order."""
    for _, run in groupby(enumerate(pages), key=lambda pair: pair[1] - pair[0]):
        found = [page for _, page in run]
        yield found[0], len(found)
