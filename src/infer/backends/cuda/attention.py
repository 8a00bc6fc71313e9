"""`attend`: softmax(q kᵀ × scale) v over the slots of its row that each token sees.

The slots of a row are cut into chunks of 256, wherever the row begins and however long it is. A chunk is read one cache
block, 16 slots, at a time. Each block's (largest score, sum, weighted values) is merged into the chunk's, and each
chunk's into the token's, always in the order of the slots. Slots that a token does not see add exact zeros. Scores and
values are `tl.dot` of one shape, whose rows are independent. So the bits do not depend on the batch, the chunks of a
prompt, or the path.

A program handles a kv head and up to 16 of its queries: heads of the group times neighbouring tokens of a row. Tiles of
tokens begin at multiples of the tile's size in positions. With few tokens, chunks are programs of their own, and the
program of a tile that ends last merges the results. With more tokens, a program loops over all chunks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.backends.cuda.activations import Quantized, Twin, room_for, store_quantized, twin_of
from infer.backends.cuda.kv_blocks import LANES, load_keys, load_values, make_blocks, place_of
from infer.backends.cuda.rotation import HEAD_NORM, NO_NORM, WHOLE_NORM, Rotation, rotate_append
from infer.backends.cuda.sampling.sampler import EXACT
from infer.operands.activation_values import Activations
from infer.operands.step import Step
from infer.operands.weights import Heads, Norm
from infer.quantization.kv_formats import KV_TYPES
from infer.quantization.kv_layout import LayerCache, Pages

CHUNK = tl.constexpr(256)  # slots whose sums are one part of a token's
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
QUERIES = 16  # of a program
SPLIT_TOKENS = 16  # a step of no more has programs for chunks
SPLIT_PROGRAMS = 32  # of a token and kv head at most: each takes every so manyth chunk


class ChunkParts(NamedTuple):
    """Results of chunks, [tokens, heads, chunks]: the largest score, the sum of weights, the values times weights."""

    largests: Any
    sums: Any
    weighted: Any
    num_chunks: Any
    arrivals: Any  # [tokens, kv heads], how many programs have come to an end


def attend(qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
    floats, planes, dim, pages = qkv.floats, twin_of(qkv).planes, heads.head_dim, layer.pages
    num_tokens = len(floats)
    cache, kv_type = make_blocks(layer), KV_TYPES.index(layer.kv_type)
    size, group = max(16, triton.next_power_of_2(dim)), heads.num_heads // heads.num_kv_heads
    group_size, num_warps = triton.next_power_of_2(group), 4 if size <= 64 else 8
    half = 0 if heads.rope is None else heads.rope.cos.shape[-1]
    shape = {"DIM": dim, "SIZE": size, "KV_TYPE": kv_type, "HAS_FAR": pages.furthest is not None}

    near = torch.empty(num_tokens, heads.num_heads, dim, device=floats.device)
    far = torch.empty_like(near) if shape["HAS_FAR"] else near
    arrivals = torch.empty(num_tokens, heads.num_kv_heads, dtype=torch.int32, device=floats.device)
    rotate_append[num_tokens, heads.num_kv_heads](
        floats, near, far, arrivals, step.rows, step.positions, _rotation(heads, pages, near), cache,
        NUM_HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, HALF=half,
        GROUP_SIZE=group_size, Q_NORM=_kind(heads.q_norm, dim), K_NORM=_kind(heads.k_norm, dim), **shape,
        num_warps=num_warps, **EXACT,
    )  # fmt: skip

    chunks = triton.cdiv(pages.table.shape[1] * pages.page_tokens, CHUNK.value)
    is_split = num_tokens <= SPLIT_TOKENS and chunks > 1
    out = torch.empty_like(near)
    parts = _parts(near, chunks, arrivals) if is_split else ChunkParts(out, out, out, chunks, arrivals)
    left = room_for(out, planes)
    to, leaves = (Quantized(out, out, out), 0) if left is None else (left.in_bytes(), planes)
    softcap = {"softcap": heads.softcap or 1.0, "HAS_SOFTCAP": heads.softcap is not None}
    attend_chunks[num_tokens, heads.num_kv_heads, min(chunks, SPLIT_PROGRAMS) if is_split else 1](
        near, far, out, to, parts, step.rows, step.positions, num_tokens, cache, float(heads.scale), **softcap,
        NUM_HEADS=heads.num_heads, GROUP=group, GROUP_SIZE=group_size, QUERIES=max(QUERIES, group_size), LEAVES=leaves,
        SPLIT=is_split, **shape, num_warps=num_warps, **EXACT,
    )  # fmt: skip
    return Activations(out.flatten(1), Twin(planes, left))


def _rotation(heads: Heads, pages: Pages, anything: Tensor) -> Rotation:
    rope, q_norm, k_norm = heads.rope, heads.q_norm, heads.k_norm
    return Rotation(
        q_norm=anything if q_norm is None else q_norm.weight,
        k_norm=anything if k_norm is None else k_norm.weight,
        q_eps=0.0 if q_norm is None else q_norm.eps,
        k_eps=0.0 if k_norm is None else k_norm.eps,
        cos=anything if rope is None else rope.cos,
        sin=anything if rope is None else rope.sin,
        set_size=0 if rope is None else rope.cos.stride(0),
        num_sets=1 if rope is None else len(rope.cos),
        rope_sets=pages.rope_sets,
        furthest=0 if pages.furthest is None else pages.furthest,
    )


def _kind(norm: Norm | None, dim: int) -> int:
    kind = NO_NORM if norm is None else HEAD_NORM if len(norm.weight) == dim else WHOLE_NORM
    return int(kind.value)


def _parts(near: Tensor, chunks: int, arrivals: Tensor) -> ChunkParts:
    shape = (*near.shape[:2], chunks)
    largests, sums = (torch.empty(shape, device=near.device) for _ in range(2))
    return ChunkParts(largests, sums, torch.empty(*shape, near.shape[2], device=near.device), chunks, arrivals)


@triton.jit(do_not_specialize=["num_tokens"])
def attend_chunks(
    near, far, out, left, parts, rows, positions, num_tokens, cache, scale, softcap,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr, HAS_FAR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries per program.

    Query m is head m % GROUP_SIZE of token m // GROUP_SIZE of the tile that begins with the program's token. A token
    that begins no tile has nothing to do, and a padding token gets NaN.
    """
    first, head = tl.program_id(0), tl.program_id(1)
    row, position = tl.load(rows + first), tl.load(positions + first)
    before = tl.load(rows + tl.maximum(first - 1, 0))
    tokens_per_tile: tl.constexpr = QUERIES // GROUP_SIZE
    if (row >= 0) & ((first == 0) | (before != row) | (position % tokens_per_tile == 0)):
        own, is_mine, lines, first_slot, last_slot, sinks, window = _tile(
            first, head, rows, positions, num_tokens, cache, NUM_HEADS, GROUP, GROUP_SIZE, QUERIES
        )
        i = tl.arange(0, SIZE)
        is_there = is_mine[:, None] & (i < DIM)[None, :]
        at = lines[:, None] * DIM + i[None, :]
        q = tl.load(near + at, mask=is_there, other=0.0)
        q_far = q
        if HAS_FAR:
            q_far = tl.load(far + at, mask=is_there, other=0.0)

        largest, total, values = _nothing(QUERIES, SIZE)
        for chunk in range(tl.program_id(2), last_slot // CHUNK + 1, tl.num_programs(2)):
            start = chunk * CHUNK
            if _is_seen(start, CHUNK, first_slot, sinks, window):
                part_largest, part_total, part_values = _chunk_part(
                    q, q_far, own, is_mine, start, first_slot, last_slot, row, sinks, window, head, cache, scale,
                    softcap, QUERIES, DIM, SIZE, KV_TYPE, HAS_FAR, HAS_SOFTCAP,
                )  # fmt: skip
                if SPLIT:
                    place = lines * parts.num_chunks + chunk
                    tl.store(parts.largests + place, part_largest, mask=is_mine)
                    tl.store(parts.sums + place, part_total, mask=is_mine)
                    tl.store(parts.weighted + place[:, None] * DIM + i[None, :], part_values, mask=is_there)
                else:
                    largest, total, values = _merged(largest, total, values, part_largest, part_total, part_values)
        if not SPLIT:
            _store(_mean(total, values), out, left, lines, is_mine, NUM_HEADS, DIM, SIZE, QUERIES, LEAVES)
        elif _is_last(parts, first, head):
            own, is_mine, lines, first_slot, last_slot, sinks, window = _tile(
                first, head, rows, positions, num_tokens, cache, NUM_HEADS, GROUP, GROUP_SIZE, QUERIES
            )  # again: to keep it would cost registers
            mean = _merged_chunks(parts, lines, is_mine, first_slot, last_slot, sinks, window, DIM, SIZE, QUERIES)
            _store(mean, out, left, lines, is_mine, NUM_HEADS, DIM, SIZE, QUERIES, LEAVES)
    elif (row < 0) & (tl.program_id(2) == 0):
        member = tl.arange(0, GROUP_SIZE)
        lines = first.to(tl.int64) * NUM_HEADS + head * GROUP + member
        nothing = tl.full((GROUP_SIZE, SIZE), float("nan"), tl.float32)
        _store(nothing, out, left, lines, member < GROUP, NUM_HEADS, DIM, SIZE, GROUP_SIZE, LEAVES)


@triton.jit
def _tile(
    first, head, rows, positions, num_tokens, cache,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return each query's slot, whether it counts, and its line in [tokens, heads].

    Also return the first and the last slot of the tile, and the row's sinks and window.
    """
    row, position = tl.load(rows + first), tl.load(positions + first)
    later, member = tl.arange(0, QUERIES) // GROUP_SIZE, tl.arange(0, QUERIES) % GROUP_SIZE
    tokens, per_tile = first + later, QUERIES // GROUP_SIZE
    theirs = tl.load(rows + tokens, mask=tokens < num_tokens, other=-1)
    is_near = position // per_tile == (position + later) // per_tile
    is_mine = (theirs == row) & is_near & (member < GROUP)
    own = position - tl.load(cache.shifts + row) + later
    lines = (tokens * NUM_HEADS + head * GROUP + member).to(tl.int64)
    sinks, window = tl.load(cache.sinks + row), tl.load(cache.windows + row)
    return own, is_mine, lines, tl.min(own), tl.max(tl.where(is_mine, own, 0)), sinks, window


@triton.jit
def _store(
    mean, out, left, lines, is_mine,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Store mean [LINES, SIZE] of heads of tokens. With LEAVES, also store it in LEAVES int8 planes."""
    i = tl.arange(0, SIZE)
    tl.store(out + lines[:, None] * DIM + i[None, :], mean, mask=is_mine[:, None] & (i < DIM)[None, :])
    if LEAVES:
        count: tl.constexpr = LINES * SIZE // 32
        at = lines[:, None] * (DIM // 32) + tl.arange(0, SIZE // 32)[None, :]
        is_block = is_mine[:, None] & (tl.arange(0, SIZE // 32) < DIM // 32)[None, :]
        at, is_block = tl.reshape(at, (count,)), tl.reshape(is_block, (count,))
        per_token: tl.constexpr = NUM_HEADS * DIM // 32
        value = tl.reshape(mean, (count, 32))
        store_quantized(left, value, at // per_token, at % per_token, per_token, is_block, LEAVES, count)


@triton.jit
def _chunk_part(
    q, q_far, own, is_mine, start, first_slot, last_slot, row, sinks, window, head, cache, scale, softcap,
    QUERIES: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr, HAS_FAR: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the largest score, the sum of weights and the values times weights of the chunk that begins at slot
    `start`.

    They cover the slots of the chunk that each query sees, read one cache block at a time.
    """
    i = tl.arange(0, SIZE)
    largest, total, values = _nothing(QUERIES, SIZE)
    for slot in range(start, tl.minimum(start + CHUNK, last_slot + 1), LANES):
        if _is_seen(slot, LANES, first_slot, sinks, window):
            slots = slot + tl.arange(0, LANES)
            seen = (slots[None, :] <= own[:, None]) & is_mine[:, None]
            seen &= (window == 0) | (slots < sinks)[None, :] | (slots[None, :] > own[:, None] - window)
            page, block, _ = place_of(cache, row, slot)
            keys = load_keys(cache, head, page, block, i, DIM, KV_TYPE)
            scores = tl.dot(q, keys, input_precision="ieee")
            if HAS_FAR:  # noqa: SIM102 - known when compiled
                if slot < sinks:
                    far_scores = tl.dot(q_far, keys, input_precision="ieee")
                    scores = tl.where((slots < sinks)[None, :], far_scores, scores)
            scores = scores * scale
            if HAS_SOFTCAP:
                scores = softcap * _tanh(tl.div_rn(scores, softcap))
            scores = tl.where(seen, scores * LOG2_E, -INFINITY)
            block_largest = tl.max(scores, axis=1)
            weights = tl.exp2(scores - _finite(block_largest)[:, None])
            v = load_values(cache, head, page, block, i, DIM, KV_TYPE)
            v = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], v, 0.0)
            block_values = tl.dot(weights, v, input_precision="ieee")
            largest, total, values = _merged(
                largest, total, values, block_largest, tl.sum(weights, axis=1), block_values
            )
    return largest, total, values


@triton.jit
def _is_last(parts, first, head):
    """Return True if this program of a tile is the last to arrive here. It may read the other programs' results."""
    tl.debug_barrier()  # what all threads have written is released with the arrival of one
    arrived = tl.atomic_add(parts.arrivals + first * tl.num_programs(1) + head, 1, sem="acq_rel", scope="gpu")
    return arrived == tl.num_programs(2) - 1


@triton.jit
def _merged_chunks(
    parts, lines, is_mine, first_slot, last_slot, sinks, window,
    DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return the mean over the results of a tile's programs, merged chunk by chunk."""
    i = tl.arange(0, SIZE)
    is_there = is_mine[:, None] & (i < DIM)[None, :]
    largest, total, values = _nothing(QUERIES, SIZE)
    for chunk in range(last_slot // CHUNK + 1):
        if _is_seen(chunk * CHUNK, CHUNK, first_slot, sinks, window):
            place = lines * parts.num_chunks + chunk
            largest, total, values = _merged(
                largest, total, values,
                tl.load(parts.largests + place, mask=is_mine, other=0.0),
                tl.load(parts.sums + place, mask=is_mine, other=1.0),
                tl.load(parts.weighted + place[:, None] * DIM + i[None, :], mask=is_there, other=0.0),
            )  # fmt: skip
    return _mean(total, values)


@triton.jit
def _nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the largest score, the sum and the values of no slots."""
    return (
        tl.full((ROWS,), -INFINITY, tl.float32),
        tl.full((ROWS,), 0.0, tl.float32),
        tl.full((ROWS, SIZE), 0.0, tl.float32),
    )


@triton.jit
def _is_seen(start, COUNT: tl.constexpr, slot, sinks, window):
    """Return True if a token at `slot` or later may see any of the COUNT slots from `start` on.

    These slots begin no later than the token.
    """
    return (window == 0) | (start < sinks) | (start + COUNT > slot - window + 1)


@triton.jit
def _merged(largest, total, values, other_largest, other_total, other_values):
    """Return two parts of the same queries merged into one. Either may cover no slots."""
    both = tl.maximum(largest, other_largest)
    mine, other = tl.exp2(largest - _finite(both)), tl.exp2(other_largest - _finite(both))
    return both, total * mine + other_total * other, values * mine[:, None] + other_values * other[:, None]


@triton.jit
def _mean(total, values):
    """Return values / total, or zeros for queries that saw no slot: those that do not count."""
    return tl.div_rn(values, tl.where(total == 0, 1.0, total)[:, None])


@triton.jit
def _finite(largest):
    """Return 0 for −inf, so that −inf minus it stays −inf and does not become NaN."""
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def _tanh(x):
    return 1.0 - tl.div_rn(2.0, tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
