"""Streams, as server-sent events or as lines of JSON: the only writer of both.

A failure after the headers ends a stream with an event that clients cannot mistake for a normal end. The causes are a
failure of the model, a reader that reads nothing, and the server's shutdown. If a client disconnects, the iterator is
closed. It must then release what it reads (an `AsyncStream` does).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from math import inf
from typing import final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.serving.server.asking import until_gone
from infer.serving.server.call import call_of
from infer.serving.server.connection import has_stalled
from infer.serving.server.endpoint import EVENTS, refusal_of
from infer.serving.server.http_errors import ENGINE_FAILED, ApiError
from infer.serving.server.resumption import FAILED

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}
_COMMENT = b": the answer goes on\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


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
