"""A route: its handler, and how the handler is called. Every exception is answered in OpenAI's error format."""

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.errors import InferError
from infer.server.body_limits import read_body
from infer.server.call import Call, call_of
from infer.server.errors import ApiError, api_error
from infer.server.resumption import unpack
from infer.server.server_state import ServerState

log = logging.getLogger("infer.server")
Handler = Callable[[Request, ServerState], Awaitable[Response]]


class ApiRoute(NamedTuple):
    """A route of the server. `path` is in Starlette's notation. If `is_open`, no key is needed.

    `operation` is the task of the model, in OpenTelemetry's words; the handler of such a request asks the door
    (`asking.enter`). `shape` converts an exception to the error that a client receives.
    """

    method: str
    path: str
    handler: Handler
    operation: str = ""
    is_open: bool = False
    shape: Callable[[Exception], ApiError] = api_error


class ClientGoneError(Exception):
    """The client has disconnected, so nobody is left to answer."""


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
            body = await read_body(request, self._state.settings)
            if call.num_sent_bytes:
                call.sent = unpack(body[: call.num_sent_bytes])
            request._body = body[call.num_sent_bytes :]
            response = await self._route.handler(request, self._state)
        except (ClientDisconnect, ClientGoneError):
            call.leave()
            return
        except Exception as error:
            response = refusal_of(error, call, self._route.shape).response
        await response(scope, receive, send)


def refusal_of(error: Exception, call: Call, shape: Callable[[Exception], ApiError] = api_error) -> ApiError:
    """Return the error that the client receives, and note its code in the call. An internal failure is logged."""
    if not isinstance(error, ApiError | InferError):
        log.error("request %s failed", call.id, exc_info=error)
    refusal = shape(error)
    call.error_code = refusal.code or refusal.type
    return refusal
