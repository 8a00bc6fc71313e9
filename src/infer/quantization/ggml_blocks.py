"""Byte layouts of GGML's tensor types, and their conversion to and from float32.

`dequantize` equals the result of the `gguf` package bit for bit: products and sums in float32, in the same order.
Layouts are those of llama.cpp's ggml-common.h; multi-byte values are little-endian.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from infer.errors import UnsupportedModelError
from infer.quantization.ggml_types import BLOCK_TYPES, FP4_VALUES, IQ4_VALUES

Blocks = UInt8[Tensor, "blocks bytes"]
Values = Float[Tensor, "blocks size"]
_VALUES_AT_ONCE = 1 << 15  # what is made on the way stays in a core's cache, and costs no pages of the system's


def dequantize(data: UInt8[Tensor, "*rows bytes"], type: str) -> Float[Tensor, "*rows columns"]:
    """Return the float32 values of rows stored in a block type, on the device of `data`."""
    if type not in _DEQUANTIZE:
        raise UnsupportedModelError(f"{type} is not a block type that can be dequantised: {', '.join(_DEQUANTIZE)} are")
    kind = BLOCK_TYPES[type]
    blocks = data.reshape(-1, kind.block_bytes)
    values = torch.empty(len(blocks), kind.block_size, device=data.device)
    at_once = _VALUES_AT_ONCE // kind.block_size
    for few, out in zip(torch.split(blocks, at_once), torch.split(values, at_once), strict=True):
        out.copy_(_DEQUANTIZE[type](few))
    return values.reshape(*data.shape[:-1], data.shape[-1] // kind.block_bytes * kind.block_size)


def quantize(values: Float[Tensor, "rows columns"], type: str) -> UInt8[Tensor, "rows bytes"]:
    """Return rows quantised to Q8_0 or Q4_1, bit for bit as the `gguf` package does.

    The number of columns is a multiple of 32.
    """
    blocks = values.float().reshape(-1, BLOCK_TYPES[type].block_size)
    if type == "Q8_0":
        scale = blocks.abs().amax(1, keepdim=True) / 127
        scaled = blocks * _inverse(scale)
        whole = scaled.abs().floor()
        rounded = whole + (2 * (scaled.abs() - whole)).floor()  # ties go away from zero
        packed = torch.cat((_half_bytes(scale), rounded.copysign(scaled).to(torch.int8).view(torch.uint8)), dim=1)
    elif type == "Q4_1":
        low, high = blocks.aminmax(dim=1, keepdim=True)
        scale = (high - low) / 15
        q = ((blocks - low) * _inverse(scale) + 0.5).trunc().clamp(0, 15).to(torch.uint8)
        packed = torch.cat((_half_bytes(scale), _half_bytes(low), q[:, :16] | (q[:, 16:] << 4)), dim=1)
    else:
        raise UnsupportedModelError(f"{type} is not a type that values are quantised to: Q8_0 and Q4_1 are")
    return packed.reshape(len(values), -1)


def quantize_fitted(values: Float[Tensor, "rows columns"]) -> UInt8[Tensor, "rows bytes"]:
    """Return rows quantised to Q4_1 with a least-squares scale and minimum, instead of the full range of the values.

    The fit starts from several ranges, each shrunk at both ends. It alternates between fitting to the rounded integers
    and rounding to the fit. The best result, measured with the stored half-precision numbers, is kept. The number of
    columns is a multiple of 32.
    """
    blocks = values.reshape(-1, BLOCK_TYPES["Q4_1"].block_size)
    packed = [_fit(part.float()) for part in torch.split(blocks, _FIT_BLOCKS)]
    return torch.cat(packed).reshape(len(values), -1)


_FIT_BLOCKS = 8192  # whose values stay in a core's cache
_FIT_CUTS = (0.0, 0.75, 1.5, 3.0)  # of 15 steps, both ends together
_FIT_ROUNDS = 2


def _fit(x: Values) -> Blocks:
    low, high = x.aminmax(dim=1, keepdim=True)
    total, span = x.sum(1, keepdim=True), high - low
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_low = span / 15, low
    for cut in _FIT_CUTS:
        scale = span / (15 + cut)
        scale, least = _as_halves(scale, low + scale * (cut / 2))
        for _ in range(_FIT_ROUNDS + 1):
            q = _nearest(x, scale, least)
            error = (x - q * scale - least).square_().sum(1, keepdim=True)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_scale, best_low = torch.where(is_better, scale, best_scale), torch.where(is_better, least, best_low)
            q_sum, q_square, product = (y.sum(1, keepdim=True) for y in (q, q * q, q * x))
            spread = x.shape[1] * q_square - q_sum * q_sum
            scale = torch.where(spread > 0, (x.shape[1] * product - q_sum * total) / spread, 0.0)
            scale, least = _as_halves(scale, (total - scale * q_sum) / x.shape[1])
    q = _nearest(x, best_scale, best_low).to(torch.uint8)
    return torch.cat((_half_bytes(best_scale), _half_bytes(best_low), q[:, :16] | (q[:, 16:] << 4)), dim=1)


def _as_halves(scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    return scale.half().float(), least.half().float()


def _nearest(x: Values, scale: Tensor, least: Tensor) -> Values:
    return ((x - least) * _inverse(scale)).round_().clamp_(0, 15)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _half_bytes(values: Tensor) -> UInt8[Tensor, "blocks 2"]:
    return values.to(torch.float16).view(torch.uint8)


def _half(blocks: Blocks, start: int) -> Float[Tensor, "blocks 1"]:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Blocks, run: int) -> UInt8[Tensor, "blocks size"]:
    """Return 2 × run values per `run` bytes: all low halves first, then all high halves."""
    runs = packed.reshape(len(packed), packed.shape[1] // run, 1, run)
    return torch.cat((runs & 0x0F, runs >> 4), dim=2).flatten(1)


def fields(packed: Blocks, run: int, bits: int) -> UInt8[Tensor, "blocks size"]:
    """Return the fields of 1, 2 or 4 bits of each `run` bytes: the lowest fields first, in the order of `nibbles`."""
    runs = packed.reshape(len(packed), packed.shape[1] // run, 1, run)
    mask = (1 << bits) - 1
    return torch.cat([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1)


def fifth_bits(packed: Blocks) -> UInt8[Tensor, "blocks size"]:
    """Return the eight bits of each byte, lowest first, shifted to the position of a value's fifth bit."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[:, :, None] >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Blocks) -> Values:
    return nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Blocks) -> Values:
    return nibbles(blocks[:, 4:], 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Blocks) -> Values:
    q = nibbles(blocks[:, 6:], 16).bitwise_or_(fifth_bits(blocks[:, 2:6]))
    return q.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Blocks) -> Values:
    q = nibbles(blocks[:, 8:], 16).bitwise_or_(fifth_bits(blocks[:, 4:8]))
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Blocks) -> Values:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Blocks) -> Values:
    """Dequantise Q2_K: 16 scales and minima of 4 bits, 256 values of 2 bits, then the scales of both."""
    scales = _half(blocks, 80) * (blocks[:, :16] & 0x0F).float()
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return _scaled(fields(blocks[:, 16:80], 32, 2), scales).sub_(minima[:, :, None]).flatten(1)


def _q3_k(blocks: Blocks) -> Values:
    """Dequantise Q3_K: 256 third bits, 256 values of 2 bits, 16 scales of 6 bits, the scale of scales.

    A clear third bit means −4.
    """
    low = nibbles(blocks[:, 96:104], 8)
    high = fields(blocks[:, 104:108], 4, 2)
    scales = _half(blocks, 108) * (low | (high << 4)).float().sub_(32)
    third = fields(blocks[:, :32], 32, 1)
    q = (fields(blocks[:, 32:96], 32, 2) | (third << 2)).float().sub_(4)
    return _scaled(q, scales).flatten(1)


def _q4_k(blocks: Blocks) -> Values:
    scales, minima = _float_scales_and_minima(blocks)
    return _scaled(nibbles(blocks[:, 16:], 32), scales).sub_(minima[:, :, None]).flatten(1)


def _q5_k(blocks: Blocks) -> Values:
    scales, minima = _float_scales_and_minima(blocks)
    fifth = fields(blocks[:, 16:48], 32, 1) << 4
    q = nibbles(blocks[:, 48:], 32).bitwise_or_(fifth)
    return _scaled(q, scales).sub_(minima[:, :, None]).flatten(1)


def _q6_k(blocks: Blocks) -> Values:
    """Dequantise Q6_K: 256 low halves, 256 upper pairs of bits, 16 scales of 8 bits, the scale of scales."""
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    high = fields(blocks[:, 128:192], 32, 2) << 4
    q = nibbles(blocks[:, :128], 64).bitwise_or_(high)
    return _scaled(q.float().sub_(32), scales).flatten(1)


def _iq4_nl(blocks: Blocks) -> Values:
    return _coded(blocks[:, 2:], IQ4_VALUES).mul_(_half(blocks, 0))


def _iq4_xs(blocks: Blocks) -> Values:
    """Dequantise IQ4_XS: the scale of scales, 8 upper pairs of bits of the scales, their low halves, 256 codes."""
    high = fields(blocks[:, 2:4], 1, 2)
    low = fields(blocks[:, 4:8], 1, 4)
    scales = _half(blocks, 0) * (low | (high << 4)).float().sub_(32)
    return _scaled(_coded(blocks[:, 8:], IQ4_VALUES), scales).flatten(1)


def _mxfp4(blocks: Blocks) -> Values:
    """Dequantise MXFP4: a power of two, then 32 codes.

    The exponent e means 2^(e − 128), because the codes' values are doubled.
    """
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _coded(blocks[:, 1:], FP4_VALUES).mul_(bits.view(torch.float32))


def _coded(packed: Blocks, values: tuple[int, ...]) -> Values:
    return torch.tensor(values, dtype=torch.float32, device=packed.device)[nibbles(packed, 16).int()]


def _scaled(q: Tensor, scales: Float[Tensor, "blocks groups"]) -> Float[Tensor, "blocks groups size"]:
    groups = scales.shape[1]
    return q.float().reshape(len(q), groups, q.shape[1] // groups).mul_(scales[:, :, None])


def scales_and_minima(blocks: Blocks) -> tuple[UInt8[Tensor, "blocks 8"], UInt8[Tensor, "blocks 8"]]:
    """Return Q4_K's and Q5_K's eight scales and minima of 6 bits, from 12 bytes.

    The first four scales and minima are the low 6 bits of bytes 0–3 and 4–7. The top 2 bits of these bytes complete the
    last four, whose low 4 bits are the halves of bytes 8–11.
    """
    first, second, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 0x3F, (halves & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (halves >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scales, minima


def _float_scales_and_minima(blocks: Blocks) -> tuple[Float[Tensor, "blocks 8"], Float[Tensor, "blocks 8"]]:
    scales, minima = scales_and_minima(blocks)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


_DEQUANTIZE: dict[str, Callable[[Blocks], Values]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
