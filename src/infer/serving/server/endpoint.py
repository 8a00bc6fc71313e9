"""A route: its handler, and how it is called. Every exception is answered in OpenAI's error format."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.errors import InferError
from infer.serving.protocols.read_body import Complete, as_given, read_body
from infer.serving.protocols.unknown_fields import Reading
from infer.serving.server.answer_types import Json
from infer.serving.server.body_limits import receive_body
from infer.serving.server.call import Call, call_of
from infer.serving.server.http_errors import ApiError, api_error
from infer.serving.server.resumption import unpack
from infer.serving.server.server_state import ServerState
from infer.system.processes.child_process import asking_for

log = logging.getLogger("infer.server")
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
_INLINE_BYTES = 1 << 15  # of a body that is read on the event loop, in a few milliseconds
_Read = TypeVar("_Read")
Handler = Callable[..., Awaitable[Response]]  # arguments: the request, the state and, if the route has one, the body


class ApiRoute(NamedTuple):
    """A route of the server. The routing table and openapi.json are derived from it.

    `path` is in Starlette's notation. The body of a request is read as a `body`, after `complete` has converted the
    fields that other programs send. Warnings about the body are kept in the call, and the answer contains them.
    `answer` is a type that msgspec describes, or the media type of any other answer. A route that `streams` can also
    answer with events: server-sent ones, or lines of JSON if its `stream_type` is `LINES`. `parameters` describe the
    query, in OpenAPI's notation. If `is_open`, no key is needed. `operation` is the model's task, in
    OpenTelemetry's words; the handler of such a request asks the door (`asking.enter`). `shape` converts an exception
    to the error that a client receives.
    """

    method: str
    path: str
    handler: Handler
    summary: str = ""
    body: type[Struct] | None = None
    answer: Any = JSON
    operation: str = ""
    streams: bool = False
    parameters: Sequence[Json] = ()
    complete: Complete = as_given
    is_open: bool = False
    shape: Callable[[Exception], ApiError] = api_error
    stream_type: str = EVENTS


get, post = partial(ApiRoute, "GET"), partial(ApiRoute, "POST")


class ClientGoneError(Exception):
    """The client has disconnected, so no answer is needed."""


@final
class Endpoint:
    """A route as an ASGI app. The body is read before the handler is called: `await request.body()` takes no time."""

    def __init__(self, route: ApiRoute, state: ServerState) -> None:
        self._route, self._state = route, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(Request(scope))
        try:
            await self._answer(call, scope, receive, send)
        finally:
            if call.entry is not None:
                call.entry.close()

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call.route, call.operation = self._route.path, self._route.operation
        try:
            body = await receive_body(request, self._state.settings)
            if call.num_sent_bytes:
                call.sent = unpack(body[: call.num_sent_bytes])
            request._body = body[call.num_sent_bytes :]
            with asking_for(call.key_name):
                response = await self._handle(request, call)
        except (ClientDisconnect, ClientGoneError):
            call.leave()
            return
        except Exception as error:
            response = refusal_of(error, call, self._route.shape).response
        await response(scope, receive, send)

    async def _handle(self, request: Request, call: Call) -> Response:
        route, state = self._route, self._state
        if route.body is None:
            return await route.handler(request, state)
        state.check_ready()
        reading = Reading(state.settings.unknown_fields, call.warnings)
        read = partial(read_body, request._body, route.body, route.complete, reading)
        return await route.handler(request, state, await read_apart(read, request._body))


async def read_apart(read: Callable[[], _Read], content: bytes) -> _Read:
    """Return the result of `read`, which reads a body. It runs on a thread if the body is large."""
    return read() if len(content) <= _INLINE_BYTES else await asyncio.to_thread(read)


def refusal_of(error: Exception, call: Call, shape: Callable[[Exception], ApiError] = api_error) -> ApiError:
    """Return the error that the client receives, and note its code in the call. An internal failure is logged."""
    if not isinstance(error, ApiError | InferError):
        log.error("request %s failed", call.id, exc_info=error)
    refusal = shape(error)
    call.error_code = refusal.code or refusal.type
    return refusal
