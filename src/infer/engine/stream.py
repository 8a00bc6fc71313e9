"""`Stream`: an answer as it comes, read by one thread at a time and closed by any; `generate` reads a whole one.

What an answer holds is given back once: by the thread that reads, where one does, else by who closes. Where a signal's
exception came in between, by whoever closes next, or when the stream is dropped.
"""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, NoReturn, Self, SupportsIndex, final

import torch

from infer.engine.admission import begin
from infer.engine.decode import Batch, OnPrefill, OnToken, decode
from infer.engine.running import Running
from infer.errors import InvalidRequestError
from infer.grammar import Constraint
from infer.model.transformer import Transformer
from infer.outputs import GenerationResult, Piece
from infer.runner.context import PREFILL_CHUNK, CachedContext, Context, RecomputedContext
from infer.sampling_params import SamplingParams
from infer.system.locks import long_lock
from infer.tokenizer import Tokenizer

_LOOK_SECONDS = 0.001  # between two looks at whether the thread that reads has left its step


@final
class Stream(Iterator[Piece]):
    """An answer as it comes: iterate for its pieces, then read `result`. `with` closes it at its end.

    One thread reads at a time; `cancel` and `close` are for any thread.
    """

    def __init__(
        self,
        running: Running,
        batch: Batch,
        *,
        on_prefill: OnPrefill | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called when the loop has ended; again where an exception left it, of which it must make sense."""
        self._running = running
        self._result: GenerationResult | None = None
        self.reading = Reading(running, on_end)
        self.reading.pieces = decode(running, batch, None if on_prefill is None else self.reading.calling(on_prefill))
        weakref.finalize(self, self.reading.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return self.reading.next()

    def __aiter__(self) -> Self:
        """For `async for`: each step runs in another thread."""
        return self

    async def __anext__(self) -> Piece:
        piece = await asyncio.to_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a stream cannot be copied or pickled: it is an answer under way")

    def __repr__(self) -> str:
        generation = self._running.generation
        state = generation.finish_reason or ("closed" if self.reading.is_closed else "open")
        return f"Stream({state}, {len(generation.token_ids)} tokens)"

    def cancel(self) -> None:
        """No further token: finish_reason is "abort", unless the answer had already ended. For any thread."""
        self._running.cancel()

    def close(self) -> None:
        """End the answer and give back what it held; happens by itself at its end and when it is dropped.

        For any thread. Where another thread is within a step, waits for it to leave: it gets no further piece. Within a
        callback of the step itself (`on_prefill`), what is held is given back once the callback has returned.
        """
        self.reading.close()

    @property
    def result(self) -> GenerationResult:
        """How the answer ended: "abort" where it was closed before its end. Runs to the end first, also after a
        `break`: `close()` before it for what there is.
        """
        return self.run()

    def run(self, on_token: OnToken | None = None) -> GenerationResult:
        try:
            for piece in self:
                if on_token is not None and on_token(piece.token_id, piece.text) is False:
                    self.cancel()
        except BaseException:
            self.close()
            raise
        if self._result is None:
            self._result = self._running.result()
        return self._result


class _Reader(NamedTuple):
    """The thread that is within a step, and its process. Told from others by identity."""

    process: int
    thread: int


@final
class Reading:
    """Who is within a step, and whether what the answer held was given back. `pieces` is the loop.

    `is_closed`: no further piece comes, as it was closed, read to its end, or left by an exception.
    """

    pieces: Generator[Piece, None, None]

    def __init__(self, running: Running, on_end: Callable[[], None]) -> None:
        self._running = running
        self._on_end: Callable[[], None] | None = on_end
        self._changing = long_lock()
        self._reader: _Reader | None = None
        self._is_calling = False  # whether the step is in a callback, of which nobody knows how long it takes
        self._is_ending = False
        self.is_closed = False

    def next(self) -> Piece:
        reader = _Reader(os.getpid(), threading.get_ident())
        if self._reader == reader:
            raise InvalidRequestError("a stream cannot be read by a callback of its own step")
        try:
            with self._changing:
                if self._reader is not None:
                    raise InvalidRequestError("another thread is reading the stream: one reads at a time")
                if self.is_closed:
                    raise StopIteration
                self._reader = reader
            return next(self.pieces)
        except BaseException:
            if self._reader is reader:
                self.is_closed = True
            raise
        finally:
            if self._reader is reader:
                self._reader = None  # first, for no signal's exception can come before it
                if self.is_closed:
                    self._end()

    def close(self) -> None:
        self.is_closed = True
        self._running.cancel()
        while self._must_wait():
            time.sleep(_LOOK_SECONDS)
        self._end()

    def calling(self, callback: OnPrefill) -> OnPrefill:
        def call(done: int, total: int) -> None:
            try:
                self._is_calling = True
                callback(done, total)
            finally:
                self._is_calling = False

        return call

    def _must_wait(self) -> bool:
        """For another thread of this process to leave its step; a child that was forked has none of its parent's."""
        reader = self._reader
        if reader is None or self._is_calling:
            return False
        return reader.process == os.getpid() and reader.thread != threading.get_ident()

    def _end(self) -> None:
        """Unless somebody is within a step, who then does. The loop first: what it commits belongs to this answer."""
        with self._changing:
            if self._reader is not None or self._on_end is None or self._is_ending:
                return
            try:
                self._is_ending = True
                try:
                    self.pieces.close()
                finally:
                    self._running.generation.cancel()
                    self._on_end()
                    self._on_end = None
            finally:
                self._is_ending = False


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    device: str | torch.device | None = None,
    use_cache: bool = True,
    on_token: OnToken | None = None,
    cancel: threading.Event | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    chain: int | None = None,
    capture: bool = True,
    constraint: Constraint | None = None,
    num_draft_tokens: int = 0,
) -> GenerationResult:
    """Generate from a prompt of ids, with the parameters exactly as given.

    `on_token(token_id, text)` sees every token as it comes; returning False cancels. `use_cache=False` runs the whole
    sequence again for each token, `capture=False` runs its ops one by one: both slower, with the same tokens, as with
    any `prefill_chunk`, `chain` and `num_draft_tokens`. `device`, where given, must be the model's.
    """
    if device is not None and torch.device(device).type != model.device.type:
        raise InvalidRequestError(f"device={device} but the model lies on {model.device}: load it there")
    generation = begin(model, tokenizer, prompt_token_ids, params)
    context: Context = RecomputedContext(model)
    if use_cache:
        context = CachedContext(model, generation.max_tokens, capture=capture)
    batch = Batch(context, model.device, prefill_chunk=prefill_chunk, chain=chain)
    running = Running(generation, constraint=constraint, num_draft_tokens=num_draft_tokens, cancel=cancel)
    return Stream(running, batch).run(on_token)
