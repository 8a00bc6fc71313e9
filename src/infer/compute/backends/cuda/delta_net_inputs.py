"""Convolutions over tokens: `short_conv`, and inputs of a gated delta net, which need no results of other tokens.

`prepare_tokens` makes q, k, v and the gates, and writes the token's inputs, k and log α into its page. One more program
lists the step's runs: the tokens of each row, which are consecutive. `multiply_keys` multiplies k and q of a token with
the keys of its page up to its own.

`short_conv` is C × conv(B × u) of each token, by one program per token and some of its channels.

A step's tokens of a row are consecutive. A token's earlier inputs are read from the step if they belong to it, and from
the row's pages otherwise. In a long step, pages that are three apart may share memory. So each place is written by the
last token that has it: `is_kept`. The page in which a row's tokens of the step begin has its own memory if it has
earlier tokens, and so has the page before it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.compute.backends.cuda.activations import Quantized, Twin, room_for, store_quantized, twin_of
from infer.compute.backends.cuda.epilogue import sigmoid, softplus
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.limits import RECENT_PAGES
from infer.compute.operands.recurrent_cache import ConvCache, DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import ConvWeights

RECENT = tl.constexpr(RECENT_PAGES)


class ConvPages(NamedTuple):
    """A layer's inputs of the convolution by page, and the pages of each row."""

    inputs: Any
    size: Any  # floats from a page to the next
    table: Any
    table_row: Any
    TOKENS: Any  # of a page, a constant


class DeltaNetPages(NamedTuple):
    """A gated delta net's part of each page. `DeltaNetCache` describes the tensors."""

    inputs: Any
    size: Any
    table: Any
    table_row: Any
    TOKENS: Any
    states: Any
    keys: Any
    updates: Any
    decays: Any


class ConvInputs(NamedTuple):
    """Inputs of the convolutions of a step. Those of a token are its first CHANNELS columns of `projected`."""

    projected: Any  # [tokens, width]
    width: Any
    taps: Any  # [taps, CHANNELS]
    rows: Any
    positions: Any
    CHANNELS: tl.constexpr
    NUM_TAPS: tl.constexpr


def conv_pages(layer: ConvCache | DeltaNetCache) -> ConvPages:
    pages = layer.pages
    page_tokens = tl.constexpr(pages.page_tokens)
    return ConvPages(layer.inputs, layer.inputs.stride(0), pages.table, pages.table.stride(0), page_tokens)


def conv_inputs(x: Tensor, taps: Tensor, step: Step) -> ConvInputs:
    num_taps, channels = map(tl.constexpr, taps.shape)
    return ConvInputs(x, x.stride(0), taps, step.rows, step.positions, channels, num_taps)


def delta_net_pages(layer: DeltaNetCache) -> DeltaNetPages:
    return DeltaNetPages(*conv_pages(layer), layer.states, layer.keys, layer.updates, layer.decays)


@triton.jit
def page_start(pages, row, index):
    """Return the number of floats before a row's page, from the start of a layer's first page."""
    return tl.load(pages.table + row * pages.table_row + index) * pages.size


@triton.jit
def is_kept(pages, rows, token, row, position, num_tokens):
    """Return True if the token writes its place of a page, and no later token of the step has the same memory."""
    first = token - position % pages.TOKENS
    is_older = (first < 0) | (tl.load(rows + tl.maximum(first, 0)) != row)
    later = token + RECENT * pages.TOKENS
    is_last = tl.load(rows + tl.minimum(later, num_tokens - 1)) != row
    return is_older | (later >= num_tokens) | is_last


@triton.jit
def convolved(inputs, pages, total, token, row, position, first, i, end, is_stored, IS_GATED: tl.constexpr):
    """Return total + the convolution of channels first + i for i < end. If `is_stored`, store the token's own inputs.

    With IS_GATED, the third CHANNELS columns multiply the inputs.
    """
    channels = first + i
    own = total
    for tap in tl.static_range(inputs.NUM_TAPS):
        back = inputs.NUM_TAPS - 1 - tap
        is_in_step = (token >= back) & (tl.load(inputs.rows + tl.maximum(token - back, 0)) == row)
        source, is_read = inputs.projected + (token - back) * inputs.width + channels, i < tl.where(is_in_step, end, 0)
        value = tl.load(source, mask=is_read, other=0.0)
        if IS_GATED:
            value *= tl.load(source + 2 * inputs.CHANNELS, mask=is_read, other=0.0)
        if back > 0:
            earlier = tl.maximum(position - back, 0)
            at = page_start(pages, row, earlier // pages.TOKENS) + earlier % pages.TOKENS * inputs.CHANNELS
            is_read = i < tl.where(is_in_step | (position < back), 0, end)
            value += tl.load(pages.inputs + at + channels, mask=is_read, other=0.0)
        total = tl.fma(tl.load(inputs.taps + tap * inputs.CHANNELS + channels, mask=i < end, other=0.0), value, total)
        own = value
    if is_stored:
        at = page_start(pages, row, position // pages.TOKENS) + position % pages.TOKENS * inputs.CHANNELS
        tl.store(pages.inputs + at + first + i, own, mask=i < end)
    return total


_EPS = tl.constexpr(1e-6)  # of the norms of q and k
_TOKENS = tl.constexpr(512)  # that are searched for runs at a time


class DeltaNetBuffers(NamedTuple):
    """Buffers of a step's tokens."""

    keys_queries: Any  # [tokens, key heads, 2, key dim]: k, then q
    dots: Any  # [tokens, key heads, 2, page tokens]: k and q times the keys of the page, 0 for later tokens
    new_values: Any  # [tokens, value heads, value dim]: v, then u
    log_alphas: Any  # [value heads, tokens]
    betas: Any  # [value heads, tokens]
    mixed: Any  # [tokens, value heads, value dim]: Sᵀq
    runs: Any  # int32 [runs, 2]: the first token of a row or -1, and the token after its last


class Gates(NamedTuple):
    dt_bias: Any
    decay: Any
    beta_scale: Any
    query_scale: Any


class NetSizes(NamedTuple):
    """Sizes of a net, as constants. SIZE is a dimension rounded up to a power of 2."""

    KEY_HEADS: tl.constexpr
    KEY_DIM: tl.constexpr
    KEY_SIZE: tl.constexpr
    VALUE_HEADS: tl.constexpr
    VALUE_DIM: tl.constexpr
    VALUE_SIZE: tl.constexpr


@triton.jit(do_not_specialize=["num_runs"])
def prepare_tokens(inputs, gates, pages, buffers, num_runs, net):
    """Prepare one head of one token. Programs of index 0 have no token, and one of them lists the runs."""
    index, head = tl.program_id(0), tl.program_id(1)
    token, num_tokens = tl.maximum(index - 1, 0).to(tl.int64), tl.num_programs(0) - 1
    row, position = tl.load(inputs.rows + token), tl.load(inputs.positions + token)
    if index == 0:
        if head == 0:
            _list_runs(buffers.runs, inputs.rows, num_tokens, num_runs)
    elif row >= 0:
        is_stored = is_kept(pages, inputs.rows, token, row, position, num_tokens)
        if head < net.KEY_HEADS:
            _prepare_key(inputs, gates, pages, buffers, token, row, position, head, is_stored, net)
        else:
            own = head - net.KEY_HEADS
            _prepare_value(inputs, gates, pages, buffers, token, row, position, own, is_stored, num_tokens, net)


@triton.jit
def _list_runs(runs, rows, num_tokens, num_runs):
    """List the runs in the order of their tokens. Entries of no use have the token -1."""
    used = 0
    for start in range(0, num_tokens, _TOKENS):
        tokens = start + tl.arange(0, _TOKENS)
        row = tl.load(rows + tokens, mask=tokens < num_tokens, other=-1)
        before = tl.load(rows + tokens - 1, mask=(tokens > 0) & (tokens < num_tokens), other=-1)
        after = tl.load(rows + tokens + 1, mask=tokens + 1 < num_tokens, other=-1)
        is_first = (row >= 0) & (row != before)
        run = runs + 2 * (used + tl.cumsum(is_first.to(tl.int32)) - 1)
        tl.store(run, tokens, mask=is_first)
        tl.store(run + 1, tokens + 1, mask=(row >= 0) & (row != after))
        used += tl.sum(is_first.to(tl.int32))
    for start in range(used, num_runs, _TOKENS):
        unused = start + tl.arange(0, _TOKENS)
        tl.store(runs + 2 * unused, -1, mask=unused < num_runs)


@triton.jit
def _prepare_key(inputs, gates, pages, buffers, token, row, position, head, is_stored, net):
    """Store q / (|q| √dim) and k / |k|, and k in the page."""
    i, first, zeros = tl.arange(0, net.KEY_SIZE), head * net.KEY_DIM, tl.zeros((net.KEY_SIZE,), tl.float32)
    to = buffers.keys_queries + (token * net.KEY_HEADS + head) * (2 * net.KEY_DIM) + i
    q = convolved(inputs, pages, zeros, token, row, position, first, i, net.KEY_DIM, is_stored, False)
    tl.store(to + net.KEY_DIM, _unit(q) * gates.query_scale, mask=i < net.KEY_DIM)
    first += net.KEY_HEADS * net.KEY_DIM
    k = _unit(convolved(inputs, pages, zeros, token, row, position, first, i, net.KEY_DIM, is_stored, False))
    tl.store(to, k, mask=i < net.KEY_DIM)
    if is_stored:
        at = page_start(pages, row, position // pages.TOKENS) + position % pages.TOKENS
        tl.store(pages.keys + at + (head * net.KEY_DIM + i) * pages.TOKENS, k, mask=i < net.KEY_DIM)


@triton.jit
def _unit(x):
    """Return silu(x) / |silu(x)|."""
    x = x * sigmoid(x)
    return tl.div_rn(x, tl.zeros_like(x) + tl.sqrt_rn(tl.sum(x * x) + _EPS))


@triton.jit
def _prepare_value(inputs, gates, pages, buffers, token, row, position, head, is_stored, num_tokens, net):
    """Store v, log α and β, and log α in the page."""
    i, zeros = tl.arange(0, net.VALUE_SIZE), tl.zeros((net.VALUE_SIZE,), tl.float32)
    first = 2 * net.KEY_HEADS * net.KEY_DIM + head * net.VALUE_DIM
    v = convolved(inputs, pages, zeros, token, row, position, first, i, net.VALUE_DIM, is_stored, False)
    to = buffers.new_values + (token * net.VALUE_HEADS + head) * net.VALUE_DIM + i
    tl.store(to, v * sigmoid(v), mask=i < net.VALUE_DIM)
    gate = inputs.projected + token * inputs.width + inputs.CHANNELS + net.VALUE_HEADS * net.VALUE_DIM + head
    beta = sigmoid(tl.load(gate)) * gates.beta_scale
    log_alpha = tl.load(gates.decay + head) * softplus(tl.load(gate + net.VALUE_HEADS) + tl.load(gates.dt_bias + head))
    tl.store(buffers.betas + head * num_tokens + token, beta)
    tl.store(buffers.log_alphas + head * num_tokens + token, log_alpha)
    if is_stored:
        at = page_start(pages, row, position // pages.TOKENS) + position % pages.TOKENS
        tl.store(pages.decays + at + head * pages.TOKENS, log_alpha)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_keys(pages, buffers, rows, positions, num_tokens, net, TILE: tl.constexpr):
    """Multiply k and q of up to TILE tokens with the keys of their page, for one key head.

    Tiles begin at multiples of TILE in positions. A program whose token does not begin a tile has no work. A product is
    computed for each token by itself, so its bits depend on no tile.
    """
    first, head = tl.program_id(0), tl.program_id(1)
    row, position = tl.load(rows + first), tl.load(positions + first)
    before = tl.load(rows + tl.maximum(first - 1, 0))
    place = (position % pages.TOKENS).to(tl.int32)
    if (row >= 0) & ((first == 0) | (before != row) | (place % TILE == 0)):
        i, j = tl.arange(0, net.KEY_SIZE)[:, None], tl.arange(0, pages.TOKENS)
        count = TILE - place % TILE
        source = first - place + j
        is_token = (source >= 0) & (source < num_tokens) & (j < place + count)
        is_in_step = tl.load(rows + source, mask=is_token, other=-1) == row
        at = (source.to(tl.int64) * net.KEY_HEADS + head) * (2 * net.KEY_DIM)
        keys = tl.load(buffers.keys_queries + at[None, :] + i, mask=is_in_step[None, :] & (i < net.KEY_DIM), other=0.0)
        at = page_start(pages, row, position // pages.TOKENS) + (head * net.KEY_DIM + i) * pages.TOKENS
        is_earlier = (is_in_step == 0) & (j < place)
        keys += tl.load(pages.keys + at + j[None, :], mask=is_earlier[None, :] & (i < net.KEY_DIM), other=0.0)
        for token in range(first, tl.minimum(first + count, num_tokens)):
            if tl.load(rows + token) == row:
                own = place + token - first
                k, q, to = token_of(buffers, token, head, net)
                to = buffers.dots + to * pages.TOKENS + j
                tl.store(to, tl.where(j < own, tl.sum(keys * k[:, None], axis=0), 0.0))
                tl.store(to + pages.TOKENS, tl.where(j <= own, tl.sum(keys * q[:, None], axis=0), 0.0))


@triton.jit
def token_of(buffers, token, head, net):
    """Return k and q of a token's key head, and the number of vectors before its own in the buffers."""
    i = tl.arange(0, net.KEY_SIZE)
    line = (tl.cast(token, tl.int64) * net.KEY_HEADS + head) * 2
    at = buffers.keys_queries + line * net.KEY_DIM + i
    k = tl.load(at, mask=i < net.KEY_DIM, other=0.0)
    return k, tl.load(at + net.KEY_DIM, mask=i < net.KEY_DIM, other=0.0), line


_BLOCKS = 32 if triton.knobs.runtime.interpret else 8  # of 32 channels, that a program has


def short_conv(projected: Activations, weights: ConvWeights, layer: ConvCache, step: Step) -> Activations:
    x, taps, planes = projected.floats, weights.taps, twin_of(projected).planes
    channels = taps.shape[1]
    out = torch.empty(len(x), channels, device=x.device)
    left = room_for(out, planes)
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    if len(x):
        convolve_tokens[len(x), triton.cdiv(channels, 32 * _BLOCKS)](
            conv_inputs(x, taps, step), taps if weights.bias is None else weights.bias, conv_pages(layer), out, to,
            len(x), HAS_BIAS=weights.bias is not None, LEAVES=leaves, BLOCKS=_BLOCKS, num_warps=4, **EXACT,
        )  # fmt: skip
    return Activations(out, Twin(planes, left))


@triton.jit(do_not_specialize=["num_tokens"])
def convolve_tokens(
    inputs, bias, pages, out, left, num_tokens, HAS_BIAS: tl.constexpr, LEAVES: tl.constexpr, BLOCKS: tl.constexpr
):
    """Store C × conv(B × u) for some channels of a token, and its B × u in the cache.

    A program has 32 × BLOCKS channels of one token. It reads `projected` [tokens, width] of B, C and u, and cached
    inputs in `pages`. It writes `out` [tokens, CHANNELS] and, with LEAVES, quantised blocks to `left`. A padding token,
    whose row is −1, gets NaN and writes no page.
    """
    token = tl.program_id(0).to(tl.int64)
    first, i = tl.program_id(1) * (BLOCKS * 32), tl.arange(0, BLOCKS * 32)
    channels, end = first + i, inputs.CHANNELS - first
    mask, row, position = i < end, tl.load(inputs.rows + token), tl.load(inputs.positions + token)
    value = tl.full((BLOCKS * 32,), float("nan"), tl.float32)
    if row >= 0:
        total = tl.zeros((BLOCKS * 32,), tl.float32)
        if HAS_BIAS:
            total = tl.load(bias + channels, mask=mask, other=0.0)
        is_stored = is_kept(pages, inputs.rows, token, row, position, num_tokens)
        total = convolved(inputs, pages, total, token, row, position, first, i, end, is_stored, True)
        gates = inputs.projected + token * inputs.width + inputs.CHANNELS
        value = tl.load(gates + channels, mask=mask, other=0.0) * total
    tl.store(out + token * inputs.CHANNELS + channels, value, mask=mask)
    if LEAVES:
        blocks, num_blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), inputs.CHANNELS // 32
        value = tl.reshape(value, (BLOCKS, 32))
        store_quantized(left, value, token + blocks * 0, blocks, num_blocks, blocks < num_blocks, LEAVES, BLOCKS)
