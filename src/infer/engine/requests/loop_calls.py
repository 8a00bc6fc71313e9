"""Work for the thread that steps the engine, which it runs between two steps, and its result."""

from collections.abc import Callable, Generator
from contextvars import copy_context
from typing import Any, Generic, TypeVar, final

from infer.engine.requests.answer import Relay, Waiters

_Found = TypeVar("_Found")
Work = Generator[bool | None, None, _Found]  # runs to its next `yield` between two steps
Check = Callable[[], None]  # called between parts of other work; it may raise
GIVE_WAY = True  # yielded by work that other work may interrupt, because it uses nothing that other work changes


@final
class EngineCall(Generic[_Found]):
    """Work for the loop's thread, and its result, for which any thread may wait. Only the caller uses `cancel`."""

    def __init__(self, work: Work[_Found], relay: Relay | None = None, tenant: str = "") -> None:
        """Begin without a result. `relay` belongs to the event loop whose task waits for it."""
        self.work, self.tenant = work, tenant
        self.has_begun, self.gives_way = False, True
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
            self._waiters.wait(lambda: self.is_done)
        except BaseException:
            self.cancel()
            raise
        return self.found

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

    def refuse(self, error: BaseException) -> None:
        """End the work with an error instead of a result."""
        self.work.close()
        self.set(error=error)

    @property
    def found(self) -> _Found:
        """The result of a finished call. Raises the exception of its work."""
        if self._error is not None:
            raise self._error
        return self._found[0]


def once(function: Callable[..., _Found], *arguments: Any) -> Work[_Found]:
    """Make work of one call of a function, which gets the current context variables."""
    context = copy_context()

    def work() -> Work[_Found]:
        yield from ()
        return context.run(function, *arguments)

    return work()
