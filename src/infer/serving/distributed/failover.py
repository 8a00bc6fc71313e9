"""An answer that survives the death of its replica.

If a replica dies, hangs, or reports that its engine has failed, the request is sent to another one. It includes the
parts of the stream that the client has (`server.connection`). The events are repeated byte by byte, and those that were
sent are dropped. An answer that is not a stream is requested again from its beginning. If the model's files were
replaced meanwhile, no stream is continued: its parts would be of two models.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from math import inf
from typing import Any, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.distributed.exchange import (
    HOP_BY_HOP,
    Exchange,
    GoneError,
    ReplicaFailedError,
    ResponseHead,
    media_type_of,
    request_bytes,
)
from infer.serving.distributed.router import RoutedBody
from infer.serving.protocols.api_errors import ENGINE_FAILED, ApiError
from infer.serving.protocols.events import EVENTS, LINES
from infer.serving.server.connection import (
    FAILED,
    FINGERPRINT_HEADER,
    HANDED_HEADERS,
    NOTE,
    SentPart,
    call_of,
    pack,
    read_note,
)
from infer.serving.server.endpoint import ApiRoute, EventStream, while_connected

BeginExchange = Callable[[], AbstractAsyncContextManager[Exchange]]  # raises GoneError if the replica dies
_MOST_DEATHS = 2  # without a new event for the client between them, because the request may be the cause
_FAILED_CODES = (ENGINE_FAILED, "failed")  # sent by a process whose engine has failed, and which is about to end
_NOT_HANDED_ON = HOP_BY_HOP | {
    *(b"authorization", b"x-api-key", b"x-request-id", b"content-length"),
    *(name.encode() for name in HANDED_HEADERS),
}
_DIED = ApiError(
    503, "the engine's process died and starts again: retry later", code="engine_died", headers={"Retry-After": "2"}
)


@final
class Failover:
    """One request to a route. `exchange` begins an exchange with a replica that is ready."""

    def __init__(self, request: Request, route: ApiRoute, asked: RoutedBody, exchange: BeginExchange) -> None:
        self._request, self._shape, self._asked, self._exchange = request, route.shape, asked, exchange
        self._call = call_of(request)
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
            head = await while_connected(self._request, self._begin(answer))
            if _is_stream(head):
                response: Response = EventStream(answer, comment_seconds=inf, fail=self._give_up)
            else:
                response = Response(b"".join([chunk async for chunk in answer]))
        except BaseException as error:
            self._call.is_forwarded = not isinstance(error, ApiError)
            raise
        response.status_code, response.raw_headers = head.status, head.headers
        return response

    def _give_up(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that no replica can continue."""
        self._call.is_forwarded = False
        return self._shape.failure(error)

    async def _begin(self, answer: AsyncGenerator[bytes, None]) -> ResponseHead:
        await anext(answer)
        assert self._head is not None
        return self._head

    async def _answer(self) -> AsyncGenerator[bytes, None]:
        """Yield nothing when the head has arrived, then the body as it arrives, from as many replicas as are needed."""
        num_deaths = 0
        while num_deaths < _MOST_DEATHS:
            self._noted, self._num_seen, num_sent = [], 0, self._num_sent
            try:
                async with self._exchange() as exchange:
                    head = await exchange.head(self._request_bytes(exchange.load_seconds))
                    fingerprint = _take_fingerprint(head)
                    if not _is_stream(head):
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
                self._noted.append(read_note(event))
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


def _take_fingerprint(head: ResponseHead) -> bytes | None:
    """Remove the fingerprint of the model from the headers, and return it."""
    own = FINGERPRINT_HEADER.encode()
    found = dict(head.headers).get(own)
    head.headers[:] = [(name, value) for name, value in head.headers if name != own]
    return found


def _is_stream(head: ResponseHead) -> bool:
    return media_type_of(head.headers) in (EVENTS, LINES)
