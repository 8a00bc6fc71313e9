"""The numbers that a block type's codes mean, before a scale multiplies them, and the nearest number to a value."""

from functools import cache, cached_property
from typing import final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from infer.compute.quantization.ggml_types import BLOCK_FIELDS, Field

_TABLE_REACH = 128  # tables have numbers from −127 to 113, and midpoints are multiples of ½


@final
class Levels:
    """The numbers of a type's codes: consecutive numbers, or those of a table."""

    def __init__(self, numbers: tuple[int, ...], *, are_consecutive: bool) -> None:
        self.numbers, self._are_consecutive = numbers, are_consecutive
        self.low, self.high = min(numbers), max(numbers)

    def nearest(self, values: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return the nearest number to each value. May change the values."""
        if self._are_consecutive:
            return values.round_().clamp_(self.low, self.high)
        return self._table[self._index(values)]

    def codes(self, numbers: Float[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
        """Return the code of each number. The number must be one of the type's."""
        if self._are_consecutive:
            return (numbers - self.low).to(torch.uint8)
        return self._codes[self._index(numbers.clone())]

    def _index(self, values: Tensor) -> Tensor:
        return values.mul_(2).add_(2 * _TABLE_REACH).clamp_(0, 4 * _TABLE_REACH - 1).to(torch.int32)

    @cached_property
    def _table(self) -> Tensor:
        halves = torch.arange(4 * _TABLE_REACH) / 2 - _TABLE_REACH + 0.25
        known = torch.tensor(self.numbers, dtype=torch.float32)
        return known[(halves[:, None] - known).abs().argmin(1)]

    @cached_property
    def _codes(self) -> Tensor:
        known = torch.tensor(self.numbers, dtype=torch.float32)
        return (self._table[:, None] == known).to(torch.uint8).argmax(1).to(torch.uint8)


@cache
def levels_of(type: str) -> Levels:
    """Return the levels of a type that uses all its codes."""
    fields = BLOCK_FIELDS[type]
    if fields.table:
        return Levels(tuple(map(int, fields.table)), are_consecutive=False)
    num_bits = sum(part.bits for part in fields.codes if isinstance(part, Field))
    return consecutive(-fields.offset, (1 << num_bits) - 1 - fields.offset)


def consecutive(low: int, high: int) -> Levels:
    """Return the integers from `low` to `high` as levels. The code of `low` is 0."""
    return Levels(tuple(range(low, high + 1)), are_consecutive=True)
