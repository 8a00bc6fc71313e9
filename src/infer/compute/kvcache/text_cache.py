"""Keys and values of whole texts, which an encoder needs for two layers at a time.

A layer's tokens read the keys and values of their own layer and write those of the next. So even layers share their
memory, and so do odd ones. Nothing is kept between two groups of texts.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.groups import TEXT_PAGE_TOKENS as PAGE_TOKENS
from infer.compute.kvcache.groups import num_text_pages
from infer.compute.kvcache.pages import num_pages
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, check_kv_type, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache, Pages
from infer.errors import InvalidRequestError


def _integers(value: int, count: int, backend: ops.Backend) -> Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=backend.device)


@final
class TextCache:
    """Room for `num_rows` texts at a time, each of at most `capacity` tokens, with `total` tokens together.

    `second_starts` has, for each row, the position at which the second text of a pair begins.
    """

    def __init__(
        self,
        attention: Sequence[Attention],
        num_rows: int,
        capacity: int,
        total: int,
        kv_type: str,
        backend: ops.Backend,
    ) -> None:
        """Make an empty cache. Raises InvalidRequestError for a storage type that heads of this size cannot have."""
        (heads, dim), *others = {(each.num_kv_heads, each.head_dim) for each in attention}
        assert not others
        check_kv_type(kv_type, dim)
        self._room = num_text_pages(num_rows, max(capacity, total))
        self._ends, self.second_starts, nothing = (_integers(0, num_rows, backend) for _ in range(3))
        self._table = _integers(0, num_rows * num_pages(capacity, PAGE_TOKENS), backend).view(num_rows, -1)
        shape = heads, self._room, PAGE_TOKENS // BLOCK_POSITIONS
        sizes = key_block_bytes(kv_type, dim), value_block_bytes(kv_type, dim)
        keys, values = ([backend.zeros((*shape, size), torch.uint8) for _ in range(2)] for size in sizes)
        self.layers = list[LayerCache]()
        for index, layer in enumerate(attention):
            windows = _integers(layer.window or 0, num_rows, backend)
            pages = Pages(PAGE_TOKENS, self._table, nothing, nothing, windows, nothing, ends=self._ends)
            self.layers.append(LayerCache(kv_type, keys[index % 2], values[index % 2], pages))

    def hold(self, lengths: Sequence[int], second_starts: Sequence[int]) -> None:
        """Give room to texts of these lengths, one per row. Raises InvalidRequestError if there is too little."""
        first = 0
        for row, (length, start) in enumerate(zip(lengths, second_starts, strict=True)):
            end = first + num_pages(length, PAGE_TOKENS)
            if end > self._room or end - first > self._table.shape[1] or row >= len(self._ends):
                raise InvalidRequestError(f"the cache has no room for texts of {', '.join(map(str, lengths))} tokens")
            self._table[row, : end - first] = torch.arange(first, end, device=self._table.device)
            self._ends[row], self.second_starts[row], first = length, start, end

    def attend(self, layer: int, qkv: Activations, heads: Heads, step: Step) -> Activations:
        """Attend over the keys of each token's text, which are in the cache."""
        return ops.attend(qkv, heads, self.layers[layer], step)
