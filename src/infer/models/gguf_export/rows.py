"""Matrices whose rows come from several weights, or in another order. Rows are read when they are needed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.operands.weights import FileWeight, UnreadWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES, FLOAT_TYPES
from infer.files.tensors.lazy_weights import as_float32

Order = NDArray[np.int64]  # for each row, the number of its source row


def rows_of(weight: FileWeight) -> UnreadWeight:
    """Return a weight with one or two axes as rows. A type that GGUF does not have becomes float32."""
    if isinstance(weight, UnreadWeight):
        rows = UnreadWeight(weight.type, weight.shape, weight.read)
        return rows if BLOCK_TYPES[weight.type].ggml_id is not None else as_floats(rows)
    if len(weight.shape) == 1:
        return vector_of(weight.data)
    return UnreadWeight(weight.type, weight.shape, lambda first, last: weight.data[first:last])


def vector_of(values: Tensor) -> UnreadWeight:
    """Return the float32 values of a vector, whose rows have one value."""
    column = values.to(torch.float32).reshape(-1, 1)
    return UnreadWeight("F32", (len(column),), lambda first, last: column[first:last])


def joined(parts: Sequence[UnreadWeight]) -> UnreadWeight:
    """Return the rows of all parts, in their order. Parts of different types become float32."""
    if len(parts) == 1:
        return parts[0]
    if len({part.type for part in parts}) > 1:
        parts = [as_floats(part) for part in parts]
    bounds = list(pairwise(accumulate((part.shape[0] for part in parts), initial=0)))

    def read(first: int, last: int) -> Tensor:
        found = [
            part.read(max(first, start) - start, min(last, end) - start)
            for part, (start, end) in zip(parts, bounds, strict=True)
            if max(first, start) < min(last, end)
        ]
        return torch.cat(found) if found else parts[0].read(0, 0)

    return replace(parts[0], shape=(bounds[-1][1], *parts[0].shape[1:]), read=read)


def reordered(rows: UnreadWeight, order: Order) -> UnreadWeight:
    """Return the rows in another order. Runs of neighbouring rows are read together."""

    def read(first: int, last: int) -> Tensor:
        wanted = order[first:last]
        if not len(wanted):
            return rows.read(0, 0)
        ascending = np.sort(wanted)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) != 1) + 1)
        data = torch.cat([rows.read(int(run[0]), int(run[-1]) + 1) for run in runs])
        return data[torch.from_numpy(np.searchsorted(ascending, wanted))]

    return replace(rows, shape=(len(order), *rows.shape[1:]), read=read)


def with_columns(rows: UnreadWeight, order: Order) -> UnreadWeight:
    """Return the matrix with its columns in another order. Values in blocks become float32."""
    floats, columns = (rows if rows.type in FLOAT_TYPES else as_floats(rows)), torch.from_numpy(order)
    read = floats.read
    return replace(floats, shape=(rows.shape[0], len(order)), read=lambda first, last: read(first, last)[:, columns])


def as_floats(rows: UnreadWeight) -> UnreadWeight:
    """Return the matrix in float32."""

    def read(first: int, last: int) -> Tensor:
        return as_float32(rows.rows(first, last)).data

    return replace(rows, type="F32", read=read)
