"""The byte layout of a cache block for every kv type, in plain torch. It defines the correct result.

A position's key or value is stored as a few **parts**, tensors that encode a vector:

    f32, f16, bf16      the vector, rounded
    keys of q8 and q4   codes [dim / 32, 32] int8, scales [dim / 32] f16: mixed key = scale × code
    values of q8        as keys: value = scale × code
    values of q4        codes [dim / 32, 16] uint8, scales and minima [dim / 32] f16: value = scale × code + minimum;
                        a byte has the codes of elements i (low) and i + 16 (high) of 32

Keys have a few large elements, always at the same indices. `mix` spreads each 32 elements with a Hadamard transform,
which is its own inverse. This halves the rounding error. Queries mixed in the same way give the same scores
(arXiv:2404.00456).

All stored values are finite, because a kernel multiplies values that a token does not see by 0, and 0 × infinity is
NaN. Scores of such slots are masked. So numbers beyond a type's range become its largest, and a position whose key or
value is not finite gets a key that is NaN (`storable`): only the tokens that see it become NaN.

In memory, each 32 dimensions of a block are one record: codes of its 16 positions, then its scales, then its minima.
The codes of keys are transposed, with positions last, so that 16 positions are one machine vector. The codes of values
are stored one position after the other. Floats are stored in the same order, but all dimensions are one record.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from infer.compute.quantization.kv_formats import (
    BLOCK_POSITIONS,
    QUANTIZED,
    VALUES_PER_SCALE,
    key_block_bytes,
    value_block_bytes,
)

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Memory = UInt8[Tensor, "*where bytes"]
Parts = tuple[Shaped[Tensor, "..."], ...]  # [*where, positions, the encoded parts of one]


@final
@dataclass(frozen=True)
class Pages:
    """Location of the slots of each row, and the slots that a token sees. Kernels read it in every step.

    A row's token at position p has the slot p − shift. Slot s is in page table[row, s // page_tokens], which has
    page_tokens / 16 blocks.

    From slot t, a slot s ≤ t is visible if s < sinks or s > t − window. If the window is 0, all slots s ≤ t are
    visible. A window of −n means chunks of n slots: s ≥ t − t mod n is visible. If `last_position` is given, the end of
    the model's context, slots s < sinks are read as if from position min(p, last_position): the model was not trained
    for distances beyond its context.

    `rope_sets` is 1 for rows that use the second set of a `RopeTable` with two sets, otherwise 0.

    `ends` is the number of slots of a row's whole text. Heads that see `num_ahead` slots after their own see none from
    there on.
    """

    page_tokens: int  # a power of 2
    table: Int64[Tensor, "rows pages"]
    shifts: Int64[Tensor, "rows"]
    sinks: Int64[Tensor, "rows"]
    windows: Int64[Tensor, "rows"]
    rope_sets: Int64[Tensor, "rows"]
    last_position: int | None = None
    ends: Int64[Tensor, "rows"] | None = None


@final
@dataclass(frozen=True)
class LayerCache:
    """The blocks of a layer, by page. The blocks of one head and page are contiguous."""

    kv_type: str
    keys: UInt8[Tensor, "kv_heads pages blocks key_bytes"]
    values: UInt8[Tensor, "kv_heads pages blocks value_bytes"]
    pages: Pages


def mix(x: Float[Tensor, "*where dim"]) -> Float[Tensor, "*where dim"]:
    """Return each 32 elements times the Hadamard matrix / √32.

    Sums of two elements 16 apart come first, then 8, 4, 2, 1.
    """
    mixed, apart = x.float().view(*x.shape[:-1], -1, VALUES_PER_SCALE), VALUES_PER_SCALE // 2
    while apart:
        first, second = mixed.view(*mixed.shape[:-1], -1, 2, apart).unbind(-2)
        mixed, apart = torch.stack([first + second, first - second], dim=-2).view(mixed.shape), apart // 2
    scaled: Tensor = mixed * VALUES_PER_SCALE**-0.5
    return scaled.flatten(-2)


def storable(
    keys: Float[Tensor, "*where dim"], values: Float[Tensor, "*where dim"]
) -> tuple[Float[Tensor, "*where dim"], Float[Tensor, "*where dim"]]:
    """Return finite values, and keys whose first element is NaN if an element of the key or the value is not finite."""
    is_number = (keys.isfinite() & values.isfinite()).all(-1, keepdim=True)
    first = torch.where(is_number, keys[..., :1], torch.nan)
    return torch.cat([first, keys[..., 1:]], -1), values.nan_to_num(0, 0, 0)


def encode_keys(keys: Float[Tensor, "*where dim"], kv_type: str) -> tuple[Tensor, ...]:
    """Return the parts of keys, rounded to nearest, ties to even. `encode_values` rounds the same way."""
    return _encode_8(mix(keys)) if kv_type in QUANTIZED else (_rounded(keys, _FLOATS[kv_type]),)


def encode_values(values: Float[Tensor, "*where dim"], kv_type: str) -> tuple[Tensor, ...]:
    if kv_type == "q8":
        return _encode_8(values)
    return _encode_4(values) if kv_type == "q4" else (_rounded(values, _FLOATS[kv_type]),)


def decode_keys(parts: tuple[Tensor, ...], kv_type: str) -> Float[Tensor, "*where dim"]:
    """Return keys in float32. `decode_values` returns float32, too."""
    return mix(_decode_8(*parts)) if kv_type in QUANTIZED else parts[0].float()


def decode_values(parts: tuple[Tensor, ...], kv_type: str) -> Float[Tensor, "*where dim"]:
    if kv_type == "q8":
        return _decode_8(*parts)
    return _decode_4(*parts) if kv_type == "q4" else parts[0].float()


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded. Numbers beyond the type's range become its largest."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _encode_8(x: Float[Tensor, "*where dim"]) -> tuple[Tensor, ...]:
    groups = x.float().view(*x.shape[:-1], -1, VALUES_PER_SCALE)
    scales = _rounded(groups.abs().amax(-1) / 127, torch.float16)
    return _steps(groups, scales).clamp(-127, 127).to(torch.int8), scales


def _encode_4(x: Float[Tensor, "*where dim"]) -> tuple[Tensor, ...]:
    groups = x.float().view(*x.shape[:-1], -1, VALUES_PER_SCALE)
    least = groups.amin(-1)
    scales, minima = (_rounded(each, torch.float16) for each in ((groups.amax(-1) - least) / 15, least))
    codes = _steps(groups - minima.float()[..., None], scales).clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scales, minima


def _steps(x: Float[Tensor, "*where size"], scales: Float[Tensor, "*where"]) -> Float[Tensor, "*where size"]:
    wide = scales.float()[..., None]
    return (x / torch.where(wide == 0, 1, wide)).round()


def _decode_8(codes: Tensor, scales: Tensor) -> Tensor:
    return (scales.float()[..., None] * codes).flatten(-2)


def _decode_4(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    steps = torch.cat([codes & 15, codes >> 4], dim=-1)
    return (scales.float()[..., None] * steps + minima.float()[..., None]).flatten(-2)


def key_parts(blocks: Memory, kv_type: str) -> Parts:
    """Return the parts of blocks of keys, as views: writing to a view stores the values."""
    if kv_type in QUANTIZED:
        codes, scales = _records(blocks, key_block_bytes(kv_type, VALUES_PER_SCALE), num_halves=1)
        lanes_last = codes.view(*codes.shape[:-1], codes.shape[-1] // BLOCK_POSITIONS, BLOCK_POSITIONS)
        return lanes_last.movedim(-1, -3).view(torch.int8), scales
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], floats.shape[-1] // BLOCK_POSITIONS, BLOCK_POSITIONS).transpose(-1, -2),)


def value_parts(blocks: Memory, kv_type: str) -> Parts:
    """Return the parts of blocks of values, as views: writing to a view stores the values."""
    if kv_type in QUANTIZED:
        record_bytes = value_block_bytes(kv_type, VALUES_PER_SCALE)
        codes, *halves = _records(blocks, record_bytes, num_halves=1 if kv_type == "q8" else 2)
        positions_first = codes.view(*codes.shape[:-1], BLOCK_POSITIONS, codes.shape[-1] // BLOCK_POSITIONS)
        return positions_first.movedim(-2, -3).view(torch.int8 if kv_type == "q8" else torch.uint8), *halves
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], BLOCK_POSITIONS, floats.shape[-1] // BLOCK_POSITIONS),)


def _records(blocks: Memory, record_bytes: int, num_halves: int) -> list[Tensor]:
    """Return codes [*where, records, bytes], then scales and minima [*where, positions, records]."""
    records = blocks.view(*blocks.shape[:-1], blocks.shape[-1] // record_bytes, record_bytes)
    codes_bytes = record_bytes - 2 * BLOCK_POSITIONS * num_halves
    halves = records.view(torch.float16)[..., codes_bytes // 2 :].chunk(num_halves, dim=-1)
    return [records[..., :codes_bytes], *(half.transpose(-1, -2) for half in halves)]
