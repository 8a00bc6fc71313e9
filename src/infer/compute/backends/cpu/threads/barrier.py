"""Waits of threads for each other: for a number that grows, and at a barrier.

A waiting thread spins for 50 µs. Then it sleeps in the kernel until it is woken, so that its core is free for a thread
that computes. If spinning was in vain, as when two threads share one core, the next waits spin less.

Each barrier has the next number. Threads count their arrivals in one word and watch another, which the last thread
sets: it is written once, whatever their number. Beyond 16 threads, groups of 8 have words of their own, and the last
thread of a group arrives for the group.
"""

from numba import njit

from infer.compute.backends.cpu.compile.record_types import nth_record
from infer.compute.backends.cpu.thread_records import GROUP, LINE_WORDS
from infer.compute.backends.cpu.threads import atomics

SPIN_NANOSECONDS, _SHORT_SPIN_NANOSECONDS = 50_000, 2_000
_NUM_SHORT = 8  # waits after one that spun in vain
_PAUSES = 32  # between two looks at the clock
_MOST_UNGROUPED = 16


@njit
def spin(word, number):
    for _ in range(_PAUSES):
        if atomics.atomic_load(word) >= number:
            return True
        atomics.pause()
    return False


@njit
def wait_until(word, number, has_sleepers, spin_nanoseconds):
    """Wait until the i64 at `word` is at least `number`. Return the nanoseconds lost, or 0 if spinning sufficed.

    It spins for `spin_nanoseconds`. Then it sets the i64 at `has_sleepers` to 1 and sleeps until `wake`.
    """
    if spin(word, number):
        return 0
    began = atomics.nanoseconds()
    while atomics.nanoseconds() - began < spin_nanoseconds:
        if spin(word, number):
            return 0
    while True:
        atomics.atomic_exchange(has_sleepers, 1)
        found = atomics.atomic_load(word)
        if found >= number:
            return atomics.nanoseconds() - began
        atomics.sleep_while(word, found)


@njit
def wake(word, has_sleepers):
    """Wake the threads that sleep until `word` grows. It is called after the word has grown."""
    if atomics.atomic_load(has_sleepers) != 0 and atomics.atomic_exchange(has_sleepers, 0) != 0:
        atomics.wake_all(word)


@njit
def clear_barrier(state, num_threads):
    """Reset the barrier's words in `state`, before the threads of a run start."""
    state.released[0], state.has_sleepers[0] = 0, 0
    for line in range(1 + (num_threads - 1) // GROUP + 1):
        state.arrivals[LINE_WORDS * line] = 0


@njit
def _is_last(state, thread, num_threads, number):
    """Count this thread's arrival at barrier `number`, and return True if all other threads have arrived."""
    parties = num_threads
    if num_threads > _MOST_UNGROUPED:
        group = thread // GROUP
        size = min(GROUP, num_threads - group * GROUP)
        if atomics.atomic_add(state.arrivals + LINE_WORDS * (1 + group), 1) + 1 < size * number:
            return False
        parties = (num_threads + GROUP - 1) // GROUP
    return atomics.atomic_add(state.arrivals, 1) + 1 == parties * number


@njit
def wait_at_barrier(state, thread, num_threads, number):
    """Wait until all threads have arrived at the barrier of this number. Return the nanoseconds lost in a long wait,
    else 0.
    """
    released, has_sleepers, own = state.released, state.has_sleepers, nth_record(state.threads, thread)
    if _is_last(state, thread, num_threads, number):
        atomics.atomic_store(released, number)
        wake(released, has_sleepers)
        return 0
    num_short = own.num_short
    lost = wait_until(released, number, has_sleepers, _SHORT_SPIN_NANOSECONDS if num_short else SPIN_NANOSECONDS)
    own.num_short = 0 if lost == 0 else num_short - 1 if num_short else _NUM_SHORT
    return lost
