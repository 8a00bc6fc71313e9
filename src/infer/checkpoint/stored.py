"""Undoes what formats do to weights, and hands them out by our names.

Two things are undone: llama.cpp's order of the rows of q and k, and Gemma's norms kept as w where 1 + w is meant.
Values of one axis (norms, biases) come out as float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from infer.errors import ModelFormatError
from infer.quants import dequantize
from infer.weights import StoredWeight


@final
@dataclass(frozen=True, eq=False)
class LazyWeights(Mapping[str, StoredWeight]):
    """Weights that are made when they are asked for."""

    make_by_name: Mapping[str, Callable[[], StoredWeight]]

    def __getitem__(self, name: str) -> StoredWeight:
        return self.make_by_name[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.make_by_name)

    def __len__(self) -> int:
        return len(self.make_by_name)


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


def rename(path: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Our name → the file's. ModelFormatError where two tensors of the file are one of ours."""
    renamed: dict[str, str] = {}
    for stored, ours in names.items():
        if ours in renamed:
            raise ModelFormatError(path, f"tensor {stored!r:.80}", f"is the same weight as {renamed[ours]!r:.80}")
        renamed[ours] = stored
    return renamed
