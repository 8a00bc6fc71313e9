"""A team of threads that walks dispatch tables: asleep when idle, one of them when the machine is busy.

Between two walks a worker spins for a moment, so that the next one starts within a microsecond; then it sleeps in a
semaphore of Python's and costs nothing. How many of the threads walk is up to `pace`: results do not depend on it, to
the bit. A team that is replaced sends its workers home; whoever still holds it walks with one thread.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.pace import Choice, Outcome, Pace
from infer.kernels.cpu.records import JOB, MAX_THREADS, WALK
from infer.kernels.cpu.state import STATE, Words, field_index, words_of
from infer.kernels.cpu.table import Walk, walk_address

_SPINS_AFTER_WALK = 3000  # pauses, 40 to 100 µs
_LARGE_STEP = 16  # tokens; a larger one costs in proportion to them
_JOB = {name: field_index(JOB, name) for name in JOB.fields or ()}
_STATE = {name: field_index(STATE, name) for name in STATE.fields or ()}
_WALK = {name: field_index(WALK, name) for name in WALK.fields or ()}

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t)


@final
class Team:
    """`num_threads` threads, the caller's own among them. Workers start with the first walk that needs them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = min(num_threads, MAX_THREADS)
        self._lock = threading.Lock()
        self._job = aligned(1, JOB)
        self._job_words, self._job_at = words_of(self._job), self._job.ctypes.data
        self._state: npt.NDArray[Any] | None = None  # of the last walk
        self._serve, self._announce, self._lead = (
            _FUNCTION(compiled_address(f".walking:make_{name}", JOB)) for name in ("serve", "announce", "lead")
        )
        self._walk = walk_address()
        self._pace = Pace(self.num_threads)
        self._semaphores: list[threading.Semaphore] = []
        self._workers: list[threading.Thread] = []
        self._is_closed = False
        self._cycles, self._seconds = 0, 0.0  # of all walks: the clock's rate

    def run(self, walk: Walk, state: npt.NDArray[Any], num_threads: int | None = None) -> None:
        """Walk a table. `num_threads` insists; None is the team's size, or one while the machine is busy."""
        with self._lock:
            started = time.perf_counter()
            choice = self._pace.choose(started) if num_threads is None else Choice(min(num_threads, self.num_threads))
            if self._is_closed:
                choice = Choice(1)
            if state is not self._state:
                self._state, self._state_words, self._state_at = state, words_of(state), state.ctypes.data
            words = self._state_words
            words[_STATE["barrier"]] = words[_STATE["dismissed"]] = words[_STATE["stalls"]] = 0
            rate = self._cycles / self._seconds if self._seconds else 0.0
            walk.words[_WALK["patience"]] = int(choice.patience_seconds * rate)
            self._launch(walk, choice.num_threads)
            ended = time.perf_counter()
            self._cycles += self._job_words[_JOB["cycles"]]
            self._seconds += ended - started
            if num_threads is None and self.num_threads > 1:
                self._learn(walk, words, choice, ended, ended - started)

    def close(self) -> None:
        """Behind the walk that runs, if any: the workers leave."""
        with self._lock:
            self._is_closed = True
            for semaphore in self._semaphores:
                semaphore.release()
        for worker in self._workers:
            worker.join()

    def _launch(self, walk: Walk, num_threads: int) -> None:
        job = self._job_words
        job[_JOB["walk"]], job[_JOB["arguments"]], job[_JOB["state"]] = self._walk, walk.address, self._state_at
        job[_JOB["finished"]], job[_JOB["num_threads"]] = 0, num_threads
        if num_threads > 1:
            self._start_workers()
            self._announce(self._job_at, 0, num_threads, 0)
            for index in range(job[_JOB["num_wakes"]]):
                self._semaphores[job[_JOB["wakes"] + index]].release()
        self._lead(self._job_at, 0, 0, _SPINS_AFTER_WALK)

    def _learn(self, walk: Walk, state: Words, choice: Choice, ended: float, seconds: float) -> None:
        tokens = max(state[_STATE["num_tokens"]], state[_STATE["num_wanted"]])
        units, class_ = walk.words[_WALK["walked"]], tokens
        if tokens > _LARGE_STEP:
            units, class_ = units * tokens, _LARGE_STEP + tokens.bit_length()
        lost = state[_STATE["stalls"]] * self._seconds / max(1, self._cycles)
        dismissed = bool(state[_STATE["dismissed"]])
        self._pace.learn((walk.serial, class_), choice, Outcome(ended, seconds, lost, seconds / units, dismissed))

    def _start_workers(self) -> None:
        while len(self._semaphores) < self.num_threads:
            thread = len(self._semaphores)
            self._semaphores.append(threading.Semaphore(0))
            if thread > 0:
                worker = threading.Thread(target=self._work, args=(thread,), name=f"infer-{thread}", daemon=True)
                self._workers.append(worker)
                worker.start()

    def _work(self, thread: int) -> None:
        while not self._is_closed:
            self._serve(self._job_at, 0, thread, _SPINS_AFTER_WALK)
            self._semaphores[thread].acquire()


def aligned(count: int, dtype: np.dtype) -> npt.NDArray[Any]:
    """Zeroed records that begin on a cache line."""
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)


@final
class CurrentTeam:
    """The process's team, and the number of threads that was asked for."""

    def __init__(self) -> None:
        self._requested: int | None = None
        self.forget()

    def forget(self) -> None:
        """In a forked child the workers do not exist, and a thread that held the lock may not either."""
        self._lock = threading.Lock()
        self._team: Team | None = None

    def get(self) -> Team:
        with self._lock:
            if self._team is None:
                self._team = Team(self._requested or default_num_threads())
            return self._team

    def replace(self, num_threads: int | None) -> None:
        with self._lock:
            self._requested = num_threads
            replaced, self._team = self._team, None
        if replaced is not None:
            replaced.close()

    def close(self) -> None:
        """Before the interpreter takes away what the workers use."""
        self.replace(1)


_current = CurrentTeam()
os.register_at_fork(after_in_child=_current.forget)
atexit.register(_current.close)


def team() -> Team:
    """The process's team, created on first use with `default_num_threads()` or what `set_num_threads` said."""
    return _current.get()


def set_num_threads(num_threads: int) -> None:
    """For all that runs from now on. Returns when the walk that runs, if any, has ended."""
    _current.replace(num_threads)


def default_num_threads() -> int:
    """Physical cores that the process may use: its affinity and its cgroup's quota."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(), MAX_THREADS))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return MAX_THREADS if limit == "max" else max(1, int(limit) // int(period))
    except (OSError, ValueError):
        pass
    try:
        limit, period = (Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return MAX_THREADS if int(limit) <= 0 else max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return MAX_THREADS
