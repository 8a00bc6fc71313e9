"""`Mailbox`: the pieces of one answer, on their way from the loop's thread to their reader.

The loop puts pieces, one reader takes them, and any thread may wait or close. No lock is held during a wait: each
waiting thread has its own gate. So a signal's handler or a finalizer may wait, or wake others, at any moment.
"""

import asyncio
import math
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from infer.outputs import Piece

MAX_UNREAD = 256  # pieces: with more, the answer pauses until its reader has taken half


@final
class Waiters:
    """Threads, and tasks of one event loop, that wait for something to arrive."""

    def __init__(self, relay: "Relay | None" = None) -> None:
        """Begin without waiting threads. `relay` belongs to the event loop, if tasks may wait."""
        self.relay = relay
        self._gates = deque[LockType]()
        self._tasks = set[asyncio.Future[None]]()

    def wait(self, is_due: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Wait until `is_due()` is True. It is called after each `notify`. Return False at the timeout."""
        ends_at = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not is_due():
            gate = allocate_lock()
            gate.acquire()
            self._gates.append(gate)
            left = ends_at - time.monotonic()
            if not is_due() and not gate.acquire(timeout=-1 if left == math.inf else max(0.0, left)):
                return is_due()
        return True

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
        while self._gates:
            try:
                self._gates.popleft().release()
            except IndexError:  # another thread has notified it
                return
        if self.relay is not None:
            self.relay.note(self)

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
        self._arrived = deque[Waiters]()
        self._is_called = False

    def note(self, waiters: Waiters) -> None:
        """Add waiting threads and tasks, which the next `call` wakes."""
        self._arrived.append(waiters)

    def call(self) -> None:
        """Call the event loop to wake the tasks. Raises RuntimeError if it is closed."""
        if self._arrived and (not self._is_called or self.event_loop.is_closed()):  # closed before it woke its tasks
            self._is_called = True
            try:
                self.event_loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._is_called = False
                raise

    def _wake(self) -> None:
        self._is_called = False  # first: pieces that arrive from now on cause another call
        while self._arrived:
            self._arrived.popleft().wake_tasks()


@final
class Mailbox:
    """The pieces of one answer. `num_put` of them have arrived, and the reader has taken `num_taken`.

    With `only_end`, the reader does not read single pieces: it is woken only at the end, and the answer never pauses.
    `num_prefilled` is the number of computed tokens of the prompt, for a reader that shows them.
    """

    def __init__(self, waiters: Waiters | None = None, *, only_end: bool = False, shows_prefill: bool = False) -> None:
        """Begin empty. Several mailboxes with the same reader may share `waiters`."""
        self.only_end = only_end
        self.num_put = self.num_taken = self.num_prefilled = 0
        self.has_ended = self.is_closed = self.is_paused = False
        # Called when a paused answer may continue, or is no longer streamed.
        self.on_room: Callable[[], None] = lambda: None
        self._shows_prefill = shows_prefill
        self._unread = deque[Piece]()
        self._waiters = waiters or Waiters()

    @property
    def relay(self) -> Relay | None:
        return self._waiters.relay

    @property
    def is_read(self) -> bool:
        """True if the answer has ended, and its reader has all of it."""
        return self.has_ended and not self._unread

    # For the loop's thread

    def put(self, pieces: Sequence[Piece], num_prefilled: int, *, has_ended: bool) -> None:
        """Store the pieces of a step, and wake all waiting threads and tasks."""
        self._unread.extend(pieces)
        self.num_put += len(pieces)
        has_news = bool(pieces) and not self.only_end
        if self._shows_prefill and num_prefilled > self.num_prefilled:
            self.num_prefilled, has_news = num_prefilled, True
        if has_ended:
            self.has_ended = True
        if has_news or has_ended:
            self._waiters.notify()

    def pause_if_full(self) -> bool:
        """Return True if the answer must pause, because its reader is `MAX_UNREAD` pieces behind."""
        if self.only_end or len(self._unread) < MAX_UNREAD:
            return False
        self.is_paused = True
        if self._has_room:  # the reader has already made room, before it could see the pause
            self.is_paused = False
        return self.is_paused

    # For the reader

    def take(self, most: int | None = None) -> list[Piece]:
        """Return up to `most` pieces that have arrived. There are none after `close`."""
        found, unread = list[Piece](), self._unread
        while unread and not self.is_closed and (most is None or len(found) < most):
            found.append(unread.popleft())
            self.num_taken += 1
        self._continue()
        return found

    def skip_to_end(self) -> None:
        """Wait only for the whole answer from now on. It does not pause any more."""
        self.only_end, self.is_paused = True, False
        self.on_room()

    def _continue(self) -> None:
        if self.is_paused and self._has_room:
            self.is_paused = False
            self.on_room()

    def wait(self, num_prefilled: int = 0) -> None:
        """Return when there is a piece, when the prompt has more than `num_prefilled` computed tokens, or at the end.

        For a thread.
        """
        self._waiters.wait(lambda: self._is_due or self.num_prefilled > num_prefilled)

    async def wait_as_task(self) -> None:
        """Return when there is a piece, or when no more pieces will arrive."""
        await self._waiters.wait_as_task(lambda: self._is_due)

    # For any thread

    def close(self) -> None:
        """Give the reader no further pieces."""
        self.is_closed = True
        if not self.has_ended:  # otherwise all readers are awake
            self.wake()

    def wake(self) -> None:
        """Wake all readers now. For any thread."""
        self._waiters.wake()

    def wait_for_end(self) -> None:
        """Wait until the answer has ended. For any thread except the loop's."""
        self._waiters.wait(lambda: self.has_ended)

    async def wait_for_end_as_task(self) -> None:
        await self._waiters.wait_as_task(lambda: self.has_ended)

    async def wait_for_end_or_close(self) -> None:
        await self._waiters.wait_as_task(lambda: self.has_ended or self.is_closed)

    @property
    def _is_due(self) -> bool:
        return self.is_closed or self.has_ended or (bool(self._unread) and not self.only_end)

    @property
    def _has_room(self) -> bool:
        return self.only_end or 2 * len(self._unread) <= MAX_UNREAD
