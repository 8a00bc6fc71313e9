"""A route: what a handler is, and how one is called. Whatever it raises is answered in OpenAI's shape."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.errors import InferError
from infer.server.call import call_of
from infer.server.errors import ApiError, api_error
from infer.server.state import ServerState

log = logging.getLogger("infer.server")
Handler = Callable[[Request, ServerState], Awaitable[Response]]


class ApiRoute(NamedTuple):
    """`path` in Starlette's notation. `is_open`: without a key."""

    method: str
    path: str
    handler: Handler
    is_open: bool = False


class ClientGoneError(Exception):
    """Nobody is left to answer."""


@final
class Endpoint:
    """A handler as an ASGI app: the body is read before it is called, so `await request.body()` takes no time."""

    def __init__(self, handler: Handler, state: ServerState) -> None:
        self._handler, self._state = handler, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            await self._read_body(request)
            response = await self._handler(request, self._state)
        except (ClientDisconnect, ClientGoneError):
            return
        except Exception as error:
            if not isinstance(error, ApiError | InferError):
                log.exception("request %s failed", call_of(request).id)
            refusal = api_error(error)
            call_of(request).error_code = refusal.code or refusal.type
            response = refusal.response
        await response(scope, receive, send)

    async def _read_body(self, request: Request) -> None:
        seconds = self._state.settings.body_seconds
        try:
            async with asyncio.timeout(seconds):
                await request.body()
        except TimeoutError:
            headers = {"Connection": "close"}
            raise ApiError(408, f"the body did not come within {seconds:g} s", headers=headers) from None
