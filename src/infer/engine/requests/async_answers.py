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
from infer.outputs import GenerationResult

Check = Callable[[], None]
NUM_PREPARING = 4
NUM_CONSTRAINING = 16  # threads, most of which only wait
_Found = TypeVar("_Found")


class _NotAwaitedError(Exception):
    """Raised in a thread that prepares a request after its caller has gone."""


@final
class _Threads:
    """A few threads for work that would block an event loop. They start when they are needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    async def run(self, work: Callable[[Check], _Found]) -> _Found:
        """Run `work(check)` outside the event loop. If it is cancelled, it ends at its next call of `check`.

        Raises ClosedError after `close`.
        """
        if self._is_closed:
            raise closed()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._count, self._name)
        is_awaited = threading.Event()
        is_awaited.set()

        def check() -> None:
            if not is_awaited.is_set():
                raise _NotAwaitedError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, check)
        finally:
            is_awaited.clear()

    def close(self) -> None:
        """Let each thread end after its current work."""
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._executor = None


@final
class AsyncAnswers:
    """The answers of one loop, for the tasks of any number of event loops."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        # Each loop's relay, while it has answers.
        self._relays = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Relay]()
        self._preparing = _Threads(NUM_PREPARING, "infer-prepare")
        self._constraining = _Threads(NUM_CONSTRAINING, "infer-constrain")

    async def prepare(self, work: Callable[[Check], _Found]) -> _Found:
        """Return `work(check)`, called on a thread. Raises ClosedError."""
        self.loop.check_open()
        return await self._preparing.run(work)

    async def constrain(self, work: Callable[[Check], _Found]) -> _Found:
        """Prepare a request with a grammar or tools, as `prepare` does for other requests.

        It may wait for the process that tries grammars. It has its own threads, so that no other request waits for it.
        """
        self.loop.check_open()
        return await self._constraining.run(work)

    async def call(self, work: Work[_Found]) -> _Found:
        """Return the result of work on the loop's thread, as `Loop.call`. If cancelled, it ends at its next `yield`."""
        reply = self.loop.call(work, self.relay())
        await reply.wait_as_task()
        return reply.found

    async def run(self, function: Callable[..., _Found], *arguments: Any) -> _Found:
        """Return `function(*arguments)`, called on the loop's thread between two steps."""
        return await self.call(once(function, *arguments))

    async def answer(self, sequence: Sequence) -> GenerationResult:
        """Return the whole answer. The event loop is called only at its end."""
        return await AsyncStream(self._open(sequence)).result()

    def stream(self, prepare: Callable[[Check], Sequence] | Sequence) -> AsyncStream:
        """Return a stream of a sequence. A sequence may also be prepared on a thread when the stream is first read."""
        if isinstance(prepare, Sequence):
            return AsyncStream(self._open(prepare))

        async def prepared() -> Answer:
            return self._open(await self.prepare(prepare))

        return AsyncStream(prepared)

    def close(self) -> None:
        """Let each thread end after the request that it prepares."""
        self._preparing.close()
        self._constraining.close()

    def _open(self, sequence: Sequence) -> Answer:
        return Answer(self.loop, sequence, Waiters(self.relay()))

    def relay(self) -> Relay:
        """Return the relay of the running event loop."""
        running = asyncio.get_running_loop()
        if (relay := self._relays.get(running)) is None:
            relay = self._relays[running] = Relay(running)
        return relay
