"""Answers of all protocols: whole at the end, or as a stream of chunks. A `Shape` defines their format.

A stream consists of server-sent events or of lines of JSON, and this is the only writer of both. A failure after the
headers ends a stream with an event that clients cannot mistake for a normal end. The causes are a failure of the model,
a reader that reads nothing, and the server's shutdown. If a client disconnects, the iterator is closed. It must then
release what it reads (an `AsyncStream` does).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from math import inf
from typing import Any, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.outputs import GenerationResult
from infer.serving.protocols.errors import ENGINE_FAILED, ApiError
from infer.serving.protocols.events import EVENTS, Chunk, Scores, Shape, failure_events, with_warnings
from infer.serving.server.call import FAILED, Call, call_of
from infer.serving.server.choices import Choices
from infer.serving.server.connection import has_stalled
from infer.serving.server.endpoint import refusal_of, until_gone, while_connected
from infer.serving.server.server_state import ServerState

_COMMENT = b": the answer goes on\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def reply(
    request: Request, state: ServerState, choices: Choices, shape: Shape, *, is_streamed: bool | None
) -> Response:
    call = call_of(request)
    if shape.is_stream_by_default if is_streamed is None else is_streamed:
        events = _events(choices, shape, call)
        seconds = state.settings.comment_seconds
        return EventStream(events, comment_seconds=seconds, fail=shape.fail, media_type=shape.media_type)
    results = await while_connected(request, choices.results())
    return json_response(shape.whole(results), call)


def json_response(answer: Any, call: Call | None = None, status: int = 200) -> Response:
    """Return the answer as JSON. With a call, it must be an `Answer`, which gets the call's warnings, or a list."""
    found = answer if call is None or isinstance(answer, list) else with_warnings(answer, call.warnings)
    return Response(msgspec.json.encode(found), status, media_type="application/json")


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


async def _events(choices: Choices, shape: Shape, call: Call) -> AsyncGenerator[bytes, None]:
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
    return chunk if isinstance(chunk, dict) else with_warnings(chunk, call.warnings)


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
