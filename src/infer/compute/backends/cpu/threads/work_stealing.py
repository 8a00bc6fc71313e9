"""Units of a command's work, divided while it runs: a thread takes its own units, then those that others have left.

Each thread has a share of its own: neighbouring units, the same in every step. So it reads memory in sequence, and the
same memory each time. It takes some units from the front of its share at a time, ever fewer, and at its end from the
others' fronts. The others wait for a slow or stopped thread only until it has computed the units that it has taken. The
thread that computes a unit changes no bit of the result.

Each command (or part of one) that divides units is a round, in the same order for all threads. The units taken from a
share are counted together with the round. So the first thread in a round restarts the count. A thread that is one round
ahead disturbs no other: in the shares that it has visited, nothing is left to take.
"""

from numba import njit

from infer.compute.backends.cpu.compile.record_types import nth_record
from infer.compute.backends.cpu.threads import atomics

_ROUND_SHIFT = 32
_TAKE_SHIFT = 2  # of what is left of a share, a quarter is taken
_MOST_SHARES = 16  # that a thread looks at, its own among them: each is a line of the cache that others write


@njit
def clear_threads(state, num_threads):
    """Reset the counters of the threads in `state`, before a run."""
    for thread in range(num_threads):
        own = nth_record(state.threads, thread)
        own.taken[0], own.round = 0, 0


@njit
def begin_units(state, thread):
    """Begin a thread's next round. Every thread calls it once per command (or part of one) that divides units."""
    own = nth_record(state.threads, thread)
    own.round += 1
    own.num_empty = 0


@njit
def take_units(state, thread, num_threads, num_units):
    """Return the units [first, end) of [0, num_units) that this thread computes next.

    (0, 0) means that none is left.
    """
    own = nth_record(state.threads, thread)
    begun = own.round << _ROUND_SHIFT
    while own.num_empty < min(num_threads, _MOST_SHARES):
        owner = (thread + own.num_empty) % num_threads
        first, end = num_units * owner // num_threads, num_units * (owner + 1) // num_threads
        counter = nth_record(state.threads, owner).taken
        taken = atomics.atomic_load(counter)
        first += max(0, taken - begun)  # beyond the end where the owner is in a later round
        if first >= end:
            own.num_empty += 1
            continue
        count = end - first if num_threads == 1 else max(1, (end - first) >> _TAKE_SHIFT)
        if atomics.compare_exchange(counter, taken, max(taken, begun) + count) == taken:
            return first, first + count
    return 0, 0


@njit
def take_share(state, thread, num_threads, total, least):
    """Return the part [begin, stop) of [0, total) that this thread computes next. (0, 0) means that none is left.

    `total` is an amount of work, such as a sum of weights. A part has at least about `least` of it, unless that leaves
    less than one part for each thread.
    """
    num_units = min(total, max(num_threads, total // least))
    first, end = take_units(state, thread, num_threads, num_units)
    if first == end:
        return 0, 0
    return total * first // num_units, total * end // num_units
