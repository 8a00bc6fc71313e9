"""`Stream`: an answer as it comes, read by one thread at a time and closed by any."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, NoReturn, Self, SupportsIndex, final

from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.errors import InferError, InvalidRequestError
from infer.outputs import GenerationResult, Piece
from infer.system.locks import long_lock

OnToken = Callable[[int, str], bool | None]
OnPrefill = Callable[[int, int], None]


@final
class Stream(Iterator[Piece]):
    """An answer as it comes: iterate for its pieces, then read `result`. `with` closes it at its end.

    One thread reads at a time; `cancel` and `close` are for any thread.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        *,
        on_prefill: OnPrefill | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called when the answer has ended, again where an exception left it."""
        self.sequence = sequence
        self.reading = Reading(engine, sequence, on_prefill, on_end)
        weakref.finalize(self, _close_dropped, self.reading)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return self.reading.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a stream cannot be copied or pickled: it is an answer under way")

    def __repr__(self) -> str:
        state = self.sequence.finish_reason if self.reading.is_closed else None
        return f"Stream({state or 'open'}, {self.sequence.num_read} tokens)"

    def cancel(self) -> None:
        """No further token: finish_reason is "abort", unless the answer had already ended. For any thread."""
        self.reading.cancel()

    def close(self) -> None:
        """End the answer and give back what it held; happens by itself at its end and when it is dropped.

        For any thread. Where a step is under way, waits for its end: a thread that reads gets no further piece.
        """
        self.reading.close()

    @property
    def result(self) -> GenerationResult:
        """How the answer ended: "abort" where it was closed before its end. Runs to the end first, also after a
        `break`: `close()` before it for what there is.
        """
        return self.run()

    def run(self, on_token: OnToken | None = None) -> GenerationResult:
        """Read to the end. `on_token(token_id, text)` sees each token and cancels by returning False."""
        try:
            self.sequence.runs_ahead, self.sequence.is_streamed = True, on_token is not None
            for piece in self:
                if on_token is not None and on_token(piece.token_id, piece.text) is False:
                    self.cancel()
        except BaseException:
            self.close()
            raise
        return self.sequence.result()


def _close_dropped(reading: "Reading") -> None:
    """Close the reading of a stream that nobody holds. A model that has failed has nothing to be given back."""
    with suppress(InferError):
        reading.close()


class _Reader(NamedTuple):
    """The thread that is reading, and its process. Told from others by identity."""

    process: int
    thread: int


@final
class Reading:
    """What is read of a sequence, and whether its end was seen to.

    `is_closed`: no further piece comes, as it was closed, read to its end, or left by an exception.
    """

    def __init__(
        self, engine: Engine, sequence: Sequence, on_prefill: OnPrefill | None, on_end: Callable[[], None]
    ) -> None:
        self._engine, self._sequence, self._on_prefill = engine, sequence, on_prefill
        self._on_end: Callable[[], None] | None = on_end
        self._changing = long_lock()
        self._reader: _Reader | None = None
        self._num_shown = 0  # tokens of the prompt that `on_prefill` was told of
        self._is_ending = False
        self.is_closed = self._is_cancelled = False

    def next(self) -> Piece:
        reader = _Reader(os.getpid(), threading.get_ident())
        if self._reader == reader:
            raise InvalidRequestError("a stream cannot be read by a callback of its own step")
        try:
            with self._changing:
                if self._reader is not None:
                    raise InvalidRequestError("another thread is reading the stream: one reads at a time")
                self._reader = reader
            return self._next()
        except BaseException:
            if self._reader is reader:
                self.is_closed = True
            raise
        finally:
            if self._reader is reader:
                self._reader = None  # first, for no signal's exception can come before it
                if self.is_closed:
                    self._end()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._sequence.cancel()

    def close(self) -> None:
        self.is_closed = True
        self._engine.cancel(self._sequence)
        self._end()

    def _next(self) -> Piece:
        sequence = self._sequence
        while True:
            self._poll_cancel()
            has_ended = sequence.has_ended  # before its pieces are looked at: there come no more
            with self._changing:
                if self.is_closed or self._is_cancelled:
                    raise StopIteration
                if sequence.num_read < len(sequence.pieces):
                    piece = sequence.pieces[sequence.num_read]
                    sequence.num_read += 1
                    return piece
                if has_ended:
                    raise StopIteration
            self._engine.advance(sequence)
            self._show_prefill()

    def _poll_cancel(self) -> None:
        event = self._sequence.request.cancel
        if event is not None and event.is_set():
            self.cancel()

    def _show_prefill(self) -> None:
        sequence = self._sequence
        if self._on_prefill is None or sequence.pieces or sequence.is_finished:
            return
        if sequence.num_computed > self._num_shown:
            self._num_shown = sequence.num_computed
            self._on_prefill(self._num_shown, sequence.num_prompt_tokens)

    def _end(self) -> None:
        """Cut the answer to what was read. Inside a step of this thread, leave that to a later call."""
        if self._engine.is_stepping_here:
            return
        with self._changing:
            if self._on_end is None or self._is_ending:
                return
            try:
                self._is_ending = True
                self._engine.cancel(self._sequence)
                self._sequence.keep(self._sequence.num_read)
                self._on_end()
                self._on_end = None
            finally:
                self._is_ending = False
