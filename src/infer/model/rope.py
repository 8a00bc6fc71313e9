"""Rotary tables: cos and sin for every position, in the float32 arithmetic that the models were trained with."""

import torch

from infer.architecture import Rope
from infer.operands.weights import RopeTable


def make_rope_table(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    """`[num_positions, half]` each, for short sequences. Angles are products in float32, as in Hugging Face's code."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RopeTable(cos.to(device), sin.to(device))
