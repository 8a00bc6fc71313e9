"""Answers for event loops, the threads that prepare their requests, and the relays that wake their tasks."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

from infer.engine.requests.answer import Answer, Relay, Waiters
from infer.engine.requests.loop import Loop
from infer.engine.requests.loop_calls import Work, once
from infer.engine.requests.stream import AsyncStream
from infer.engine.step.sequence import Sequence
from infer.errors import closed

Check = Callable[[], None]
NUM_PREPARING = 4
NUM_CONSTRAINING = 16  # threads, most of which only wait
_Found = TypeVar("_Found")


class _NotAwaitedError(Exception):
    """Raised in a thread that prepares a request after its caller has gone."""


@final
class AsyncAnswers:
    """The answers of one loop, for the tasks of any number of event loops."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        # Each loop's relay, while it has answers.
        self._relays = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Relay]()
        self._preparing = ThreadPoolExecutor(NUM_PREPARING, "infer-prepare")
        self._constraining = ThreadPoolExecutor(NUM_CONSTRAINING, "infer-constrain")

    async def prepare(self, work: Callable[[Check], _Found], *, is_constrained: bool = False) -> _Found:
        """Return `work(check)`, called on a thread. If the task is cancelled, work ends at its next call of `check`.

        A request that `is_constrained` by a grammar or tools may wait for the process that tries grammars. It has its
        own threads, so that no other request waits for it. Raises ClosedError.
        """
        self.loop.check_open()
        is_left = threading.Event()

        def check() -> None:
            if is_left.is_set():
                raise _NotAwaitedError

        threads = self._constraining if is_constrained else self._preparing
        try:
            future = asyncio.get_running_loop().run_in_executor(threads, work, check)
        except RuntimeError:
            if self.loop.is_open:
                raise
            raise closed() from None  # by another thread
        try:
            return await future
        finally:
            is_left.set()

    async def call(self, work: Work[_Found]) -> _Found:
        """Return the result of work on the loop's thread, as `Loop.call`. If cancelled, it ends at its next `yield`."""
        call = self.loop.call(work, self.relay())
        await call.wait_as_task()
        return call.found

    async def run(self, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Return `function(*arguments)`, called on the loop's thread between two steps."""
        return await self.call(once(function, *arguments))

    def stream(self, prepare: Callable[[Check], Sequence] | Sequence, *, is_constrained: bool = False) -> AsyncStream:
        """Return a stream of a sequence. A sequence may also be prepared on a thread when the stream is first read."""
        if isinstance(prepare, Sequence):
            return AsyncStream(self._open(prepare))

        async def prepared() -> Answer:
            return self._open(await self.prepare(prepare, is_constrained=is_constrained))

        return AsyncStream(prepared)

    def close(self) -> None:
        """Let each thread end after the request that it prepares."""
        self._preparing.shutdown(wait=False)
        self._constraining.shutdown(wait=False)

    def _open(self, sequence: Sequence) -> Answer:
        return Answer(self.loop, sequence, Waiters(self.relay()))

    def relay(self) -> Relay:
        """Return the relay of the running event loop."""
        running = asyncio.get_running_loop()
        if (relay := self._relays.get(running)) is None:
            relay = self._relays[running] = Relay(running)
        return relay
