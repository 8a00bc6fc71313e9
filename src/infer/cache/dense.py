"""Every token of every row in its own place, in the float type of choice.

Slot = position, so what was not committed is overwritten by the next step and needs no clean-up. Memory is reserved
for the whole capacity but taken from the system only where it is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.architecture import Layer
from infer.batch import Step
from infer.cache.base import KVCache
from infer.errors import InvalidRequestError
from infer.weights import Heads

LANES = 16  # positions that lie side by side in a block of keys


@final
class DenseCache(KVCache):
    def __init__(
        self, layers: Sequence[Layer], num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        blocks = _blocks(capacity)
        self._capacity = capacity
        self._lengths = [0] * num_rows
        self._keys, self._values = [], []
        for layer in layers:
            heads, dim = layer.num_kv_heads, layer.head_dim
            self._keys.append(ops.zeros((num_rows, heads, blocks, dim, LANES), dtype, device))
            self._values.append(ops.zeros((num_rows, heads, blocks * LANES, dim), dtype, device))

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        return ops.attend(qkv, heads, self._keys[layer], self._values[layer], step)

    def commit(self, num_accepted: Sequence[int]) -> None:
        for row, count in enumerate(num_accepted):
            self._lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        self._lengths[row] = min(self._lengths[row], length)

    @property
    def kind(self) -> str:
        return f"dense {str(self._keys[0].dtype).removeprefix('torch.')}"

    def export_row(self, row: int) -> Iterator[tuple[str, Float[Tensor, "kv_heads positions dim"]]]:
        length = self._lengths[row]
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            yield f"{layer}.keys", keys[row, :, : _blocks(length)].transpose(-1, -2).flatten(1, 2)[:, :length]
            yield f"{layer}.values", values[row, :, :length]

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int) -> None:
        if not 0 <= length <= self._capacity:
            raise InvalidRequestError(f"the cache holds {self._capacity} tokens, got {length}")
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for layer, values in enumerate(self._values):
            shape = (values.dtype, (values.shape[1], length, values.shape[3]))
            expected |= {f"{layer}.keys": shape, f"{layer}.values": shape}
        if found != expected:
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise InvalidRequestError(f"the cache of {length} tokens does not look like this one's: {wrong[0]!r:.80}")
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            values[row, :, :length] = tensors[f"{layer}.values"].to(values.device)
            positions = tensors[f"{layer}.keys"].to(keys.device)
            padded = torch.nn.functional.pad(positions, (0, 0, 0, -length % LANES))
            keys[row, :, : _blocks(length)] = padded.reshape(
                len(padded), _blocks(length), LANES, padded.shape[2]
            ).transpose(-1, -2)
        self._lengths[row] = length

    def copy_row(self, row: int, source: Self, source_row: int) -> None:
        length = source._lengths[source_row]
        for mine, theirs in zip(self._keys, source._keys, strict=True):
            mine[row, :, : _blocks(length)] = theirs[source_row, :, : _blocks(length)]
        for mine, theirs in zip(self._values, source._values, strict=True):
            mine[row, :, :length] = theirs[source_row, :, :length]
        self._lengths[row] = length


def _blocks(length: int) -> int:
    return -(-length // LANES)
