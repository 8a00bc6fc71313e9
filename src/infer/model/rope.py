"""Rotary tables: cos and sin for every position, in the float32 arithmetic that the models were trained with."""

import torch

from infer.architecture import Rope
from infer.weights import RopeTable


def make_rope_table(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    """`[num_positions, dim / 2]` each. Angles are products of float32 numbers, as in Hugging Face's code."""
    theta, factors = rope.theta, rope.frequency_factors
    if rope.long is not None and num_positions > rope.long.beyond:
        factors = rope.long.frequency_factors
        if rope.long.growth is not None:
            stretch = rope.long.growth * num_positions / rope.long.beyond - rope.long.growth + 1
            theta *= stretch ** (rope.dim / (rope.dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RopeTable(cos.to(device), sin.to(device))
