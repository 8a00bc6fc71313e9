"""Responses with JSON: whole at the end, or a stream of events.

A stream consists of server-sent events or of lines of JSON, and this is the only writer of both. A failure after the
headers ends a stream with an event that clients cannot mistake for a normal end. The causes are a failure of the model,
a reader that reads nothing, and the server's shutdown. If a client disconnects, the iterator is closed. It must then
release what it reads (an `AsyncStream` does).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from math import inf
from typing import Any, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.serving.protocols.api_errors import ENGINE_FAILED, ApiError
from infer.serving.protocols.events import EVENTS, ErrorShape, with_warnings
from infer.serving.server.call import FAILED, Call, call_of
from infer.serving.server.connection import has_stalled
from infer.serving.server.endpoint import refusal_of, until_gone

_COMMENT = b": the answer goes on\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def json_response(answer: Any, call: Call | None = None, status: int = 200) -> Response:
    """Return the answer as JSON. With a call, it must be an `Answer`, which gets the call's warnings, or a list."""
    found = answer if call is None or isinstance(answer, list) else with_warnings(answer, call.warnings)
    return Response(msgspec.json.encode(found), status, media_type="application/json")


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
        fail: Callable[[ApiError], bytes] = ErrorShape.failure,
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
