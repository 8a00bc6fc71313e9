"""Rotary tables: cos and sin for every position, in the float32 arithmetic that the models were trained with."""

import torch
from jaxtyping import Float
from torch import Tensor

from infer.operands.architecture import Rope
from infer.operands.weights import RopeTable


def make_rope_table(rope: Rope, num_positions: int, device: torch.device) -> RopeTable:
    """Return cos and sin, each of shape `[sets, num_positions, half]`.

    Angles are products in float32, as in Hugging Face's code.
    """
    cos, sin = zip(*(_cos_and_sin(own, num_positions) for own in rope.sets(num_positions)), strict=True)
    return RopeTable(torch.stack(cos).to(device), torch.stack(sin).to(device))


def _cos_and_sin(
    rope: Rope, num_positions: int
) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
