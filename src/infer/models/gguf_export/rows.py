"""Matrices whose rows come from several weights, or in another order. Rows are read when they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.operands.weights import FileWeight, StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES, FLOAT_TYPES
from infer.files.tensors.lazy_weights import as_float32

Order = NDArray[np.int64]  # for each row, the number of its source row


@final
@dataclass(frozen=True)
class Rows:
    """A matrix. `read(first, last)` returns the rows [first, last) as `StoredWeight.data`.

    A vector has one column.
    """

    type: str
    count: int
    columns: int
    read: Callable[[int, int], Tensor]
    is_vector: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,) if self.is_vector else (self.count, self.columns)


def rows_of(weight: FileWeight) -> Rows:
    """Return the rows of a weight with one or two axes. A type that GGUF does not have becomes float32."""
    if isinstance(weight, UnreadWeight):
        rows = Rows(weight.type, weight.shape[0], weight.shape[1], weight.read)
        return rows if BLOCK_TYPES[weight.type].ggml_id is not None else as_floats(rows)
    data = weight.data.reshape(weight.shape[0], -1)
    if len(weight.shape) == 1:
        return vector_of(data)
    return Rows(weight.type, weight.shape[0], weight.shape[1], lambda first, last: data[first:last])


def vector_of(values: Tensor) -> Rows:
    """Return the float32 values of a vector."""
    column = values.to(torch.float32).reshape(-1, 1)
    return Rows("F32", len(column), 1, lambda first, last: column[first:last], is_vector=True)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, in their order. Parts of different types become float32."""
    if len(parts) == 1:
        return parts[0]
    if len({part.type for part in parts}) > 1:
        parts = [as_floats(part) for part in parts]
    bounds = list(pairwise(accumulate((part.count for part in parts), initial=0)))

    def read(first: int, last: int) -> Tensor:
        found = [
            part.read(max(first, start) - start, min(last, end) - start)
            for part, (start, end) in zip(parts, bounds, strict=True)
            if max(first, start) < min(last, end)
        ]
        return torch.cat(found) if found else parts[0].read(0, 0)

    return replace(parts[0], count=bounds[-1][1], read=read)


def reordered(rows: Rows, order: Order) -> Rows:
    """Return the rows in another order. Runs of neighbouring rows are read together."""

    def read(first: int, last: int) -> Tensor:
        wanted = order[first:last]
        if not len(wanted):
            return rows.read(0, 0)
        ascending = np.sort(wanted)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) != 1) + 1)
        data = torch.cat([rows.read(int(run[0]), int(run[-1]) + 1) for run in runs])
        return data[torch.from_numpy(np.searchsorted(ascending, wanted))]

    return replace(rows, count=len(order), read=read)


def with_columns(rows: Rows, order: Order) -> Rows:
    """Return the matrix with its columns in another order. Values in blocks become float32."""
    floats, columns = (rows if rows.type in FLOAT_TYPES else as_floats(rows)), torch.from_numpy(order)
    return replace(floats, columns=len(order), read=lambda first, last: floats.read(first, last)[:, columns])


def as_floats(rows: Rows) -> Rows:
    """Return the matrix in float32."""

    def read(first: int, last: int) -> Tensor:
        return as_float32(StoredWeight(rows.type, (last - first, rows.columns), rows.read(first, last))).data

    return replace(rows, type="F32", read=read)
