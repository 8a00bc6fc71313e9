"""A route: its handler, how it is called, and its answer: JSON at the end, or a stream of events.

The body of a request is limited in bytes and in time, and the body of a POST must be JSON. The model is asked on behalf
of a key, for a client that may disconnect. Every exception is answered in the protocol's error format.

A stream consists of server-sent events or of lines of JSON, and this is the only writer of both. A failure after the
headers ends a stream with an event that clients cannot mistake for a normal end. The causes are a failure of the model,
a reader that reads nothing, and the server's shutdown. If a client disconnects, the iterator is closed. It must then
release what it reads (`Choices` does).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.errors import InferError
from infer.serving.protocols.api_errors import ENGINE_FAILED, ApiError, api_error
from infer.serving.protocols.bodies import refusing
from infer.serving.protocols.events import EVENTS, ErrorShape, Json, with_warnings
from infer.serving.protocols.fields import Parameters, Reading, read_body
from infer.serving.server.connection import CONNECTION, FAILED, Call, call_of, unpack
from infer.serving.server.door import Arrival
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings
from infer.system.spellings import plain_name

log = logging.getLogger("infer.server")
JSON = "application/json"
_INLINE_BYTES = 1 << 15  # of a body that is read on the event loop, in a few milliseconds
# Its arguments are the `ApiRequest` and, if the route has one, the body. All but a `Response` is sent as JSON.
Handler = Callable[..., Awaitable[Any]]
_BYTES_PER_TOKEN = 3  # an estimate, for prompts that are not tokenised yet
_Found = TypeVar("_Found")
# A larger body is read and dropped up to this multiple of the limit, so that its sender sees the answer.
_DRAINED = 8
_MOST_DIGITS = 20  # of a Content-Length: a number with more digits exceeds every limit
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}
_CURLS = {"", "application/x-www-form-urlencoded"}
_OF_BROWSERS = ("origin", "sec-fetch-site")  # a browser's page cannot leave out either of them
_CLOSE = {"Connection": "close"}
_COMMENT = b": the answer goes on\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ApiRoute(NamedTuple):
    """A route of the server. The routing table and openapi.json are derived from it.

    `path` is in Starlette's notation. The body of a request is read as a `body`. Warnings about the body are kept in
    the call, and the answer contains them.
    `answer` is a type that msgspec describes, or the media type of any other answer. A route that `streams` can also
    answer with events: those of its `shape`, which also shows its errors. `parameters` describe the query, in OpenAPI's
    notation. If `is_open`, no key is needed. `operation` is the model's task, in OpenTelemetry's words; the handler of
    such a request asks the door (`ApiRequest.enter`). `shape` converts an exception to the error that a client
    receives.
    """

    method: str
    path: str
    handler: Handler
    summary: str = ""
    body: type[Parameters] | None = None
    answer: Any = JSON
    operation: str = ""
    streams: bool = False
    parameters: Sequence[Json] = ()
    is_open: bool = False
    shape: type[ErrorShape] = ErrorShape

    @property
    def methods(self) -> Sequence[str]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


get, post = partial(ApiRoute, "GET"), partial(ApiRoute, "POST")


@final
class ApiRequest(Request):
    """A request of a route, with its call and the state of the server."""

    def __init__(self, scope: Scope, receive: Receive, server: ServerState) -> None:
        super().__init__(scope, receive)
        self.call, self.server = call_of(self), server

    def check_model(self, name: str | None, *, is_any_taken: bool = False) -> None:
        """Note the name that the request uses for the model; None means its first name.

        Raises ApiError 404 for another model, unless `is_any_taken`: then it is a warning.
        """
        names = self.server.names
        if (name := known_name(name, names)) is not None and name not in names:
            problem = f"the model {name!r:.80} is not served here"
            if not is_any_taken:
                message = f"{problem}: name {' or '.join(map(repr, names))}"
                raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")
            self.call.warnings.append(f"{problem}: {names[0]!r} answers")
            name = None
        self.call.model = name or names[0]

    async def enter(self, arrival: Arrival) -> None:
        """Count the request at the door until it is answered. Raises ApiError 429."""
        call, server = self.call, self.server
        if not call.sent and call.entry is None:  # the client of a continued stream has already waited
            call.entry = server.door.enter(arrival, await self.body(), server.look)

    async def prepared(self, prepare: Callable[[], _Found], param: str) -> _Found:
        """Return the result of `prepare`, which runs on a thread in the tenant's turn.

        Raises ApiError 429 if too much work of the tenant is waiting, and 400 that names `param` if the library refuses
        it.
        """
        self.server.check_ready()
        with refusing(param):
            return await self.while_connected(self.server.turns.run(self.call.key_name, prepare))

    async def while_connected(self, work: Awaitable[_Found]) -> _Found:
        """Return the result of the work.

        If the client disconnects first, cancel the work and raise ClientDisconnect.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(self))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientDisconnect
        finally:
            for task in (working, leaving):
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs its error


async def answer_to(request: ApiRequest, route: ApiRoute) -> Any:
    """Return the answer of a route's handler.

    The body is read before the handler is called: `await request.body()` takes no time.
    """
    call, state = request.call, request.server
    call.route, call.operation = route.path, route.operation
    body = await receive_body(request, state.settings)
    if call.num_sent_bytes:
        call.sent = unpack(body[: call.num_sent_bytes])
    request._body = body[call.num_sent_bytes :]
    if route.body is None:
        return await route.handler(request)
    state.check_ready()
    reading = Reading(state.settings.unknown_fields, call.warnings)
    read = partial(read_body, request._body, route.body, reading)
    return await route.handler(request, await read_apart(read, request._body))


async def read_apart(read: Callable[[], _Found], content: bytes) -> _Found:
    """Return the result of `read`, which reads a body. It runs on a thread if the body is large."""
    return read() if len(content) <= _INLINE_BYTES else await asyncio.to_thread(read)


def refusal_of(error: Exception, call: Call, shape: type[ErrorShape] = ErrorShape) -> ApiError:
    """Return the error that the client receives, and note its code in the call. An internal failure is logged."""
    if not isinstance(error, ApiError | InferError):
        log.error("request %s failed", call.id, exc_info=error)
    refusal = shape.error_type.of(api_error(error))
    call.error_code = refusal.code or refusal.type
    return refusal


def json_response(answer: Any, call: Call | None = None, status: int = 200) -> Response:
    """Return the answer as JSON. An `Output` gets the warnings of its call."""
    found = answer if call is None else with_warnings(answer, call.warnings)
    return Response(msgspec.json.encode(found), status, media_type=JSON)


async def until_gone(request: Request) -> None:
    """Return when the client disconnects. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def text_tokens(value: Any) -> int:
    """Estimate the number of tokens of a prompt: a text, ids, messages, or tools. All texts inside count."""
    match value:
        case str():
            return -(-len(value.encode(errors="replace")) // _BYTES_PER_TOKEN)
        case dict():
            return sum(map(text_tokens, (*value, *value.values())))
        case list() | tuple():
            if set(map(type, value)) == {int}:  # the ids of a prompt
                return len(value)
            return [*map(type, value)].count(int) + sum(map(text_tokens, value))
    return 0


async def receive_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the request's body. Raises ApiError 408, 413 or 415, and ClientDisconnect."""
    if request.method == "POST":
        _check_type(request)
    most = settings.max_body_bytes
    message = f"the body must have at most {most} bytes"
    too_large = partial(ApiError, 413, message, code="body_too_large", headers=_CLOSE)
    digits = request.headers.get("content-length", "").lstrip("0")
    announced = int(digits[:_MOST_DIGITS]) if digits.isdecimal() else 0
    if announced > _DRAINED * most or (announced > most and "expect" in request.headers):
        raise too_large()
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > _DRAINED * most:
                    break
                if num_bytes <= most:
                    body += chunk
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} s"
        raise ApiError(408, message, code="timeout", headers=_CLOSE) from None
    if num_bytes > most:
        raise too_large()
    return bytes(body)


def _check_type(request: Request) -> None:
    """Raise ApiError 415 unless the type is JSON, or one that curl sends by itself, and the body is not compressed.

    A page of another origin can send curl's types without a preflight. But the browser then names the page's origin.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding must be identity, got {coding!r:.60}: send the body uncompressed"
        raise ApiError(415, message, code="unsupported_media_type")
    sent = request.headers.get("content-type", "")
    if sent == JSON or (sent in _CURLS and not any(name in request.headers for name in _OF_BROWSERS)):
        return
    kind, *parameters = (part.strip().lower() for part in sent.split(";"))
    charsets = {part.partition("=")[2].strip('"') for part in parameters if part.startswith("charset=")}
    if kind != JSON or charsets - _CHARSETS:
        given = f"got {sent!r:.60}" if sent else "got none"
        message = f"Content-Type must be application/json, in UTF-8, {given}"
        raise ApiError(415, message, code="unsupported_media_type")


def known_name(name: str | None, known: Container[str]) -> str | None:
    """Return the known spelling of a model's name: as it is, or plain, or without the ending of its file."""
    if name is None or name in known:
        return name
    plain = plain_name(name)
    return stem if (stem := plain.removesuffix(".gguf")) in known else plain


@final
class EventStream(StreamingResponse):
    """A response that streams `events`: whole events, including `DONE` if the API has it.

    `fail` returns the last bytes of a stream that fails. Streams of JSON lines have no comments.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        comment_seconds: float,
        fail: Callable[[ApiError], bytes] = ErrorShape.failure,
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(events, 200, _HEADERS, media_type=f"{media_type}; charset=utf-8")
        self._events, self._fail = events, fail
        self._comment_seconds = comment_seconds if media_type == EVENTS else inf
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call = call_of(request)
        call.phase = "streaming"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [*map(asyncio.create_task, (self._write(request, send), until_gone(request), self._comment(send)))]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                call.left_in = call.phase
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
                if (connection := request.scope.get(CONNECTION)) is not None and await connection.has_stalled():
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
