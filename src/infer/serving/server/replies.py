"""Answers of all protocols: whole at the end, or as a stream of chunks. A `ReplyFormat` defines their format.

A stream consists of server-sent events or of lines of JSON, and this is the only writer of both. A failure after the
headers ends a stream with an event that clients cannot mistake for a normal end. The causes are a failure of the model,
a reader that reads nothing, and the server's shutdown. If a client disconnects, the iterator is closed. It must then
release what it reads (an `AsyncStream` does).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from math import inf
from typing import Any, NamedTuple, TypeVar, final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.outputs import GenerationResult, TokenLogprob
from infer.serving.protocols.openai.ask import CompletingBody
from infer.serving.server.answer_types import Answer, AnswerHead, Extension, Json, Usage
from infer.serving.server.call import FAILED, Call, call_of
from infer.serving.server.choices import ChoicePart, Choices
from infer.serving.server.connection import has_stalled
from infer.serving.server.endpoint import EVENTS, refusal_of, until_gone, while_connected
from infer.serving.server.http_errors import ENGINE_FAILED, ApiError
from infer.serving.server.server_state import ServerState

_Answer = TypeVar("_Answer", bound=Answer)
Scores = Sequence[TokenLogprob | None]  # one entry per token of a prompt
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}
_COMMENT = b": the answer goes on\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StreamUsage(NamedTuple):
    """The chunks of a stream that contain the usage: an additional last one, or every chunk."""

    is_last: bool = False
    is_in_each: bool = False

    @classmethod
    def of(cls, body: CompletingBody) -> "StreamUsage":
        if (options := body.stream_options) is None:
            return cls()
        return cls(bool(options.include_usage), bool(options.continuous_usage_stats))

    def after(self, num_prompt_tokens: int, num_completion_tokens: int) -> Usage | UnsetType | None:
        """Return the usage field of a chunk after this many tokens."""
        if not self.is_in_each:
            return None if self.is_last else UNSET
        return Usage(num_prompt_tokens, num_completion_tokens, num_prompt_tokens + num_completion_tokens)


Chunk = Answer | Json  # a dict is an event whose `type` is also its name


class ReplyFormat(ABC):
    """The format of an answer and of its stream, which has this media type. `last` ends a stream."""

    last, media_type = DONE, EVENTS

    @abstractmethod
    def whole(self, results: Sequence[GenerationResult]) -> Answer | Sequence[Answer]: ...

    @abstractmethod
    def chunks(self, part: ChoicePart) -> Sequence[Chunk]:
        """Return the chunks of a part. They may depend on the parts before it."""

    def opening(self) -> Sequence[Chunk]:
        """Return the chunks that precede all generated parts."""
        return ()

    def closing(self, results: Sequence[GenerationResult]) -> Sequence[Chunk]:
        """Return the chunks that follow after all choices have ended."""
        return ()

    def event(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk in the stream."""
        return event(msgspec.json.encode(chunk), chunk["type"] if isinstance(chunk, dict) else "")

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        return failure_events(error)


async def reply(
    request: Request, state: ServerState, choices: Choices, shape: ReplyFormat, *, is_streamed: bool | None
) -> Response:
    call = call_of(request)
    if is_streamed:
        events = _events(choices, shape, call)
        seconds = state.settings.comment_seconds
        return EventStream(events, comment_seconds=seconds, fail=shape.fail, media_type=shape.media_type)
    results = await while_connected(request, choices.results())
    return json_response(shape.whole(results), call)


def make_head(prefix: str, request: Request, state: ServerState) -> AnswerHead:
    """Return the head of an answer. Its id is the request's id, which also appears in the log."""
    call, loaded = call_of(request), state.loaded
    assert loaded is not None
    number, fingerprint = call.id.removeprefix("req-"), loaded.llm.system_fingerprint
    return AnswerHead(prefix + number, call.created, call.model, fingerprint)


def json_response(answer: Any, call: Call | None = None, status: int = 200) -> Response:
    """Return the answer as JSON. With a call, it must be an `Answer`, which gets the call's warnings, or a list."""
    found = answer if call is None or isinstance(answer, list) else with_warnings(answer, call)
    return Response(msgspec.json.encode(found), status, media_type="application/json")


def with_warnings(answer: _Answer, call: Call) -> _Answer:
    """Add the call's warnings, if any, to the answer, and return it."""
    if call.warnings:
        answer.infer = Extension() if answer.infer is UNSET else answer.infer
        answer.infer.warnings = call.warnings
    return answer


async def score_prompts(
    request: Request, state: ServerState, prompts: Sequence[Sequence[int]], num: int | None
) -> list[Scores]:
    """Return the log-probability of each token of each prompt, with the `num` likeliest tokens.

    If `num` is None, the scores are empty.
    """
    if num is None:
        return [() for _ in prompts]
    llm = state.llm()
    return [await while_connected(request, llm.prompt_logprobs(prompt, num=num)) for prompt in prompts]


async def _events(choices: Choices, shape: ReplyFormat, call: Call) -> AsyncGenerator[bytes, None]:
    results: dict[int, GenerationResult] = {}
    for chunk in shape.opening():
        yield shape.event(chunk)
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            for chunk in shape.chunks(part):
                yield shape.event(chunk if part.result is None else _warned(chunk, call))
            if part.result is not None:
                results[part.choice] = part.result
    for chunk in shape.closing([results[index] for index in sorted(results)]):
        yield shape.event(_warned(chunk, call))
    if shape.last:
        yield shape.last


def _warned(chunk: Chunk, call: Call) -> Chunk:
    """Add the call's warnings, if any, to a chunk that can hold them, and return it."""
    return chunk if isinstance(chunk, dict) else with_warnings(chunk, call)


def event(body: bytes, name: str = "") -> bytes:
    """Return one line of JSON as an event. `name` is for APIs that name their events.

    Some clients end a line at every character that Unicode calls a line's end (httpx's `iter_lines`, `str.splitlines`).
    Three of these characters are legal in JSON, so they are escaped.
    """
    data = b"data: " + line(body) + b"\n"
    return data if not name else b"event: " + name.encode() + b"\n" + data


def line(body: bytes) -> bytes:
    """Return one line of JSON with its end. See `event` for the characters that are escaped."""
    for line_end, escaped in _LINE_ENDS.items():
        if line_end in body:
            body = body.replace(line_end, escaped)
    return body + b"\n"


def failure_events(error: ApiError) -> bytes:
    """Return the last events of an OpenAI stream that fails."""
    return event(error.body) + DONE


@final
class EventStream(Response):
    """A response that streams `events`: whole events, including `DONE` if the API has it.

    `fail` returns the last bytes of a stream that fails. Streams of JSON lines have no comments.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        comment_seconds: float,
        fail: Callable[[ApiError], bytes] = failure_events,
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENTS,
    ) -> None:
        content_type = f"{media_type}; charset=utf-8"
        super().__init__(None, 200, {**_HEADERS, **(headers or {})}, media_type=content_type)
        del self.headers["content-length"]
        self._events, self._fail = events, fail
        self._comment_seconds = comment_seconds if media_type == EVENTS else inf
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call = call_of(request)
        call.phase = "streaming"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        works = (self._write(request, send), until_gone(request), self._comment(send))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                call.leave()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()

    async def _write(self, request: Request, send: Send) -> None:
        notes = call_of(request).notes
        try:
            async for chunk in self._events:
                self._num_sent += 1
                noted, notes[:] = b"".join((*notes, chunk)), []
                await send({"type": "http.response.body", "body": noted, "more_body": True})
                if await has_stalled(request.scope):
                    await self._events.aclose()
                    raise ApiError(408, "the answer was ended because its reader was too slow", code="slow_reader")
            last = b""
        except Exception as error:
            call = call_of(request)
            refusal = refusal_of(error, call)
            last = self._fail(refusal)
            if call.is_noted and refusal.code == ENGINE_FAILED:
                last = FAILED + last
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Send a comment after each interval of silence, because proxies close silent connections."""
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._comment_seconds)
            if self._num_sent == num_sent:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
