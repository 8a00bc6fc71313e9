"""What stands behind the head in a chain: the most likely token of each row, and the step moved on to it.

Ties go to the lowest id. A row with NaN among its logits gets −1 and ends the chain.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import LANES
from infer.kernels.cpu.records import MAX_THREADS
from infer.kernels.cpu.simd import load_f32, load_i64, load_scalar_f32, splat_f32, store_i64


@njit
def _best(logits, first, end):  # type: ignore[no-untyped-def]
    """The lowest id of the largest of logits[first, end), which is not empty; −1 if one is NaN."""
    largest = load_scalar_f32(logits + 4 * first)
    whole = first + (end - first) // LANES * LANES
    if whole > first:
        most = load_f32(logits + 4 * first)
        for i in range(first + LANES, whole, LANES):
            most = simd.maximum(most, load_f32(logits + 4 * i))
        largest = simd.max_f32(most)
    for i in range(whole, end):
        largest = simd.first_lane(simd.maximum(splat_f32(load_scalar_f32(logits + 4 * i)), splat_f32(largest)))
    for i in range(first, end):
        if load_scalar_f32(logits + 4 * i) == largest:
            return i
    return -1


def make_sample() -> Callable[..., None]:
    """Each thread's best of its part of the vocabulary."""

    def sample(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        first, end = args.vocab * thread // num_threads, args.vocab * (thread + 1) // num_threads
        for row in range(state.num_wanted):
            best = np.int64(-2)
            if first < end:
                best = _best(args.logits + 4 * args.vocab * row, first, end)
            store_i64(args.found + 8 * (row * MAX_THREADS + thread), best)

    return sample


def make_advance() -> Callable[..., None]:
    """The best of all: the next token of its row, at the next position."""

    def advance(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        if thread != 0:
            return
        num_ended = 0
        for row in range(state.num_wanted):
            logits, best = args.logits + 4 * args.vocab * row, np.int64(-2)
            for other in range(num_threads):
                found = load_i64(args.found + 8 * (row * MAX_THREADS + other))
                if found == -1 or best == -1:
                    best = np.int64(-1)
                elif found >= 0 and (
                    best == -2 or load_scalar_f32(logits + 4 * found) > load_scalar_f32(logits + 4 * best)
                ):
                    best = found
            store_i64(args.generated + 8 * (args.num_generated * state.num_wanted + row), best)
            store_i64(state.tokens + 8 * row, best)
            store_i64(state.positions + 8 * row, load_i64(state.positions + 8 * row) + 1)
            for index in range(args.num_stop_ids):
                if load_i64(args.stop_ids + 8 * index) == best:
                    store_i64(args.ended + 8 * row, 1)
            if best == -1:
                args.stop = 1
            num_ended += load_i64(args.ended + 8 * row)
        args.num_generated += 1
        if num_ended == state.num_wanted:
            args.stop = 1

    return advance
