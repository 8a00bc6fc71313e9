"""`/api/pull`: download a model from the hub into its local cache, with its progress as lines."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from math import inf

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InferError
from infer.serving.protocols.ollama.ollama_bodies import OllamaModelBody
from infer.serving.protocols.refusals import refuse
from infer.serving.server.answer_types import Count
from infer.serving.server.asking import while_connected
from infer.serving.server.endpoint import LINES
from infer.serving.server.http_errors import ApiError
from infer.serving.server.model_catalog import fetch, is_at_hand, is_fetched
from infer.serving.server.ollama_events import failure_line
from infer.serving.server.replies import json_response
from infer.serving.server.routes.served_models import known_name
from infer.serving.server.server_state import ServerState
from infer.serving.server.sse import EventStream, line
from infer.system.spellings import plain_name


class OllamaStatus(Struct, kw_only=True):
    """The state of a download or another change of models. A download has its bytes; `digest` is the model's name."""

    status: str
    digest: str | UnsetType = UNSET
    total: Count | UnsetType = UNSET
    completed: Count | UnsetType = UNSET


_SUCCESS = OllamaStatus(status="success")


async def pull(request: Request, state: ServerState, body: OllamaModelBody) -> Response:
    return await pull_unless(request, state, body, {state.settings.model, *state.settings.aliases})


async def pull_unless(request: Request, state: ServerState, body: OllamaModelBody, known: Collection[str]) -> Response:
    """Download a model, unless it is already served or on this machine.

    If the client disconnects, the download ends, and the next download of this model resumes it. Raises ApiError 403 if
    clients may not download.
    """
    name = await asyncio.to_thread(_name_to_fetch, known_name(body.model, known) or "", known)
    if name is not None and not state.settings.allow_pull:
        message = f"clients may not download {name!r:.80} here: run infer pull, or start the server with --allow-pull"
        raise ApiError(403, message, code="pull_not_allowed")
    if body.stream is False:
        await while_connected(request, _last_of(_progress(name)))
        return json_response(_SUCCESS)
    return EventStream(_lines(_progress(name)), comment_seconds=inf, fail=failure_line, media_type=LINES)


def _name_to_fetch(model: str, known: Collection[str]) -> str | None:
    """Return the name of a model on the hub, or None if it is on this machine. Raises BodyError for any other name."""
    plain = plain_name(model)
    if model in known or is_at_hand(plain):
        return None
    if (has_files := is_fetched(plain)) is None:
        message = f"{model!r:.80} is not a name on the hub: write org/repo, or org/repo:Q4_K_M for a GGUF file"
        raise refuse(message, "model")
    return None if has_files else plain


async def _progress(name: str | None) -> AsyncGenerator[OllamaStatus, None]:
    """Yield the states of a download until its end. Raises the errors of `fetch`."""
    yield OllamaStatus(status="pulling manifest")
    if name is not None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[OllamaStatus | None]()
        has_left = threading.Event()

        def report(num_done: int, total: int) -> None:
            if has_left.is_set():
                raise InferError(f"the download of {name} was cancelled")
            status = OllamaStatus(status=f"pulling {name}", digest=name, total=total, completed=num_done)
            loop.call_soon_threadsafe(arrived.put_nowait, status)

        fetching = asyncio.create_task(asyncio.to_thread(fetch, name, report))
        fetching.add_done_callback(lambda task: arrived.put_nowait(None))
        try:
            while (status := await arrived.get()) is not None:
                yield status
            await fetching
        finally:
            has_left.set()
            fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
    yield _SUCCESS


async def _last_of(states: AsyncGenerator[OllamaStatus, None]) -> None:
    async with aclosing(states):
        async for _ in states:
            pass


async def _lines(states: AsyncGenerator[OllamaStatus, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(states):
        async for state in states:
            yield line(msgspec.json.encode(state))
