"""A thread pool that runs dispatch tables: asleep when idle, fewer threads when the machine is busy.

A run is one call of compiled code, which takes the turn, wakes the workers, computes thread 0's part and releases the
turn. So an exception between any two lines of Python leaves a usable pool. Between two runs a worker spins for a
moment, so that the next one starts within a microsecond; then it sleeps in a semaphore and costs nothing. `adaptive`
decides how many of the threads run: results do not depend on it, to the bit. A pool that is replaced loses its workers;
a caller that still holds it runs with one thread.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.thread_records import FLAG, JOB, MAX_THREADS, TABLE, Words, fields_of
from infer.compute.backends.cpu.threads.adaptive import AdaptiveThreads, Choice, Outcome
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.errors import InferError
from infer.system.cores import default_num_threads, keep_on_node, node_of_thread, start_thread, visit

_NEEDED_BYTES = 512 << 10
_ATTRIBUTE_BYTES = 256  # more than a pthread_attr_t of any system


def check_stack() -> None:
    """Raise InferError if the calling thread's stack is too small: it would end the process without a message."""
    size = stack_bytes()
    if size is not None and size < _NEEDED_BYTES:
        raise InferError(
            f"this thread has a stack of {size >> 10} KB, and running a model takes {_NEEDED_BYTES >> 10}: "
            "call threading.stack_size(1 << 20) before the thread is started"
        )


def stack_bytes() -> int | None:
    """Return the stack size of the calling thread; None if the system does not report it."""
    library = _libc()
    this = ctypes.c_void_p(threading.get_ident())
    with suppress(AttributeError):
        if sys.platform == "darwin":
            library.pthread_get_stacksize_np.restype = ctypes.c_size_t
            return int(library.pthread_get_stacksize_np(this))
        attributes, size = (ctypes.c_char * _ATTRIBUTE_BYTES)(), ctypes.c_size_t()
        if library.pthread_getattr_np(this, attributes) == 0:
            is_known = library.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
            library.pthread_attr_destroy(attributes)
            return size.value if is_known else None
    return None


@cache
def _libc() -> ctypes.CDLL:
    """Return the process's C library, without loading it again: each thread asks it before its first run."""
    return ctypes.CDLL(None)


_SPINS_AFTER_RUN = 3000  # pauses, 40 to 100 µs
_LARGE_STEP = 16  # tokens; a larger one costs in proportion to them
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t)


@final
class _ThisThread(threading.local):
    """Permissions of a thread: one that a run waits for must not wait for another run."""

    may_run = True
    has_stack = False  # that is known to be large enough


_this_thread = _ThisThread()


def forbid_runs() -> None:
    """Make runs of the calling thread raise an error instead of a deadlock. For a Python thread that runs wait for."""
    _this_thread.may_run = False


@final
class ThreadPool:
    """A pool of `num_threads` threads, including the caller's. Workers start with the first run that needs them."""

    def __init__(self, num_threads: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Make the pool of one rank. The pools of ranks that share a model bind to memory nodes like one pool of all
        threads.
        """
        self.num_threads = min(num_threads, MAX_THREADS)
        self._rank, self._num_ranks = rank, num_ranks
        self._node = node_of_thread(self._place_of(0), num_ranks * self.num_threads)
        self._job = fields_of(aligned(1, JOB))
        self._job_at = ctypes.addressof(self._job)
        self._job.dispatch = compiled_address(".threads.worker_loop:dispatch", TABLE)
        _make_semaphore(self._job.turn, 1)
        for thread in range(1, self.num_threads):
            _make_semaphore(self._job.semaphores[thread], 0)
        self._serve, self._run, self._close = (
            _FUNCTION(compiled_address(f".threads.worker_loop:{name}", JOB)) for name in ("serve", "run", "close")
        )
        self._last: tuple[npt.NDArray[Any], Any, int] | None = None  # of the last run: state, fields, address
        self._adaptive = AdaptiveThreads(self.num_threads)
        self._workers: list[threading.Thread] = []
        self._starting = threading.RLock()  # a signal handler may close the pool while this thread starts workers
        self._failure: str | None = None  # why there are no workers
        self.run_seconds = 0.0  # of all runs

    def run(self, table: DispatchTable, state: npt.NDArray[Any], num_threads: int | None = None) -> None:
        """Run a table. `num_threads` is fixed if given; None is the pool's size, or one while the machine is busy.

        Raises InferError if an active run waits for the caller: a function that it calls must start no run. Any other
        exception is raised before or after the run: the next one works.
        """
        self._check_caller()
        if not _this_thread.has_stack:
            check_stack()
            _this_thread.has_stack = True
        now = time.perf_counter()
        choice = self._adaptive.choose(now) if num_threads is None else Choice(min(num_threads, self.num_threads))
        last = self._last
        if last is None or last[0] is not state:
            last = self._last = (state, fields_of(state), state.ctypes.data)
        fields = table.fields
        fields.patience = int(1e9 * choice.patience_seconds)
        if choice.num_threads > 1:
            self._start_workers()
        fields.has_run = 0
        with nullcontext() if self._node is None else visit(self._node):
            while not fields.has_run:  # a signal ends the wait for the turn
                self._run(self._job_at, last[2], table.address, choice.num_threads)
        taken = (fields.ended - fields.began) / 1e9
        self.run_seconds += taken
        if num_threads is None and self.num_threads > 1:
            self._learn(table, last[1], choice, taken)

    @property
    def is_closed(self) -> bool:
        return bool(self._job.is_closed[0])

    def close(self) -> None:
        """Wait for the active run, if any, and for the workers to leave. No worker is started afterwards."""
        self._check_caller()
        while not self.is_closed:
            self._close(self._job_at, self._job_at, 0, 0)
        with self._starting:
            workers = list(self._workers)
        for worker in workers:
            if worker.is_alive():
                worker.join()

    def _check_caller(self) -> None:
        if self._job.owner == threading.get_ident() or not _this_thread.may_run:
            raise InferError(
                "a constraint or callback ran the model, or an op, within a step that waits for it: "
                "do that before or after the generation"
            )

    def _learn(self, table: DispatchTable, state: Any, choice: Choice, seconds: float) -> None:
        tokens = max(state.num_tokens, state.num_logits)
        units, class_ = table.fields.completed, tokens
        if tokens > _LARGE_STEP:
            units, class_ = units * tokens, _LARGE_STEP + tokens.bit_length()
        seconds -= state.reading / 1e9
        lost, ended, dismissed = state.stalls[0] / 1e9, table.fields.ended / 1e9, bool(state.dismissed[0])
        self._adaptive.learn((table.serial, class_), choice, Outcome(ended, seconds, lost, seconds / units, dismissed))

    def _start_workers(self) -> None:
        """Start the workers that do not serve yet. A worker that is started twice leaves immediately.

        Raises:
            InferError: the system starts no more threads. Those that were started leave.
        """
        if self._failure is not None:
            raise InferError(self._failure)
        for thread in range(1, self.num_threads):
            if not self._job.is_served[thread]:
                with self._starting:
                    if not self.is_closed:
                        self._start_worker(thread)

    def _start_worker(self, thread: int) -> None:
        worker = threading.Thread(target=self._work, args=(thread,), name=f"infer-{thread}", daemon=True)
        self._workers.append(worker)
        try:
            start_thread(worker)
        except (RuntimeError, MemoryError) as error:
            self.close()
            self._failure = (
                f"the system starts {thread} of {self.num_threads} threads and no more "
                f"({str(error) or 'out of memory'}): use threads={thread} or fewer"
            )
            raise InferError(self._failure) from None

    def _place_of(self, thread: int) -> int:
        """Return the place of a thread among those of all ranks."""
        return self._rank * self.num_threads + thread

    def _work(self, thread: int) -> None:
        keep_on_node(self._place_of(thread), self._num_ranks * self.num_threads)
        self._serve(self._job_at, self._job_at, thread, _SPINS_AFTER_RUN)


def _make_semaphore(at: Words, value: int) -> None:
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":
        create = library.dispatch_semaphore_create
        create.restype, create.argtypes = ctypes.c_void_p, (ctypes.c_long,)
        at[0] = create(value)
    elif library.sem_init(at, 0, ctypes.c_uint(value)):
        raise OSError(ctypes.get_errno(), "sem_init failed")


def aligned(count: int, dtype: np.dtype) -> npt.NDArray[Any]:
    """Return zeroed records that begin on a cache line."""
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)


@final
class CurrentPool:
    """The process's thread pool, and the requested number of threads."""

    def __init__(self) -> None:
        self._requested: int | None = None
        self._place = 0, 1  # rank and number of ranks
        self.forget()

    def forget(self) -> None:
        """Forget the pool.

        In a forked child, its workers do not exist, and a thread that held the lock may not exist.
        """
        self._lock = threading.Lock()
        self._pool: ThreadPool | None = None

    def get(self) -> ThreadPool:
        current = self._pool
        if current is not None and not current.is_closed:
            return current
        with self._lock:
            if self._pool is None or self._pool.is_closed:
                self._pool = ThreadPool(self._requested or default_num_threads(), *self._place)
            return self._pool

    def replace(self, num_threads: int | None, rank: int = 0, num_ranks: int = 1) -> None:
        with self._lock:
            self._requested, self._place = num_threads, (rank, num_ranks)
            if self._pool is not None:
                self._pool.close()

    def close(self) -> None:
        """Close the pool, before the interpreter frees what the workers use."""
        self.replace(1)


_current = CurrentPool()
os.register_at_fork(after_in_child=_current.forget)
atexit.register(_current.close)


def thread_pool() -> ThreadPool:
    """Return the process's pool, made on first use, of `default_num_threads()` or `set_num_threads`'s threads."""
    return _current.get()


def set_num_threads(num_threads: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Set the number of threads of all later runs. Returns when the active run, if any, has ended."""
    _current.replace(num_threads, rank, num_ranks)


def publisher(flag: npt.NDArray[np.int64]) -> Callable[[], None]:
    """Return a function that sets a flag for compiled code.

    A thread that sees the flag set sees everything that was written before.
    """
    publish = _FUNCTION(compiled_address(".threads.worker_loop:publish", FLAG))
    return partial(publish, flag.ctypes.data, None, 0, 0)
