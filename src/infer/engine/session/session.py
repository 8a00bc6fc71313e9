"""`Session`: many turns over one cache. Each turn computes only its new tokens.

A session has two lists of ids: those of the conversation, and those whose keys and values are in the cache. A turn
keeps the prefix that its prompt and the cache share. So an answer equals the answer of a fresh model for the same ids.

A signal may raise its exception between any two lines. The conversation is replaced as a whole, only the engine's loop
changes the cache, and a call has ended as soon as its `finally` begins. So the next call works after any exception.
"""

import copy
import threading
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar, Unpack, final

from infer.compute.sampling.keywords import Params, refuse_sampling
from infer.engine.requests.answer import Answer
from infer.engine.requests.ask import Ask
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Message, prompt_ids
from infer.engine.requests.stream import OnPrefill, OnToken, Stream
from infer.engine.session.session_cache import SessionCache, Tensors
from infer.engine.session.session_file import read_session, write_session
from infer.engine.session.transcript import Transcript, copied, keep_spelling, typed
from infer.engine.step.request import check_prompt
from infer.engine.step.request_options import CALLBACK, RequestKeywords, RequestOptions
from infer.engine.step.sequence import Sequence, common_length
from infer.errors import InvalidRequestError, closed
from infer.outputs import GenerationResult
from infer.text.toolcalls.tools import ToolLike, read_tools

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
Messages = list[dict[str, Any]]


def _exclusively(
    method: "Callable[Concatenate[Session, _Arguments], _Result]",
) -> "Callable[Concatenate[Session, _Arguments], _Result]":
    """Let the method run only while no other call runs and no stream is open."""

    @wraps(method)
    def call(session: "Session", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        caller = object()
        try:
            session._enter(caller)
            return method(session, *args, **kwargs)
        finally:
            if session._caller is caller:
                session._caller = None
                session._free_if_closed()

    return call


@final
class Session:
    """A conversation whose computed tokens stay in the cache. `LLM.session` creates it.

    A session gives one answer at a time: while a stream is open, every other call raises InvalidRequestError. A turn
    that fails, or is stopped before its first word, leaves the conversation as it was. `close()`, the end of `with`,
    and dropping the session free its slot.

    Examples:
        >>> with llm.session() as session:
        ...     first = session.send("What is the capital of France?")
        ...     print(session.send("And of Italy?").text)
        The capital of Italy is Rome.
    """

    def __init__(self, host: Host, transcript: Transcript) -> None:
        self._transcript = transcript
        self._open_cache: SessionCache | None = SessionCache(host)
        self._entering = threading.RLock()  # held briefly; a signal's handler may acquire it again
        self._caller: object | None = None  # the call that uses the session
        self._last: Answer | None = None  # it uses the session until it is settled
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a session cannot be copied or pickled: fork() copies it, save() writes it to a file")

    def __repr__(self) -> str:
        transcript = self._transcript
        state = "" if self._is_open else ", closed"
        return f"Session({len(transcript.messages)} messages, {len(transcript.token_ids)} tokens{state})"

    def close(self) -> None:
        """End the active answer and free the cache. Any thread may call it; a second call does nothing.

        Later calls raise ClosedError. `messages` and `token_ids` can still be read.

        Examples:
            >>> session = llm.session()
            >>> session.close()
        """
        self._is_closed = True
        if self._last is not None:
            self._last.close()
        self._free_if_closed()

    @property
    def _is_open(self) -> bool:
        return not self._is_closed and self._open_cache is not None and self._open_cache.host.loop.is_open

    @property
    def _cache(self) -> SessionCache:
        if (cache := self._open_cache) is None:
            raise closed("session")
        return cache

    @property
    def _host(self) -> Host:
        return self._cache.host

    @property
    def token_ids(self) -> list[int]:
        """Ids of the whole conversation, as the template renders it."""
        self._settle()
        return list(self._transcript.token_ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Copies of the messages of the conversation."""
        self._settle()
        return copy.deepcopy(self._transcript.messages)

    @property
    def num_cached_tokens(self) -> int:
        """Number of first `token_ids` that the next turn does not compute again."""
        self._settle()
        cached = () if self._open_cache is None else self._open_cache.lease.token_ids
        return common_length(cached, self._transcript.token_ids)

    def send(
        self,
        message: str | Message,
        params: Params | None = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult:
        """Return the answer to another message. Both become messages of the session.

        If the template writes past messages in a form that differs from the cached ids, all tokens after the first
        difference are computed again.

        Args:
            message: A message. A text is a message of the user.
            params: As for `LLM.generate`.
            on_token: As for `LLM.generate`.
            on_prefill: As for `LLM.stream`.
            options: As for `LLM.generate`.
            keywords: As for `LLM.stream`. With `overflow="truncate_left"` the session forgets its oldest turns if they
                leave no room for the answer.

        Returns:
            The result. `reused_tokens` of the prompt were in the cache. `dropped_tokens` of the cache are not in the
            prompt.

        Raises:
            InvalidRequestError: An argument breaks a rule, the prompt does not fit, or a stream is open.
            ClosedError: The session or the model is closed.

        Examples:
            >>> llm.session().send("What is the capital of France?").text
            'The capital of France is Paris.'
        """
        stream = self.stream(message, params, on_prefill=on_prefill, options=options, **keywords)
        return _run(stream, on_token)

    def stream(
        self,
        message: str | Message,
        params: Params | None = None,
        *,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Stream:
        """Return a stream of the answer that `send` would return, with the arguments of `send`.

        If the stream is closed early, the session keeps the pieces that were read as its answer.

        Examples:
            >>> stream = llm.session().stream("What is the capital of France?")
            >>> "".join(piece.text for piece in stream)
            'The capital of France is Paris.'
        """
        ask = Ask.of((), params, options, keywords)
        return self._begin(partial(Transcript.asked, message=message), ask, on_prefill)

    def answer(
        self,
        messages: abc.Sequence[Message],
        params: Params | None = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult:
        """Replace the conversation and return the answer to it. The prefix that both share is not computed again.

        Args:
            messages: The messages of the whole conversation.
            params: As for `LLM.generate`. The other arguments are those of `send`.

        Examples:
            >>> session = llm.session()
            >>> session.answer([{"role": "user", "content": "What is the capital of France?"}]).text
            'The capital of France is Paris.'
        """
        ask = Ask.of((), params, options, keywords)
        return _run(self._begin(lambda transcript: list(map(copied, messages)), ask, on_prefill), on_token)

    def generate(
        self,
        params: Params | None = None,
        *,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> GenerationResult:
        """Continue from the current ids without a template, with the arguments of `send`.

        The answer is added to `token_ids`, but not to a message.

        Examples:
            >>> session = llm.session()
            >>> session.append("The capital of France is")
            >>> session.generate(temperature=0, max_new_tokens=2).text
            ' Paris.'
        """
        ask = Ask.of((), params, options, keywords)
        return _run(self._begin(lambda transcript: None, ask, on_prefill), on_token)

    @_exclusively
    def append(self, prompt: str | abc.Sequence[int]) -> None:
        """Add tokens to the conversation and compute them, so that `generate` continues after them.

        Args:
            prompt: A text or ids. A text is encoded; BOS is added only at the start of the conversation.

        Raises:
            InvalidRequestError: The tokens do not fit the context, or a stream is open.
            ClosedError: The session or the model is closed.

        Examples:
            >>> session = llm.session()
            >>> session.append("Red, green,")
            >>> len(session.token_ids)
            4
        """
        before = self._transcript.token_ids
        tokenizer, limits = self._host.tokenizer, self._host.requests.limits
        new = prompt_ids(prompt, tokenizer, limits.max_seq_len, add_special=not before)
        if not new:
            return
        token_ids = check_prompt(limits, [*before, *new], room=0)
        self._cache.extend(token_ids)
        self._transcript = self._transcript.with_tokens(token_ids)

    @_exclusively
    def rewind(self, count: int) -> None:
        """Forget the last tokens, and the messages of each turn that they belong to.

        Args:
            count: Number of tokens, from 0 to the number of `token_ids`.

        Raises:
            InvalidRequestError: The count is out of range, or a stream is open.
            ClosedError: The session or the model is closed.

        Examples:
            >>> session = llm.session()
            >>> session.append("Red, green,")
            >>> session.rewind(1)
            >>> llm.tokenizer.decode(session.token_ids)
            'Red, green'
        """
        length = len(self._transcript.token_ids)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= length:
            raise InvalidRequestError(f"rewind takes from 0 to {length} tokens, all of the session, got {count!r:.80}")
        transcript = self._transcript.shortened(length - count)
        self._cache.keep_common(transcript.token_ids)
        self._transcript = transcript

    @_exclusively
    def fork(self) -> "Session":
        """Return a copy that continues independently. Both share the cached tokens until one of them changes them.

        Raises:
            InvalidRequestError: A stream is open.
            ClosedError: The session or the model is closed.

        Examples:
            >>> session = llm.session()
            >>> session.append("The capital of")
            >>> other = session.fork()
            >>> other.append(" Italy is")
            >>> other.generate(temperature=0, max_new_tokens=2).text, len(session.token_ids)
            (' Rome.', 3)
        """
        other = Session(self._host, self._transcript)
        other._cache.copy_of(self._cache)
        return other

    @_exclusively
    def save(self, path: str | Path, *, note: Mapping[str, Any] | None = None) -> None:
        """Write ids, messages and cache to a file, which is replaced as a whole.

        Args:
            path: The file.
            note: A mapping that JSON can store. `load` returns it.

        Raises:
            InvalidRequestError: The file cannot be written, or a message is not JSON.
            ClosedError: The session or the model is closed.

        Examples:
            >>> session = llm.session()
            >>> answer = session.send("What is the capital of France?")
            >>> session.save("talk.safetensors", note={"topic": "capitals"})
        """
        transcript, fingerprint = self._transcript, self._host.fingerprint(self._host.runner.cache.kind)

        def write(num_cached: int, tensors: Tensors) -> None:
            record = transcript.to_record() | {"num_cached": num_cached, "note": {} if note is None else dict(note)}
            write_session(Path(path), fingerprint, transcript.token_ids, record, tensors)

        self._cache.export(transcript.token_ids, write)

    @_exclusively
    def load(self, path: str | Path) -> dict[str, Any]:
        """Replace the conversation and the cache by those of a saved session.

        Args:
            path: The file that `save` wrote, in this process or another.

        Returns:
            The note of `save`.

        Raises:
            InvalidRequestError: The file is damaged or belongs to another model. Nothing is changed.
            ClosedError: The session or the model is closed.

        Examples:
            >>> session, other = llm.session(), llm.session()
            >>> session.append("The capital of France is")
            >>> session.save("talk.safetensors", note={"topic": "capitals"})
            >>> other.load("talk.safetensors")
            {'topic': 'capitals'}
        """
        cache = self._host.runner.cache
        saved = read_session(Path(path), self._host.fingerprint(cache.kind), cache.num_bytes)
        try:
            transcript = Transcript.from_record(saved.token_ids, saved.record)
            if length := len(transcript.token_ids):
                check_prompt(self._host.requests.limits, transcript.token_ids, room=0)
            num_cached, note = typed(saved.record, "num_cached", int), typed({"note": {}} | saved.record, "note", dict)
            if not 0 <= num_cached <= length:
                raise InvalidRequestError(f"num_cached must be in [0, {length}], got {num_cached!r:.80}")
            self._cache.load(saved.tensors, transcript.token_ids[:num_cached])
        except InvalidRequestError as error:
            raise type(error)(f"{path} cannot be loaded: {error}") from error
        self._transcript = transcript
        return dict(note)

    def _respell(self, rendered: list[int]) -> list[int]:
        """Return rendered messages in the spelling of the conversation's ids, which are in the cache."""
        tokenizer = self._host.tokenizer
        return keep_spelling(self._transcript.token_ids, rendered, tokenizer.token_bytes, tokenizer.special_token_ids)

    def _enter(self, caller: object) -> None:
        """Claim the session for the caller. Raises InvalidRequestError if another caller has it, and ClosedError."""
        self._settle()
        with self._entering:
            if not self._is_open:
                raise closed("session")
            self._host.loop.check_open()
            if self._caller is not None or (self._last is not None and not self._last.is_settled):
                raise InvalidRequestError("the session is answering: read its stream to the end, or close it")
            self._caller = caller

    def _settle(self) -> None:
        """Wait for the end of the last answer, if its stream was dropped or an exception ended its reader."""
        if self._last is not None and self._last.is_closed:
            self._last.close()

    def _free_if_closed(self) -> None:
        """Free the cache if the session is closed. `close` and the end of each call use this; the later one frees."""
        if self._is_closed and self._caller is None:
            self._open_cache = self._last = None

    @_exclusively
    def _begin(
        self, next_messages: Callable[[Transcript], Messages | None], ask: Ask, on_prefill: OnPrefill | None
    ) -> Stream:
        """Answer the messages that `next_messages` makes from the conversation; without it, continue the ids."""
        before = self._transcript
        if (messages := next_messages(before)) is None:
            ask = replace(ask, prompts=[before.token_ids])
        else:
            variables = dict(before.template)
            tools, options = variables.pop("tools", None), ask.options
            options = options if options.tools is not None else replace(options, tools=tools)
            ask = replace(ask, prompts=[messages], options=options, variables=variables, respell=self._respell)
        sequence = self._host.requests.sequence(ask)
        on_end = partial(self._take_over, sequence, before, has_messages=messages is not None)
        stream = self._host.loop.stream(sequence, on_prefill, self._cache.lease, on_end)
        self._last = stream.answer
        return stream

    def _take_over(self, sequence: Sequence, before: Transcript, *, has_messages: bool) -> None:
        """Add a finished answer to the conversation: to its messages, or only to its ids."""
        result = sequence.result()
        if result.error:
            return
        if not has_messages:
            self._transcript = before.with_tokens(sequence.token_ids)
        elif result.finish_reason != "abort" or result.text or result.reasoning or result.tool_calls:
            messages = [*map(dict, sequence.request.messages), result.to_message()]
            self._transcript = before.answered(sequence.token_ids, messages)


def begin_session(
    host: Host, system: str | None, tools: abc.Sequence[ToolLike] | None, variables: Mapping[str, Any]
) -> Session:
    """Return a new session. `variables` are those of the chat template. Raises InvalidRequestError."""
    host.requests.check_generates()
    tokenizer = host.tokenizer
    refuse_sampling(variables, tokenizer.chat_templates)
    messages = [] if system is None else [{"role": "system", "content": system}]
    template = {**variables, **({} if tools is None else {"tools": [tool.as_given() for tool in read_tools(tools)]})}
    if (messages or template) and tokenizer.chat_template is None:
        raise InvalidRequestError("the model has no chat template: use append() and generate() with plain text")
    return Session(host, Transcript(messages=messages, template=template, num_given=len(messages)))


def _run(stream: Stream, on_token: OnToken | None) -> GenerationResult:
    try:
        CALLBACK.check("on_token", on_token)
        return stream.run(on_token)
    finally:
        stream.close()
