"""Requests to replicas, over a connection each, and answers that survive the death of their replica.

The other side is the same server, on a socket that only this process uses. Its answers are forwarded byte by byte.

If a replica dies, hangs, or reports that its engine has failed, the request is sent to another one. It includes the
parts of the stream that the client has (`server.connection`). The events are repeated byte by byte, and those that were
sent are dropped. An answer that is not a stream is requested again from its beginning. If the model's files were
replaced meanwhile, no stream is continued: its parts would be of two models.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from math import inf
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import httptools
import msgspec
from starlette.responses import Response

from infer.serving.distributed.router import RoutedBody, RoutedPrompt
from infer.serving.protocols.api_errors import ENGINE_FAILED, ApiError
from infer.serving.protocols.events import EVENTS, LINES
from infer.serving.server.connection import FAILED, FINGERPRINT_HEADER, HANDED_HEADERS, NOTE, SentPart, pack
from infer.serving.server.endpoint import ApiRequest, ApiRoute, EventStream

_READ_BYTES, _END, _LINE_END = 2**16, b"\n\n", b"\n"
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"host", b"date"}
_MOST_DEATHS = 2  # without a new event for the client between them, because the request may be the cause
_FAILED_CODES = (ENGINE_FAILED, "failed")  # sent by a process whose engine has failed, and which is about to end
_NOT_HANDED_ON = HOP_BY_HOP | {
    *(b"authorization", b"x-api-key", b"x-request-id", b"content-length"),
    *(name.encode() for name in HANDED_HEADERS),
}
_DIED = ApiError(
    503, "the engine's process died and starts again: retry later", code="engine_died", headers={"Retry-After": "2"}
)
Headers = Iterable[tuple[bytes, bytes]]


class GoneError(Exception):
    """The other side has died, or does not exist."""


class ReplicaFailedError(GoneError):
    """The other side's engine has failed: its process is alive, but does not answer any more."""


class ResponseHead(NamedTuple):
    status: int
    headers: dict[bytes, bytes]

    @property
    def media_type(self) -> str:
        """The media type of the answer, without its parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].decode("latin-1")

    @property
    def is_stream(self) -> bool:
        return self.media_type in (EVENTS, LINES)


def request_bytes(method: str, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    own = [(b"host", b"engine"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in (*headers, *own))
    return method.encode() + b" " + target + b" HTTP/1.1\r\n" + fields + b"\r\n" + body


@runtime_checkable
class ByteReader(Protocol):
    """A reader like asyncio's, or a reader of bytes that arrive in another way."""

    async def read(self, num_bytes: int, /) -> bytes: ...


@runtime_checkable
class ByteWriter(Protocol):
    def write(self, found: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


@final
class Exchange:
    def __init__(self, reader: ByteReader, writer: ByteWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._chunks = dict[bytes, bytes](), list[bytes]()
        self._head: ResponseHead | None = None
        self._has_ended = False
        self.load_seconds = 0.0  # that the request waited until the other side was loaded

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in HOP_BY_HOP:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._head = ResponseHead(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._has_ended = True

    # Requests. Each method raises GoneError if the other side is gone before the end.

    async def get(self, target: bytes) -> tuple[int, bytes]:
        """Send a GET request, and return status and body."""
        head = await self.head(request_bytes("GET", target, []))
        return head.status, await self.body()

    async def head(self, request: bytes) -> ResponseHead:
        with suppress(OSError):
            self._writer.write(request)
            await self._writer.drain()
        while self._head is None:
            await self._read()
        return self._head

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self._body_chunks()])

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Yield the events that have arrived, for a body that is a stream of events or of lines.

        An incomplete event is dropped. A comment between lines, which only our own processes write, ends like an event.
        """
        rest, end = b"", _LINE_END if self._head is not None and self._head.media_type == LINES else _END
        async for chunk in self._body_chunks():
            *whole, rest = (rest + chunk).split(end)
            if found := [event + (_END if event.startswith(b":") else end) for event in whole if event]:
                yield found

    def close(self) -> None:
        self._writer.close()

    async def _body_chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            if self._chunks:
                found, self._chunks = b"".join(self._chunks), []
                yield found
            elif self._has_ended:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        try:
            found = await self._reader.read(_READ_BYTES)
        except OSError:
            found = b""
        if not found:
            raise GoneError
        self._parser.feed_data(found)


BeginExchange = Callable[[], AbstractAsyncContextManager[Exchange]]  # raises GoneError if the replica dies


@runtime_checkable
class Exchanges(Protocol):
    """Exchanges with the replicas of a server."""

    @property
    def are_several(self) -> bool: ...

    def exchange(self, prompt: RoutedPrompt) -> AbstractAsyncContextManager[Exchange]:
        """Yield an exchange with the replica chosen for the prompt, when a replica is ready.

        Raises GoneError if that replica dies meanwhile.
        """

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        """Return status and body by name, for the replicas that are ready and answer soon."""


@final
class Failover:
    """One request to a route. `exchange` begins an exchange with a replica that is ready."""

    def __init__(self, request: ApiRequest, route: ApiRoute, asked: RoutedBody, exchange: BeginExchange) -> None:
        self._request, self._shape, self._asked, self._exchange = request, route.shape, asked, exchange
        self._call = request.call
        self._noted = list[SentPart]()  # parts whose events come next
        self._sent = list[SentPart]()  # parts of which the client has an event
        self._num_sent = 0  # events that the client has
        self._num_seen = 0  # events of the replica that is answering
        self._head: ResponseHead | None = None  # the head that the client gets, when a replica has sent it
        self._fingerprint: bytes | None = None  # the fingerprint of the model that began the stream

    async def response(self) -> Response:
        """Return the response.

        Raises ApiError if no replica can answer. Then the call counts as the front's again.
        """
        self._call.is_forwarded = True
        answer = self._answer()
        try:
            await self._request.while_connected(anext(answer))
            assert self._head is not None
            if self._head.is_stream:
                response: Response = EventStream(answer, comment_seconds=inf, fail=self._give_up)
            else:
                response = Response(b"".join([chunk async for chunk in answer]))
        except BaseException as error:
            self._call.is_forwarded = not isinstance(error, ApiError)
            raise
        response.status_code, response.raw_headers = self._head.status, [*self._head.headers.items()]
        return response

    def _give_up(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that no replica can continue."""
        self._call.is_forwarded = False
        return self._shape.failure(error)

    async def _answer(self) -> AsyncGenerator[bytes, None]:
        """Yield nothing when the head has arrived, then the body as it arrives, from as many replicas as are needed."""
        num_deaths = 0
        while num_deaths < _MOST_DEATHS:
            self._noted, self._num_seen, num_sent = [], 0, self._num_sent
            try:
                async with self._exchange() as exchange:
                    head = await exchange.head(self._request_bytes(exchange.load_seconds))
                    fingerprint = head.headers.pop(FINGERPRINT_HEADER.encode(), None)
                    if not head.is_stream:
                        body = await exchange.body()
                        if head.status >= 500 and _code_of(body) in _FAILED_CODES:
                            raise ReplicaFailedError
                        if self._head is not None:
                            raise _DIED
                        self._head = head
                        yield b""
                        yield body
                        return
                    if self._head is None:
                        self._head, self._fingerprint = head, fingerprint
                        yield b""
                    elif fingerprint != self._fingerprint:
                        raise _DIED
                    async with aclosing(exchange.events()) as arriving:
                        async for events in arriving:
                            has_failed = FAILED in events
                            answered = events[: events.index(FAILED)] if has_failed else events
                            if unsent := self._unsent(answered):
                                yield unsent
                            if has_failed:
                                raise ReplicaFailedError
                    return
            except GoneError:
                if self._head is not None and not self._asked.is_repeatable:
                    break
                num_deaths = 1 if self._num_sent > num_sent else num_deaths + 1
        raise _DIED

    def _unsent(self, events: Sequence[bytes]) -> bytes:
        """Return the events that the client does not have, without the notes among them.

        Comments are sent, but not counted.
        """
        found = list[bytes]()
        for event in events:
            if event.startswith(NOTE):
                self._noted.append(SentPart.of_note(event))
            elif event.startswith(b":"):
                found.append(event)
            else:
                self._sent += self._noted
                self._noted = []
                self._num_seen += 1
                if self._num_seen > self._num_sent:
                    self._num_sent = self._num_seen
                    found.append(event)
        return b"".join(found)

    def _request_bytes(self, load_seconds: float) -> bytes:
        scope, call = self._request.scope, self._call
        query: bytes = scope["query_string"]
        target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        packed = pack(self._sent) if self._sent else b""
        kept = [(name, value) for name, value in scope["headers"] if name not in _NOT_HANDED_ON]
        own = [(b"x-request-id", (call.client_id or call.id).encode()), *call.handed_on(len(packed), load_seconds)]
        return request_bytes(self._request.method, target, [*kept, *own], packed + self._asked.content)


def _code_of(body: bytes) -> Any:
    """Return the code of an error's body, or None. Ollama's error is a text, and its code is a field next to it."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    error = found.get("error")
    return (error if isinstance(error, dict) else found).get("code")
