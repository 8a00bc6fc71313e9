"""Every token of every row in its own place, stored in the kv type of choice.

Slot = position, so what was not committed is overwritten by the next step and needs no clean-up. Memory is reserved
for the whole capacity but taken from the system only where it is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from infer import ops
from infer.architecture import Layer
from infer.batch import Step
from infer.cache.base import KVCache
from infer.errors import InvalidRequestError
from infer.kv_blocks import LayerCache, key_parts, value_parts
from infer.kv_types import check_kv_type, key_block_bytes, num_blocks, value_block_bytes
from infer.weights import Heads


@final
class DenseCache(KVCache):
    def __init__(
        self, layers: Sequence[Layer], num_rows: int, capacity: int, kv_type: str, device: torch.device
    ) -> None:
        self._kv_type, self._capacity = kv_type, capacity
        self._lengths = [0] * num_rows
        self._layers = []
        for layer in layers:
            check_kv_type(kv_type, layer.head_dim)
            shape = num_rows, layer.num_kv_heads, num_blocks(capacity)
            keys = ops.zeros((*shape, key_block_bytes(kv_type, layer.head_dim)), torch.uint8, device)
            values = ops.zeros((*shape, value_block_bytes(kv_type, layer.head_dim)), torch.uint8, device)
            self._layers.append(LayerCache(kv_type, keys, values))

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        return ops.attend(qkv, heads, self._layers[layer], step)

    def commit(self, num_accepted: Sequence[int]) -> None:
        for row, count in enumerate(num_accepted):
            self._lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        self._lengths[row] = min(self._lengths[row], length)

    @property
    def kind(self) -> str:
        return f"dense {self._kv_type}"

    def export_row(self, row: int) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads positions *size"]]]:
        length = self._lengths[row]
        for name, part in self._parts(row):
            yield name, part[:, : num_blocks(length)].flatten(1, 2)[:, :length]

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int) -> None:
        if not 0 <= length <= self._capacity:
            raise InvalidRequestError(f"the cache holds {self._capacity} tokens, got {length}")
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        parts = dict(self._parts(row))
        expected = {name: (part.dtype, (part.shape[0], length, *part.shape[3:])) for name, part in parts.items()}
        if found != expected:
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise InvalidRequestError(f"the cache of {length} tokens does not look like this one's: {wrong[0]!r:.80}")
        for name, part in parts.items():
            blocks, lanes = num_blocks(length), part.shape[2]
            unused = (0, 0) * (part.dim() - 3)
            padded = torch.nn.functional.pad(tensors[name].to(part.device), (*unused, 0, -length % lanes))
            part[:, :blocks] = padded.reshape(len(padded), blocks, lanes, *part.shape[3:])
        self._lengths[row] = length

    def copy_row(self, row: int, source: Self, source_row: int) -> None:
        blocks = num_blocks(source._lengths[source_row])
        for mine, theirs in zip(self._layers, source._layers, strict=True):
            mine.keys[row, :, :blocks] = theirs.keys[source_row, :, :blocks]
            mine.values[row, :, :blocks] = theirs.values[source_row, :, :blocks]
        self._lengths[row] = source._lengths[source_row]

    def _parts(self, row: int) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads blocks lanes *size"]]]:
        """What is stored of a row, by name, as views."""
        for index, layer in enumerate(self._layers):
            for number, part in enumerate(key_parts(layer.keys[row], self._kv_type)):
                yield f"{index}.keys.{number}", part
            for number, part in enumerate(value_parts(layer.values[row], self._kv_type)):
                yield f"{index}.values.{number}", part
