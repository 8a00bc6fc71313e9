"""The gated delta rule over pages: a warp walks a row's tokens for some columns of a value head's state.

`gated_delta_net` launches the four kernels of the op. `DeltaNetCache` has the definition. A page's first token makes
the page's S from the page before. Within a page

    Sᵀx of token t = e^{G_t} S₀ᵀx + Σ_j (k_j · x) e^{G_t − G_j} u_j        G_t = Σ_{i ≤ t} log α_i

for x = k with j < t, which gives u_t, then for x = q with j ≤ t, which gives o_t. All tokens are computed this way, in
steps of one token or of many. S₀ and the page's u are in registers. If the step begins within a page, they come from
the page's memory. Sums have one shape, in which later tokens are zeros. So the bits depend neither on the number of
tokens in a step, nor on other rows. G_t − G_j is the sum of the log α after j, from the last one on. No large numbers
cancel in it.
"""

import torch
import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import Quantized, Twin, room_for, store_quantized, twin_of
from infer.compute.backends.cuda.delta_net_inputs import (
    RECENT,
    DeltaNetBuffers,
    Gates,
    NetSizes,
    conv_inputs,
    delta_net_pages,
    multiply_keys,
    page_start,
    prepare_tokens,
    token_of,
)
from infer.compute.backends.cuda.epilogue import sigmoid
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import DeltaNetCache
from infer.compute.operands.step import Step
from infer.compute.operands.weights import DeltaNetWeights


@triton.jit(do_not_specialize=["num_tokens"])
def mix_runs(pages, buffers, rows, positions, num_tokens, net, ARE_TILED: tl.constexpr, COLUMNS: tl.constexpr):
    """Store Sᵀq of a run's tokens for some columns of a head, u in place of v, and the pages' u and S."""
    blocks: tl.constexpr = (net.VALUE_DIM + COLUMNS - 1) // COLUMNS
    head, block, run = tl.program_id(0) // blocks, tl.program_id(0) % blocks, buffers.runs + 2 * tl.program_id(1)
    key_head = head % net.KEY_HEADS if ARE_TILED else head // (net.VALUE_HEADS // net.KEY_HEADS)
    first = tl.load(run)
    if first >= 0:
        end, row, start = tl.load(run + 1), tl.load(rows + first), tl.load(positions + first)
        j, columns = tl.arange(0, pages.TOKENS), block * COLUMNS + tl.arange(0, COLUMNS)
        is_column, gates = columns < net.VALUE_DIM, head * num_tokens
        state, updates, later, opening = _before(pages, row, start, head, columns, net)
        for token in range(first, end):
            position = start + (token - first)
            place = (position % pages.TOKENS).to(tl.int32)
            log_alpha, beta = tl.load(buffers.log_alphas + gates + token), tl.load(buffers.betas + gates + token)
            is_stored = (position - place < start) | (token + RECENT * pages.TOKENS >= end)
            page = page_start(pages, row, position // pages.TOKENS)
            if place == 0:
                if position > 0:
                    state = _next_state(
                        state, pages, buffers, row, position, token, token - first, head, key_head, columns, gates,
                        net, COLUMNS,
                    )  # fmt: skip
                updates, later, opening = tl.zeros_like(updates), tl.zeros_like(later), log_alpha
                if is_stored:
                    at, is_there = _state_places(head, columns, net)
                    tl.store(pages.states + page + at, state, mask=is_there)
            later = tl.where(j == place - 1, log_alpha, later)
            k, q, line = token_of(buffers, token, key_head, net)
            left, decays = tl.exp(opening + tl.sum(later)), tl.exp(tl.cumsum(later, reverse=True))
            shares = buffers.dots + line * pages.TOKENS + j
            at = (tl.cast(token, tl.int64) * net.VALUE_HEADS + head) * net.VALUE_DIM + columns
            v = tl.load(buffers.new_values + at, mask=is_column, other=0.0)
            u = beta * (v - _read(state, updates, k, left, tl.load(shares) * decays))
            updates = tl.where((j == place)[:, None], u[None, :], updates)
            o = _read(state, updates, q, left, tl.load(shares + pages.TOKENS) * decays)
            tl.store(buffers.new_values + at, u, mask=is_column)
            tl.store(buffers.mixed + at, o, mask=is_column)
            if is_stored:
                to = pages.updates + page + (head * pages.TOKENS + place) * net.VALUE_DIM + columns
                tl.store(to, u, mask=is_column)


@triton.jit
def _read(state, updates, x, left, shares):
    """Return left × Sᵀx + Σ_j shares_j u_j."""
    return left * tl.sum(state * x[:, None], axis=0) + tl.sum(updates * shares[:, None], axis=0)


@triton.jit
def _state_places(head, columns, net):
    """Return the places of a head's columns in the states of a page, and which of them exist."""
    i = tl.arange(0, net.KEY_SIZE)[:, None]
    is_there = (i < net.KEY_DIM) & (columns < net.VALUE_DIM)[None, :]
    return (head * net.KEY_DIM + i) * net.VALUE_DIM + columns[None, :], is_there


@triton.jit
def _before(pages, row, start, head, columns, net):
    """Return what the token before position `start` has left in its page: S at the page's start, u and log α.

    The first log α is apart, and element j of the others is that of the token at place j + 1. All are 0 before the
    first token.
    """
    j, last = tl.arange(0, pages.TOKENS), tl.maximum(start - 1, 0)
    count = tl.where(start > 0, (last % pages.TOKENS).to(tl.int32) + 1, 0)
    page = page_start(pages, row, last // pages.TOKENS)
    at, is_there = _state_places(head, columns, net)
    is_there &= (columns < tl.where(start > 0, net.VALUE_DIM, 0))[None, :]
    state = tl.load(pages.states + page + at, mask=is_there, other=0.0)
    at = (head * pages.TOKENS + j)[:, None] * net.VALUE_DIM + columns[None, :]
    is_there = (j < count)[:, None] & (columns < net.VALUE_DIM)[None, :]
    updates = tl.load(pages.updates + page + at, mask=is_there, other=0.0)
    decays = pages.decays + page + head * pages.TOKENS
    later = tl.load(decays + j + 1, mask=j + 1 < count, other=0.0)
    return state, updates, later, tl.load(decays, mask=start > 0, other=0.0)


@triton.jit
def _next_state(
    state, pages, buffers, row, position, token, num_before, head, key_head, columns, gates, net, COLUMNS: tl.constexpr
):
    """Return S before the first token of a page: e^G S + Σ_j e^{G − G_j} k_j u_jᵀ of the page before.

    The sum begins with the last token. The last `num_before` tokens before this one belong to the step.
    """
    tl.debug_barrier()  # the u of other threads can be read
    added, total = tl.zeros((net.KEY_SIZE, COLUMNS), tl.float32), 0.0
    i, is_column = tl.arange(0, net.KEY_SIZE), columns < net.VALUE_DIM
    split = tl.minimum(num_before, pages.TOKENS)
    for back in range(split):
        earlier = tl.cast(token - 1 - back, tl.int64)
        k, _, _ = token_of(buffers, earlier, key_head, net)
        at = (earlier * net.VALUE_HEADS + head) * net.VALUE_DIM + columns
        added = _plus(added, k, tl.load(buffers.new_values + at, mask=is_column, other=0.0), total)
        total += tl.load(buffers.log_alphas + gates + earlier)
    page = page_start(pages, row, position // pages.TOKENS - 1)
    for back in range(split, pages.TOKENS):
        place = pages.TOKENS - 1 - back
        at = (key_head * net.KEY_DIM + i) * pages.TOKENS + place
        k = tl.load(pages.keys + page + at, mask=i < net.KEY_DIM, other=0.0)
        at = (head * pages.TOKENS + place) * net.VALUE_DIM + columns
        added = _plus(added, k, tl.load(pages.updates + page + at, mask=is_column, other=0.0), total)
        total += tl.load(pages.decays + page + head * pages.TOKENS + place)
    return state * tl.exp(total) + added


@triton.jit
def _plus(added, k, u, total):
    """Return added + k uᵀ e^total."""
    rows, columns = tl.broadcast(k[:, None], added), tl.broadcast((u * tl.exp(total))[None, :], added)
    return tl.fma(rows[0], columns[0], added)


@triton.jit
def gate_heads(mixed, z, width, weight, eps, out, left, rows, net, HEADS: tl.constexpr, LEAVES: tl.constexpr):
    """Store norm(o) × silu(z) of some heads of a token. A padding token gets NaN."""
    token = tl.program_id(0).to(tl.int64)
    heads, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, net.VALUE_SIZE)
    at = heads[:, None] * net.VALUE_DIM + i[None, :]
    is_there = (heads < net.VALUE_HEADS)[:, None] & (i < net.VALUE_DIM)[None, :]
    value = tl.full((HEADS, net.VALUE_SIZE), float("nan"), tl.float32)
    if tl.load(rows + token) >= 0:
        o = tl.load(mixed + token * (net.VALUE_HEADS * net.VALUE_DIM) + at, mask=is_there, other=0.0)
        factor = 1.0 / tl.sqrt_rn(tl.sum(o * o, axis=1) / net.VALUE_DIM + eps)
        gate = tl.load(z + token * width + at, mask=is_there, other=0.0)
        scale = tl.load(weight + i, mask=i < net.VALUE_DIM, other=0.0)
        value = o * factor[:, None] * scale[None, :] * (gate * sigmoid(gate))
    tl.store(out + token * (net.VALUE_HEADS * net.VALUE_DIM) + at, value, mask=is_there)
    if LEAVES:
        count: tl.constexpr = HEADS * net.VALUE_SIZE // 32
        per_token: tl.constexpr = net.VALUE_HEADS * net.VALUE_DIM // 32
        block = tl.arange(0, net.VALUE_SIZE // 32)
        blocks = tl.reshape(heads[:, None] * (net.VALUE_DIM // 32) + block[None, :], (count,))
        is_block = tl.reshape((heads < net.VALUE_HEADS)[:, None] & (block < net.VALUE_DIM // 32)[None, :], (count,))
        value = tl.reshape(value, (count, 32))
        store_quantized(left, value, token + blocks * 0, blocks, per_token, is_block, LEAVES, count)


# Bits depend on no tile's size. The interpreter takes about as long for many columns as for one.
COLUMNS = 256 if triton.knobs.runtime.interpret else 8  # of S, that a warp has
TILE = 8  # tokens that are multiplied with the keys of their page together
HEADS = 4  # of a token, whose results a program normalises


def gated_delta_net(projected: Activations, weights: DeltaNetWeights, layer: DeltaNetCache, step: Step) -> Activations:
    net, x, planes = weights.net, projected.floats, twin_of(projected).planes
    num_tokens, heads, norm = len(x), net.num_value_heads, weights.norm
    buffers, pages = _buffers(net, num_tokens, layer, x.device), delta_net_pages(layer)
    out = torch.empty(num_tokens, heads, net.value_dim, device=x.device)
    left = room_for(out, planes)
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    if not num_tokens:
        return Activations(out.flatten(1), Twin(planes, left))
    sizes, tokens = _sizes(net), (step.rows, step.positions)
    key_size, value_size = sizes.KEY_SIZE.value, sizes.VALUE_SIZE.value
    prepare_tokens[num_tokens + 1, net.num_key_heads + heads](
        conv_inputs(x, weights.taps, step), _gates(weights), pages, buffers, len(buffers.runs), sizes, num_warps=4,
        **EXACT,
    )  # fmt: skip
    multiply_keys[num_tokens, net.num_key_heads](
        pages, buffers, *tokens, num_tokens, sizes, TILE=TILE, num_warps=max(4, key_size // 32), **EXACT
    )
    columns = min(COLUMNS, value_size)
    mix_runs[heads * triton.cdiv(net.value_dim, columns), len(buffers.runs)](
        pages, buffers, *tokens, num_tokens, sizes, ARE_TILED=net.are_heads_tiled, COLUMNS=columns, num_warps=1, **EXACT
    )
    gate_heads[num_tokens, triton.cdiv(heads, HEADS)](
        buffers.mixed, x[:, net.num_channels :], x.stride(0), norm.weight, norm.eps, out, to, step.rows, sizes,
        HEADS=HEADS, LEAVES=leaves, num_warps=4, **EXACT,
    )  # fmt: skip
    return Activations(out.flatten(1), Twin(planes, left))


def _buffers(net: GatedDeltaNet, num_tokens: int, layer: DeltaNetCache, device: torch.device) -> DeltaNetBuffers:
    pages, heads = layer.pages, net.num_value_heads
    values = torch.empty(num_tokens, heads, net.value_dim, device=device)
    log_alphas = torch.empty(heads, num_tokens, device=device)
    num_runs = min(num_tokens, len(pages.table))
    return DeltaNetBuffers(
        keys_queries=torch.empty(num_tokens, net.num_key_heads, 2, net.key_dim, device=device),
        dots=torch.empty(num_tokens, net.num_key_heads, 2, pages.page_tokens, device=device),
        new_values=values,
        log_alphas=log_alphas,
        betas=torch.empty_like(log_alphas),
        mixed=torch.empty_like(values),
        runs=torch.empty(num_runs, 2, dtype=torch.int32, device=device),
    )


def _gates(weights: DeltaNetWeights) -> Gates:
    net = weights.net
    return Gates(weights.dt_bias, weights.decay, float(net.beta_scale), net.key_dim**-0.5)


def _sizes(net: GatedDeltaNet) -> NetSizes:
    key_size, value_size = map(triton.next_power_of_2, (net.key_dim, net.value_dim))
    sizes = net.num_key_heads, net.key_dim, key_size, net.num_value_heads, net.value_dim, value_size
    return NetSizes(*map(tl.constexpr, sizes))
