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
    """Return block_at(args, row, kv, slot): the addresses of a head's blocks of keys and of values that contain the
    slot.
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
    """Return the end of the slots from `slot` on, before `end`, that are contiguous in memory: those in one page."""
    return min(((slot >> args.page_bits) + 1) << args.page_bits, end)


@njit(forceinline=True)
def slot_of(args, row, position):
    return position - args.shifts[row]


@njit(forceinline=True)
def seen_lanes(at, sinks, low, high, x):
    """Return x of the slots [at, at + 16) of a chunk, −infinity for slots in neither [0, sinks) nor [low, high)."""
    seen = simd.keep_lanes(np.int32(low - at), np.int32(high - at), x)
    if at < sinks:
        seen = simd.maximum(seen, simd.keep_lanes(np.int32(-at), np.int32(sinks - at), x))
    return seen


@njit(forceinline=True)
def _first_seen(slot, window):
    if window < 0:  # chunks of −window slots
        return slot // -window * -window
    return 0 if window == 0 else max(0, slot + 1 - window)


@njit
def last_seen(args, row, slot):
    """Return the last slot that a token sees: its own, unless it sees slots ahead."""
    return slot if args.num_ahead == 0 else min(slot + args.num_ahead, args.ends[row] - 1)


@njit
def num_seen(args, row, slot):
    """Return how many slots a token sees."""
    sinks = min(args.sinks[row], slot + 1)
    return last_seen(args, row, slot) + 1 - max(0, _first_seen(slot, args.windows[row]) - sinks)


@njit
def chunks_seen(args, row, slot):
    """Return (number of first chunks, number of skipped chunks).

    A token sees something of the first chunks, nothing of the skipped ones after them, and something of the rest up to
    that of the last slot that it sees.
    """
    sinks = min(args.sinks[row], slot + 1)
    num_first = (sinks + CHUNK - 1) // CHUNK
    return num_first, max(0, _first_seen(slot, args.windows[row]) // CHUNK - num_first)


@njit
def seen_of_chunk(args, row, chunk, slot):
    """Return (sinks, low, high): a token sees [0, sinks) and [low, high) of a chunk."""
    start = chunk * CHUNK
    high = min(CHUNK, last_seen(args, row, slot) + 1 - start)
    low = max(0, _first_seen(slot, args.windows[row]) - start)
    sinks = min(args.sinks[row] - start, CHUNK)
    if sinks >= low:
        return 0, 0, high
    return max(0, sinks), min(low, max(0, high)), high


@njit
def parts_of_chunk(sinks, low, high):
    """Return (gap, first, end): [0, gap) and [first, end) are the blocks with visible slots.

    gap is 0 if there are no separate sinks.
    """
    gap, first, end = up(sinks), low // LANES * LANES, up(high)
    return gap, max(gap, first), max(gap, end)


@njit(forceinline=True)
def up(slots):
    return (slots + LANES - 1) // LANES * LANES
