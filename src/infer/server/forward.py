"""A request handed to the engine's process, and its answer handed back, byte by byte as they come.

The other side is the same server, on a socket that no one else has. Where it dies, a stream ends as a stream that
fails, and what has not begun is refused: the client may ask again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from math import inf
from typing import NamedTuple, final

import httptools
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.server.asking import while_connected
from infer.server.call import KEY_NAME_HEADER, Call, call_of
from infer.server.errors import ApiError
from infer.server.sse import EventStream

Fail = Callable[[ApiError], bytes]
_READ_BYTES, _END = 2**16, b"\n\n"
_HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"host", b"date"}
_OWN = {b"authorization", b"x-api-key", b"x-request-id", b"content-length", KEY_NAME_HEADER}
GONE = ApiError(503, "the engine's process died: it is started again", code="engine_died", headers={"Retry-After": "2"})


class Head(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]


@final
class Exchange:
    """One request over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._headers = list[tuple[bytes, bytes]]()
        self._chunks = list[bytes]()
        self._has_head = self._has_ended = False

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._has_ended = True

    # What is asked of it

    async def head(self, request: bytes) -> Head:
        """Raises ApiError where the other side is gone."""
        with suppress(OSError):
            self._writer.write(request)
            await self._writer.drain()
        while not self._has_head:
            await self._read()
        kept = [(name, value) for name, value in self._headers if name not in _HOP_BY_HOP]
        return Head(self._parser.get_status_code(), kept)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Of the body. Raises ApiError where the other side is gone before its end."""
        try:
            while True:
                if self._chunks:
                    found, self._chunks = b"".join(self._chunks), []
                    yield found
                elif self._has_ended:
                    return
                else:
                    await self._read()
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> None:
        try:
            found = await self._reader.read(_READ_BYTES)
        except OSError:
            found = b""
        if not found:
            raise GONE
        self._parser.feed_data(found)


async def forward(request: Request, path: str, fail: Fail) -> Response:
    """The answer of the process that listens at `path`; `fail` ends a stream that is cut. Raises ApiError where it is
    gone: then the call is not its own any more.
    """
    call = call_of(request)
    exchange = await _connected(path)
    call.is_forwarded = True

    def fail_here(error: ApiError) -> bytes:
        call.is_forwarded = False
        return fail(error)

    try:
        found = await while_connected(request, exchange.head(_request_bytes(request, await request.body(), call)))
        kind = dict(found.headers).get(b"content-type", b"")
        if kind.startswith(b"text/event-stream"):
            return _Streamed(exchange, found, fail_here)
        body = b"".join([chunk async for chunk in exchange.chunks()])
    except BaseException as error:
        call.is_forwarded = not isinstance(error, ApiError)
        exchange.close()
        raise
    response = Response(body, found.status)
    response.raw_headers = found.headers
    return response


async def _connected(path: str) -> Exchange:
    try:
        return Exchange(*await asyncio.open_unix_connection(path))
    except OSError:
        raise GONE from None


def _request_bytes(request: Request, body: bytes, call: Call) -> bytes:
    scope = request.scope
    query: bytes = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    kept = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP | _OWN]
    own = [
        (b"host", b"engine"),
        (b"connection", b"close"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", call.shown_id.encode()),
        (KEY_NAME_HEADER, call.key_name.encode()),
    ]
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in (*kept, *own))
    return request.method.encode() + b" " + target + b" HTTP/1.1\r\n" + fields + b"\r\n" + body


@final
class _Streamed(Response):
    def __init__(self, exchange: Exchange, head: Head, fail: Fail) -> None:
        super().__init__(None, head.status)
        self._exchange, self._head, self._fail = exchange, head, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(_whole_events(self._exchange), comment_seconds=inf, fail=self._fail)
        events.raw_headers = self._head.headers
        await events(scope, receive, send)


async def _whole_events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """What was cut within an event is not sent."""
    rest = b""
    async with aclosing(exchange.chunks()) as chunks:
        async for chunk in chunks:
            whole, end, rest = (rest + chunk).rpartition(_END)
            if whole:
                yield whole + end
