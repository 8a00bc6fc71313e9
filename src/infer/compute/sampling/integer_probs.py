"""Probabilities as integers, so that their sums do not depend on an order, a device or a number of threads.

    weight(d) = eᵈ × 2⁴², rounded to the nearest integer, for d = logit − largest logit ≤ 0

The largest token weighs 2⁴² and a million of them fit 63 bits. eᵈ = 2ⁿ p(r) with n = round(d / ln 2), r = d − n ln 2
and Taylor's p to the 11th power, within 7e-15: float64 of +, −, × in the order written, rounded each time, never
fused, so that every device and language has the same bits. Numba keeps to that without `fastmath`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.constants import LN2_HIGH_64, LN2_LOW_64, LOG2_E, LOWEST, ROUNDER, TAYLOR, WEIGHT_BITS


def weights(logits: Float[Tensor, "*rows vocab"], largest: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows vocab"]:
    """Return the weights of float32 logits; −inf weighs 0."""
    d = (logits.double() - largest.double()[..., None]).clamp(min=LOWEST)
    n = (d * LOG2_E + ROUNDER) - ROUNDER
    r = (d - n * LN2_HIGH_64) - n * LN2_LOW_64
    p = torch.full_like(r, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        p = p * r + coefficient
    scale = (n.to(torch.int64) + (1023 + WEIGHT_BITS) << 52).view(torch.float64)
    return ((p * scale + ROUNDER) - ROUNDER).to(torch.int64)


def target(total: Int[Tensor, "*rows"], top_p: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Return the sum that a kept set must reach.

    It is slightly below p, by the precision of float32 logits: log 0.5, log 0.3 and log 0.2 at top_p = 0.8 keep two
    tokens.
    """
    return (top_p - 1e-7) * total.double()
