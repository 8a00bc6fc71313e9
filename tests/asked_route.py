"""A route of tests that asks the model for as many tokens as it is told, as a stream or as a whole."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer import AsyncStream, RequestOptions, SamplingParams
from infer.server.app import ROUTES
from infer.server.asking import answer, begin, check_result
from infer.server.endpoint import ApiRoute
from infer.server.sse import DONE, EventStream, event
from infer.server.state import ServerState

PATH = "/test/ask"


async def ask(request: Request, state: ServerState) -> Response:
    asked: dict[str, Any] = msgspec.json.decode(await request.body())
    params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=asked.get("max_tokens", 4))
    if not asked.get("stream"):
        result = await answer(request, state, asked["prompt"], params, RequestOptions())
        return JSONResponse({"token_ids": result.token_ids, "finish_reason": result.finish_reason})
    stream = await begin(request, state, asked["prompt"], params, RequestOptions())
    events = _events(stream, state, "x" * asked.get("num_extra_bytes", 0))
    return EventStream(events, comment_seconds=state.settings.comment_seconds)


async def _events(stream: AsyncStream, state: ServerState, extra: str) -> AsyncGenerator[bytes, None]:
    async with stream:
        async for piece in stream:
            yield event(json.dumps({"token_id": piece.token_id, "extra": extra}).encode())
        check_result(await stream.result(), state)
        yield DONE


TABLE = [*ROUTES, ApiRoute("POST", PATH, ask, operation="text_completion")]
