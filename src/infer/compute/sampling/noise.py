"""Noise and probabilities as pure functions, with the same bits on every device and in every language.

Gumbel noise is a function of (seed, position, token id).

`argmax(logit / T + Gumbel)` draws from `softmax(logit / T)`, so a token depends only on its logits and this function.

    key   = splitmix64(splitmix64(seed) + position)                        64 bits: low and high word
    h     = mix32(mix32(token ^ low) + high)                               32 bits, a bijection of the token id
    V     = (h + ½) / 2³²                                                  strictly inside (0, 1)
    noise = −ln(−ln(1 − V))                                                −3.14 ≤ noise ≤ 22.88

Noise increases as h decreases. It is float32 made of integer operations, conversions that round to nearest, and +, −, ×
in the written order: no division, no library logarithm, no fused multiply-add. Numba keeps to that without `fastmath`,
Triton with `enable_fp_fusion=False`. Small V keep their full relative precision, because such tokens win. A token whose
scaled logit is more than 26.1 below the largest can never win, so it can be skipped.

Probabilities are integers, so that their sums do not depend on an order, a device or a number of threads.

    weight(d) = eᵈ × 2⁴², rounded to the nearest integer, for d = logit − largest logit ≤ 0

The largest token weighs 2⁴² and a million of them fit 63 bits. eᵈ = 2ⁿ p(r) with n = round(d / ln 2), r = d − n ln 2
and Taylor's p to the 11th power, within 7e-15: float64 of +, −, × in the order written, rounded each time, never fused.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.constants import (
    LN2_HIGH_32,
    LN2_HIGH_64,
    LN2_LOW_32,
    LN2_LOW_64,
    LOG2_E,
    LOG_COEFFICIENTS,
    LOWEST,
    ONE_BITS,
    ROUNDER,
    SQRT_HALF_BITS,
    TAYLOR,
    WEIGHT_BITS,
)
from infer.sampling_params import signed


def gumbel_at(seed: int, position: int, token_ids: Int[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Return one row's noise for the given token ids, on their device. The seed is taken modulo 2⁶⁴."""
    row = torch.tensor([[signed(seed)], [signed(position)]], device=token_ids.device)
    return gumbel_rows(row[0], row[1], token_ids)[0]


def gumbel_rows(
    seeds: Int[Tensor, "rows"], positions: Int[Tensor, "rows"], token_ids: Int[Tensor, "tokens"]
) -> Float[Tensor, "rows tokens"]:
    """Return the noise of each row, from int64 columns of seeds and positions.

    A seed of 2⁶³ or more is written as the negative number with the same bits.
    """
    keys = mix64(mix64(seeds) + positions)
    return gumbel_of(hash_tokens(keys, token_ids))


def mix64(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Apply SplitMix64 (Steele, Lea, Flood 2014) to int64 values with wraparound."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


def shifted_seed(seed: int, shift: int) -> int:
    """Return the seed whose noise at position p is the noise of `seed` at position p + `shift`.

    It is the inverse of SplitMix64 at `mix64(seed) + shift`. The result is from 0 to 2⁶⁴ − 1.
    """
    x = (int(mix64(torch.tensor(signed(seed)))) + shift) % 2**64
    for bits, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089), (30, 1)):
        x = (x ^ x >> bits ^ x >> 2 * bits) * factor % 2**64
    return (x - 0x9E3779B97F4A7C15) % 2**64


def mix32(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Apply lowbias32 (Wellons 2018), a murmur3 finaliser with better constants, to int32 values with wraparound."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ (x >> 16 & 0xFFFF)


def hash_tokens(keys: Int[Tensor, "rows"], token_ids: Int[Tensor, "tokens"]) -> Int[Tensor, "rows tokens"]:
    """Return h for each row's key and each token id: 32 bits in an int32."""
    low, high = _low_word(keys)[:, None], _low_word(keys >> 32)[:, None]
    return mix32(mix32(token_ids.to(torch.int32) ^ low) + high)


def gumbel_of(h: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return −ln(−ln(1 − V)) in float32, from the 32 bits of an int32."""
    minus_v = (_unsigned(h) + 0.5) * -(2.0**-32)
    exponent, fraction = _split((_unsigned(~h) + 0.5) * 2.0**-32)
    # Where 1 − V has exponent 0 its fraction is −V itself: taking it from h keeps the bits that 1 − V rounds away.
    fraction = torch.where(exponent == 0, minus_v, fraction)
    return -_log(*_split(-_log(exponent, fraction)))


def _split(x: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return (e, f) with x = 2ᵉ (1 + f) and √½ ≤ 1 + f < √2, for normal positive x."""
    bits = x.view(torch.int32) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).view(torch.float32)
    return exponent.to(torch.float32), mantissa - 1.0


def _log(exponent: Float[Tensor, "*shape"], fraction: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ln(2ᵉ (1 + f)), within two units in the last place."""
    polynomial = fraction * LOG_COEFFICIENTS[0] + LOG_COEFFICIENTS[1]
    for coefficient in LOG_COEFFICIENTS[2:]:
        polynomial = polynomial * fraction + coefficient
    square = fraction * fraction
    tail = polynomial * fraction * square + exponent * LN2_LOW_32 - square * 0.5
    return fraction + tail + exponent * LN2_HIGH_32


def _unsigned(word: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the int32's bits as an unsigned number, rounded to float32."""
    return (word.to(torch.int64) & 0xFFFFFFFF).to(torch.float32)


def _low_word(x: Int[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    word = x & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


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
