"""`Stream` and `AsyncStream`: the pieces of an answer, for a thread and for a task. Both are views of a `Mailbox`."""

import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NoReturn, Self, SupportsIndex, final

from infer.engine.requests.loop import Loop
from infer.engine.requests.mailbox import Mailbox
from infer.engine.step.sequence import Lease, Sequence
from infer.errors import InferError, InvalidRequestError
from infer.outputs import GenerationResult, Piece

OnToken = Callable[[int, str], bool | None]
OnPrefill = Callable[[int, int], None]
Prepare = Callable[[], Awaitable[Sequence]]
_NOT_COPIED = "a stream cannot be copied or pickled: it is a running answer"


@final
class OpenAnswer:
    """An answer that is being computed. One reader reads it, and others may end it. It is computed after `begin`.

    At its end, it is cut to the pieces that its reader took, and `on_end` is called. `on_end` may be called several
    times, by each thread that sees the end.
    """

    def __init__(
        self,
        loop: Loop,
        sequence: Sequence,
        mailbox: Mailbox,
        lease: Lease | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop, self.sequence, self.mailbox = loop, sequence, mailbox
        self._lease, self._on_end = lease, on_end
        self._changing = threading.RLock()  # held briefly; a signal's handler may acquire it again
        self._has_begun = False

    @property
    def is_closed(self) -> bool:
        """True if its reader gets no further pieces."""
        return self.mailbox.is_closed or self.mailbox.is_read

    def begin(self, *, only_end: bool = False) -> None:
        """Submit the sequence if that is not done. Raises ClosedError, and InferError if the loop accepts no more."""
        self.loop.check_process()
        with self._changing:
            if self._has_begun or self.mailbox.is_closed:
                return
            self.mailbox.only_end = only_end
            self._has_begun = True  # first, because an exception may be raised before `submit` returns
            try:
                self.loop.submit(self.sequence, self.mailbox, self._lease)
            except InferError:
                self._has_begun = False
                raise

    def cancel(self) -> None:
        """Give the reader no further pieces, and end the sequence. Does not wait. For any thread and for finalizers."""
        self.mailbox.close()
        self.loop.cancel(self.sequence, self.mailbox)

    def poll_cancel(self) -> None:
        """Cancel if the event of its request is set."""
        event = self.sequence.request.cancel
        if event is not None and event.is_set():
            self.cancel()

    def take(self, most: int | None) -> list[Piece] | None:
        """Return up to `most` arrived pieces: an empty list at the end of the answer, None if more may arrive.

        Raises EngineFailedError instead of the end if the engine's failure ended the answer.
        """
        self.poll_cancel()
        has_ended = self.mailbox.has_ended  # read before the pieces, because none arrive after the end
        found = self.mailbox.take(most)
        if not found and has_ended:
            self.loop.check_answer(self.sequence)
        return found if found or has_ended or self.mailbox.is_closed else None

    def result(self) -> GenerationResult:
        """Return the finished answer. Raises EngineFailedError if the engine's failure ended it."""
        self.settle()
        self.loop.check_answer(self.sequence)
        return self.sequence.result()

    def close(self) -> None:
        """Cancel, and wait until the sequence has ended. On the loop's own thread and in a fork, do not wait."""
        self.cancel()
        if self.loop.can_be_awaited:
            self.mailbox.wait_for_end()
            self.settle()

    async def close_as_task(self) -> None:
        self.cancel()
        await self.mailbox.wait_for_end_as_task()
        self.settle()

    def settle(self) -> None:
        """Cut a finished answer to the pieces that were taken."""
        with self._changing:
            self.sequence.keep(self.mailbox.num_taken)
            self._on_end()


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

    def __init__(self, answer: OpenAnswer, on_prefill: OnPrefill | None = None) -> None:
        self.answer, self._on_prefill = answer, on_prefill
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
        return f"Stream({state or 'open'}, {answer.mailbox.num_taken} tokens)"

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
            if on_token is None and self._on_prefill is None and answer.loop.is_open and not answer.is_closed:
                answer.begin(only_end=True)
            for piece in self:
                if on_token is not None and on_token(piece.token_id, piece.text) is False:
                    self.cancel()
        except BaseException:
            if self._reader is None:  # otherwise another thread reads the answer
                self.close()
            raise
        return answer.result()

    def _next(self) -> Piece:
        answer, mailbox = self.answer, self.answer.mailbox
        if not answer.loop.is_open:
            answer.close()  # the model was closed, so an answer that has not begun ends, too
        elif not mailbox.is_closed:
            answer.begin()
        while (found := answer.take(1)) is None:
            mailbox.wait(self._num_shown)
            self._show_prefill()
        if not found:
            raise StopIteration
        return found[0]

    def _show_prefill(self) -> None:
        sequence, num_prefilled = self.answer.sequence, self.answer.mailbox.num_prefilled
        if self._on_prefill is None or num_prefilled <= self._num_shown:
            return
        self._num_shown = num_prefilled
        if num_prefilled < sequence.num_prompt_tokens:
            self._on_prefill(num_prefilled, sequence.num_prompt_tokens)


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

    def __init__(self, prepare: Prepare, open_answer: Callable[[Sequence], OpenAnswer]) -> None:
        """Begin with `prepare`, which makes the sequence. `open_answer` is called on the reader's event loop."""
        self._prepare, self._open = prepare, open_answer
        self._answer: OpenAnswer | None = None
        self._is_read = self._is_cancelled = False

    @classmethod
    def of(cls, answer: OpenAnswer) -> Self:
        """Return a stream of an answer that is already prepared.

        Args:
            answer: The answer.
        """

        async def prepared() -> Sequence:
            return answer.sequence

        stream = cls(prepared, lambda sequence: answer)
        stream._take_up(answer)
        return stream

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
        return f"AsyncStream({'not begun' if answer is None else f'{answer.mailbox.num_taken} tokens'})"

    @property
    def sequence(self) -> Sequence:
        """The sequence that is answered. Raises InvalidRequestError before `begin`, unless it was prepared already."""
        if self._answer is None:
            raise InvalidRequestError("the stream has not begun: await its begin()")
        return self._answer.sequence

    def cancel(self) -> None:
        """End the answer without waiting, as `Stream.cancel` does. Any thread may call it.

        Examples:
            >>> stream = await AsyncLLM(llm).stream("Once upon a time").begin()
            >>> stream.cancel()
            >>> (await stream.result()).finish_reason
            'abort'
        """
        self._is_cancelled = True
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
        async with _Reading(self):
            answer = await self._begun(only_end=True)
            mailbox = answer.mailbox
            answer.poll_cancel()
            if not mailbox.only_end and not mailbox.is_closed:
                mailbox.skip_to_end()
            await mailbox.wait_for_end_or_close()
            answer.poll_cancel()
            mailbox.take()
            await mailbox.wait_for_end_as_task()
            return answer.result()

    def _take_up(self, answer: OpenAnswer) -> None:
        self._answer = answer
        weakref.finalize(self, answer.cancel).atexit = False

    async def _begun(self, *, only_end: bool = False) -> OpenAnswer:
        if self._answer is None:
            self._take_up(self._open(await self._prepare()))
        assert self._answer is not None
        if self._is_cancelled:
            self._answer.cancel()
        else:
            self._answer.begin(only_end=only_end)
        return self._answer

    async def _take(self, most: int | None) -> list[Piece]:
        async with _Reading(self):
            answer = await self._begun()
            while (found := answer.take(most)) is None:
                await answer.mailbox.wait_as_task()
            return found


@final
class _Reading:
    """Lets one task read a stream at a time. If the task is cancelled or fails, the answer ends."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    async def __aenter__(self) -> None:
        if self._stream._is_read:
            raise InvalidRequestError("another task is reading the stream: only one may read it at a time")
        self._stream._is_read = True

    async def __aexit__(self, kind: object, *rest: object) -> None:
        self._stream._is_read = False
        if kind is not None:
            self._stream.cancel()
