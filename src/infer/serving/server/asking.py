"""Ask the model on behalf of a key, for a client that may disconnect."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from infer.engine.step.request_options import RequestOptions
from infer.outputs import GenerationResult
from infer.serving.server.call import call_of
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import ClientGoneError
from infer.serving.server.http_errors import ENGINE_FAILED, ApiError
from infer.serving.server.server_state import ServerState

_BYTES_PER_TOKEN = 3  # an estimate, for prompts that are not tokenised yet
_Found = TypeVar("_Found")


def check_result(result: GenerationResult, state: ServerState) -> None:
    """Raise ApiError if the answer failed, or if the server cancelled it for a reason other than a timeout."""
    if result.finish_reason == "error":
        has_engine_failed = result.stop_reason == "internal" and state.has_engine_failed
        code, headers = ENGINE_FAILED if has_engine_failed else None, {"x-should-retry": "false"}
        raise ApiError(500, result.error or "the answer failed", code=code, headers=headers)
    if result.finish_reason == "abort" and result.stop_reason != "timeout":
        state.llm()  # raises if the server is shutting down
        raise ApiError(500, "the answer was cancelled")


async def while_connected(request: Request, coroutine: Coroutine[Any, Any, _Found]) -> _Found:
    """Return the coroutine's result.

    If the client disconnects first, cancel the coroutine and raise ClientGoneError.
    """
    working, leaving = asyncio.create_task(coroutine), asyncio.create_task(until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
            task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task whose client has disconnected, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


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
            return sum(text_tokens(key) + text_tokens(each) for key, each in value.items())
        case list() | tuple():
            if set(map(type, value)) == {int}:  # the ids of a prompt
                return len(value)
            return sum(1 if type(each) is int else text_tokens(each) for each in value)
    return 0


async def enter(request: Request, state: ServerState, arrival: Arrival) -> None:
    """Count the request at the door until it is answered. Raises ApiError 429."""
    call = call_of(request)
    if not call.sent and call.entry is None:  # the client of a continued stream has already waited
        call.entry = state.door.enter(arrival._replace(tenant=call.key_name), await request.body(), state.look)


def of_tenant(options: RequestOptions, key_name: str) -> RequestOptions:
    """Return the options with the key as tenant, so that each key has its own turns and its own cached prefixes."""
    if not key_name:
        return options
    return replace(options, tenant=key_name, cache_salt=f"{key_name}\0{options.cache_salt}")
