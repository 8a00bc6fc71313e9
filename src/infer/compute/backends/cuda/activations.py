"""Activations in the form that products take: normalised, in float32 or in planes of blocks of 32.

Quantised weights are multiplied with integers. By the CPU's rule a block's scale is max |x| / 32512, or / 127 if there
is one plane. x is the nearest multiple of the scale: an integer of 16 bits in two planes of signed bytes, 256 high +
low. Beside the integers are the sums of each half block. They are multiplied with what a type subtracts from its codes
or adds to a block.

Weights of 16 bits are multiplied with floats of 16 bits, which tensor cores multiply exactly and add in float32. What
remains after one plane is exact, so the next plane holds it. For BF16, x is the sum of three bf16
numbers, which have all 24 bits. For F16, x is a scale times the sum of two f16 numbers, which have 22 bits. The scale
is a power of two that lifts the block's largest value to 2¹⁴ or above.

If an activation is NaN, all products of its token are NaN: `is_none` finds that without reading a weight. Padding
tokens are NaN too, and so are unused lines of logits, whose index is −1.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cuda.layouts import BLOCK
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.backends.reference_parts import gathered
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.group import Shares
from infer.compute.operands.weights import Norm

BF16_PLANES = tl.constexpr(3)
F16_PLANES = tl.constexpr(4)  # the form's number
NUM_PLANES = {0: 1, 1: 1, 2: 2, BF16_PLANES.value: 3, F16_PLANES.value: 2}  # by form; 0: float32


@triton.jit
def store_planes(codes, value, tokens, inputs, width, mask, FORM: tl.constexpr):
    """Store float32 values in the planes of form BF16_PLANES or F16_PLANES: a plane has what the planes before it lack.

    `codes` points to 16-bit floats [tokens, planes, width]. `tokens` and `inputs` broadcast to the value's shape. For
    f16 the values are scaled first (`lifted`).
    """
    count: tl.constexpr = 3 if FORM == BF16_PLANES else 2
    dtype: tl.constexpr = tl.bfloat16 if FORM == BF16_PLANES else tl.float16
    to = codes + tokens * (width * count) + inputs
    for _ in tl.static_range(count):
        part = value.to(dtype)
        tl.store(to, part, mask=mask)
        value -= part.to(tl.float32)
        to += width


@triton.jit
def lifted(value, AXIS: tl.constexpr):
    """Return value / scale and the scale of each block, whose values lie along `AXIS`.

    The scale is the power of two that brings the block's largest value to at least 2¹⁴ and below 2¹⁵.
    """
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS, keep_dims=True)
    exponent = tl.maximum(bits >> 23, 15)  # so that the scale is a normal number
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return value * inverse, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


BLOCKS = 32  # that a program has at once
SMALLEST = tl.constexpr(1e-33)  # a block below this counts as this, so that its scale is a normal number
ROUNDER = tl.constexpr(12582912.0)  # 1.5 × 2²³: the sum's low bits are the nearest integer
ROUNDER_BITS = tl.constexpr(0x4B400000)


class RowNorm(NamedTuple):
    """A norm as kernels read it. Tensors that are not read are replaced by any existing one."""

    weight: Any
    bias: Any
    eps: Any
    HAS_WEIGHT: tl.constexpr
    HAS_BIAS: tl.constexpr
    IS_CENTRED: tl.constexpr  # LayerNorm, which subtracts the mean

    @classmethod
    def of(cls, norm: Norm | None, x: Tensor, eps: float = 0.0) -> "RowNorm":
        """Return the norm; one without weights if it is None."""
        if norm is None:
            return cls(x, x, eps, *map(tl.constexpr, (False, False, False)))
        has_bias = norm.bias is not None
        return cls(
            norm.weight, norm.bias if has_bias else x, norm.eps, *map(tl.constexpr, (True, has_bias, norm.is_centred))
        )


class Quantized(NamedTuple):
    """Activations of some tokens in planes."""

    codes: Any  # int32 [tokens, planes, blocks, 8], or as int8; bf16 or f16 [tokens, planes, blocks, 32]
    scales: Any  # float32 [tokens, blocks]; `codes` in bf16
    sums: Any  # int32 [tokens, blocks, 2], of the first 16 and the last; `codes` in bf16 and f16

    def in_bytes(self) -> "Quantized":
        """Return the codes as kernels write them: integers as int8."""
        return self._replace(codes=self.codes.view(torch.int8)) if self.codes.dtype == torch.int32 else self


class Twin(NamedTuple):
    """The twin of an op's result, and how the op computed the result."""

    planes: int  # form of the activations that the op multiplied: 0 float32, 1 or 2 planes of int8, or one of 16 bits
    quantized: Quantized | None = None  # the result in the same form, for the product that is next


def twin_of(x: Activations) -> Twin:
    """Return the twin of activations; one of floats without integers if they have none."""
    return x.twin if isinstance(x.twin, Twin) else Twin(planes=0)


def activations_of_all(own: Float[Tensor, "tokens own"], twin: Twin | None, shares: Shares | None) -> Activations:
    """Return all ranks' columns with the twin of this rank's, whose integers are left out if there are other ranks."""
    if shares is None:
        return Activations(own, twin)
    return Activations(gathered(own, shares), None if twin is None else twin._replace(quantized=None))


def room_for(y: Tensor, planes: int) -> Quantized | None:
    """Return buffers for y [tokens, …] in planes; None without planes, or if y's last axis has no whole blocks."""
    if not planes or y.shape[-1] % BLOCK:
        return None
    return empty_planes(len(y), y.flatten(1).shape[1] // BLOCK, planes, y.device)


def empty_planes(num_tokens: int, num_blocks: int, planes: int, device: torch.device) -> Quantized:
    if planes == BF16_PLANES.value:
        codes = torch.empty(num_tokens, 3, num_blocks, BLOCK, dtype=torch.bfloat16, device=device)
        return Quantized(codes, codes, codes)
    if planes == F16_PLANES.value:
        codes = torch.empty(num_tokens, 2, num_blocks, BLOCK, dtype=torch.float16, device=device)
        return Quantized(codes, torch.empty(num_tokens, num_blocks, device=device), codes)
    codes = torch.empty(num_tokens, planes, num_blocks, 8, dtype=torch.int32, device=device)
    scales = torch.empty(num_tokens, num_blocks, device=device)
    return Quantized(codes, scales, torch.empty(num_tokens, num_blocks, 2, dtype=torch.int32, device=device))


def normalize(
    x: Float[Tensor, "tokens in"], norm: Norm | None, indices: Int[Tensor, "logits"] | None = None
) -> Float[Tensor, "selected in"]:
    """Return norm(x), or norm(x[indices]), in float32."""
    if norm is None:
        return x if indices is None else x[indices]
    return _normalized(x, RowNorm.of(norm, x), indices)


def divided_by_rms(x: Float[Tensor, "tokens in"], eps: float) -> Float[Tensor, "tokens in"]:
    """Return a norm of x without a weight, in float32."""
    return _normalized(x, RowNorm.of(None, x, eps), None)


def _normalized(
    x: Float[Tensor, "tokens in"], norm: RowNorm, indices: Int[Tensor, "logits"] | None
) -> Float[Tensor, "selected in"]:
    num_tokens = len(x) if indices is None else len(indices)
    y = torch.empty(num_tokens, x.shape[1], device=x.device)
    if num_tokens:
        normalize_rows[(num_tokens,)](
            x, x if indices is None else indices, norm, y, x.shape[1],
            HAS_INDICES=indices is not None, BLOCKS=BLOCKS, num_warps=4, **EXACT,
        )  # fmt: skip
    return y


def quantized(
    x: Float[Tensor, "tokens in"], norm: Norm | None, planes: int, indices: Int[Tensor, "logits"] | None = None
) -> Quantized:
    """Return norm(x), or norm(x[indices]), in planes. A last block that is not whole ends with zeros."""
    num_tokens, num_blocks = len(x) if indices is None else len(indices), triton.cdiv(x.shape[1], BLOCK)
    found = empty_planes(num_tokens, num_blocks, planes, x.device)
    if num_tokens:
        quantize_rows[num_tokens, triton.cdiv(num_blocks, BLOCKS)](
            x, x if indices is None else indices, RowNorm.of(norm, x), found.in_bytes(), x.shape[1],
            HAS_INDICES=indices is not None, HAS_NORM=norm is not None, PLANES=planes, BLOCKS=BLOCKS, num_warps=4,
            **EXACT,
        )  # fmt: skip
    return found


def add_normalized(
    residual: Float[Tensor, "tokens in"], y: Float[Tensor, "tokens in"], norm: Norm, scale: float = 1.0
) -> None:
    """Replace residual by (residual + norm(y)) × scale, in place."""
    if len(y):
        add_normalized_rows[(len(y),)](
            residual, y, RowNorm.of(norm, y), y.shape[1], float(scale), BLOCKS=BLOCKS, num_warps=4, **EXACT
        )


@triton.jit
def normalize_rows(x, indices, norm, y, features, HAS_INDICES: tl.constexpr, BLOCKS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + token) if HAS_INDICES else token
    row = x + tl.maximum(index, 0) * features
    mean, factor = mean_and_factor(row, norm, features, BLOCKS)
    factor = tl.where(index < 0, float("nan"), factor)
    for start in range(0, features, BLOCKS * 32):
        at = start + tl.arange(0, BLOCKS * 32)
        mask = at < features
        value = normalized_part(tl.load(row + at, mask=mask, other=0), norm, mean, factor, at, mask)
        tl.store(y + token * features + at, value, mask=mask)


@triton.jit
def add_normalized_rows(residual, y, norm, features, scale, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * features
    mean, factor = mean_and_factor(y + row, norm, features, BLOCKS)
    for start in range(0, features, BLOCKS * 32):
        at = start + tl.arange(0, BLOCKS * 32)
        mask = at < features
        value = normalized_part(tl.load(y + row + at, mask=mask, other=0), norm, mean, factor, at, mask)
        total = tl.load(residual + row + at, mask=mask, other=0) + value
        tl.store(residual + row + at, total * scale, mask=mask)


@triton.jit
def quantize_rows(
    x, indices, norm, to, features,
    HAS_INDICES: tl.constexpr, HAS_NORM: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + token) if HAS_INDICES else token
    quantize_part(x, token, index, norm, to, features, tl.program_id(1), HAS_NORM, PLANES, BLOCKS)


@triton.jit
def quantize_part(
    x, token, index, norm, to, features, part, HAS_NORM: tl.constexpr, PLANES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Quantise some blocks of norm(x[index]) for a token. Every program of a row computes the row's norm itself."""
    num_blocks, row = tl.cdiv(features, 32), x + tl.maximum(index, 0) * features
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = at < features
    value = tl.where(index < 0, float("nan"), tl.load(row + at, mask=mask, other=0))
    if HAS_NORM:
        mean, factor = mean_and_factor(row, norm, features, BLOCKS)
        value = normalized_part(value, norm, mean, factor, at, mask)
    store_quantized(to, value, token + blocks * 0, blocks, num_blocks, blocks < num_blocks, PLANES, BLOCKS)


@triton.jit
def store_quantized(to, value, tokens, blocks, num_blocks, mask, PLANES: tl.constexpr, BLOCKS: tl.constexpr):
    """Store value [BLOCKS, 32] in planes. Each line is one block of a token that has `num_blocks` blocks."""
    inputs, width = blocks[:, None] * 32 + tl.arange(0, 32)[None, :], num_blocks * 32
    if PLANES == BF16_PLANES:
        store_planes(to.codes, value, tokens[:, None], inputs, width, mask[:, None], PLANES)
    elif PLANES == F16_PLANES:
        value, scale = lifted(value, 1)
        store_planes(to.codes, value, tokens[:, None], inputs, width, mask[:, None], PLANES)
        tl.store(to.scales + tokens[:, None] * num_blocks + blocks[:, None], scale, mask=mask[:, None])
    else:
        _store_integers(to, value, tokens, blocks, num_blocks, mask, PLANES, BLOCKS)


@triton.jit
def _store_integers(to, value, tokens, blocks, num_blocks, mask, PLANES: tl.constexpr, BLOCKS: tl.constexpr):
    q, scale = _nearest(value, 32512.0 if PLANES == 2 else 127.0)
    codes = to.codes + ((tokens * PLANES * num_blocks + blocks) * 32)[:, None] + tl.arange(0, 32)[None, :]
    high = (q + 128) >> 8 if PLANES == 2 else q
    tl.store(codes, high.to(tl.int8), mask=mask[:, None])
    if PLANES == 2:
        tl.store(codes + num_blocks * 32, (q - high * 256).to(tl.int8), mask=mask[:, None])
    at = tokens * num_blocks + blocks
    tl.store(to.scales + at, scale, mask=mask)
    halves = tl.sum(tl.reshape(q, (BLOCKS, 2, 16)), axis=2)
    tl.store(to.sums + at[:, None] * 2 + tl.arange(0, 2)[None, :], halves, mask=mask[:, None])


@triton.jit
def _nearest(x, unit):
    """Return int32 [blocks, 32] and float32 [blocks]. A NaN makes the scale NaN: its bits, as an integer, are the
    largest.
    """
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    units = tl.zeros_like(largest) + unit
    scaled = x * tl.div_rn(units, largest)[:, None]
    return (scaled + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS, tl.div_rn(largest, units)


@triton.jit
def is_none(first, num_tokens, TOKENS: tl.constexpr):
    """Return True if every token of a tile is NaN, judged by its first number. With one tile, always return False."""
    number = tl.load(first, mask=tl.zeros(first.shape, tl.int32) + num_tokens > TOKENS, other=0.0).to(tl.float32)
    return tl.sum((number == number).to(tl.int32)) == 0


@triton.jit
def normalized_part(value, norm, mean, factor, at, mask):
    """Return a part of a row's values, which are at `at`, normalised."""
    if norm.IS_CENTRED:
        value = value - mean
    value = value * factor
    if norm.HAS_WEIGHT:
        value = value * tl.load(norm.weight + at, mask=mask, other=0)
    if norm.HAS_BIAS:
        value = value + tl.load(norm.bias + at, mask=mask, other=0)
    return value


@triton.jit
def mean_and_factor(x, norm, features, BLOCKS: tl.constexpr):
    """Return the mean m of a row, or 0 if the norm is not centred, and 1 / sqrt(mean((x − m)²) + eps)."""
    mean = 0.0
    if norm.IS_CENTRED:
        sums = tl.zeros((BLOCKS * 32,), tl.float32)
        for start in range(0, features, BLOCKS * 32):
            at = start + tl.arange(0, BLOCKS * 32)
            sums += tl.load(x + at, mask=at < features, other=0)
        mean = tl.sum(sums) / features
    squares = tl.zeros((BLOCKS * 32,), tl.float32)
    for start in range(0, features, BLOCKS * 32):
        at = start + tl.arange(0, BLOCKS * 32)
        value = tl.load(x + at, mask=at < features, other=0)
        if norm.IS_CENTRED:
            value = tl.where(at < features, value - mean, 0.0)
        squares += value * value
    return mean, 1.0 / tl.sqrt_rn(tl.sum(squares) / features + norm.eps)
