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
from infer.backends.cpu.simd import address_of, load_i64, store_i64
from infer.backends.cpu.state import LINE_BYTES, STATE, THREAD, field_offset

_THREADS = field_offset(STATE, "threads")
_TAKEN, _ROUND, _NUM_EMPTY = (field_offset(THREAD, name) for name in ("taken", "round", "num_empty"))
_ROUND_SHIFT = 32
_TAKE_SHIFT = 2  # of what is left of a share, a quarter is taken
_MOST_SHARES = 16  # that a thread looks at, its own among them: each is a line of the cache that others write


@njit(forceinline=True)
def _threads(state):
    return address_of(state) + _THREADS


@njit
def clear_threads(state, num_threads):
    """Before a walk."""
    for thread in range(num_threads):
        at = _threads(state) + LINE_BYTES * thread
        store_i64(at + _TAKEN, 0)
        store_i64(at + _ROUND, 0)


@njit
def begin_units(state, thread):
    """A thread's next round."""
    own = _threads(state) + LINE_BYTES * thread
    store_i64(own + _ROUND, load_i64(own + _ROUND) + 1)
    store_i64(own + _NUM_EMPTY, 0)


@njit
def take_units(state, thread, num_threads, num_units):
    """The units [first, end) of [0, num_units) that a thread does next; (0, 0): none is left."""
    own = _threads(state) + LINE_BYTES * thread
    begun, num_empty = load_i64(own + _ROUND) << _ROUND_SHIFT, load_i64(own + _NUM_EMPTY)
    while num_empty < min(num_threads, _MOST_SHARES):
        owner = (thread + num_empty) % num_threads
        first, end = num_units * owner // num_threads, num_units * (owner + 1) // num_threads
        taken_at = _threads(state) + LINE_BYTES * owner + _TAKEN
        taken = control.atomic_load(taken_at)
        first += max(0, taken - begun)  # beyond the end where the owner is in a later round
        if first >= end:
            num_empty += 1
            store_i64(own + _NUM_EMPTY, num_empty)
            continue
        count = end - first if num_threads == 1 else max(1, (end - first) >> _TAKE_SHIFT)
        if control.compare_exchange(taken_at, taken, max(taken, begun) + count) == taken:
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
