"""The work of `attend_chunks`, and the merge of its parts.

One program of `rotate_append` makes a list of items while the others rotate, in the first layer of each page group.

A tile of tokens sees some chunks of its row. If it sees many in comparison with the whole step, its chunks are split
into items: a few for one program each. All other tiles are one item, as is a padding token. So no program walks a long
context while the others have nothing to do, whatever the number of tokens. Results do not depend on the items.

A tile's visible turns of 64 slots are counted without the turns between its sinks and its window.

Parts of attention are merged: the largest score, the sum of weights, and the values times weights of some slots. Scores
are logarithms of base 2. A part's largest score is rounded up to an integer, so its factor in a merge is a power of two
and exact. Chunks are merged from the left, in a program's registers or by the last program of a tile.

After all chunks are merged, a query's result is finished: the sink of its head, its mean of values, its output gates,
and the store. A sink is one more logit of the softmax, without a value. It is added once, so its bits do not depend on
the path.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import store_quantized
from infer.compute.backends.cuda.epilogue import sigmoid, softplus
from infer.compute.backends.cuda.kv_blocks import Q8, QUANTIZED_UNIT, TURN

CHUNK = tl.constexpr(256)  # slots whose sums are one part of a token's
TURNS = tl.constexpr(256 // TURN.value)  # of a chunk
PROGRAMS = 512  # that a step is split into, about four for each multiprocessor of a large GPU
SLOTS = 512  # for parts of split tiles, besides those of one row
FIELDS = tl.constexpr(8)  # of an item; five are used
_TOKENS = tl.constexpr(512)  # that are planned at a time


class Items(NamedTuple):
    """Buffers of a step's items."""

    fields: Any  # int32 [items, FIELDS]: the first token or -1, the first chunk, the end, the tile's slot or -1, items
    arrivals: Any  # int32 [tokens, kv heads], how many items of a tile have come to an end


class Seen(NamedTuple):
    """The turns that a tile sees: those before `sink_turns`, and those from `first` to `last`."""

    sink_turns: Any
    first: Any
    last: Any


def num_splits(kv_heads: int) -> int:
    """Return the number of items into which the long contexts of a step are split at most."""
    return max(PROGRAMS // kv_heads, 1)


@triton.jit
def first_seen(slot, window):
    """Return the first slot that a token with this slot sees besides sinks, which may be below 0. See `Pages`."""
    of_chunk = slot - slot % tl.maximum(-window, 1)
    return tl.where(window < 0, of_chunk, tl.where(window == 0, 0, slot - window + 1))


@triton.jit
def seen_turns(first_slot, last_slot, sinks, window):
    """Return the turns that tokens from `first_slot` to `last_slot` see. They may have unseen slots, too."""
    last = last_slot // TURN
    sink_turns = tl.where(window == 0, 0, tl.minimum((sinks + TURN - 1) // TURN, last + 1))
    first = tl.maximum(tl.maximum(first_seen(first_slot, window), 0) // TURN, sink_turns)
    return Seen(sink_turns, first, last)


@triton.jit
def num_seen_chunks(seen):
    sink_chunks = (seen.sink_turns + TURNS - 1) // TURNS
    return sink_chunks + tl.maximum(seen.last // TURNS - tl.maximum(seen.first // TURNS, sink_chunks) + 1, 0)


@triton.jit
def first_turn_of(seen, chunk):
    """Return the number of visible turns before the visible chunk of this number."""
    sink_chunks = (seen.sink_turns + TURNS - 1) // TURNS
    turn = (tl.maximum(seen.first // TURNS, sink_chunks) + chunk - sink_chunks) * TURNS
    turn = tl.minimum(tl.maximum(turn, seen.first), seen.last + 1) - seen.first + seen.sink_turns
    return tl.where(chunk < sink_chunks, chunk * TURNS, turn)


@triton.jit
def turn_of(seen, visible):
    """Return the turn that has `visible` visible turns before it."""
    return tl.where(visible < seen.sink_turns, visible, visible - seen.sink_turns + seen.first)


@triton.jit
def plan_items(
    fields, rows, positions, num_tokens, capacity, num_slots, cache, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """Write `capacity` items for tiles of up to TILE tokens; those of no use have the token -1."""
    total = 0
    for start in range(0, num_tokens, _TOKENS):
        _, chunks = _tiles(start, rows, positions, num_tokens, cache, TILE)
        total += tl.sum(chunks)
    size = tl.maximum((total + SPLITS - 1) // SPLITS, 1)
    num_items, used = 0, 0
    for start in range(0, num_tokens, _TOKENS):
        is_first, chunks = _tiles(start, rows, positions, num_tokens, cache, TILE)
        wanted = tl.where(chunks > size, chunks, 0)
        slot = used + tl.cumsum(wanted) - wanted
        is_split = (wanted > 0) & (slot + wanted <= num_slots)
        count = tl.where(is_split, (chunks + size - 1) // size, is_first.to(tl.int32))
        item = num_items + tl.cumsum(count) - count
        for index in range(tl.max(count)):
            is_there = index < count
            at = fields + (item + index) * FIELDS
            tl.store(at, start + tl.arange(0, _TOKENS), mask=is_there)
            tl.store(at + 1, tl.where(is_split, index * size, 0), mask=is_there)
            tl.store(at + 2, tl.where(is_split, tl.minimum(index * size + size, chunks), chunks), mask=is_there)
            tl.store(at + 3, tl.where(is_split, slot, -1), mask=is_there)
            tl.store(at + 4, count, mask=is_there)
        num_items += tl.sum(count)
        used += tl.sum(wanted)
    for start in range(num_items, capacity, _TOKENS):
        unused = start + tl.arange(0, _TOKENS)
        tl.store(fields + unused * FIELDS, -1, mask=unused < capacity)


@triton.jit
def _tiles(start, rows, positions, num_tokens, cache, TILE: tl.constexpr):
    """Return True for each token that begins a tile or is padding, and the number of chunks that its tile sees.

    A tile that ends before its last position may count one chunk that nobody sees.
    """
    tokens = start + tl.arange(0, _TOKENS)
    is_token = tokens < num_tokens
    row = tl.load(rows + tokens, mask=is_token, other=-1).to(tl.int32)
    before = tl.load(rows + tokens - 1, mask=is_token & (tokens > 0), other=-1).to(tl.int32)
    position = tl.load(positions + tokens, mask=is_token, other=0).to(tl.int32)
    is_real = is_token & (row >= 0)
    is_first = (row != before) | (position % TILE == 0) | (row < 0)
    shift = tl.load(cache.shifts + row, mask=is_real, other=0).to(tl.int32)
    sinks = tl.load(cache.sinks + row, mask=is_real, other=0).to(tl.int32)
    window = tl.load(cache.windows + row, mask=is_real, other=0).to(tl.int32)
    seen = seen_turns(position - shift, (position | (TILE - 1)) - shift, sinks, window)
    return is_first & is_token, tl.where(is_first & is_real, num_seen_chunks(seen), 0)


INFINITY = tl.constexpr(float("inf"))
AT_ONCE = tl.constexpr(4)  # chunks whose parts are loaded before the first of them is merged


class ChunkParts(NamedTuple):
    """Parts of the chunks of split tiles, by [slot, kv head]."""

    largests: Any  # [..., queries]
    sums: Any  # [..., queries]
    weighted: Any  # [..., queries, dims]


@triton.jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the part of no slots."""
    return (
        tl.full((ROWS,), -INFINITY, tl.float32),
        tl.full((ROWS,), 0.0, tl.float32),
        tl.full((ROWS, SIZE), 0.0, tl.float32),
    )


@triton.jit
def merged(largest, total, values, other_largest, other_total, other_values):
    """Return two parts of the same queries merged into one. Either may cover no slots."""
    both = tl.maximum(largest, other_largest)
    mine, other = tl.exp2(largest - finite(both)), tl.exp2(other_largest - finite(both))
    return both, total * mine + other_total * other, values * mine[:, None] + other_values * other[:, None]


@triton.jit
def finite(largest):
    """Return 0 for −inf, so that −inf minus it stays −inf and does not become NaN."""
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def store_part(
    parts, part, is_mine, largest, total, values, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr
):
    at = part.to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    i = tl.arange(0, SIZE)
    tl.store(parts.largests + at, largest, mask=is_mine)
    tl.store(parts.sums + at, total, mask=is_mine)
    tl.store(parts.weighted + at[:, None] * DIM + i[None, :], values, mask=is_mine[:, None] & (i < DIM)[None, :])


@triton.jit
def merged_parts(parts, part, step, count, is_mine, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr):
    """Return `count` parts, `step` apart from `part` on, merged from the left."""
    largest, total, values = nothing(QUERIES, SIZE)
    at_once: tl.constexpr = AT_ONCE if SIZE <= 256 else 1  # as many as the registers have room for
    for start in range(0, count, at_once):
        for index in tl.static_range(at_once):
            is_there = is_mine & (tl.zeros((QUERIES,), tl.int32) + start + index < count)
            at = (part + (start + index) * step).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
            i = tl.arange(0, SIZE)
            largest, total, values = merged(
                largest, total, values,
                tl.load(parts.largests + at, mask=is_there, other=-INFINITY),
                tl.load(parts.sums + at, mask=is_there, other=0.0),
                tl.load(
                    parts.weighted + at[:, None] * DIM + i[None, :],
                    mask=is_there[:, None] & (i < DIM)[None, :], other=0.0,
                ),
            )  # fmt: skip
    return largest, total, values


LOG2_E = tl.constexpr(1.4426950408889634)


class Results(NamedTuple):
    """Arguments of a layer's sinks and gates. Tensors that are not read are replaced by any existing one."""

    sinks: Any  # float32 [heads]
    gates: Any  # qkv
    WIDTH: tl.constexpr  # columns of qkv
    GATE_START: tl.constexpr
    HAS_SINKS: tl.constexpr
    CURVE: tl.constexpr  # of the gates; "" if there are none
    ARE_OF_HEADS: tl.constexpr  # one gate per head, otherwise one per element


@triton.jit
def mean_of(largest, total, values, lines, is_mine, results, NUM_HEADS: tl.constexpr, KV_TYPE: tl.constexpr):
    """Return values / total, or zeros for queries that saw no slot: those that do not count."""
    if results.HAS_SINKS:
        sink = tl.load(results.sinks + lines % NUM_HEADS, mask=is_mine, other=0.0) * LOG2_E
        total += tl.exp2(sink - finite(largest))
    mean = tl.div_rn(values, tl.where(total == 0, 1.0, total)[:, None])
    return mean * (1.0 / QUANTIZED_UNIT) if KV_TYPE >= Q8 else mean


@triton.jit
def gated(mean, lines, is_mine, results, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return mean [lines, SIZE] times the gate of each head or element."""
    if results.CURVE != "":
        tokens, heads, i = lines // NUM_HEADS, lines % NUM_HEADS, tl.arange(0, SIZE)
        at = results.gates + tokens * results.WIDTH + results.GATE_START
        if results.ARE_OF_HEADS:
            gate = tl.load(at + heads, mask=is_mine, other=0.0)[:, None]
        else:
            is_there = is_mine[:, None] & (i < DIM)[None, :]
            gate = tl.load((at + heads * DIM)[:, None] + i[None, :], mask=is_there, other=0.0)
        mean *= sigmoid(gate) if results.CURVE == "sigmoid" else softplus(gate)
    return mean


@triton.jit
def store_results(
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
