"""Every token of every row in its own place, in the float type of choice.

Slot = position, so what was not committed is overwritten by the next step and needs no clean-up. Memory is reserved
for the whole capacity but taken from the system only where it is written.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.architecture import Layer
from infer.batch import Step
from infer.cache.base import KVCache
from infer.weights import Heads

LANES = 16  # positions that lie side by side in a block of keys


@final
class DenseCache(KVCache):
    def __init__(
        self, layers: Sequence[Layer], num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        blocks = -(-capacity // LANES)
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
