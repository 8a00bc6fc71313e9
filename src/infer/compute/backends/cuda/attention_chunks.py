"""The second half of `attend`: softmax(q kᵀ × scale) v over the slots of its row that each token sees.

The slots of a row are cut into chunks of 256, wherever the row begins and however long it is. A chunk is read one turn,
64 slots, at a time: its keys and values go to tensor cores as they are stored, and those of the next turn are on their
way meanwhile. The values of a chunk's turns are summed in the order of the slots, and chunks are merged in that order.
Slots that a token does not see add exact zeros. Products are `tl.dot` of one shape, whose rows are independent. So the
bits do not depend on the batch, the chunks of a prompt, or the path.

A program handles an item of `attention_items`: some chunks of a kv head for up to 16 of its queries, which are heads of
the group times neighbouring tokens of a row. Tiles of tokens begin at multiples of the tile's size in positions. The
program of a split tile that ends last merges the parts of all its chunks.

An operand of tensor cores is a float32 as the sum of two float16 or three bfloat16 numbers. Products with keys and
values in float16 or bfloat16 are exact, and sums are float32. So what is lost is what sums in float32 lose. Two halves
have 22 bits: 24 if both are far from the smallest half, 2^-24. So queries are scaled to numbers of up to 2^15 and
weights of a softmax, too. Three bfloat16 numbers have 24 bits and the range of float32. Quantised keys and values have
up to 23 bits. They are the sum of a half and of 2^-12 times another.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.attention_items import (
    FIELDS,
    INFINITY,
    LOG2_E,
    finite,
    first_seen,
    first_turn_of,
    gated,
    mean_of,
    merged,
    merged_parts,
    nothing,
    num_seen_chunks,
    seen_turns,
    store_part,
    store_results,
    turn_of,
)
from infer.compute.backends.cuda.kv_blocks import LANES, Q8, QUANTIZED_UNIT, TURN, load_keys, load_values, locate_turn
from infer.compute.quantization.kv_formats import KV_TYPES

F32 = tl.constexpr(KV_TYPES.index("f32"))
BF16 = tl.constexpr(KV_TYPES.index("bf16"))
LOW = tl.constexpr(2.0**12)  # by which the lower half of a quantised number is multiplied
LARGEST_EXPONENT = tl.constexpr(15)  # of a half: 2^15 × 1.99 is finite


@triton.jit
def weight_shift(KV_TYPE: tl.constexpr):
    """Return the exponent of a softmax's largest weight. Weights may be multiplied by any power of two."""
    return 0.0 if (KV_TYPE == F32) | (KV_TYPE == BF16) else 1.0 * LARGEST_EXPONENT


@triton.jit
def query_factors(q, KV_TYPE: tl.constexpr):
    """Return a power of two for each query of q [rows, dims], and what makes products with scaled queries scores."""
    if (KV_TYPE == F32) | (KV_TYPE == BF16):
        one = tl.full((q.shape[0],), 1.0, tl.float32)
        return one, one
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        exponent = tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1) >> 23
        up = tl.minimum(LARGEST_EXPONENT - 1 + 127 + 127 - exponent, 253)
        down = ((254 - up) << 23).to(tl.float32, bitcast=True)
        return (up << 23).to(tl.float32, bitcast=True), down * (1.0 / QUANTIZED_UNIT) if KV_TYPE >= Q8 else down


@triton.jit
def parts_of(x, KV_TYPE: tl.constexpr):
    """Return the parts of x that are multiplied with keys or values of a type, the largest first."""
    if KV_TYPE == F32:
        return (x,)
    elif KV_TYPE == BF16:  # noqa: RET505 - constant conditions: only one of the three is compiled
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        high = x.to(tl.float16)
        return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def product(parts, y, total, KV_TYPE: tl.constexpr):
    """Return total + x y for the parts of x, and keys or values y as they were loaded. Small products come first."""
    if KV_TYPE == F32:
        return tl.dot(parts[0], y, total, input_precision="ieee")
    elif KV_TYPE == BF16:  # noqa: RET505 - constant conditions: only one of the four is compiled
        total = tl.dot(parts[2], y, total)
        total = tl.dot(parts[1], y, total)
        return tl.dot(parts[0], y, total)
    elif KV_TYPE >= Q8:
        high = y.to(tl.float16)
        low = ((y - high.to(tl.float32)) * LOW).to(tl.float16)
        total += tl.dot(parts[0], low) * (1.0 / LOW)
        total = tl.dot(parts[1], high, total)
        return tl.dot(parts[0], high, total)
    else:
        total = tl.dot(parts[1], y, total)
        return tl.dot(parts[0], y, total)


WIDEST = tl.constexpr(256)  # dimensions of a head that are multiplied at once; of wider heads as many as NARROW
NARROW = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_tokens"])
def attend_chunks(
    near, far, out, left, parts, items, rows, positions, num_tokens, cache, scale, softcap, results,
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
        store_results(none, out, left, lines, member < GROUP, NUM_HEADS, DIM, SIZE, GROUP_SIZE, LEAVES)
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
                q, q_far, near, far, lines, unit * scale, unit_far * scale, own, is_mine, first_turn_of(seen, index),
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
            mean = mean_of(largest, total, values, lines, is_mine, results, NUM_HEADS, KV_TYPE)
            mean = gated(mean, lines, is_mine, results, NUM_HEADS, DIM, SIZE)
            store_results(mean, out, left, lines, is_mine, NUM_HEADS, DIM, SIZE, QUERIES, LEAVES)


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
    """Return the parts of queries, or only their factors if they are wide, and what makes their products scores."""
    q = _some_dims(x, lines, is_mine, 0, DIM, SIZE)
    factors, unit = query_factors(q, KV_TYPE)
    return factors if SIZE > WIDEST else parts_of(q * factors[:, None], KV_TYPE), unit


@triton.jit
def _some_dims(x, lines, is_mine, from_dim, DIM: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE) + from_dim
    is_there = is_mine[:, None] & (i < DIM)[None, :]
    return tl.load(x + lines[:, None] * DIM + i[None, :], mask=is_there, other=0.0)


@triton.jit
def _chunk_part(
    q, q_far, near, far, lines, scale, scale_far, own, is_mine, turn, end, seen, first_slot, last_slot, row, sinks,
    window, head, cache, softcap, QUERIES: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr,
    HAS_FAR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the part of the visible turns from `turn` on: of the slots in them that each query sees."""
    largest, total, values = nothing(QUERIES, min(SIZE, WIDEST))
    if SIZE > WIDEST:
        values = _wide_zeros(QUERIES, SIZE)
    before = first_seen(own, window) - 1  # the last slot that is too old
    oldest = first_seen(first_slot, window) - 1
    own_slot = tl.where(is_mine, own, -1)
    before = tl.where(is_mine, before, last_slot)
    for visible in tl.range(turn, end, num_stages=STAGES):
        start = turn_of(seen, visible) * TURN
        slots = start + tl.arange(0, TURN)
        block = start + tl.arange(0, TURN) // LANES * LANES
        is_read = (block <= last_slot) & ((block < sinks) | (block + LANES - 1 > oldest))
        page, block, lane = locate_turn(cache, row, start, is_read)
        if SIZE > WIDEST:
            scores = (
                _wide_scores(q, near, lines, is_mine, head, cache, page, block, lane, QUERIES, DIM, SIZE, KV_TYPE)
                * scale[:, None]
            )
        else:
            keys = load_keys(cache, head, page, block, lane, 0, DIM, SIZE, KV_TYPE)
            scores = product(q, keys, tl.full((QUERIES, TURN), 0.0, tl.float32), KV_TYPE) * scale[:, None]
        if HAS_FAR:
            if SIZE > WIDEST:
                far_scores = _wide_scores(
                    q_far, far, lines, is_mine, head, cache, page, block, lane, QUERIES, DIM, SIZE, KV_TYPE
                )
            else:
                far_scores = product(q_far, keys, tl.full((QUERIES, TURN), 0.0, tl.float32), KV_TYPE)
            scores = tl.where((slots < sinks)[None, :], far_scores * scale_far[:, None], scores)
        if HAS_SOFTCAP:
            scores = softcap * _tanh(tl.div_rn(scores, softcap)) * LOG2_E
        is_seen = (slots[None, :] <= own_slot[:, None]) & (
            (slots < sinks)[None, :] | (slots[None, :] > before[:, None])
        )
        scores = tl.where(is_seen, scores, -INFINITY)
        new = tl.maximum(largest, tl.ceil(tl.max(scores, axis=1)) - weight_shift(KV_TYPE))
        weights, factor = tl.exp2(scores - finite(new)[:, None]), tl.exp2(largest - finite(new))
        is_seen_by_any = (slots <= last_slot) & ((slots < sinks) | (slots > oldest))
        if SIZE > WIDEST:
            values = _wide_values(weights, values, factor, is_seen_by_any, head, cache, page, block, lane, DIM, KV_TYPE)
        else:
            v = load_values(cache, head, page, block, lane, 0, is_seen_by_any, DIM, SIZE, KV_TYPE)
            values = product(parts_of(weights, KV_TYPE), v, values * factor[:, None], KV_TYPE)
        largest, total = new, total * factor + tl.sum(weights, axis=1)
    if SIZE > WIDEST:
        first, second, third, fourth = values
        values = _side_by_side(_side_by_side(first, second), _side_by_side(third, fourth))
    return largest, total, values


@triton.jit
def _wide_scores(
    factors, x, lines, is_mine, head, cache, page, block, lane,
    QUERIES: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KV_TYPE: tl.constexpr,
):  # fmt: skip
    """Return the products of scaled queries with a turn's keys. The sum is that of parts of the dimensions."""
    scores = tl.full((QUERIES, TURN), 0.0, tl.float32)
    for from_dim in range(0, SIZE, NARROW):
        q = _some_dims(x, lines, is_mine, from_dim, DIM, NARROW) * factors[:, None]
        keys = load_keys(cache, head, page, block, lane, from_dim, DIM, NARROW, KV_TYPE)
        scores = product(parts_of(q, KV_TYPE), keys, scores, KV_TYPE)
    return scores


@triton.jit
def _wide_zeros(QUERIES: tl.constexpr, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 4 * NARROW, "heads have at most 512 dimensions")
    zeros = tl.full((QUERIES, NARROW), 0.0, tl.float32)
    return zeros, zeros, zeros, zeros


@triton.jit
def _wide_values(
    weights, values, factor, is_seen, head, cache, page, block, lane, DIM: tl.constexpr, KV_TYPE: tl.constexpr
):
    """Return each part of values times factor, plus the product of weights with that part of a turn's values."""
    first, second, third, fourth = values
    parts = parts_of(weights, KV_TYPE)
    v = load_values(cache, head, page, block, lane, 0, is_seen, DIM, NARROW, KV_TYPE)
    first = product(parts, v, first * factor[:, None], KV_TYPE)
    v = load_values(cache, head, page, block, lane, NARROW, is_seen, DIM, NARROW, KV_TYPE)
    second = product(parts, v, second * factor[:, None], KV_TYPE)
    v = load_values(cache, head, page, block, lane, 2 * NARROW, is_seen, DIM, NARROW, KV_TYPE)
    third = product(parts, v, third * factor[:, None], KV_TYPE)
    v = load_values(cache, head, page, block, lane, 3 * NARROW, is_seen, DIM, NARROW, KV_TYPE)
    fourth = product(parts, v, fourth * factor[:, None], KV_TYPE)
    return first, second, third, fourth


@triton.jit
def _side_by_side(left, right):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


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
