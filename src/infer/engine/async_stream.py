"""Answers for event loops: requests are prepared in a few threads, the service runs the steps, and a loop is called at
most once a step, for all its streams together.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, Self, SupportsIndex, TypeVar, final

from infer.engine.engine import Output
from infer.engine.sequence import Sequence
from infer.engine.service import Service
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, Piece
from infer.runner.closing import closed

Check = Callable[[], None]
Prepare = Callable[[Check], Sequence]  # calls `check`, which may raise, between its stages
Begin = Prepare | Sequence  # or what was prepared already
NUM_PREPARING = 4
NUM_CONSTRAINING = 16  # most of them wait
_Found = TypeVar("_Found")
_Read = TypeVar("_Read")


class _NotAwaitedError(Exception):
    """Raised in a thread that prepares a request for which nobody waits any more."""


@final
class _Loop:
    """What the service tells one event loop. It is called once for all that came since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = set[Sequence]()
        self._of_ends = set[Sequence]()  # of which nobody reads the pieces as they come
        self._is_called = False
        self._waiting: dict[Sequence, set[asyncio.Future[None]]] = {}

    async def wait(self, sequence: Sequence) -> None:
        """Wait until the service reports the sequence, unless it has ended. For any number of tasks."""
        if sequence.has_ended:
            return
        future = self._loop.create_future()
        futures = self._waiting.setdefault(sequence, set())
        futures.add(future)
        try:
            await future
        finally:
            futures.discard(future)
            if not futures and self._waiting.get(sequence) is futures:
                del self._waiting[sequence]

    async def wait_for_end(self, sequence: Sequence) -> None:
        """Whatever it gives meanwhile, the loop is not called."""
        self._of_ends.add(sequence)
        sequence.is_streamed = False
        try:
            while not sequence.has_ended:
                await self.wait(sequence)
        finally:
            self._of_ends.discard(sequence)
            sequence.is_streamed = True

    # On the thread of the service

    def tell(self, outputs: Items[Output]) -> None:
        """Raises RuntimeError where the loop is closed."""
        sequences = [output.sequence for output in outputs]
        self._arrived.update([each for each in sequences if each.has_ended or each not in self._of_ends])
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
            for future in self._waiting.get(self._arrived.pop(), ()):
                if not future.done():
                    future.set_result(None)


class _Begun(NamedTuple):
    """A sequence that was submitted, and the loop whose tasks read it."""

    sequence: Sequence
    loop: _Loop


@final
class _Threads:
    """A few threads for what would keep a loop waiting. They start when they are needed, in each process its own."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._executor: ThreadPoolExecutor | None = None
        self._owner = 0  # the process that has its threads
        self._is_closed = False

    async def run(self, work: Callable[[Check], _Found]) -> _Found:
        """Away from the loop. Cancelled, it ends before its next stage. Raises ClosedError after `close`."""
        if self._is_closed:
            raise closed()
        if self._executor is None or self._owner != os.getpid():
            self._owner, self._executor = os.getpid(), ThreadPoolExecutor(self._count, self._name)
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
        """Each ends after what it does."""
        self._is_closed = True
        if self._executor is not None and self._owner == os.getpid():
            self._executor.shutdown(wait=False)
        self._executor = None


@final
class AsyncAnswers:
    """Answers of one service for any number of event loops."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loops = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Loop]()  # while they have answers
        self._preparing = _Threads(NUM_PREPARING, "infer-prepare")
        self._constraining = _Threads(NUM_CONSTRAINING, "infer-constrain")
        self._computing = _Threads(1, "infer-compute")

    async def prepare(self, prepare: Callable[[Check], _Found]) -> _Found:
        """In a thread, as `_Threads.run`."""
        return await self._preparing.run(prepare)

    async def constrain(self, prepare: Callable[[Check], _Found]) -> _Found:
        """The same for a request with a grammar or tools, which waits for the process that tries them: no other request
        waits behind it.
        """
        return await self._constraining.run(prepare)

    async def compute(self, compute: Callable[[Check], _Found]) -> _Found:
        """The same for what computes beside the steps: one after the other."""
        return await self._computing.run(compute)

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

    def stream(self, begin: Begin) -> "AsyncStream":
        return AsyncStream(self, begin)

    def submit(self, sequence: Sequence) -> _Begun:
        """For tasks of the running loop, which is told of each step."""
        loop = self._loop()
        self._service.submit(sequence, loop.tell)
        return _Begun(sequence, loop)

    def close(self) -> None:
        """The threads end, each after what it prepares."""
        self._preparing.close()
        self._constraining.close()
        self._computing.close()

    def _loop(self) -> _Loop:
        running = asyncio.get_running_loop()
        return self._loops.setdefault(running, _Loop(running))


@final
class AsyncStream(AsyncIterator[Piece]):
    """An answer as it comes: `async for` its pieces, then await `result()`. `async with` closes it at its end, and so
    does dropping it: to leave the loop, or to cancel its task, frees its slot when the step under way has ended.

    One task reads at a time. `cancel` is for any thread.
    """

    def __init__(self, answers: AsyncAnswers, begin: Begin) -> None:
        self._answers, self._to_begin = answers, begin
        self._begun: _Begun | None = None
        self._is_read = self._is_cancelled = False

    async def begin(self) -> Self:
        """Prepare and submit the request, which reading does by itself. Raises InvalidRequestError where it is refused,
        ClosedError and InferError where the model takes no requests.
        """
        await self._begin()
        return self

    async def __anext__(self) -> Piece:
        pieces = await self._next(1)
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    async def take(self) -> list[Piece]:
        """All the pieces that have come and were not read, at least one; none at the end of the answer."""
        return await self._next(None)

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
        """What is answered. Raises InvalidRequestError before `begin`, unless it was prepared already."""
        if self._begun is not None:
            return self._begun.sequence
        if isinstance(self._to_begin, Sequence):
            return self._to_begin
        raise InvalidRequestError("the stream has not begun: await its begin()")

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
        begun = await self._begin()
        await self._alone(self._run_out(*begun))
        if self._is_cancelled:
            await _end(begun)
        return begun.sequence.result()

    async def _begin(self) -> _Begun:
        if self._begun is None:
            begin = self._to_begin
            sequence = begin if isinstance(begin, Sequence) else await self._answers.prepare(begin)
            if self._is_cancelled:
                sequence.cancel()
            self._begun = self._answers.submit(sequence)
            weakref.finalize(self, sequence.cancel).atexit = False
        return self._begun

    async def _next(self, most: int | None) -> list[Piece]:
        return await self._alone(self._pieces(most))

    async def _alone(self, reading: Coroutine[Any, Any, _Read]) -> _Read:
        if self._is_read:
            reading.close()
            raise InvalidRequestError("another task is reading the stream: one reads at a time")
        self._is_read = True
        try:
            return await reading
        except BaseException:  # such as the task's end
            self.cancel()
            raise
        finally:
            self._is_read = False

    async def _pieces(self, most: int | None) -> list[Piece]:
        """At most so many, of those that have come."""
        sequence, loop = await self._begin()
        while True:
            has_ended = sequence.has_ended  # before its pieces are looked at: there come no more
            if self._has_been_cancelled(sequence):
                return []
            if sequence.num_read < len(sequence.pieces):
                read = sequence.num_read
                found = sequence.pieces[read : None if most is None else read + most]
                sequence.num_read += len(found)
                return found
            if has_ended:
                return []
            await loop.wait(sequence)

    async def _run_out(self, sequence: Sequence, loop: _Loop) -> None:
        if not self._has_been_cancelled(sequence):
            await loop.wait_for_end(sequence)
        if not self._has_been_cancelled(sequence):
            sequence.num_read = len(sequence.pieces)

    def _has_been_cancelled(self, sequence: Sequence) -> bool:
        event = sequence.request.cancel
        if event is not None and event.is_set():
            self.cancel()
        return self._is_cancelled


async def _end(begun: _Begun) -> None:
    """Of a sequence that was cancelled: cut to what was read."""
    while not begun.sequence.has_ended:
        await begun.loop.wait(begun.sequence)
    begun.sequence.keep(begun.sequence.num_read)
