"""Answers for event loops: requests are prepared in a few threads, the service runs the steps, and a loop is called at
most once a step, for all its streams together.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn, Self, SupportsIndex, TypeVar, final

from infer.engine.engine import Output
from infer.engine.sequence import Sequence
from infer.engine.service import Service
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, Piece
from infer.runner.closing import closed

Check = Callable[[], None]
Prepare = Callable[[Check], Sequence]  # calls `check`, which may raise, between its stages
NUM_PREPARING = 4
_Prepared = TypeVar("_Prepared")


class _NotAwaitedError(Exception):
    """Raised in a thread that prepares a request for which nobody waits any more."""


@final
class _Loop:
    """What the service tells one event loop. It is called once for all that came since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = set[Sequence]()
        self._is_called = False
        self._waiting: dict[Sequence, asyncio.Future[None]] = {}

    async def wait(self, sequence: Sequence) -> None:
        """Until the service has told of the sequence, unless it has ended. One task waits for a sequence."""
        if not sequence.has_ended:
            self._waiting[sequence] = self._loop.create_future()
            try:
                await self._waiting[sequence]
            finally:
                del self._waiting[sequence]

    # On the thread of the service

    def tell(self, outputs: Items[Output]) -> None:
        """Raises RuntimeError where the loop is closed."""
        self._arrived.update([output.sequence for output in outputs])
        if self._arrived and not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._is_called = False
                raise

    def tell_ends(self, outputs: Items[Output]) -> None:
        self.tell([output for output in outputs if output.sequence.has_ended])

    def _wake(self) -> None:
        self._is_called = False  # first: what arrives now calls again
        while self._arrived:
            future = self._waiting.get(self._arrived.pop())
            if future is not None and not future.done():
                future.set_result(None)


class _Begun(NamedTuple):
    """A sequence that was submitted, and the loop whose tasks read it."""

    sequence: Sequence
    loop: _Loop


@final
class AsyncAnswers:
    """Answers of one service for any number of event loops."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loops = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Loop]()  # while they have answers
        self._executor: ThreadPoolExecutor | None = None
        self._owner = 0  # the process that has its threads
        self._is_closed = False

    async def prepare(self, prepare: Callable[[Check], _Prepared]) -> _Prepared:
        """Away from the loop. Cancelled, it ends before its next stage. Raises ClosedError after `close`."""
        if self._is_closed:
            raise closed()
        if self._executor is None or self._owner != os.getpid():
            self._owner, self._executor = os.getpid(), ThreadPoolExecutor(NUM_PREPARING, "infer-prepare")
        is_awaited = threading.Event()
        is_awaited.set()

        def check() -> None:
            if not is_awaited.is_set():
                raise _NotAwaitedError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, prepare, check)
        finally:
            is_awaited.clear()

    async def answer(self, sequence: Sequence) -> GenerationResult:
        """The whole of it; the loop is called at its end alone."""
        loop = self._loop()
        self._service.submit(sequence, loop.tell_ends)
        try:
            await loop.wait(sequence)
        except BaseException:
            self._service.cancel(sequence)
            raise
        return sequence.result()

    def stream(self, prepare: Prepare) -> "AsyncStream":
        return AsyncStream(self, prepare)

    def submit(self, sequence: Sequence) -> _Begun:
        """For tasks of the running loop, which is told of each step."""
        loop = self._loop()
        self._service.submit(sequence, loop.tell)
        return _Begun(sequence, loop)

    def close(self) -> None:
        """The threads end, each after what it prepares."""
        self._is_closed = True
        if self._executor is not None and self._owner == os.getpid():
            self._executor.shutdown(wait=False)
        self._executor = None

    def _loop(self) -> _Loop:
        running = asyncio.get_running_loop()
        return self._loops.setdefault(running, _Loop(running))


@final
class AsyncStream(AsyncIterator[Piece]):
    """An answer as it comes: `async for` its pieces, then await `result()`. `async with` closes it at its end, and so
    does dropping it: to leave the loop, or to cancel its task, frees its slot when the step under way has ended.

    One task reads at a time. `cancel` is for any thread.
    """

    def __init__(self, answers: AsyncAnswers, prepare: Prepare) -> None:
        self._answers, self._prepare = answers, prepare
        self._begun: _Begun | None = None
        self._is_read = self._is_cancelled = False

    async def begin(self) -> Self:
        """Prepare and submit the request, which reading does by itself. Raises InvalidRequestError where it is refused,
        ClosedError and InferError where the model takes no requests.
        """
        await self._begin()
        return self

    async def __anext__(self) -> Piece:
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a stream cannot be copied or pickled: it is an answer under way")

    def __repr__(self) -> str:
        return f"AsyncStream({'not begun' if self._begun is None else f'{self._begun.sequence.num_read} tokens'})"

    @property
    def sequence(self) -> Sequence:
        """What is answered. Raises InvalidRequestError before `begin`."""
        if self._begun is None:
            raise InvalidRequestError("the stream has not begun: await its begin()")
        return self._begun.sequence

    def cancel(self) -> None:
        """No further piece: finish_reason is "abort", unless the answer had been read to its end. For any thread."""
        self._is_cancelled = True
        if self._begun is not None:
            self._begun.sequence.cancel()

    async def close(self) -> None:
        """End the answer, and wait until it has given back what it held."""
        self.cancel()
        if self._begun is not None:
            await _end(self._begun)

    async def result(self) -> GenerationResult:
        """How the answer ended. Runs to the end first, also after a `break`; after `close` or `cancel` it is what was
        read.
        """
        while await self._next() is not None:
            pass
        begun = await self._begin()
        if self._is_cancelled:
            await _end(begun)
        return begun.sequence.result()

    async def _begin(self) -> _Begun:
        if self._begun is None:
            sequence = await self._answers.prepare(self._prepare)
            if self._is_cancelled:
                sequence.cancel()
            self._begun = self._answers.submit(sequence)
            weakref.finalize(self, sequence.cancel).atexit = False
        return self._begun

    async def _next(self) -> Piece | None:
        if self._is_read:
            raise InvalidRequestError("another task is reading the stream: one reads at a time")
        self._is_read = True
        try:
            return await self._piece(*await self._begin())
        except BaseException:  # such as the task's end
            self.cancel()
            raise
        finally:
            self._is_read = False

    async def _piece(self, sequence: Sequence, loop: _Loop) -> Piece | None:
        event = sequence.request.cancel
        while True:
            if event is not None and event.is_set():
                self.cancel()
            has_ended = sequence.has_ended  # before its pieces are looked at: there come no more
            if self._is_cancelled:
                return None
            if sequence.num_read < len(sequence.pieces):
                sequence.num_read += 1
                return sequence.pieces[sequence.num_read - 1]
            if has_ended:
                return None
            await loop.wait(sequence)


async def _end(begun: _Begun) -> None:
    """Of a sequence that was cancelled: cut to what was read."""
    while not begun.sequence.has_ended:
        await begun.loop.wait(begun.sequence)
    begun.sequence.keep(begun.sequence.num_read)
