"""The threads' own loops, compiled: the walk over a table, a worker's wait for walks, the launch of one."""

from collections.abc import Callable

from numba import carray, njit

from infer.kernels.cpu import control, simd
from infer.kernels.cpu.records import JOB
from infer.kernels.cpu.simd import load_i64, store_i64
from infer.kernels.cpu.state import STATE, field_offset

_ROW_BYTES = 24
_NUM_SPINS = 500
_SHARE_SHIFT = 2  # of thread 0's time may go in waits: a quarter

_BARRIER_AT, _DISMISSED_AT, _STALLS_AT = (field_offset(STATE, name) for name in ("barrier", "dismissed", "stalls"))
_OFFSETS = {name: field_offset(JOB, name) for name in ("generation", "finished", "sleeping", "seen")}
_GENERATION, _FINISHED, _SLEEPING, _SEEN = (_OFFSETS[name] for name in ("generation", "finished", "sleeping", "seen"))
_STEP = 512


@njit
def wait_for_all(barrier, arrivals, spins):  # type: ignore[no-untyped-def]
    """Return when the barrier has counted `arrivals`: the cycles lost if that took longer than a spin."""
    control.atomic_add(barrier, 1)
    for _ in range(spins):
        if control.atomic_load(barrier) >= arrivals:
            return 0
        control.pause()
    began = control.cycles()
    while control.atomic_load(barrier) < arrivals:
        control.yield_thread()
    return control.cycles() - began


def make_walk() -> Callable[..., None]:
    """Alone, thread 0 still does each command in `num_threads` parts: what a later command reads stays the same."""

    def walk(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        state_address = simd.address_of(state_at)
        barrier, dismissed = state_address + _BARRIER_AT, state_address + _DISMISSED_AT
        arrivals, stalls, is_alone = 0, 0, num_threads == 1
        first, end, started = thread, thread + 1, control.cycles()
        for repeat in range(args.repeats):
            for index in range(args.again if repeat > 0 else 0, args.num_rows):
                row = args.rows + _ROW_BYTES * index
                began = control.cycles() if args.times != 0 else 0
                for part in range(first, end):
                    control.call_command(load_i64(row), load_i64(row + 8), state_address, part, num_threads)
                flag = load_i64(row + 16)
                if not is_alone and (flag == 1 or (flag == 2 and max(state.num_tokens, state.num_wanted) > 1)):
                    arrivals += num_threads
                    beyond = stalls - args.patience if thread == 0 and args.patience != 0 else 0
                    if beyond > 0 and beyond > (control.cycles() - started) >> _SHARE_SHIFT:
                        control.atomic_store(dismissed, arrivals)  # before its own arrival: all see it behind this one
                    stalls += wait_for_all(barrier, arrivals, _NUM_SPINS)
                    if control.atomic_load(dismissed) == arrivals:
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
                    arrivals += num_threads
                    stalls += wait_for_all(barrier, arrivals, _NUM_SPINS)
                if is_stopped:
                    break
        if stalls != 0:
            control.atomic_add(state_address + _STALLS_AT, stalls)

    return walk


def make_serve() -> Callable[..., None]:
    """A worker's loop: walk whenever the generation moves; fall asleep and return when nothing came for a while."""

    def serve(job_at, state_at, thread, spins):  # type: ignore[no-untyped-def]
        job, base = carray(job_at, 1)[0], simd.address_of(job_at)
        sleeping, seen = base + _SLEEPING + 8 * thread, base + _SEEN + 8 * thread
        idle = 0
        while True:
            generation = control.atomic_load(base + _GENERATION)
            if generation != control.atomic_load(seen):
                control.atomic_store(seen, generation)
                num_threads = generation % _STEP
                if thread < num_threads:
                    control.call_command(job.walk, job.arguments, job.state, thread, num_threads)
                    control.atomic_add(base + _FINISHED, 1)
                idle = 0
            elif idle < spins:
                idle += 1
                control.pause()
            else:
                control.atomic_exchange(sleeping, 1)
                if control.atomic_load(base + _GENERATION) == generation or control.atomic_exchange(sleeping, 0) == 0:
                    return  # whoever takes our flag wakes us
                idle = 0

    return serve


def make_announce() -> Callable[..., None]:
    """Move the generation, then take the flags of the workers that sleep."""

    def announce(job_at, state_at, num_threads, unused):  # type: ignore[no-untyped-def]
        job, base = carray(job_at, 1)[0], simd.address_of(job_at)
        walks = control.atomic_load(base + _GENERATION) // _STEP
        control.atomic_exchange(base + _GENERATION, (walks + 1) * _STEP + num_threads)
        job.num_wakes = 0
        for thread in range(1, num_threads):
            if control.atomic_exchange(base + _SLEEPING + 8 * thread, 0) != 0:
                job.wakes[job.num_wakes] = thread
                job.num_wakes += 1

    return announce


def make_lead() -> Callable[..., None]:
    """Thread 0's part of a walk, and the wait for the workers."""

    def lead(job_at, state_at, thread, spins):  # type: ignore[no-untyped-def]
        job, base = carray(job_at, 1)[0], simd.address_of(job_at)
        began = control.cycles()
        control.call_command(job.walk, job.arguments, job.state, 0, job.num_threads)
        waited = 0
        while control.atomic_load(base + _FINISHED) < job.num_threads - 1:
            waited += 1
            if waited < spins:
                control.pause()
            else:
                control.yield_thread()
        job.cycles = control.cycles() - began

    return lead
