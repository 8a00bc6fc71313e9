"""The threads' own loops, compiled: the walk over a table, a worker's life, the run of a walk, the end of all."""

from collections.abc import Callable

from infer.backends.cpu import control
from infer.backends.cpu.barrier import SPIN_NANOSECONDS, clear_barrier, meet, wait_until, wake
from infer.backends.cpu.records import JOB, MAX_THREADS, SEMAPHORE_BYTES, WALK
from infer.backends.cpu.simd import address_of, load_i64, store_i64
from infer.backends.cpu.state import STATE, field_offset
from infer.backends.cpu.units import clear_threads

_ROW_BYTES = 24
_SHARE_SHIFT = 2  # of thread 0's time may go in waits: a quarter

_DISMISSED, _STALLS = (field_offset(STATE, name) for name in ("dismissed", "stalls"))
_HAS_SLEEPERS = field_offset(JOB, "has_sleepers")
_GENERATION, _FINISHED, _IS_CLOSED = (field_offset(JOB, name) for name in ("generation", "finished", "is_closed"))
_SLEEPING, _SEEN, _IS_SERVED = (field_offset(JOB, name) for name in ("sleeping", "seen", "is_served"))
_TURN, _SEMAPHORES = (field_offset(JOB, name) for name in ("turn", "semaphores"))
_HAS_RUN, _BEGAN, _ENDED = (field_offset(WALK, name) for name in ("has_run", "began", "ended"))
_STEP = 512


def make_walk() -> Callable[..., None]:
    """Alone, thread 0 still does each command in `num_threads` parts: what a later command reads stays the same."""

    def walk(args, state, thread, num_threads):
        state_address = address_of(state)
        dismissed, is_alone = state_address + _DISMISSED, num_threads == 1
        barrier, stalls, first, end, started = 0, 0, thread, thread + 1, control.nanoseconds()
        for repeat in range(args.repeats):
            for index in range(args.again if repeat > 0 else 0, args.num_rows):
                row = args.rows + _ROW_BYTES * index
                began = control.cycles() if args.times != 0 else 0
                for part in range(first, end):
                    control.call_command(load_i64(row), load_i64(row + 8), state_address, part, num_threads)
                flag = load_i64(row + 16)
                if not is_alone and (flag == 1 or (flag == 2 and max(state.num_tokens, state.num_logits) > 1)):
                    barrier += 1
                    beyond = stalls - args.patience if thread == 0 and args.patience != 0 else 0
                    if beyond > 0 and beyond > (control.nanoseconds() - started) >> _SHARE_SHIFT:
                        control.atomic_store(dismissed, barrier)  # before its own arrival: all see it after this one
                    stalls += meet(state_address, thread, num_threads, barrier)
                    if control.atomic_load(dismissed) == barrier:
                        is_alone, first, end = True, 0, num_threads
                if args.times != 0 and thread == 0:
                    at = args.times + 8 * index
                    store_i64(at, load_i64(at) + control.cycles() - began)
                if is_alone and thread != 0:
                    break
            if thread == 0:
                args.walked = repeat + 1 if args.again == 0 else 1
            if is_alone and thread != 0:
                break
            if args.stop != 0:
                is_stopped = load_i64(args.stop) != 0
                if not is_alone:  # nobody begins the next repeat, and sets it anew, before all have looked
                    barrier += 1
                    stalls += meet(state_address, thread, num_threads, barrier)
                if is_stopped:
                    break
        if stalls != 0:
            control.atomic_add(state_address + _STALLS, stalls)

    return walk


def make_serve() -> Callable[..., None]:
    """A worker's whole life: walk whenever the generation moves, sleep when nothing came for a while, leave when the
    team is closed. A second worker for the same thread leaves at once."""

    def serve(job, state, thread, spins):
        base = address_of(job)
        sleeping, seen = base + _SLEEPING + 8 * thread, base + _SEEN + 8 * thread
        if control.atomic_exchange(base + _IS_SERVED + 8 * thread, 1) != 0:
            return
        idle = 0
        while control.atomic_load(base + _IS_CLOSED) == 0:
            generation = control.atomic_load(base + _GENERATION)
            if generation != control.atomic_load(seen):
                control.atomic_store(seen, generation)
                num_threads = generation % _STEP
                if thread < num_threads:
                    control.call_command(job.walk, job.arguments, job.state, thread, num_threads)
                    if control.atomic_add(base + _FINISHED, 1) == num_threads - 2:
                        wake(base + _FINISHED, base + _HAS_SLEEPERS)
                idle = 0
            elif idle < spins:
                idle += 1
                control.pause()
            else:
                control.atomic_exchange(sleeping, 1)
                is_same = control.atomic_load(base + _GENERATION) == generation
                is_needed = is_same and control.atomic_load(base + _IS_CLOSED) == 0
                if is_needed or control.atomic_exchange(sleeping, 0) == 0:  # who takes our flag posts
                    while control.wait_semaphore(base + _SEMAPHORES + SEMAPHORE_BYTES * thread) != 0:
                        pass
                idle = 0

    return serve


def make_run() -> Callable[..., None]:
    """All of a walk in one call, so that nothing can come between its parts: wait for the turn, tell and wake the
    workers, do thread 0's part, wait for the workers, give the turn to the next."""

    def run(job, state, arguments_at, num_threads):
        base, state_address = address_of(job), address_of(state)
        store_i64(arguments_at + _HAS_RUN, 0)
        if control.wait_semaphore_briefly(base + _TURN) != 0:
            return
        job.owner = control.thread_id()
        if control.atomic_load(base + _IS_CLOSED) != 0:
            num_threads = 1
        state.dismissed, state.stalls = 0, 0
        clear_barrier(state_address, num_threads)
        clear_threads(state, num_threads)
        job.arguments, job.state, job.num_threads = arguments_at, state_address, num_threads
        job.finished, job.has_sleepers = 0, 0
        if num_threads > 1:
            walks = control.atomic_load(base + _GENERATION) // _STEP
            control.atomic_exchange(base + _GENERATION, (walks + 1) * _STEP + num_threads)
            for thread in range(1, num_threads):
                if control.atomic_exchange(base + _SLEEPING + 8 * thread, 0) != 0:
                    control.post_semaphore(base + _SEMAPHORES + SEMAPHORE_BYTES * thread)
        store_i64(arguments_at + _BEGAN, control.nanoseconds())
        control.call_command(job.walk, arguments_at, state_address, 0, num_threads)
        wait_until(base + _FINISHED, num_threads - 1, base + _HAS_SLEEPERS, SPIN_NANOSECONDS)
        store_i64(arguments_at + _ENDED, control.nanoseconds())
        store_i64(arguments_at + _HAS_RUN, 1)
        job.owner = 0
        control.post_semaphore(base + _TURN)

    return run


def make_close() -> Callable[..., None]:
    """Send the workers away, when the walk that runs, if any, has ended. Leaves 1 in `is_closed`, 0 if a signal came
    before."""

    def close(job, state, unused, also_unused):
        base = address_of(job)
        if control.wait_semaphore_briefly(base + _TURN) != 0:
            return
        control.atomic_exchange(base + _IS_CLOSED, 1)
        for thread in range(1, MAX_THREADS):
            if control.atomic_exchange(base + _SLEEPING + 8 * thread, 0) != 0:
                control.post_semaphore(base + _SEMAPHORES + SEMAPHORE_BYTES * thread)
        control.post_semaphore(base + _TURN)

    return close


def make_publish() -> Callable[..., None]:
    """Set a flag to 1 for another thread, which may sleep until then, and then sees what was written before."""

    def publish(args, state, thread, num_threads):
        flag = address_of(args)
        control.atomic_exchange(flag, 1)
        control.wake_all(flag)

    return publish
