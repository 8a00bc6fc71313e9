"""The work of `attend_chunks`: a list of items, which one program of `rotate_append` makes while the others rotate.

A tile of tokens sees some chunks of its row. If it sees many in comparison with the whole step, its chunks are split
into items: a few for one program each. All other tiles are one item, as is a padding token. So no program walks a long
context while the others have nothing to do, whatever the number of tokens. Results do not depend on the items.

A tile's visible turns of 64 slots are counted without the turns between its sinks and its window.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from infer.compute.backends.cuda.kv_blocks import TURN

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
