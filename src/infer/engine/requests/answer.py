"""`Answer` and `EngineCall`: a running answer and other work, on their way from the loop's thread to their reader.

The loop's thread gives an answer the pieces of each step, the end, or the failure of the engine. One reader takes
them, and any thread may cancel it or wait for its end. `Stream`, `AsyncStream` and a batch are views of it.

No lock is held during a wait: each waiting thread has its own gate, see `Waiters`. So a signal's handler or a finalizer
may wait, or wake others, at any moment.
"""

import asyncio
import math
import threading
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

from infer.engine.step.sequence import Lease, Sequence
from infer.errors import EngineFailedError, InferError
from infer.outputs import GenerationResult, Piece

_Result = TypeVar("_Result")
Work = Generator[bool | None, None, _Result]  # runs to its next `yield` between two steps
Check = Callable[[], None]  # called between parts of other work; it may raise
GIVE_WAY = True  # yielded by work that other work may interrupt, because it uses nothing that other work changes
MAX_UNREAD = 256  # pieces: with more, the answer pauses until its reader has taken half


@final
class Waiters:
    """Threads, and tasks of one event loop, that wait for something to arrive."""

    def __init__(self, relay: "Relay | None" = None) -> None:
        """Begin without waiting threads. `relay` belongs to the event loop, if tasks may wait."""
        self.relay = relay
        self._gates = deque[LockType]()
        self._tasks = set[asyncio.Future[None]]()

    def wait(self, is_due: Callable[[], bool]) -> None:
        """Wait until `is_due()` is True. It is called after each `notify`."""
        while not is_due():
            gate = allocate_lock()
            gate.acquire()
            self._gates.append(gate)
            if not is_due():
                gate.acquire()

    async def wait_as_task(self, is_due: Callable[[], bool]) -> None:
        """Wait until `is_due()` is True. For any number of tasks of the relay's event loop."""
        assert self.relay is not None
        while not is_due():
            future = self.relay.event_loop.create_future()
            self._tasks.add(future)
            try:
                await future
            finally:
                self._tasks.discard(future)

    def notify(self) -> None:
        """Wake the threads now, and the tasks with the relay's next call. For any thread."""
        for gate in tuple(self._gates):  # whoever comes later sees what has arrived
            with suppress(RuntimeError):  # another thread has notified it
                gate.release()  # before it is removed: a signal may raise between the two
            with suppress(ValueError):
                self._gates.remove(gate)
        if self.relay is not None:
            self.relay.arrived.append(self)

    def wake(self) -> None:
        """Wake the threads and the tasks now, not only after a step. For any thread."""
        self.notify()
        if self.relay is not None:
            with suppress(RuntimeError):  # a closed event loop has no waiting tasks
                self.relay.call()

    def wake_tasks(self) -> None:
        """Wake the tasks. For the event loop of the relay."""
        for future in self._tasks:
            if not future.done():
                future.set_result(None)


@final
class Relay:
    """Wakes the tasks of one event loop. The loop is called once for everything that arrived in a step."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self.arrived = deque[Waiters]()  # whose tasks the next `call` wakes
        self._is_called = False

    def call(self) -> None:
        """Call the event loop to wake the tasks. Raises RuntimeError if it is closed."""
        if self.arrived and (not self._is_called or self.event_loop.is_closed()):  # closed before it woke its tasks
            self._is_called = True
            try:
                self.event_loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._is_called = False
                raise

    def _wake(self) -> None:
        self._is_called = False  # first: pieces that arrive from now on cause another call
        while self.arrived:
            self.arrived.popleft().wake_tasks()


@runtime_checkable
class _Loop(Protocol):
    """The `Loop` of an answer, as far as the answer uses it."""

    is_open: bool

    @property
    def can_be_awaited(self) -> bool: ...
    def check_process(self) -> None: ...
    def submit(self, answer: "Answer") -> None: ...
    def proceed(self, answer: "Answer") -> None: ...
    def cancel(self, answer: "Answer") -> None: ...


@final
class Backlog:
    """Answers of one caller, of which `most_running` run. When one ends, the next one begins before the next step.

    Only the loop's thread changes it. Any thread may read `is_full`.
    """

    def __init__(self, most_running: int) -> None:
        self.most_running, self.num_running = most_running, 0
        self.waiting = deque[Answer]()  # one that was cancelled is skipped

    @property
    def is_full(self) -> bool:
        return self.num_running == self.most_running


@final
class Answer:
    """The answer of a sequence, which is computed after `begin`.

    `num_put` of its pieces have arrived, and the reader has taken `num_taken`. With `only_end`, the reader does not
    read single pieces: it is woken only at the end, has read what arrived until then, and the answer never pauses.
    `num_prefilled` is the number of computed tokens of the prompt, for a reader that shows them.

    Once its reader gets no further pieces, it is settled: it is cut to those that were taken, and `on_end` is called.
    """

    def __init__(
        self,
        loop: _Loop,
        sequence: Sequence,
        waiters: Waiters | None = None,
        *,
        lease: Lease | None = None,
        on_end: Callable[[], None] | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        """Begin without pieces. Several answers with the same reader may share `waiters`."""
        self.loop, self.sequence, self.lease, self.only_end = loop, sequence, lease, False
        self.backlog = backlog  # in which it may wait
        self.num_put = self.num_taken = self.num_prefilled = 0
        self.has_ended = self.is_dropped = self.is_paused = self.is_settled = False
        self._failure: BaseException | None = None
        self.shows_prefill = False  # True if the reader is woken when tokens of the prompt are computed
        self._on_end = on_end
        self._waiters = waiters or Waiters()
        self.relay = self._waiters.relay  # wakes the reader, if that is a task
        self._changing = threading.RLock()  # held briefly; a signal's handler may acquire it again
        self._has_begun = False

    # For the loop's thread

    def put(self) -> None:
        """Take over the new pieces of the sequence or its end, and wake all waiting threads and tasks."""
        sequence, num_before = self.sequence, self.num_put
        self.num_put = len(sequence.pieces)
        has_news = self.num_put > num_before and not self.only_end
        if self.shows_prefill and sequence.num_computed > self.num_prefilled:
            self.num_prefilled, has_news = sequence.num_computed, True
        self.has_ended = sequence.has_ended
        if has_news or self.has_ended:
            self._waiters.notify()

    def pause_if_full(self) -> bool:
        """Return True if the answer must pause, because its reader is `MAX_UNREAD` pieces behind."""
        if self.only_end or self.num_put - self.num_taken < MAX_UNREAD:
            return False
        self.is_paused = True
        if self._has_room:  # the reader has already made room, before it could see the pause
            self.is_paused = False
        return self.is_paused

    def fail(self, failure: BaseException, why: str) -> None:
        """Let the answer end with the engine's failure, unless it was complete. The reader gets EngineFailedError."""
        if not self.sequence.is_finished:
            self._failure = failure
            self.sequence.fail("internal", why)

    def end(self) -> None:
        """End an answer that never entered the engine, and wake its reader now. A second call does nothing.

        If the loop's thread is over, any thread may call it.
        """
        if not self.sequence.has_ended:
            self.sequence.end()
            self.put()
            self._waiters.wake()

    # For the reader

    def begin(self, *, only_end: bool = False) -> None:
        """Submit the sequence if that is not done. Raises ClosedError, and InferError if the loop accepts no more."""
        self.loop.check_process()
        with self._changing:
            if self._has_begun or self.is_dropped:
                return
            self.only_end = only_end
            self._has_begun = True  # first, because an exception may be raised before `submit` returns
            try:
                self.loop.submit(self)
            except InferError:
                self._has_begun = False
                raise

    def take(self, most: int | None = None) -> list[Piece] | None:
        """Return up to `most` arrived pieces: an empty list at the end of the answer, None if more may arrive.

        Raises EngineFailedError instead of the end if the engine's failure ended the answer.
        """
        self.poll_cancel()
        has_ended = self.has_ended  # read before the pieces, because none arrive after the end
        with self._changing:  # another thread that closes may settle the answer
            end = self.num_put if most is None else min(self.num_put, self.num_taken + most)
            pieces = [] if self.is_dropped else self.sequence.pieces[self.num_taken : end]
            self.num_taken += len(pieces)
        if self.is_paused and self._has_room:
            self.is_paused = False
            self.loop.proceed(self)
        if not pieces and has_ended:
            self._check_failure()
        return pieces if pieces or has_ended or self.is_dropped else None

    def wait(self, num_prefilled: int = 0) -> None:
        """Wait for a piece, more than `num_prefilled` computed tokens of the prompt, or the end. For a thread."""
        self._waiters.wait(partial(self._is_due, num_prefilled))

    async def take_as_task(self, most: int | None = None) -> list[Piece]:
        """Wait for a piece, and return up to `most` unread ones: an empty list at the end. Raises as `take`."""
        while (pieces := self.take(most)) is None:
            await self._waiters.wait_as_task(self._is_due)
        return pieces

    async def result_as_task(self) -> GenerationResult:
        """Wait until the answer has ended, and return it as `result`. From now on it does not pause."""
        self.poll_cancel()
        if not self.only_end and not self.is_dropped:
            self.only_end, self.is_paused = True, False
            self.loop.proceed(self)
        await self._waiters.wait_as_task(lambda: self.has_ended or self.is_dropped)
        self.poll_cancel()
        await self._waiters.wait_as_task(lambda: self.has_ended)
        return self.result()

    def result(self) -> GenerationResult:
        """Return the finished answer, with `only_end` all of it. Raises EngineFailedError if that ended it."""
        self.settle()
        self._check_failure()
        return self.sequence.result()

    # For any thread

    @property
    def is_closed(self) -> bool:
        """True if its reader gets no further pieces."""
        return self.is_dropped or (self.has_ended and self.num_taken == self.num_put)

    def cancel(self) -> None:
        """Give the reader no further pieces, and end the sequence. Does not wait. For finalizers, too."""
        self.is_dropped = True
        if not self.has_ended:  # otherwise the sequence has left the engine, and all readers are awake
            self._waiters.wake()
            self.loop.cancel(self)

    def abandon(self) -> None:
        """Cancel, because an exception ended the reader: what it has not taken does not count as read."""
        self.only_end = False
        self.cancel()

    def poll_cancel(self) -> None:
        """Cancel if the event of its request is set."""
        event = self.sequence.request.options.cancel
        if event is not None and event.is_set():
            self.cancel()

    def close(self) -> None:
        """Cancel, and wait until the sequence has ended. On the loop's own thread and in a fork, do not wait."""
        self.cancel()
        if self.loop.can_be_awaited:
            self._waiters.wait(lambda: self.has_ended)
            self.settle()

    async def close_as_task(self) -> None:
        self.cancel()
        await self._waiters.wait_as_task(lambda: self.has_ended)
        self.settle()

    def settle(self) -> None:
        """Cut a finished answer to the pieces that were taken. A second call does nothing."""
        with self._changing:
            if not self.is_settled:
                try:
                    if self.only_end:
                        self.num_taken = self.num_put
                    try:
                        self.sequence.keep(self.num_taken)
                    finally:
                        if self._on_end is not None:
                            self._on_end()
                finally:
                    self.is_settled = True
                    self._on_end = None  # a session would wait for the collector otherwise

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EngineFailedError(self.sequence.error or "the engine has failed") from self._failure

    def _is_due(self, num_prefilled: float = math.inf) -> bool:
        has_news = self.num_prefilled > num_prefilled or (self.num_put > self.num_taken and not self.only_end)
        return has_news or self.is_dropped or self.has_ended

    @property
    def _has_room(self) -> bool:
        return self.only_end or 2 * (self.num_put - self.num_taken) <= MAX_UNREAD


@final
class EngineCall(Generic[_Result]):
    """Work for the loop's thread, and its result, for which any thread may wait. Only the caller uses `cancel`."""

    def __init__(self, work: Work[_Result], relay: Relay | None = None, tenant: str = "") -> None:
        """Begin without a result. `relay` belongs to the event loop whose task waits for it."""
        self.work, self.tenant = work, tenant
        self.has_begun, self.gives_way = False, True
        self._waiters = Waiters(relay)
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self.is_done = self.is_cancelled = False

    def set(self, *results: _Result, error: BaseException | None = None) -> None:
        self._results, self._error, self.is_done = list(results), error, True
        self._waiters.wake()

    def get(self) -> _Result:
        """Wait for the result. An exception that interrupts the wait, such as Ctrl-C, cancels the call."""
        try:
            self._waiters.wait(lambda: self.is_done)
        except BaseException:
            self.cancel()
            raise
        return self._result()

    async def get_as_task(self) -> _Result:
        """Wait for the result, as `get` does, for a task. If the task is cancelled, so is the call."""
        try:
            await self._waiters.wait_as_task(lambda: self.is_done)
        except BaseException:
            self.cancel()
            raise
        return self._result()

    def cancel(self) -> None:
        """Let the work end at its next `yield`."""
        self.is_cancelled = True

    def refuse(self, error: BaseException) -> None:
        """End the work with an error instead of a result."""
        self.work.close()
        self.set(error=error)

    def _result(self) -> _Result:
        """Return the result of a finished call. Raises the exception of its work."""
        if self._error is not None:
            raise self._error
        return self._results[0]


def once(function: Callable[..., _Result], *arguments: Any) -> Work[_Result]:
    """Make work of one call of a function, which gets the current context variables."""
    context = copy_context()

    def work() -> Work[_Result]:
        yield from ()
        return context.run(function, *arguments)

    return work()
