"""A route of tests that asks the model for as many tokens as it is told, as a stream or as a whole."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer import RequestOptions, SamplingParams
from infer.protocols.asked import Asked
from infer.server.app import ROUTES
from infer.server.asking import while_connected
from infer.server.choices import Choices, accept
from infer.server.endpoint import ApiRoute
from infer.server.server_state import ServerState
from infer.server.sse import DONE, EventStream, event

PATH = "/test/ask"


async def ask(request: Request, state: ServerState) -> Response:
    asked: dict[str, Any] = msgspec.json.decode(await request.body())
    params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=asked.get("max_tokens", 4))
    choices = await accept(request, state, Asked([asked["prompt"]], [params], RequestOptions(), "prompt", {}))
    if not asked.get("stream"):
        (result,) = await while_connected(request, choices.results())
        return JSONResponse({"token_ids": result.token_ids, "finish_reason": result.finish_reason})
    events = _events(choices, "x" * asked.get("num_extra_bytes", 0))
    return EventStream(events, comment_seconds=state.settings.comment_seconds)


async def _events(choices: Choices, extra: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            for piece in part.pieces:
                yield event(json.dumps({"token_id": piece.token_id, "extra": extra}).encode())
    yield DONE


TABLE = [*ROUTES, ApiRoute("POST", PATH, ask, operation="text_completion")]
