"""What stands around the sampler in a table: in a multi-step `advance`, which makes of its tokens the next step's
input; in a step that verifies drafts `accept`, after each entry. Before the sampler's first in both, `await_mask`. They
read the clock: what stands before `await_mask` is the forward, the rest is sampling.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.backends.cpu.barrier import SPIN_NANOSECONDS
from infer.backends.cpu.control import atomic_load, call_python, nanoseconds, pause, sleep_while
from infer.backends.cpu.sample_math import load_i32
from infer.backends.cpu.simd import load_i64, store_i32, store_i64


@njit
def _remember(args, row, token):  # type: ignore[no-untyped-def]
    """`History.append` for the row's slot, if it has one."""
    slot = load_i64(args.history_slot + 8 * row)
    if slot < 0:
        return
    length = load_i64(args.lengths + 8 * slot)
    if length == args.capacity:
        return
    at, entry = 4 * (args.capacity * slot + length), 4 * (args.vocab * slot + token)
    store_i32(args.tokens + at, token)
    store_i32(args.last + entry, length + 1)
    store_i32(args.counts + entry, load_i32(args.counts + entry) + 1)
    store_i64(args.lengths + 8 * slot, length + 1)


def make_advance() -> Callable[..., None]:
    """No more steps when every row has met a stop id, any row failed, another thread has interrupted them, or Python,
    where it is asked, says so."""

    def advance(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        if thread != 0:
            return
        num_ended = 0
        for row in range(args.num_rows):
            token = load_i64(args.sampled + 8 * row)
            store_i64(args.generated + 8 * (args.num_generated * args.num_rows + row), token)
            store_i64(state.tokens + 8 * row, token)
            store_i64(state.positions + 8 * row, load_i64(state.positions + 8 * row) + 1)
            for index in range(args.num_stop_ids):
                if load_i64(args.stop_ids + 8 * index) == token:
                    store_i64(args.ended + 8 * row, 1)
            if token < 0:
                args.stop = 1
            else:
                _remember(args, row, token)
            num_ended += load_i64(args.ended + 8 * row)
        store_i64(args.stamps + 16 * args.num_generated + 8, nanoseconds())
        args.num_generated += 1
        if num_ended == args.num_rows or (args.interrupt != 0 and load_i64(args.interrupt) != 0):
            args.stop = 1
        if args.after_step != 0 and args.stop == 0:
            args.stop = 1  # unless it returns and clears this: whatever is raised within ends the multi-step
            call_python(args.after_step, args.num_generated)

    return advance


def make_accept() -> Callable[..., None]:
    """A row goes on to its next entry while what was sampled is what was drafted, and ends with its first surprise; the
    repeats of the walk end with the last row."""

    def accept(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        if thread != 0:
            return
        args.stop = 1
        for row in range(args.num_rows):
            alive = args.alive + 8 * row
            if load_i64(alive) == 0:
                continue
            token = load_i64(args.sampled + 8 * row)
            store_i64(args.generated + 8 * (args.entry * args.num_rows + row), token)
            store_i64(args.counts_sampled + 8 * row, args.entry + 1)
            draft = np.int64(-1)
            if args.entry < load_i64(args.num_drafts + 8 * row):
                draft = load_i64(args.drafts + 8 * (args.draft_stride * row + args.entry))
            if token >= 0:
                _remember(args, row, token)
            if token < 0 or token != draft:
                store_i64(alive, 0)
            else:
                args.stop = 0
        args.entry += 1
        store_i64(args.stamps + 8 * args.entry, nanoseconds())

    return accept


def make_await_mask() -> Callable[..., None]:
    """Wait until another thread has filled the grammars' masks, which it does while the forward runs."""

    def await_mask(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        if thread != 0:
            return
        store_i64(args.stamps + 16 * args.num_generated, nanoseconds())
        if args.mask_ready == 0:
            return
        began = nanoseconds()
        while atomic_load(args.mask_ready) == 0:
            if nanoseconds() - began < SPIN_NANOSECONDS:
                pause()
            else:
                sleep_while(args.mask_ready, 0)

    return await_mask
