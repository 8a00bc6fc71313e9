"""Commands around the sampler in a table. They also read the clock.

In a multi-step, `advance` turns the sampled tokens into the next step's input. In a step that verifies drafts, `accept`
runs after each entry. In both, `await_mask` runs before the sampler's first command. The time before `await_mask` is
the forward's, the rest is the sampling's.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.simd import address_of
from infer.compute.backends.cpu.threads.atomics import atomic_load, call_python, nanoseconds, pause, sleep_while
from infer.compute.backends.cpu.threads.barrier import SPIN_NANOSECONDS


@njit
def _remember(args, row, token):
    """Append a token to the history of the row's slot, as `History.append` does.

    Writes `tokens`, i32 [slots, capacity], `last` and `counts`, i32 [slots, vocabulary], and `lengths`, i64 [slots].
    Nothing happens without a slot, or if the history is full.
    """
    slot = args.history_slot[row]
    if slot < 0:
        return
    length = args.lengths[slot]
    if length == args.capacity:
        return
    entry = args.vocab * slot + token
    args.tokens[args.capacity * slot + length] = token
    args.last[entry] = length + 1
    args.counts[entry] += 1
    args.lengths[slot] = length + 1


def advance(args, state, thread, num_threads):
    """Store the sampled tokens, and make them the next step's input. Thread 0 does it.

    Reads `sampled`, i64 [rows]. Writes `generated`, `state.tokens`, `state.positions`, the histories, `ended` and a
    time stamp. Sets `stop` to 1 if every row has met a stop id, if any row failed, or if another thread set the
    interrupt. Python's callback, if there is one, decides otherwise.
    """
    if thread != 0:
        return
    num_ended = 0
    for row in range(args.num_rows):
        token = args.sampled[row]
        args.generated[args.num_generated * args.num_rows + row] = token
        state.tokens[row] = token
        state.positions[row] += 1
        for index in range(args.num_stop_ids):
            if args.stop_ids[index] == token:
                args.ended[row] = 1
        if token < 0:
            args.stop = 1
        else:
            _remember(args, row, token)
        num_ended += args.ended[row]
    args.stamps[2 * args.num_generated + 1] = nanoseconds()
    args.num_generated += 1
    if num_ended == args.num_rows or (address_of(args.interrupt) != 0 and args.interrupt[0] != 0):
        args.stop = 1
    if args.after_step != 0 and args.stop == 0:
        args.stop = 1  # unless it returns and clears this: whatever is raised within ends the multi-step
        call_python(args.after_step, args.num_generated)


def accept(args, state, thread, num_threads):
    """Store the sampled tokens of one entry of a step with drafts. Thread 0 does it.

    Reads `sampled`, i64 [rows], and `drafts`, i64 [rows, draft_stride]. Writes `generated`, `counts_sampled`, the
    histories and a time stamp. A row stays in `alive` while the sampled token equals the draft. If no row does, `stop`
    is set to 1, so the repeats end.
    """
    if thread != 0:
        return
    args.stop = 1
    for row in range(args.num_rows):
        if args.alive[row] == 0:
            continue
        token = args.sampled[row]
        args.generated[args.entry * args.num_rows + row] = token
        args.counts_sampled[row] = args.entry + 1
        draft = np.int64(-1)
        if args.entry < args.num_drafts[row]:
            draft = args.drafts[args.draft_stride * row + args.entry]
        if token >= 0:
            _remember(args, row, token)
        if token < 0 or token != draft:
            args.alive[row] = 0
        else:
            args.stop = 0
    args.entry += 1
    args.stamps[args.entry] = nanoseconds()


def await_mask(args, state, thread, num_threads):
    """Wait until another thread has filled the grammars' masks, which it does while the forward runs. Thread 0 does it.

    It writes a time stamp, and reads `mask_ready`, which is not 0 when the masks are filled.
    """
    if thread != 0:
        return
    args.stamps[2 * args.num_generated] = nanoseconds()
    if address_of(args.mask_ready) == 0:
        return
    began = nanoseconds()
    while atomic_load(args.mask_ready) == 0:
        if nanoseconds() - began < SPIN_NANOSECONDS:
            pause()
        else:
            sleep_while(args.mask_ready, 0)
