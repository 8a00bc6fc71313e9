"""What the bytes of a cache block mean, for every kv type, in plain torch: the definition of correct.

A position's key (or value) is stored as a few **parts**, tensors that `encode` makes and `decode` reads:

    f32, f16, bf16    the vector, rounded

A part of a block of keys lies transposed, [dim, 16 positions], so that 16 positions are a vector of the machine;
a part of a block of values lies as [16 positions, dim].
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from infer.kv_types import BLOCK_POSITIONS

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Memory = UInt8[Tensor, "*where bytes"]
Parts = tuple[Shaped[Tensor, "*where positions size"], ...]


@final
@dataclass(frozen=True)
class Pages:
    """Where the slots of each row lie, and what of them a token sees: read whenever a step runs.

    A row's token at position p has the slot p − shift. Slot s lies in page table[row, s // page_tokens], which is
    page_tokens / 16 blocks one behind the other. From slot t the slots s ≤ t are seen with s < sinks or s > t − window;
    all of them where the window is 0.
    """

    page_tokens: int  # a power of 2
    table: Int64[Tensor, "rows pages"]
    shifts: Int64[Tensor, "rows"]
    sinks: Int64[Tensor, "rows"]
    windows: Int64[Tensor, "rows"]


@final
@dataclass(frozen=True)
class LayerCache:
    """The blocks of a layer, page after page."""

    kv_type: str
    keys: UInt8[Tensor, "kv_heads blocks key_bytes"]
    values: UInt8[Tensor, "kv_heads blocks value_bytes"]
    pages: Pages


def encode(x: Float[Tensor, "*where dim"], kv_type: str) -> tuple[Tensor, ...]:
    return (x.to(_FLOATS[kv_type]),)


def decode(parts: tuple[Tensor, ...], kv_type: str) -> Float[Tensor, "*where dim"]:
    """float32"""
    assert kv_type in _FLOATS
    return parts[0].float()


def key_parts(blocks: Memory, kv_type: str) -> Parts:
    """Views of blocks of keys: what is written to them is stored."""
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], floats.shape[-1] // BLOCK_POSITIONS, BLOCK_POSITIONS).transpose(-1, -2),)


def value_parts(blocks: Memory, kv_type: str) -> Parts:
    floats = blocks.view(_FLOATS[kv_type])
    return (floats.view(*floats.shape[:-1], BLOCK_POSITIONS, floats.shape[-1] // BLOCK_POSITIONS),)
