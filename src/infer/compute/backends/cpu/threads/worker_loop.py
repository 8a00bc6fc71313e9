"""The threads' own loops, compiled: dispatch over a table, a worker's loop, a run of a table, the shutdown."""

from llvmlite.ir import IRBuilder as Builder
from numba import njit

from infer.compute.backends.cpu.compile.record_types import RecordAt, nth_record
from infer.compute.backends.cpu.simd import I8, Value, address, address_of, operation
from infer.compute.backends.cpu.thread_records import (
    BARRIER_IF_MANY,
    BARRIER_IF_MERGED,
    LINE_WORDS,
    MAX_THREADS,
    NO_BARRIER,
    READ_BARRIER,
    TABLE,
)
from infer.compute.backends.cpu.threads import atomics
from infer.compute.backends.cpu.threads.barrier import (
    SPIN_NANOSECONDS,
    clear_barrier,
    wait_at_barrier,
    wait_until,
    wake,
)
from infer.compute.backends.cpu.threads.work_stealing import clear_threads

_SHARE_SHIFT = 2  # of thread 0's time may go in waits: a quarter
_STEP = 512


@operation(RecordAt(TABLE), address)
def _as_table(b: Builder, where: Value) -> Value:
    return b.inttoptr(where, I8.as_pointer())


@njit
def _wake_workers(job, end):
    """Wake the workers 1 to `end` − 1 that sleep."""
    for thread in range(1, end):
        if atomics.atomic_exchange(job.sleeping + thread, 0) != 0:
            atomics.post_semaphore(job.semaphores + LINE_WORDS * thread)


@njit
def _is_met(barrier, state, thread):
    """Return True if threads wait for each other at this kind of barrier, in this step."""
    if barrier == BARRIER_IF_MERGED:
        return nth_record(state.threads, thread).needs_merge != 0
    return barrier != NO_BARRIER and (barrier != BARRIER_IF_MANY or max(state.num_tokens, state.num_logits) > 1)


@njit
def _is_overdue(args, stalls, started):
    """Return True if waits of `stalls` nanoseconds since `started` are longer than thread 0's patience."""
    beyond = stalls - args.patience if args.patience != 0 else 0
    return beyond > 0 and beyond > (atomics.nanoseconds() - started) >> _SHARE_SHIFT


def dispatch(args, state, thread, num_threads):
    """Run the commands of a table.

    A lone thread 0 still computes each command in `num_threads` parts: the inputs of a later command stay the same.
    """
    is_alone = num_threads == 1
    barrier, stalls, first, end, started = 0, 0, thread, thread + 1, atomics.nanoseconds()
    for repeat in range(args.repeats):
        for index in range(args.again if repeat > 0 else 0, args.num_rows):
            row, is_timed = nth_record(args.rows, index), address_of(args.times) != 0
            began = atomics.cycles() if is_timed else 0
            flag = row.barrier
            reading = atomics.nanoseconds() if flag == READ_BARRIER and thread == 0 else 0
            for part in range(first, end):
                atomics.call_command(row.function, row.arguments, address_of(state), part, num_threads)
            if not is_alone and _is_met(flag, state, thread):
                barrier += 1
                if thread == 0 and _is_overdue(args, stalls, started):
                    atomics.atomic_store(state.dismissed, barrier)  # before its own arrival: all see it after it
                stalls += (flag != READ_BARRIER) * wait_at_barrier(state, thread, num_threads, barrier)
                if atomics.atomic_load(state.dismissed) == barrier:
                    is_alone, first, end = True, 0, num_threads
            if reading != 0:
                state.reading += atomics.nanoseconds() - reading
            if is_timed and thread == 0:
                args.times[index] += atomics.cycles() - began
            if is_alone and thread != 0:
                break
        if thread == 0:
            args.completed = repeat + 1 if args.again == 0 else 1
        if is_alone and thread != 0:
            break
        if address_of(args.stop) != 0:
            is_stopped = args.stop[0] != 0
            if not is_alone:  # nobody begins the next repeat, and sets it anew, before all have looked
                barrier += 1
                stalls += wait_at_barrier(state, thread, num_threads, barrier)
            if is_stopped:
                break
    atomics.atomic_add(state.stalls, stalls)


def serve(job, state, thread, spins):
    """Run a worker's whole loop.

    It runs a table whenever the generation changes, sleeps after some idle time, and leaves when the pool is closed. A
    second worker for the same thread leaves immediately.
    """
    sleeping, seen = job.sleeping + thread, job.seen + thread
    if atomics.atomic_exchange(job.is_served + thread, 1) != 0:
        return
    idle = 0
    while atomics.atomic_load(job.is_closed) == 0:
        generation = atomics.atomic_load(job.generation)
        if generation != atomics.atomic_load(seen):
            atomics.atomic_store(seen, generation)
            num_threads = generation % _STEP
            if thread < num_threads:
                atomics.call_command(job.dispatch, job.arguments, job.state, thread, num_threads)
                if atomics.atomic_add(job.finished, 1) == num_threads - 2:
                    wake(job.finished, job.has_sleepers)
            idle = 0
        elif idle < spins:
            idle += 1
            atomics.pause()
        else:
            atomics.atomic_exchange(sleeping, 1)
            is_same = atomics.atomic_load(job.generation) == generation
            is_needed = is_same and atomics.atomic_load(job.is_closed) == 0
            if is_needed or atomics.atomic_exchange(sleeping, 0) == 0:  # who takes our flag posts
                while atomics.wait_semaphore(job.semaphores + LINE_WORDS * thread) != 0:
                    pass
            idle = 0


def run(job, state, table_at, num_threads):
    """Run a table in one call, so that no exception can interrupt it.

    It waits for the turn, notifies and wakes the workers, computes thread 0's part, waits for the workers, and releases
    the turn. It leaves 0 in `has_run` if a signal arrived before the turn.
    """
    table = _as_table(table_at)
    table.has_run = 0
    if atomics.wait_semaphore_briefly(job.turn) != 0:
        return
    job.owner = atomics.thread_id()
    if atomics.atomic_load(job.is_closed) != 0:
        num_threads = 1
    state.dismissed[0], state.stalls[0], state.reading = 0, 0, 0
    clear_barrier(state, num_threads)
    clear_threads(state, num_threads)
    job.arguments, job.state = table_at, address_of(state)
    job.finished[0], job.has_sleepers[0] = 0, 0
    if num_threads > 1:
        runs = atomics.atomic_load(job.generation) // _STEP
        atomics.atomic_exchange(job.generation, (runs + 1) * _STEP + num_threads)
        _wake_workers(job, num_threads)
    table.began = atomics.nanoseconds()
    atomics.call_command(job.dispatch, table_at, address_of(state), 0, num_threads)
    wait_until(job.finished, num_threads - 1, job.has_sleepers, SPIN_NANOSECONDS)
    table.ended = atomics.nanoseconds()
    table.has_run = 1
    job.owner = 0
    atomics.post_semaphore(job.turn)


def close(job, state, unused, also_unused):
    """Make the workers leave after the active run, if any. Leaves 1 in `is_closed`, or 0 if a signal came first."""
    if atomics.wait_semaphore_briefly(job.turn) != 0:
        return
    atomics.atomic_exchange(job.is_closed, 1)
    _wake_workers(job, MAX_THREADS)
    atomics.post_semaphore(job.turn)


def publish(args, state, thread, num_threads):
    """Set a flag to 1, and wake threads that sleep until then. They see everything that was written before."""
    atomics.atomic_exchange(args.is_set, 1)
    atomics.wake_all(args.is_set)
