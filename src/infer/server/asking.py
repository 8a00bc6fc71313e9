"""How a handler asks the model: for a client that may go away at any time, in the name of its key."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from infer.engine.request_options import RequestOptions
from infer.outputs import GenerationResult
from infer.server.endpoint import ClientGoneError
from infer.server.errors import ApiError
from infer.server.state import ServerState

_Found = TypeVar("_Found")


def check_result(result: GenerationResult, state: ServerState) -> None:
    """Raises ApiError for an answer that ended as no client may be told: failed, or cut by the server."""
    if result.finish_reason == "error":
        raise ApiError(500, result.error or "the answer failed", headers={"x-should-retry": "false"})
    if result.finish_reason == "abort" and result.stop_reason != "timeout":
        state.llm()  # raises where the server is shutting down
        raise ApiError(500, "the answer was cancelled")


async def while_connected(request: Request, coroutine: Coroutine[Any, Any, _Found]) -> _Found:
    """Its result; a client that goes away cancels it. Raises ClientGoneError then."""
    working, leaving = asyncio.create_task(coroutine), asyncio.create_task(until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()


async def until_gone(request: Request) -> None:
    """Return when the client is gone. For a request whose body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def of_tenant(options: RequestOptions, key_name: str) -> RequestOptions:
    """Keys share neither their turns nor what their prompts begin with."""
    if not key_name:
        return options
    return replace(options, tenant=key_name, cache_salt=f"{key_name}\0{options.cache_salt}")
