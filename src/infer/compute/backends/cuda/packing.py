"""GGML's blocks → planes (`layouts`) on the device, some rows at a time. Numbers are moved, and none is changed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import UInt8
from torch import Tensor

from infer.compute.backends.cuda.layouts import BLOCK, LAYOUTS, PLANES, Layout, PackedWeight
from infer.compute.backends.gpu_memory import stored_type
from infer.compute.backends.reference_parts import as_halves
from infer.compute.operands.weights import ConvertedWeight, Projection, StoredWeight, UnreadWeight, Weight
from infer.compute.quantization.ggml_blocks import Numbers, numbers_of
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES

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
