"""The second half of `attend`: softmax(q kᵀ × scale) v over the slots of its row that each token sees.

The slots of a row are cut into chunks of 256, wherever the row begins and however long it is. A chunk is read one turn,
64 slots, at a time: its keys and values go to tensor cores as they are stored, and those of the next turn are on their
way meanwhile. The values of a chunk's turns are summed in the order of the slots, and chunks are merged in that order.
Slots that a token does not see add exact zeros. Products are `tl.dot` of one shape, whose rows are independent. So the
bits do not depend on the batch, the chunks of a prompt, or the path.

A program handles an item of `attention_items`: some chunks of a kv head for up to 16 of its queries, which are heads of
the group times neighbouring tokens of a row. Tiles of tokens begin at multiples of the tile's size in positions. The
program of a split tile that ends last merges the parts of all its chunks.
"""

import triton
import triton.language as tl

from infer.backends.cuda.activations import store_quantized
from infer.backends.cuda.attention_items import FIELDS, first_turn_of, num_seen_chunks, seen_turns, turn_of
from infer.backends.cuda.attention_merge import (
    INFINITY,
    finite,
    mean_of,
    merged,
    merged_parts,
    nothing,
    store_part,
)
from infer.backends.cuda.kv_blocks import LANES, TURN, load_keys, load_values, locate_turn
from infer.backends.cuda.operand_parts import parts_of, product, query_parts, weight_shift

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens"])
def attend_chunks(
    near, far, out, left, parts, items, rows, positions, num_tokens, cache, scale, softcap,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr, HAS_FAR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    LEAVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with one item per program.

    Query m is head m % GROUP_SIZE of token m // GROUP_SIZE of the tile that begins with the item's token. A padding
    token gets NaN.
    """
    item, head, heads = items.fields + tl.program_id(0) * FIELDS, tl.program_id(1), tl.num_programs(1)
    first = tl.load(item)
    row = tl.load(rows + tl.maximum(first, 0))
    if (first >= 0) & (row < 0):
        member = tl.arange(0, GROUP_SIZE)
        lines = first.to(tl.int64) * NUM_HEADS + head * GROUP + member
        none = tl.full((GROUP_SIZE, SIZE), float("nan"), tl.float32)
        _store(none, out, left, lines, member < GROUP, NUM_HEADS, DIM, SIZE, GROUP_SIZE, LEAVES)
    elif first >= 0:
        chunk, end, slot, count = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        own, is_mine, lines, first_slot, last_slot, sinks, window = _tile(
            first, head, rows, positions, num_tokens, cache, NUM_HEADS, GROUP, GROUP_SIZE, QUERIES
        )
        seen = seen_turns(first_slot, last_slot, sinks, window)
        q, unit = _queries(near, lines, is_mine, DIM, SIZE, KV_TYPE)
        q_far, unit_far = q, unit
        if HAS_FAR:
            q_far, unit_far = _queries(far, lines, is_mine, DIM, SIZE, KV_TYPE)
        largest, total, values = nothing(QUERIES, SIZE)
        for index in range(chunk, tl.minimum(end, num_seen_chunks(seen))):
            part_largest, part_total, part_values = _chunk_part(
                q, q_far, unit * scale, unit_far * scale, own, is_mine, first_turn_of(seen, index),
                first_turn_of(seen, index + 1), seen, first_slot, last_slot, row, sinks, window, head, cache,
                softcap, QUERIES, DIM, SIZE, KV_TYPE, HAS_FAR, HAS_SOFTCAP, STAGES,
            )  # fmt: skip
            if slot >= 0:
                part = (slot + index) * heads + head
                store_part(parts, part, is_mine, part_largest, part_total, part_values, DIM, SIZE, QUERIES)
            else:
                largest, total, values = merged(largest, total, values, part_largest, part_total, part_values)
        is_done = slot < 0
        if slot >= 0:
            is_done = _is_last(items.arrivals + first * heads + head, count)
            if is_done:
                chunks, part = num_seen_chunks(seen), slot * heads + head
                largest, total, values = merged_parts(parts, part, heads, chunks, is_mine, DIM, SIZE, QUERIES)
        if is_done:
            own, is_mine, lines, first_slot, last_slot, sinks, window = _tile(
                first, head, rows, positions, num_tokens, cache, NUM_HEADS, GROUP, GROUP_SIZE, QUERIES
            )  # again: to keep it would cost registers
            mean = mean_of(total, values, KV_TYPE)
            _store(mean, out, left, lines, is_mine, NUM_HEADS, DIM, SIZE, QUERIES, LEAVES)


@triton.jit
def _tile(
    first, head, rows, positions, num_tokens, cache,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return each query's slot, whether it counts, and its line in [tokens, heads].

    Also return the first and the last slot of the tile, and the row's sinks and window.
    """
    row, position = tl.load(rows + first), tl.load(positions + first).to(tl.int32)
    later, member = tl.arange(0, QUERIES) // GROUP_SIZE, tl.arange(0, QUERIES) % GROUP_SIZE
    tokens, per_tile = first + later, QUERIES // GROUP_SIZE
    theirs = tl.load(rows + tokens, mask=tokens < num_tokens, other=-1)
    is_near = position // per_tile == (position + later) // per_tile
    is_mine = (theirs == row) & is_near & (member < GROUP)
    own = position - tl.load(cache.shifts + row).to(tl.int32) + later
    lines = tokens.to(tl.int64) * NUM_HEADS + head * GROUP + member
    sinks, window = tl.load(cache.sinks + row).to(tl.int32), tl.load(cache.windows + row).to(tl.int32)
    return own, is_mine, lines, tl.min(own), tl.max(tl.where(is_mine, own, 0)), sinks, window


@triton.jit
def _queries(x, lines, is_mine, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr):
    i = tl.arange(0, SIZE)
    is_there = is_mine[:, None] & (i < DIM)[None, :]
    return query_parts(tl.load(x + lines[:, None] * DIM + i[None, :], mask=is_there, other=0.0), KV_TYPE)


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
    q, q_far, scale, scale_far, own, is_mine, turn, end, seen, first_slot, last_slot, row, sinks, window, head, cache,
    softcap, QUERIES: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr,
    HAS_FAR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the part of the visible turns from `turn` on: of the slots in them that each query sees."""
    i = tl.arange(0, SIZE)
    largest, total, values = nothing(QUERIES, SIZE)
    before = tl.where(window == 0, -1, own - window)  # the last slot that is too old
    oldest = tl.where(window == 0, -1, first_slot - window)
    own = tl.where(is_mine, own, -1)
    before = tl.where(is_mine, before, last_slot)
    for visible in tl.range(turn, end, num_stages=STAGES):
        start = turn_of(seen, visible) * TURN
        slots = start + tl.arange(0, TURN)
        block = start + tl.arange(0, TURN) // LANES * LANES
        is_read = (block <= last_slot) & ((block < sinks) | (block + LANES - 1 > oldest))
        page, block, lane = locate_turn(cache, row, start, is_read)
        keys = load_keys(cache, head, page, block, lane, i, DIM, SIZE, KV_TYPE)
        scores = product(q, keys, tl.full((QUERIES, TURN), 0.0, tl.float32), KV_TYPE) * scale[:, None]
        if HAS_FAR:
            far_scores = product(q_far, keys, tl.full((QUERIES, TURN), 0.0, tl.float32), KV_TYPE)
            scores = tl.where((slots < sinks)[None, :], far_scores * scale_far[:, None], scores)
        if HAS_SOFTCAP:
            scores = softcap * _tanh(tl.div_rn(scores, softcap)) * LOG2_E
        is_seen = (slots[None, :] <= own[:, None]) & ((slots < sinks)[None, :] | (slots[None, :] > before[:, None]))
        scores = tl.where(is_seen, scores, -INFINITY)
        new = tl.maximum(largest, tl.ceil(tl.max(scores, axis=1)) - weight_shift(KV_TYPE))
        weights, factor = tl.exp2(scores - finite(new)[:, None]), tl.exp2(largest - finite(new))
        is_seen_by_any = (slots <= last_slot) & ((slots < sinks) | (slots > oldest))
        v = load_values(cache, head, page, block, lane, i, is_seen_by_any, DIM, SIZE, KV_TYPE)
        values = product(parts_of(weights, KV_TYPE), v, values * factor[:, None], KV_TYPE)
        largest, total = new, total * factor + tl.sum(weights, axis=1)
    return largest, total, values


@triton.jit
def _is_last(arrivals, count):
    """Return True if this program of a tile is the last of `count` to arrive here.

    It may read the other programs' results.
    """
    tl.debug_barrier()  # what all threads have written is released with the arrival of one
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1


@triton.jit
def _tanh(x):
    return 1.0 - tl.div_rn(2.0, tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
