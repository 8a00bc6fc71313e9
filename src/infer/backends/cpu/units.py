"""Units of a command's work, shared out while it runs: a thread takes its own, then what others have left.

Each thread has a share of its own, neighbours and the same in every step, so that it reads memory in sequence and the
same memory each time. It takes some units from the front of it at a time, ever fewer, and at its end from the others'
fronts: for a thread that is slow, or does not run, the others wait only as long as it needs for what it has taken. Who
does a unit changes no bit of it.

Each command (or part of one) that shares out units is a round, in the same order for all threads. What is taken of a
share is counted together with the round, so that whoever comes first in a round begins the count anew, and a thread
that is a round further disturbs nobody: where it has been, nothing is left to take.
"""

from numba import njit

from infer.backends.cpu import control
from infer.backends.cpu.record_types import nth_record

_ROUND_SHIFT = 32
_TAKE_SHIFT = 2  # of what is left of a share, a quarter is taken
_MOST_SHARES = 16  # that a thread looks at, its own among them: each is a line of the cache that others write


@njit
def clear_threads(state, num_threads):
    """Before a walk."""
    for thread in range(num_threads):
        own = nth_record(state.threads, thread)
        own.taken[0], own.round = 0, 0


@njit
def begin_units(state, thread):
    """A thread's next round."""
    own = nth_record(state.threads, thread)
    own.round += 1
    own.num_empty = 0


@njit
def take_units(state, thread, num_threads, num_units):
    """The units [first, end) of [0, num_units) that a thread does next; (0, 0): none is left."""
    own = nth_record(state.threads, thread)
    begun = own.round << _ROUND_SHIFT
    while own.num_empty < min(num_threads, _MOST_SHARES):
        owner = (thread + own.num_empty) % num_threads
        first, end = num_units * owner // num_threads, num_units * (owner + 1) // num_threads
        counter = nth_record(state.threads, owner).taken
        taken = control.atomic_load(counter)
        first += max(0, taken - begun)  # beyond the end where the owner is in a later round
        if first >= end:
            own.num_empty += 1
            continue
        count = end - first if num_threads == 1 else max(1, (end - first) >> _TAKE_SHIFT)
        if control.compare_exchange(counter, taken, max(taken, begun) + count) == taken:
            return first, first + count
    return 0, 0


@njit
def take_share(state, thread, num_threads, total, least):
    """The part [begin, stop) of [0, total) that a thread does next, of `least` or more unless that leaves less than one
    for each thread; (0, 0): none is left."""
    num_units = min(total, max(num_threads, total // least))
    first, end = take_units(state, thread, num_threads, num_units)
    if first == end:
        return 0, 0
    return total * first // num_units, total * end // num_units
