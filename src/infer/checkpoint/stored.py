"""Makes weights of what lies in a file, undoes what formats do to them, and hands them out by our names.

Two things are undone: llama.cpp's order of the rows of q and k, and Gemma's norms kept as w where 1 + w is meant.
Values of one axis (norms, biases) come out as float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from jaxtyping import UInt8
from torch import Tensor

from infer.block_types import BLOCK_TYPES
from infer.checkpoint.mapped import TensorInfo
from infer.quants import dequantize
from infer.weights import StoredWeight

_DTYPE_BY_TYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@final
@dataclass(frozen=True, eq=False)
class LazyWeights(Mapping[str, StoredWeight]):
    """Weights that are made when they are asked for."""

    tensors: Mapping[str, TensorInfo]

    def __getitem__(self, name: str) -> StoredWeight:
        info = self.tensors[name]
        weight = read_weight(info)
        if len(info.shape) == 1:
            weight = as_float32(weight, info.added)
        return in_half_order(weight, info.num_paired_heads) if info.num_paired_heads else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def read_weight(info: TensorInfo) -> StoredWeight:
    """What the file has, as a view of it: no bytes are read yet. Floats are copied where the file does not align them
    to their own element."""
    kind = BLOCK_TYPES[info.type]
    if not kind.is_float:
        rows, row_bytes = prod(info.shape[:-1]), kind.row_bytes(info.shape[-1])
        return StoredWeight(info.type, info.shape, _bytes(info).reshape(rows, row_bytes))
    dtype = _DTYPE_BY_TYPE[info.type]
    if not info.num_bytes:
        return StoredWeight(info.type, info.shape, torch.empty(info.shape, dtype=dtype))
    raw = _bytes(info).clone() if info.offset % dtype.itemsize else _bytes(info)
    return StoredWeight(info.type, info.shape, raw.view(dtype).reshape(info.shape))


def _bytes(info: TensorInfo) -> UInt8[Tensor, "bytes"]:
    return torch.frombuffer(info.content, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)


def in_half_order(weight: StoredWeight, num_heads: int) -> StoredWeight:
    """Rows of q or k from llama.cpp's order, in which elements that rotate together are neighbours (0, 1), (2, 3) …,
    to Hugging Face's, in which they are half a head apart. Whole rows move, so block types stay as they are. Copies.

    It is the inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    data = weight.data
    pairs = data.reshape(num_heads, -1, 2, *data.shape[1:])
    return StoredWeight(weight.type, weight.shape, pairs.transpose(1, 2).reshape(data.shape))


def as_float32(weight: StoredWeight, added: float = 0.0) -> StoredWeight:
    """The values, plus a constant, as F32."""
    values: Tensor = weight.data if weight.data.is_floating_point() else dequantize(weight.data, weight.type)
    values = values.reshape(weight.shape).to(torch.float32)
    return StoredWeight("F32", weight.shape, values + added if added else values)
