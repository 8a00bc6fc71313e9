"""Make weights from the tensors in a file, under our names, and undo the changes of formats.

The undone changes are: llama.cpp's order of the rows of q and k; norms stored as w for 1 + w; rows of matrices that
alternate, one by one or by heads; transposed matrices; separate tensors with the scales of MXFP4 and of NVFP4's
matrices; matrices that GPTQ, AWQ and other methods quantised (`quantised_rows`). Tensors with one axis (norms, biases)
are returned as float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.operands.weights import FilePlace, FileWeight, StoredWeight, UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.quantised_rows import QuantisedRows, mxfp4_blocks, unpacked
from infer.files.tensors.tensor_bytes import DTYPES, bytes_of, memory_for
from infer.files.tensors.tensor_info import TensorInfo

ReadRows = Callable[[int, int], Tensor]


@final
@dataclass(frozen=True, eq=False)
class LazyWeights(Mapping[str, FileWeight]):
    """Weights that are made when they are requested."""

    tensors: Mapping[str, TensorInfo]

    def __getitem__(self, name: str) -> FileWeight:
        """Return a weight. A matrix stays in its file until it is used; other tensors are read immediately.

        Raises ModelError if reading fails.
        """
        info = self.tensors[name]
        if len(info.shape) == 2 and info.num_bytes:
            return _unread(info)
        weight = read_weight(info)
        return as_float32(weight, info.added) if len(info.shape) == 1 else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def read_weight(info: TensorInfo) -> StoredWeight:
    """Return a copy of a tensor in our order."""
    data = _unread(info).data if info.shape else _as_stored(info, (), bytes_of(info))
    return StoredWeight(info.type, info.shape, data)


def read_row(info: TensorInfo, row: int) -> Tensor:
    """Return a row of a matrix as float32, `[columns]`. Raises ModelError if reading fails."""
    stored = StoredWeight(info.type, (1, info.shape[1]), _unread(info).read(row, row + 1))
    return as_float32(stored).data[0]


def _unread(info: TensorInfo) -> UnreadWeight:
    place, read = None, stored_rows(info)
    if info.row_ranges:
        read = partial(_read_ranges, info, read)
    if info.num_paired_heads:
        read = partial(_read_in_half_order, info, read)
    elif not (info.packed or info.scales or info.factor or info.row_stride or info.row_ranges):
        place = FilePlace(info.file.descriptor, info.offset)
    return UnreadWeight(info.type, info.shape, read, place)


def stored_rows(info: TensorInfo) -> ReadRows:
    """Return read(first, last), which returns rows in the file's order, in the form of `StoredWeight.data`."""
    if info.packed is not None:
        return QuantisedRows(info, info.packed).read
    if info.scales is not None:
        return partial(_read_mxfp4, info, info.scales)
    if info.factor is not None:
        return partial(_read_with_factor, info, info.factor)
    return partial(_read_columns if info.column_stride else _read_rows, info)


def _read_rows(info: TensorInfo, first: int, last: int) -> Tensor:
    row_bytes = info.num_bytes // max(1, info.shape[0])
    return _as_stored(info, (last - first, *info.shape[1:]), _rows(info, first, last, row_bytes))


def _read_in_half_order(info: TensorInfo, read: ReadRows, first: int, last: int) -> Tensor:
    """Read the whole heads that contain the requested rows, reorder these heads, and return the rows."""
    head_rows = info.shape[0] // info.num_paired_heads
    first_head, end_head = first // head_rows, -(-last // head_rows)
    start, end = first_head * head_rows, end_head * head_rows
    heads = StoredWeight(info.type, (end - start, *info.shape[1:]), read(start, end))
    return in_half_order(heads, end_head - first_head, info.num_paired_rows).data[first - start : last - start]


def _read_ranges(info: TensorInfo, read: ReadRows, first: int, last: int) -> Tensor:
    """Return rows of a tensor whose rows are in several places of the file's tensor."""
    parts, start = [], 0
    for low, high in info.row_ranges:
        begin, end = max(first - start, 0) + low, min(last - start, high - low) + low
        if begin < end:
            parts.append(read(begin, end))
        start += high - low
    return torch.cat(parts) if parts else read(0, 0)


def _read_columns(info: TensorInfo, first: int, last: int) -> Tensor:
    """Return rows of floats that are columns in the file."""
    size, dtype = BLOCK_TYPES[info.type].block_bytes, DTYPES[info.type]
    span = (last - first - 1) * info.row_stride + size
    columns = memory_for(info, (info.shape[1], span))
    for column, room in enumerate(columns):
        info.file.read_into(info.offset + first * info.row_stride + column * info.column_stride, room.data)
    return torch.from_numpy(columns).view(dtype)[:, :: info.row_stride // size].T


def _read_mxfp4(info: TensorInfo, scales: TensorInfo, first: int, last: int) -> Tensor:
    """Return rows of GGML's blocks. In the file, the two halves of a byte are neighbouring values."""
    num_blocks = scales.shape[1]
    codes = unpacked(_rows(info, first, last, 16 * num_blocks), 4)
    return torch.from_numpy(mxfp4_blocks(codes, _rows(scales, first, last, num_blocks)))


def _read_with_factor(info: TensorInfo, factor: TensorInfo, first: int, last: int) -> Tensor:
    """Return rows of blocks, with the matrix's factor after each row, as in `BlockType.tail_bytes`."""
    rows, number = _rows(info, first, last, info.num_bytes // info.shape[0]), bytes_of(factor)
    if not np.isfinite(number.view(np.float32)).all():
        factor.fail("expected a finite scale, got a number that is not")
    return torch.from_numpy(np.concatenate((rows, np.broadcast_to(number, (len(rows), len(number)))), axis=1))


def _rows(info: TensorInfo, first: int, last: int, row_bytes: int) -> NDArray[np.uint8]:
    """Read and return rows, without the bytes between them."""
    stride = info.row_stride or row_bytes
    data = memory_for(info, (last - first) * stride)
    wanted = data[: len(data) - (stride - row_bytes)]
    info.file.read_into(info.offset + first * stride, wanted.data)
    return np.ascontiguousarray(data.reshape(last - first, stride)[:, :row_bytes])


def _as_stored(info: TensorInfo, shape: tuple[int, ...], content: NDArray[np.uint8]) -> Tensor:
    """Return `StoredWeight.data` of the bytes of this shape."""
    raw, kind = torch.from_numpy(content.reshape(-1)), BLOCK_TYPES[info.type]
    if kind.is_float:
        dtype = DTYPES[info.type]
        return raw.view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
    return raw.reshape(prod(shape[:-1]), kind.row_bytes(shape[-1]))


def in_half_order(weight: StoredWeight, num_heads: int, num_rotated: int = 0) -> StoredWeight:
    """Return a copy of the rows of q or k in Hugging Face's order instead of llama.cpp's.

    In llama.cpp's order, elements that rotate together are neighbours (0, 1), (2, 3) …. In Hugging Face's order they
    are half a head apart. Whole rows move, so block types stay unchanged. If only the first `num_rotated` rows of a
    head rotate, the others stay. It is the inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    data = weight.data
    heads = data.reshape(num_heads, -1, *data.shape[1:])
    num_rotated = num_rotated or heads.shape[1]
    pairs = heads[:, :num_rotated].reshape(num_heads, -1, 2, *data.shape[1:]).transpose(1, 2).flatten(1, 2)
    return StoredWeight(weight.type, weight.shape, torch.cat([pairs, heads[:, num_rotated:]], 1).reshape(data.shape))


def as_float32(weight: StoredWeight, added: float = 0.0) -> StoredWeight:
    """Return the values, plus a constant, as F32."""
    values: Tensor = weight.data if weight.data.is_floating_point() else dequantize(weight.data, weight.type)
    values = values.reshape(weight.shape).to(torch.float32)
    return StoredWeight("F32", weight.shape, values + added if added else values)
