"""Weights → the numbers of blocks of the IQ types whose codes are patterns of a grid, with a small squared error.

`grid_kernels` searches. Every pattern is tried at 16 scales, so the error is below that of ggml's quantisers, which
only search patterns near the rounded weights.
"""

from functools import cache
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.quantization.ggml_blocks import Numbers, numbers_of
from infer.compute.quantization.ggml_grids import EVEN_SIGNS, FREE_SIGNS, SHIFT_OF_8, SHIFT_OF_GROUP, grid
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES, Bits, Field, Grid
from infer.errors import InvalidRequestError

GRID_TYPES = tuple(name for name, fields in BLOCK_FIELDS.items() if isinstance(fields.codes, Grid))
NEEDS_IMPORTANCE = tuple(name for name in GRID_TYPES if name.startswith(("IQ1", "IQ2")))
_NEARBY = np.geomspace(0.5, 1.7, 16).astype(np.float32)
_TRIED = np.geomspace(0.8, 1.25, 14).astype(np.float32)


class _GridForm(NamedTuple):
    """Constants of a type that the search needs."""

    numbers: NDArray[np.float32]  # [width, patterns]
    patterns: NDArray[np.uint8]  # codes [patterns, width]
    kind: int
    most: int
    sign_shift: int
    num_groups: int


def search_grid(blocks: Float[Tensor, "blocks 256"], weights: Float[Tensor, "blocks 256"] | None, type: str) -> Numbers:
    """Return the numbers of blocks of a grid type. Threads may call it at the same time.

    Args:
        blocks: The weights of the model.
        weights: Weights of their squared errors, above 0, or None for equal ones.
        type: A name of `GRID_TYPES`.

    Raises:
        InvalidRequestError: The type is of `NEEDS_IMPORTANCE`, and there are no weights.
    """
    if weights is None and type in NEEDS_IMPORTANCE:
        raise InvalidRequestError(f"{type} needs an importance matrix for every tensor: make one with infer imatrix")
    form, x = _form_of(type), np.ascontiguousarray(blocks.numpy(), np.float32)
    own = np.ones_like(x) if weights is None else np.ascontiguousarray(weights.numpy(), np.float32)
    codes = np.empty(x.shape, np.uint8)
    small = np.empty((len(x), form.num_groups), np.int8)
    units = np.empty(len(x), np.float32)
    kernels = import_module("infer.compute.quantization.grid_kernels")  # loads Numba, which only these types need
    kernels.search_blocks(
        x, own, form.numbers, form.patterns, form.kind, form.most, form.sign_shift, _NEARBY, _TRIED, codes, small, units
    )
    scales = torch.from_numpy(units / np.float32(BLOCK_FIELDS[type].factor)).half()
    return Numbers(torch.from_numpy(codes), torch.from_numpy(small), None, scales[:, None])


@cache
def _form_of(type: str) -> _GridForm:
    fields = BLOCK_FIELDS[type]
    form, scales = fields.codes, fields.scales
    assert isinstance(form, Grid)
    places = np.arange(0, 16, form.code_bits)
    patterns = (grid(form.name)[:, None].astype(np.int32) >> places & ((1 << form.code_bits) - 1)).astype(np.uint8)
    numbers = np.array(fields.table, np.float32)[patterns]
    if form.signs.bits == 1:
        kind, numbers = SHIFT_OF_GROUP if form.is_mirrored else SHIFT_OF_8, numbers - 1  # the shift adds it again
    else:
        kind = EVEN_SIGNS if form.signs.bits == 7 else FREE_SIGNS
    first = scales if isinstance(scales, Bits) else scales[0]
    assert isinstance(first, Bits | Field)
    empty = torch.zeros(1, BLOCK_TYPES[type].block_bytes, dtype=torch.uint8)
    num_groups = numbers_of(empty, type).scales.shape[1]
    most = (2 << first.bits) - 1
    return _GridForm(np.ascontiguousarray(numbers.T), patterns, kind, most, form.sign_shift, num_groups)
