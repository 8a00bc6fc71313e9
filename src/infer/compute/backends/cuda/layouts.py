"""Layout of a packed matrix in a GPU's memory: a plane for each kind of number, blocks of 32 inputs in each.

    codes    [rows, blocks, bytes]   4 bits: 16 bytes, input i in the low nibble of byte i, i + 16 in the high one;
                                     8 bits: 32 signed bytes; 2 bits: see below
    high     [rows, blocks, bytes]   the bits above; 1 bit: 4 bytes, input 4 j + b in bit j of byte b; 2 bits: see below
    scales   [rows, blocks]          f16, or bf16 if it is a power of two
    minima   [rows, blocks]          f16, if the type has one

2 bits: input 16 g + 4 w + b is in byte 4 g + b, from bit 2 w on. So the four bytes of a word, shifted and masked, are
four consecutive inputs of every type: an operand of dp4a.

K and IQ types have an f16 scale (and minimum) per 8 blocks in `supers` [rows, blocks / 8, 1 or 2]. They have small
integers in `scales` and `minima` [rows, blocks, 1 or 2]: int8, one per block or one per half block.

Other types are unpacked into these forms. Patterns of grids become 4-bit codes with signs, under `supers` in f32 if
these have a factor. A scale of more than 32 values is repeated for each block. Bits of Q1_0 become 0 and 2. The two
scales of a block of NVFP4 are f16, under `supers` of 1.

Every number keeps the value that the file gives it. An integer q is stored as q + offset ≥ 0, or as its code in the
type's table. A matrix of a float type is `codes`, as stored.

`prepare` packs some rows at a time. Numbers are moved, and none is changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

import torch
from jaxtyping import UInt8
from torch import Tensor

from infer.compute.backends.gpu_memory import stored_type
from infer.compute.backends.reference_parts import as_halves
from infer.compute.operands.weights import ConvertedWeight, Projection, StoredWeight, UnreadWeight, Weight
from infer.compute.quantization.ggml_blocks import Numbers, numbers_of
from infer.compute.quantization.ggml_types import (
    BLOCK_FIELDS,
    BLOCK_TYPES,
    FP4_VALUES,
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
)

BLOCK = 32  # inputs of a block of weights, and of quantised activations
PLANES = {"exact": 2, "fast": 1}  # int8 planes of quantised activations, by their precision


@final
@dataclass(frozen=True)
class Layout:
    type: str
    low_bits: int
    high_bits: int = 0
    offset: int = 0
    has_minimum: bool = False
    scales_per_block: int = 0  # scales under a super-block's; 0: each block has its own float
    table: tuple[int, ...] = ()  # what the codes of 4 bits stand for, 16 at most; (): themselves
    is_float: bool = False


LAYOUTS = {
    layout.type: layout
    for layout in (
        Layout("Q4_0", low_bits=4, offset=8),
        Layout("Q4_1", low_bits=4, has_minimum=True),
        Layout("Q5_0", low_bits=4, high_bits=1, offset=16),
        Layout("Q5_1", low_bits=4, high_bits=1, has_minimum=True),
        Layout("Q8_0", low_bits=8),
        Layout("Q2_K", low_bits=2, has_minimum=True, scales_per_block=2),
        Layout("Q3_K", low_bits=2, high_bits=1, offset=4, scales_per_block=2),
        Layout("Q4_K", low_bits=4, has_minimum=True, scales_per_block=1),
        Layout("Q5_K", low_bits=4, high_bits=1, has_minimum=True, scales_per_block=1),
        Layout("Q6_K", low_bits=4, high_bits=2, offset=32, scales_per_block=2),
        Layout("IQ4_NL", low_bits=4, table=IQ4_VALUES),
        Layout("IQ4_XS", low_bits=4, table=IQ4_VALUES, scales_per_block=1),
        Layout("MXFP4", low_bits=4, table=FP4_VALUES),
        Layout("NVFP4", low_bits=4, table=FP4_VALUES, scales_per_block=2),
        Layout("IQ1_S", low_bits=4, table=IQ1_VALUES, scales_per_block=1),
        Layout("IQ1_M", low_bits=4, table=IQ1_VALUES, scales_per_block=2),
        Layout("IQ2_XXS", low_bits=4, table=IQ2_VALUES, scales_per_block=1),
        Layout("IQ2_XS", low_bits=4, table=IQ2_VALUES, scales_per_block=2),
        Layout("IQ2_S", low_bits=4, table=IQ2_VALUES, scales_per_block=2),
        Layout("IQ3_XXS", low_bits=4, table=IQ3_XXS_VALUES, scales_per_block=1),
        Layout("IQ3_S", low_bits=4, table=IQ3_S_VALUES, scales_per_block=1),
        Layout("TQ1_0", low_bits=2, offset=1),
        Layout("TQ2_0", low_bits=2, offset=1),
        Layout("Q1_0", low_bits=2, offset=1),
        Layout("Q2_0", low_bits=2, offset=1),
        Layout("F32", low_bits=32, is_float=True),
        Layout("F16", low_bits=16, is_float=True),
        Layout("BF16", low_bits=16, is_float=True),
    )
}


@final
@dataclass(frozen=True)
class PackedWeight(Weight):
    layout: Layout
    shape: tuple[int, int]
    planes: int  # int8 planes of the activations that it is multiplied with: 2 is exact, 1 is fast
    codes: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None
    supers: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.high, self.scales, self.minima, self.supers)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)


_BYTES_AT_ONCE = 1 << 24
FileWeight = StoredWeight | UnreadWeight | ConvertedWeight


def prepare(projection: Projection, device: torch.device, precision: str = "exact") -> Projection:
    """Return the projection packed. Neighbours of one type become one matrix: q, k and v, or gate and up."""
    parts = []
    for _, same in groupby(projection.parts, key=lambda part: _stored(part).type):
        parts.append(_pack([_stored(part) for part in same], device, PLANES[precision]))
    bias = None if projection.bias is None else projection.bias.to(device, torch.float32)
    return replace(projection, parts=tuple(parts), bias=bias)


def _stored(weight: Weight) -> FileWeight:
    weight = as_halves(weight, stored_type)
    assert isinstance(weight, StoredWeight | UnreadWeight | ConvertedWeight)
    return weight


def _pack(weights: list[FileWeight], device: torch.device, planes: int) -> PackedWeight:
    layout = LAYOUTS[weights[0].type]
    num_rows, in_features = sum(weight.out_features for weight in weights), weights[0].in_features
    whole: list[Tensor | None] = []
    first = 0
    for data in _some_rows(weights, device):
        tensors = (data, None, None, None, None) if layout.is_float else _planes(layout, data)
        if not whole:
            whole = [None if t is None else t.new_empty(num_rows, *t.shape[1:]) for t in tensors]
        for to, part in zip(whole, tensors, strict=True):
            if to is not None and part is not None:
                to[first : first + len(data)] = part
        first += len(data)
    codes, *others = whole
    assert codes is not None
    return PackedWeight(layout, (num_rows, in_features), planes, codes, *others)


def _some_rows(weights: list[FileWeight], device: torch.device) -> Iterator[Tensor]:
    """Yield the bytes or floats of consecutive rows, on the device. For CUDA they pass through pinned memory."""
    for weight in weights:
        at_once = max(1, _BYTES_AT_ONCE // weight.row_bytes)
        buffer = None
        for first in range(0, weight.out_features, at_once):
            data = weight.rows(first, min(first + at_once, weight.out_features)).data
            if device.type != "cuda":
                yield data.to(device)
                continue
            if buffer is None:
                buffer = torch.empty(at_once, *data.shape[1:], dtype=data.dtype, pin_memory=True)
            buffer[: len(data)] = data
            yield buffer[: len(data)].to(device)


def _planes(layout: Layout, data: UInt8[Tensor, "rows bytes"]) -> list[Tensor | None]:
    """Return codes, high, scales, minima and supers of some rows."""
    numbers = _in_blocks(layout, data)
    codes, high = _split_bits(layout, numbers.codes)
    num_blocks, per_block = len(codes) // len(data), layout.scales_per_block or 1
    tensors = [codes, high, numbers.scales, numbers.minima, numbers.supers]
    lines = [codes.shape[-1], 4 * layout.high_bits, per_block, per_block, 1 + layout.has_minimum]
    counts = [num_blocks] * 4 + [-(-num_blocks // 8)]
    return [
        None if tensor is None else tensor.reshape(len(data), count, line).contiguous()
        for tensor, line, count in zip(tensors, lines, counts, strict=True)
    ]


def _in_blocks(layout: Layout, data: UInt8[Tensor, "rows bytes"]) -> Numbers:
    """Return the numbers of some rows in blocks of 32 codes, with the scales that the layout has."""
    fields, block = BLOCK_FIELDS[layout.type], BLOCK_TYPES[layout.type]
    numbers = numbers_of(data.reshape(-1, block.block_bytes), layout.type)
    codes, scales, supers = numbers.codes.reshape(-1, BLOCK).view(torch.uint8), numbers.scales, numbers.supers
    if fields.table and not layout.table:
        values = torch.tensor(fields.table, dtype=torch.int32, device=codes.device) + layout.offset
        codes = values[codes.int()].to(torch.uint8)
    if supers is not None and fields.factor != 1:
        supers = supers.float() * fields.factor
    elif supers is None and layout.scales_per_block:
        supers = scales.new_ones(len(data) * -(-len(codes) // len(data) // 8))
    elif supers is None:
        scales = scales.repeat_interleave(block.block_size // BLOCK, dim=1)
    return Numbers(codes, scales, numbers.minima, supers)


def _split_bits(layout: Layout, q: UInt8[Tensor, "blocks 32"]) -> tuple[Tensor, Tensor | None]:
    """Return integers as codes of `low_bits`, and the bits above them."""
    high = None
    if layout.high_bits == 1:
        bits = (q >> layout.low_bits).view(-1, 8, 4) << torch.arange(8, dtype=torch.uint8, device=q.device)[:, None]
        high = bits.sum(1, dtype=torch.uint8)
    elif layout.high_bits == 2:
        high = _pairs(q >> layout.low_bits)
    if layout.low_bits == 8:
        return q, high
    if layout.low_bits == 2:
        return _pairs(q & 3), high
    return (q[:, :16] & 15) | (q[:, 16:] << 4), high


def _pairs(q: UInt8[Tensor, "blocks 32"]) -> UInt8[Tensor, "blocks 8"]:
    """Return four pairs of bits per byte: input 16 g + 4 w + b in byte 4 g + b, from bit 2 w on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=q.device)
    return (q.view(-1, 2, 4, 4) << shifts[:, None]).sum(2, dtype=torch.uint8).flatten(1)
