"""`Session`: many turns over one cache, of which only what is new is run.

Two lists of ids: what was said, and what the cache holds; a turn keeps what its prompt and the cache share. So
whatever was done before, an answer is the one that a fresh model gives for the same ids.
"""

import copy
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from infer.admission import check_prompt
from infer.checkpoint.saved import read_session, write_session
from infer.context import CachedContext
from infer.decode import Batch, OnPrefill, OnToken, Stream
from infer.draft import NUM_DRAFT_TOKENS
from infer.errors import InferError, InvalidRequestError
from infer.model.transformer import Transformer
from infer.params import SamplingParams
from infer.results import GenerationResult
from infer.running import Running
from infer.said import Said
from infer.tokenizer import Tokenizer
from infer.tokenizer.alignment import common_length, keep_spelling

Message = Mapping[str, Any]


@runtime_checkable
class Begin(Protocol):
    """`LLM`'s check of a request."""

    def __call__(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        speculation: str | None,
        num_draft_tokens: int,
        cancel: threading.Event | None,
    ) -> Running: ...


@final
@dataclass(frozen=True)
class Host:
    """What a session has from the `LLM` that made it."""

    model: Transformer
    tokenizer: Tokenizer
    weights: str  # tells them from others
    begin: Begin
    take_context: Callable[[], CachedContext]
    give_back: Callable[[CachedContext], None]


@final
class Session:
    """Made by `LLM.session`. One answer at a time: while a stream is open, every other call is refused.

    A turn that fails, or is stopped before its first word, leaves what was said as it was.
    """

    def __init__(self, host: Host, said: Said) -> None:
        self._host, self._said = host, said
        self._context = host.take_context()
        self._cached: list[int] = []  # what the context's row holds, token by token
        self._busy = threading.Lock()
        weakref.finalize(self, host.give_back, self._context).atexit = False

    @property
    def token_ids(self) -> list[int]:
        """All that was said, in the template's own form."""
        return list(self._said.token_ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self._said.messages)

    @property
    def num_cached_tokens(self) -> int:
        """How many of `token_ids` a next turn need not run again."""
        return common_length(self._cached, self._said.token_ids)

    def send(
        self,
        message: str | Message,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> GenerationResult:
        """The answer to a further message; a text is the user's. Both are messages of the session from then on.

        `result.reused_tokens` of the prompt were in the cache, `result.dropped_tokens` of the cache are not in the
        prompt: where the template writes the past in another way than it was said, what follows is run again.
        """
        stream = self.stream(message, params, cancel=cancel, speculation=speculation, num_draft_tokens=num_draft_tokens)
        return _run(stream, on_token)

    def stream(
        self,
        message: str | Message,
        params: SamplingParams | None = None,
        *,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """`send`, piece by piece. A stream that is closed early keeps what was said, as a cancelled answer does."""
        with self._answering() as start:
            said = self._said
            if num_raw := said.num_raw_tokens:
                raise InvalidRequestError(
                    f"the last {num_raw} tokens belong to no message and would be forgotten: rewind({num_raw}), or go "
                    "on with generate()"
                )
            new = {"role": "user", "content": message} if isinstance(message, str) else copy.deepcopy(dict(message))
            messages = [*said.messages, new]
            running = self._host.begin(self._render(messages), params, speculation, num_draft_tokens, cancel)
            return start(running, messages, on_prefill)

    def answer(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> GenerationResult:
        """The answer to a whole conversation in place of the session's own: what both share is not run again."""
        with self._answering() as start:
            asked = [copy.deepcopy(dict(message)) for message in messages]
            running = self._host.begin(self._render(asked), params, speculation, num_draft_tokens, cancel)
            stream = start(running, asked, None)
        return _run(stream, on_token)

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> GenerationResult:
        """Go on from the ids as they stand, without a template; what is said is part of them, but of no message."""
        with self._answering() as start:
            running = self._host.begin(self._said.token_ids, params, speculation, num_draft_tokens, cancel)
            stream = start(running, None, None)
        return _run(stream, on_token)

    def append(self, prompt: str | Sequence[int]) -> None:
        """Run further ids, so that `generate` begins behind them. A text is encoded; BOS stands only at the start."""
        with self._exclusively():
            before = self._said.token_ids
            if isinstance(prompt, str):
                prompt = self._host.tokenizer.encode(prompt, add_special_tokens=not before)
            if not len(prompt):
                return
            token_ids = check_prompt(self._host.model, self._host.tokenizer, [*before, *prompt], room=0)
            self._trim(common_length(self._cached, token_ids))
            try:
                self._context.extend(0, token_ids[len(self._cached) :])
            finally:
                self._cached = token_ids[: self._context.lengths[0]]
            self._said = self._said.with_tokens(token_ids)

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens, and the messages of each turn that they belong to."""
        with self._exclusively():
            length = len(self._said.token_ids)
            if not 0 <= count <= length:
                raise InvalidRequestError(f"rewind takes from 0 to the session's {length} tokens, got {count}")
            self._said = self._said.shortened(length - count)
            self._trim(common_length(self._cached, self._said.token_ids))

    def fork(self) -> "Session":
        """A copy that goes its own way."""
        with self._exclusively():
            other = Session(self._host, self._said)
            other._context.cache.copy_row(0, self._context.cache, 0)
            other._context.restore(0, self._cached)
            other._cached = list(self._cached)
            return other

    def save(self, path: str | Path, *, note: Mapping[str, Any] | None = None) -> None:
        """Write ids, messages and cache to a file, and a note of the caller's own, as JSON has it. The old file or the
        new one stands there, never half of it.
        """
        with self._exclusively():
            said = self._said
            self._trim(common_length(self._cached, said.token_ids))
            record = said.to_record() | {"num_cached": len(self._cached), "note": {} if note is None else dict(note)}
            cache = self._context.cache
            write_session(Path(path), self._fingerprint(), said.token_ids, record, partial(cache.export_row, 0))

    def load(self, path: str | Path) -> dict[str, Any]:
        """Become what was saved; returns the note. Raises InvalidRequestError, nothing changed, for a file that is not
        whole or not of this model.
        """
        with self._exclusively():
            saved = read_session(Path(path), self._fingerprint())
            try:
                said = Said.from_record(saved.token_ids, saved.record)
                if said.token_ids:
                    check_prompt(self._host.model, self._host.tokenizer, said.token_ids, room=0)
                num_cached = saved.record.get("num_cached")
                if type(num_cached) is not int or not 0 <= num_cached <= len(said.token_ids):
                    raise InvalidRequestError(
                        f"num_cached must be in [0, {len(said.token_ids)}], got {num_cached!r:.80}"
                    )
                note = saved.record.get("note", {})
                if not isinstance(note, dict):
                    raise InvalidRequestError(f"note must be an object, got {note!r:.80}")
                self._context.cache.import_row(0, saved.tensors, num_cached)
            except InvalidRequestError as error:
                raise type(error)(f"{path} cannot be loaded: {error}") from error
            self._said, self._cached = said, said.token_ids[:num_cached]
            self._context.restore(0, self._cached)
            return note

    def _render(self, messages: Sequence[Message]) -> list[int]:
        """What the template makes of them, in the spelling that was said and that the cache holds."""
        tokenizer = self._host.tokenizer
        rendered = tokenizer.encode_chat(messages, **self._said.template)
        return keep_spelling(self._said.token_ids, rendered, tokenizer.token_bytes, tokenizer.special_token_ids)

    def _take(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise InvalidRequestError("the session is answering: read its stream to the end, or close it")

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        self._take()
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _answering(self) -> Iterator[Callable[..., Stream]]:
        """Exclusively, until the stream that is started within has ended."""
        self._take()
        try:
            yield self._start
        except BaseException:
            self._busy.release()
            raise

    def _start(self, running: Running, messages: list[dict[str, Any]] | None, on_prefill: OnPrefill | None) -> Stream:
        prompt = running.generation.prompt_token_ids
        num_same = common_length(self._cached, prompt)
        running.generation.dropped_tokens = len(self._cached) - num_same
        self._trim(min(num_same, len(prompt) - 1))
        running.reuse(len(self._cached))
        batch = Batch(self._context, self._host.model.device)
        return Stream(running, batch, on_prefill=on_prefill, on_end=partial(self._settle, running, messages))

    def _settle(self, running: Running, messages: list[dict[str, Any]] | None) -> None:
        """However the answer ended: what the cache holds, and whether it counts as said."""
        try:
            generation = running.generation
            generation.cancel()
            result, token_ids = running.result(), generation.history
            self._context.end_answer(0)
            self._cached = token_ids[: self._context.lengths[0]]
            self._trim(generation.reused_tokens if result.error else len(self._cached))
            if result.error or (result.finish_reason == "abort" and not result.text and messages is not None):
                return
            if messages is None:
                self._said = self._said.with_tokens(token_ids)
            else:
                answered = [*messages, {"role": "assistant", "content": result.text}]
                self._said = self._said.answered(token_ids, answered)
        finally:
            self._busy.release()

    def _trim(self, length: int) -> None:
        """Where the cache has forgotten what the next token must see, nothing is left of it."""
        self._context.truncate(0, length)
        del self._cached[self._context.lengths[0] :]
        num_held = self._context.lengths[0]
        if not len(self._cached) == num_held <= length:  # what is run next would be nothing, for ever, or wrong
            raise InferError(
                f"the session's cache holds {num_held} tokens where it must hold {len(self._cached)} and {length} at "
                "most, a fault of ours: go on in a new session"
            )

    def _fingerprint(self) -> dict[str, str]:
        """What must be the same for a saved cache to mean the same."""
        tokenizer = self._host.tokenizer
        vocabulary = repr((tokenizer.token_bytes, sorted(tokenizer.special_token_ids), sorted(tokenizer.eos_token_ids)))
        return {
            "architecture": _digest(repr(self._host.model.architecture)),
            "tokenizer": _digest(vocabulary),
            "weights": self._host.weights,
            "cache": self._context.cache.kind,
        }


def _run(stream: Stream, on_token: OnToken | None) -> GenerationResult:
    try:
        return stream.run(on_token)
    finally:
        stream.close()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
