"""Packed masks: one bit per token id, 32 per int32, the lowest bit first, the layout that grammar libraries use."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

MASK_BITS = 32


def pack_masks(allowed: Sequence[Collection[int]], vocab_size: int) -> Int[Tensor, "masks words"]:
    bits = torch.zeros(len(allowed), num_mask_words(vocab_size) * MASK_BITS, dtype=torch.bool)
    for row, token_ids in enumerate(allowed):
        bits[row, torch.tensor(sorted(token_ids), dtype=torch.int64)] = True
    return pack_bits(bits)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_BITS)


def pack_bits(bits: Bool[Tensor, "masks padded"]) -> Int[Tensor, "masks words"]:
    """Return the last axis, whose length is a multiple of 32, packed into int32 words."""
    shifts = torch.arange(MASK_BITS, device=bits.device)
    words = (bits.view(*bits.shape[:-1], bits.shape[-1] // MASK_BITS, MASK_BITS).to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_bits(words: Int[Tensor, "*masks words"], vocab_size: int) -> Bool[Tensor, "*masks vocab"]:
    shifts = torch.arange(MASK_BITS, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :vocab_size]
