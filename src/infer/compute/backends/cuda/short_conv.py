"""`short_conv`: C × conv(B × u) of each token, by one program per token and some of its channels."""

import torch
import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import Quantized, Twin, room_for, store_quantized, twin_of
from infer.compute.backends.cuda.recurrent_pages import conv_pages, convolved, is_kept, store_input
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.recurrent_cache import ConvCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights

_BLOCKS = 32 if triton.knobs.runtime.interpret else 8  # of 32 channels, that a program has


def short_conv(projected: Activations, weights: ConvWeights, layer: ConvCache, step: Step) -> Activations:
    x, taps, planes = projected.floats, weights.taps, twin_of(projected).planes
    num_taps, channels = taps.shape
    out = torch.empty(len(x), channels, device=x.device)
    left = room_for(out, planes)
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    if len(x):
        convolve_tokens[len(x), triton.cdiv(channels, 32 * _BLOCKS)](
            x, x.stride(0), taps, taps if weights.bias is None else weights.bias, conv_pages(layer), out, to,
            step.rows, step.positions, len(x),
            CHANNELS=channels, NUM_TAPS=num_taps, HAS_BIAS=weights.bias is not None, LEAVES=leaves, BLOCKS=_BLOCKS,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return Activations(out, Twin(planes, left))


@triton.jit(do_not_specialize=["num_tokens"])
def convolve_tokens(
    projected, width, taps, bias, pages, out, left, rows, positions, num_tokens,
    CHANNELS: tl.constexpr, NUM_TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, LEAVES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the result of some channels, and B × u in the cache. A padding token gets NaN and writes no page."""
    token = tl.program_id(0).to(tl.int64)
    first, i = tl.program_id(1) * (BLOCKS * 32), tl.arange(0, BLOCKS * 32)
    channels, end = first + i, CHANNELS - first
    mask, row, position = i < end, tl.load(rows + token), tl.load(positions + token)
    value = tl.full((BLOCKS * 32,), float("nan"), tl.float32)
    if row >= 0:
        total = tl.zeros((BLOCKS * 32,), tl.float32)
        if HAS_BIAS:
            total = tl.load(bias + channels, mask=mask, other=0.0)
        total, own = convolved(
            projected, width, pages, taps, total, rows, token, row, position, first, i, end, CHANNELS, NUM_TAPS, True
        )
        value = tl.load(projected + token * width + CHANNELS + channels, mask=mask, other=0.0) * total
        if is_kept(pages, rows, token, row, position, num_tokens):
            store_input(pages, row, position, first, i, end, own, CHANNELS)
    tl.store(out + token * CHANNELS + channels, value, mask=mask)
    if LEAVES:
        blocks, num_blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), CHANNELS // 32
        value = tl.reshape(value, (BLOCKS, 32))
        store_quantized(left, value, token + blocks * 0, blocks, num_blocks, blocks < num_blocks, LEAVES, BLOCKS)
