"""What the bytes of a cache block mean, for every kv type, in plain torch: the definition of correct.

A position's key (or value) is stored as a few **parts**, tensors that `encode` makes and `decode` reads:

    f32, f16, bf16    the vector, rounded
    q8                codes [dim / 32, 32] int8, scales [dim / 32] f16: x = scale × code
    q4                codes [dim / 32, 16] uint8, scales and minima [dim / 32] f16: x = scale × code + minimum;
                      a byte holds the codes of elements i (low) and i + 16 (high) of 32

In memory each 32 dimensions of a block are a record: codes of its 16 positions, then its scales, then its minima.
The codes of keys lie transposed, positions last, so that 16 positions are a vector of the machine; those of values
lie one position after the other. Floats lie the same way, but all dimensions are one record.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from infer.kv_types import BLOCK_POSITIONS, BYTES_PER_DIM, QUANTIZED, VALUES_PER_SCALE

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CODES = {"q8": torch.int8, "q4": torch.uint8}

Memory = UInt8[Tensor, "*where bytes"]
Parts = tuple[Shaped[Tensor, "..."], ...]  # [*where, positions, what encode gives of one]


@final
@dataclass(frozen=True)
class LayerCache:
    """The blocks of a layer: position p of a row is in block p // 16."""

    kv_type: str
    keys: UInt8[Tensor, "rows kv_heads blocks key_bytes"]
    values: UInt8[Tensor, "rows kv_heads blocks value_bytes"]


def encode(x: Float[Tensor, "*where dim"], kv_type: str) -> tuple[Tensor, ...]:
    """Rounded to the nearest, ties to even."""
    if kv_type not in QUANTIZED:
        return (x.to(_FLOATS[kv_type]),)
    groups = x.float().view(*x.shape[:-1], -1, VALUES_PER_SCALE)
    if kv_type == "q8":
        scales = (groups.abs().amax(-1) / 127).half()
        return _steps(groups, scales).clamp(-127, 127).to(torch.int8), scales
    minima = groups.amin(-1)
    scales = ((groups.amax(-1) - minima) / 15).half()
    codes = _steps(groups - minima.half().float()[..., None], scales).clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scales, minima.half()


def _steps(x: Float[Tensor, "*where size"], scales: Float[Tensor, "*where"]) -> Float[Tensor, "*where size"]:
    wide = scales.float()[..., None]
    return (x / torch.where(wide == 0, 1, wide)).round()


def decode(parts: tuple[Tensor, ...], kv_type: str) -> Float[Tensor, "*where dim"]:
    """float32"""
    if kv_type not in QUANTIZED:
        return parts[0].float()
    codes, scales = parts[0], parts[1].float()[..., None]
    if kv_type == "q8":
        return (scales * codes).flatten(-2)
    return (scales * torch.cat([codes & 15, codes >> 4], dim=-1) + parts[2].float()[..., None]).flatten(-2)


def key_parts(blocks: Memory, kv_type: str) -> Parts:
    """Views of blocks of keys: what is written to them is stored."""
    if kv_type in QUANTIZED:
        codes, *others = _records(blocks, kv_type)
        lanes_last = codes.view(*codes.shape[:-1], codes.shape[-1] // BLOCK_POSITIONS, BLOCK_POSITIONS)
        return lanes_last.movedim(-1, -3), *others
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], floats.shape[-1] // BLOCK_POSITIONS, BLOCK_POSITIONS).transpose(-1, -2),)


def value_parts(blocks: Memory, kv_type: str) -> Parts:
    """The same of blocks of values."""
    if kv_type in QUANTIZED:
        codes, *others = _records(blocks, kv_type)
        positions_first = codes.view(*codes.shape[:-1], BLOCK_POSITIONS, codes.shape[-1] // BLOCK_POSITIONS)
        return positions_first.movedim(-2, -3), *others
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], BLOCK_POSITIONS, floats.shape[-1] // BLOCK_POSITIONS),)


def _records(blocks: Memory, kv_type: str) -> list[Tensor]:
    """Codes [*where, records, bytes], scales and minima [*where, positions, records]."""
    record_bytes = BYTES_PER_DIM[kv_type] * VALUES_PER_SCALE
    records = blocks.view(*blocks.shape[:-1], blocks.shape[-1] // record_bytes, record_bytes)
    num_halves = 1 if kv_type == "q8" else 2
    codes_bytes = record_bytes - 2 * BLOCK_POSITIONS * num_halves
    halves = records.view(torch.float16)[..., codes_bytes // 2 :].chunk(num_halves, dim=-1)
    return [records[..., :codes_bytes].view(_CODES[kv_type]), *(half.transpose(-1, -2) for half in halves)]
