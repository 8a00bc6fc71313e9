"""`Stream` and `AsyncStream`: views of an `Answer`, for a thread and for a task."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Self, SupportsIndex, final

from infer.engine.requests.answer import Answer
from infer.engine.step.sequence import Sequence
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, Piece

OnToken = Callable[[int, str], bool | None]
OnPrefill = Callable[[int, int], None]
Prepare = Callable[[], Awaitable[Answer]]
_NOT_COPIED = "a stream cannot be copied or pickled: it is a running answer"


@final
class Stream(Iterator[Piece]):
    """The pieces of an answer, as they are computed. Iterate over them, then read `result`.

    One thread reads at a time. Any thread may call `cancel` and `close`. The end of `with` closes the stream.

    Examples:
        >>> with llm.stream("The capital of France is", temperature=0, max_new_tokens=2) as stream:
        ...     text = "".join(piece.text for piece in stream)
        >>> text, stream.result.finish_reason
        (' Paris.', 'length')
    """

    def __init__(self, answer: Answer, on_prefill: OnPrefill | None = None) -> None:
        self.answer, self._on_prefill = answer, on_prefill
        answer.shows_prefill = on_prefill is not None
        self._num_shown = 0  # tokens of the prompt that `on_prefill` knows of
        self._entering = threading.RLock()
        self._reader: object | None = None  # the call that is reading
        weakref.finalize(self, answer.cancel).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        reader = object()
        try:
            with self._entering:
                if self._reader is not None:
                    raise InvalidRequestError(
                        "the stream is being read: only one thread may read it at a time, and its own callbacks may not"
                    )
                self._reader = reader
            return self._next()
        except StopIteration:
            self.answer.close()
            raise
        except BaseException:
            if self._reader is reader:
                self.answer.abandon()
                self.answer.close()
            raise
        finally:
            if self._reader is reader:
                self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(_NOT_COPIED)

    def __repr__(self) -> str:
        answer = self.answer
        state = answer.sequence.finish_reason if answer.is_closed else None
        return f"Stream({state or 'open'}, {answer.num_taken} tokens)"

    @property
    def sequence(self) -> Sequence:
        """The sequence in the engine, for servers."""
        return self.answer.sequence

    def cancel(self) -> None:
        """End the answer without waiting. Any thread may call it.

        The reader gets no further piece. `finish_reason` is "abort", unless the answer was already read to its end.

        Examples:
            >>> stream = llm.stream("Once upon a time")
            >>> piece = next(stream)
            >>> stream.cancel()
            >>> stream.run().finish_reason
            'abort'
        """
        self.answer.cancel()

    def close(self) -> None:
        """End the answer, wait for the current step, and free the answer's slot. Any thread may call it.

        The reader gets no further piece. The end of the answer, and dropping the stream, close it too.

        Examples:
            >>> stream = llm.stream("Once upon a time")
            >>> piece = next(stream)
            >>> stream.close()
        """
        self.answer.close()

    @property
    def result(self) -> GenerationResult:
        """The whole answer. Reading it runs the answer to its end first, also after a `break`.

        After `close` it is the part that was read, with finish_reason "abort".
        """
        return self.run()

    def run(self, on_token: OnToken | None = None) -> GenerationResult:
        """Read the stream to its end and return the result.

        Args:
            on_token: Called as `on_token(token_id, text)` with each token. Returns False to cancel the answer.

        Raises:
            InvalidRequestError: Another thread is reading the stream.
            ClosedError: The model is closed.
            EngineFailedError: The engine failed before the answer was complete.

        Examples:
            >>> llm.stream("The capital of France is", temperature=0, max_new_tokens=2).run().text
            ' Paris.'
        """
        answer = self.answer
        try:
            with self._entering:  # a refused second reader does not silence the first
                waits = on_token is None and self._on_prefill is None and self._reader is None
                if waits and answer.loop.is_open and not answer.is_closed:
                    answer.begin(only_end=True)
            for piece in self:
                if on_token is not None and on_token(piece.token_id, piece.text) is False:
                    self.cancel()
        except BaseException:
            if self._reader is None:  # otherwise another thread reads the answer
                answer.abandon()
                self.close()
            raise
        return answer.result()

    def _next(self) -> Piece:
        answer = self.answer
        if not answer.loop.is_open:
            answer.close()  # the model was closed, so an answer that has not begun ends, too
        elif not answer.is_dropped:
            answer.begin()
        while (pieces := answer.take(1)) is None:
            answer.wait(self._num_shown)
            if self._on_prefill is not None:
                self._show_prefill(self._on_prefill)
        if not pieces:
            raise StopIteration
        return pieces[0]

    def _show_prefill(self, on_prefill: OnPrefill) -> None:
        num_prompt_tokens, num_prefilled = self.answer.sequence.num_prompt_tokens, self.answer.num_prefilled
        if num_prefilled > self._num_shown:
            self._num_shown = num_prefilled
            if num_prefilled < num_prompt_tokens:
                on_prefill(num_prefilled, num_prompt_tokens)


@final
class AsyncStream(AsyncIterator[Piece]):
    """The pieces of an answer for a task. Iterate with `async for`, then await `result()`.

    One task reads at a time. Any thread may call `cancel`. The end of `async with`, leaving the loop, and cancelling
    the task free the slot after the current step.

    Examples:
        >>> async for piece in AsyncLLM(llm).stream("The capital of France is", temperature=0, max_new_tokens=2):
        ...     print(repr(piece.text))
        ' Paris'
        '.'
    """

    def __init__(self, prepare: Answer | Prepare) -> None:
        """Begin with an answer, or with a function that prepares it, which is called on the reader's event loop."""
        self._answer: Answer | None = None
        self._is_read = self._is_dropped = False
        self._preparing = asyncio.Lock()
        if isinstance(prepare, Answer):
            self._take_up(prepare)
        else:
            self._prepare = prepare

    @classmethod
    def of(cls, answer: Answer) -> Self:
        """Return a stream of an answer that is already prepared.

        Args:
            answer: The answer.
        """
        return cls(answer)

    async def begin(self) -> Self:
        """Prepare and submit the request, and return the stream. Reading the stream also does this.

        Raises:
            InvalidRequestError: The request is refused.
            ClosedError: The model is closed.
            InferError: The engine has failed.

        Examples:
            >>> stream = AsyncLLM(llm).stream("Once upon a time", max_new_tokens=2)
            >>> stream = await stream.begin()  # raises if the request is refused
            >>> await stream.close()
        """
        await self._begun()
        return self

    async def __anext__(self) -> Piece:
        pieces = await self._take(1)
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    async def take(self) -> list[Piece]:
        """Wait for a piece, and return all unread pieces. The list is empty at the end of the answer.

        Examples:
            >>> async with AsyncLLM(llm).stream("The capital of France is", temperature=0, max_new_tokens=2) as stream:
            ...     pieces = await stream.take()  # at least one, and all that have arrived
            >>> len(pieces) >= 1
            True
        """
        return await self._take(None)

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(_NOT_COPIED)

    def __repr__(self) -> str:
        answer = self._answer
        return f"AsyncStream({'not begun' if answer is None else f'{answer.num_taken} tokens'})"

    @property
    def answer(self) -> Answer:
        """The running answer. Raises InvalidRequestError before `begin`, unless it was prepared already."""
        if self._answer is None:
            raise InvalidRequestError("the stream has not begun: await its begin()")
        return self._answer

    @property
    def sequence(self) -> Sequence:
        """The sequence that is answered. Raises as `answer`."""
        return self.answer.sequence

    def cancel(self) -> None:
        """End the answer without waiting, as `Stream.cancel` does. Any thread may call it.

        Examples:
            >>> stream = await AsyncLLM(llm).stream("Once upon a time").begin()
            >>> stream.cancel()
            >>> (await stream.result()).finish_reason
            'abort'
        """
        self._is_dropped = True
        if self._answer is not None:
            self._answer.cancel()

    async def close(self) -> None:
        """End the answer, and wait until its slot is free.

        Examples:
            >>> stream = await AsyncLLM(llm).stream("Once upon a time").begin()
            >>> await stream.close()
        """
        self.cancel()
        if self._answer is not None:
            await self._answer.close_as_task()

    async def result(self) -> GenerationResult:
        """Run the answer to its end and return it. After `close` or `cancel`, return the part that was read.

        Examples:
            >>> stream = AsyncLLM(llm).stream("The capital of France is", temperature=0, max_new_tokens=2)
            >>> (await stream.result()).text
            ' Paris.'
        """
        with self._reading():
            return await (await self._begun(only_end=True)).result_as_task()

    def _take_up(self, answer: Answer) -> None:
        self._answer = answer
        weakref.finalize(self, answer.cancel).atexit = False

    async def _begun(self, *, only_end: bool = False) -> Answer:
        async with self._preparing:  # two tasks may begin the stream
            if self._answer is None:
                self._take_up(await self._prepare())
        assert self._answer is not None
        if self._is_dropped:
            self._answer.cancel()
        else:
            self._answer.begin(only_end=only_end)
        return self._answer

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let one task read at a time. If the task is cancelled or fails, the answer ends."""
        if self._is_read:
            raise InvalidRequestError("another task is reading the stream: only one may read it at a time")
        self._is_read = True
        try:
            yield
        except BaseException:
            self._is_dropped = True
            if self._answer is not None:
                self._answer.abandon()
            raise
        finally:
            self._is_read = False

    async def _take(self, most: int | None) -> list[Piece]:
        with self._reading():
            return await (await self._begun()).take_as_task(most)
