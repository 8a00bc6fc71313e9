"""Messages to the thread that steps the engine, and the reply of a call."""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, final

from infer.compute.ops import Backend
from infer.engine.engine import Engine
from infer.engine.requests.mailbox import Mailbox, Relay, Waiters
from infer.engine.step.sequence import Lease, Sequence
from infer.errors import closed

_Found = TypeVar("_Found")
Work = Generator[bool | None, None, _Found]  # runs to its next `yield` between two steps
GIVE_WAY = True  # yielded by work that other work may interrupt, because it uses nothing that other work changes


@final
class Reply(Generic[_Found]):
    """The result of a call, for any thread. Only the caller uses `cancel`."""

    def __init__(self, relay: Relay | None = None) -> None:
        """Begin without a result. `relay` belongs to the event loop whose task waits for it."""
        self._waiters = Waiters(relay)
        self._found: list[_Found] = []
        self._error: BaseException | None = None
        self.is_done = self.is_cancelled = False

    def set(self, *found: _Found, error: BaseException | None = None) -> None:
        self._found, self._error, self.is_done = list(found), error, True
        self._waiters.wake()

    def get(self) -> _Found:
        """Wait for the result. An exception that interrupts the wait, such as Ctrl-C, cancels the call."""
        try:
            self.wait()
        except BaseException:
            self.cancel()
            raise
        return self.found

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the call is done. Return False at the timeout."""
        return self._waiters.wait(lambda: self.is_done, timeout_seconds)

    async def wait_as_task(self) -> None:
        """Wait until the call is done. If the task is cancelled, so is the call."""
        try:
            await self._waiters.wait_as_task(lambda: self.is_done)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Let the work end at its next `yield`."""
        self.is_cancelled = True

    @property
    def found(self) -> _Found:
        """The result of a finished call. Raises the exception of its work."""
        if self._error is not None:
            raise self._error
        return self._found[0]


@final
class Backlog:
    """Sequences of one caller. When one ends, the next one enters before the next step.

    The caller appends to `waiting`, and then sends a `Refill`.
    """

    def __init__(self, most_running: int) -> None:
        self.most_running, self.num_running = most_running, 0
        self.waiting = deque[tuple[Sequence, Mailbox]]()

    def end_waiting(self) -> None:
        """End the sequences that have not entered."""
        with suppress(IndexError):
            while True:
                end(*self.waiting.popleft())


class Own(NamedTuple):
    """The engine that the thread steps from now on, or None for an encoder, and the backend that computes."""

    engine: Engine | None
    backend: Backend


class Submit(NamedTuple):
    sequence: Sequence
    mailbox: Mailbox
    lease: Lease | None


class Refill(NamedTuple):
    """Sequences were added to a backlog."""

    backlog: Backlog


class Drop(NamedTuple):
    """The answers of a backlog are no longer read."""

    backlog: Backlog


class Cancel(NamedTuple):
    sequence: Sequence
    mailbox: Mailbox


class Continue(NamedTuple):
    """The reader of an answer has room again, or waits only for its end."""

    sequence: Sequence


@dataclass(eq=False)
class EngineCall:
    work: Work[Any]
    reply: Reply[Any]
    tenant: str = ""
    has_begun: bool = False
    gives_way: bool = True


class Drain(NamedTuple):
    """Reply after all sequences have ended."""

    reply: Reply[None]


class Close(NamedTuple):
    """End the sequences, and the thread."""


Message = Own | Submit | Refill | Drop | Cancel | Continue | EngineCall | Drain | Close
Inbox = SimpleQueue[Message]


def once(function: Callable[..., _Found], *arguments: Any) -> Work[_Found]:
    """Make work of one call of a function, which gets the current context variables."""
    context = copy_context()

    def work() -> Work[_Found]:
        yield from ()
        return context.run(function, *arguments)

    return work()


def end(sequence: Sequence, mailbox: Mailbox) -> None:
    """End a sequence that never entered, and notify its reader. A second call does nothing."""
    if sequence.has_ended:
        return
    sequence.end()
    mailbox.put([], 0, has_ended=True)
    mailbox.wake()


def refuse_all(inbox: Inbox) -> None:
    """Answer the messages that arrived too late. For any thread."""
    with suppress(Empty):
        while True:
            match inbox.get_nowait():
                case Submit(sequence, mailbox, _) | Cancel(sequence, mailbox):
                    end(sequence, mailbox)
                case Refill(backlog) | Drop(backlog):
                    backlog.end_waiting()
                case EngineCall(work, reply):
                    work.close()
                    reply.set(error=closed())
                case Drain(reply):
                    reply.set(None)
