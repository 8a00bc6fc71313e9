"""Slots of a row: the page of each slot, and the slots that a token sees.

`infer.compute.quantization.kv_layout.Pages` defines the table and the rule. A chunk is 256 slots.
The visible blocks of 16 slots form at most two parts, [0, gap) of the sinks and [first, end) of the window. Pages
without visible slots are not read.
"""

from typing import Any

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention.cached_forms import KEYS, VALUES
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.records import CHUNK


def make_block_at(kv_type: str) -> Any:
    """Return block_at(args, row, kv, slot): the addresses of the block of keys and of the block of values of a slot.

    Both blocks are those of kv head `kv`, and have 16 slots each. The slot's page must be in the row's table.
    """
    key_bytes, value_bytes = KEYS[kv_type].dim_bytes, VALUES[kv_type].dim_bytes

    @njit(forceinline=True)
    def block_at(args, row, kv, slot):
        page = args.table[row * args.table_stride + (slot >> args.page_bits)]
        block = (slot & ((1 << args.page_bits) - 1)) // LANES
        keys = args.keys + page * args.key_page_stride + kv * args.key_stride
        values = args.values + page * args.value_page_stride + kv * args.value_stride
        return keys + block * args.dim * key_bytes, values + block * args.dim * value_bytes

    return block_at


@njit(forceinline=True)
def end_of_run(args, slot, end):
    """Return the end of the slots [slot, …) that are contiguous in memory: the slot's page ends there, or `end`."""
    return min(((slot >> args.page_bits) + 1) << args.page_bits, end)


@njit(forceinline=True)
def slot_of(args, row, position):
    """Return the slot of a row's token, by its position in the text."""
    return position - args.shifts[row]


@njit(forceinline=True)
def seen_lanes(at, sinks, low, high, x):
    """Return x, f32 × 16, of the slots [at, at + 16) of a chunk, with −inf for slots that are not seen.

    Slots in [0, sinks) and in [low, high) are seen. All are relative to the chunk.
    """
    seen = simd.keep_lanes(np.int32(low - at), np.int32(high - at), x)
    if at < sinks:
        seen = simd.maximum(seen, simd.keep_lanes(np.int32(-at), np.int32(sinks - at), x))
    return seen


@njit(forceinline=True)
def _first_seen(slot, window):
    """Return the first slot that the window of the token at `slot` includes. A window of 0 has no limit."""
    if window < 0:  # chunks of −window slots
        return slot // -window * -window
    return 0 if window == 0 else max(0, slot + 1 - window)


@njit
def last_seen(args, row, slot):
    """Return the last slot that the token at `slot` sees: its own, or up to `num_ahead` slots later in the same row."""
    return slot if args.num_ahead == 0 else min(slot + args.num_ahead, args.ends[row] - 1)


@njit
def num_seen(args, row, slot):
    """Return the number of slots that the token at `slot` sees."""
    sinks = min(args.sinks[row], slot + 1)
    return last_seen(args, row, slot) + 1 - max(0, _first_seen(slot, args.windows[row]) - sinks)


@njit
def chunks_seen(args, row, slot):
    """Return (number of first chunks, number of skipped chunks) for the token at `slot`.

    The token sees some slot of each of the first chunks, which contain sinks. It sees none of the skipped chunks after
    them. It sees some slot of each later chunk, up to the chunk of `last_seen`.
    """
    sinks = min(args.sinks[row], slot + 1)
    num_first = (sinks + CHUNK - 1) // CHUNK
    return num_first, max(0, _first_seen(slot, args.windows[row]) // CHUNK - num_first)


@njit
def seen_of_chunk(args, row, chunk, slot):
    """Return (sinks, low, high): the token at `slot` sees the slots [0, sinks) and [low, high) of a chunk.

    They are relative to the chunk's first slot. `high` is at most 256. If the sinks touch the window, sinks and low are
    0.
    """
    start = chunk * CHUNK
    high = min(CHUNK, last_seen(args, row, slot) + 1 - start)
    low = max(0, _first_seen(slot, args.windows[row]) - start)
    sinks = min(args.sinks[row] - start, CHUNK)
    if sinks >= low:
        return 0, 0, high
    return max(0, sinks), min(low, max(0, high)), high


@njit
def parts_of_chunk(sinks, low, high):
    """Return (gap, first, end): [0, gap) and [first, end) are the blocks of 16 slots in which some slot is visible.

    All are multiples of 16, relative to the chunk. gap is 0 if there are no separate sinks.
    """
    gap, first, end = up(sinks), low // LANES * LANES, up(high)
    return gap, max(gap, first), max(gap, end)


@njit(forceinline=True)
def up(slots):
    return (slots + LANES - 1) // LANES * LANES
