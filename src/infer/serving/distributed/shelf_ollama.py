"""Ollama's API of a server of several models: its lists, and `keep_alive`, which loads and unloads models."""

import time
from functools import partial
from typing import Any, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.distributed.front import hand_on, read_body
from infer.serving.distributed.shelf import Shelf
from infer.serving.distributed.shelved_model import ShelvedModel, tasks_of_route
from infer.serving.protocols.ollama.ask import MOST_SECONDS, OllamaModelBody, seconds_of
from infer.serving.protocols.ollama.events import LoadedModel, OllamaModels, listed, time_text, without_prompt
from infer.serving.server.app import ROUTES as ALL_ROUTES
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import Handler
from infer.serving.server.replies import json_response
from infer.serving.server.routes.ollama import ROUTES, pull_unless, refuse_change, shown_response, version
from infer.serving.server.routes.served_models import facts_of
from infer.serving.server.server_state import ServerState

# The routes that use a model.
OLLAMA_ANSWERS = [each.path for each in ALL_ROUTES if each.path.startswith("/api/") and each.operation]


class _Wish(msgspec.Struct):
    """The fields of a body that decide if its model is loaded."""

    keep_alive: float | str | None = None
    prompt: Any = None
    suffix: Any = None
    messages: Any = None
    input: Any = None

    @property
    def has_prompt(self) -> bool:
        return bool(self.prompt or self.suffix or self.messages or self.input)


@final
class ShelfOllama:
    """The handlers of Ollama's routes."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handlers by path, for the routes that use no model."""
        own: dict[str, Handler] = {
            route.path: route.handler for route in ROUTES if route.handler in (refuse_change, version)
        }
        return own | {
            "/api/tags": self._tags,
            "/api/ps": self._running,
            "/api/show": self._show,
            "/api/pull": self._pull,
        }

    async def answer(self, request: Request, state: ServerState) -> Response:
        """Forward a request, and note for how long its model stays loaded.

        A request without a prompt only loads the model. If its `keep_alive` is 0, it unloads the model.
        """
        state.check_ready()
        asked = await read_body(request)
        wish = _wish_of(asked.content)
        model = await self._shelf.able(asked.model, tasks_of_route(request.url.path) if wish.has_prompt else ())
        seconds, tenant = seconds_of(wish.keep_alive), call_of(request).key_name
        if seconds == 0 and not wish.has_prompt:
            await self._shelf.unload(model, tenant)
            call = call_of(request)
            call.model, is_chat = model.name, request.url.path == "/api/chat"
            return json_response(without_prompt(model.name, call.created, is_chat=is_chat, is_unloaded=True))

        def keep() -> None:  # not earlier, because the model may be unloaded until then
            model.idle_seconds, model.idle_tenant = seconds, tenant

        return await hand_on(request, asked, partial(self._shelf.exchange, model, tenant, keep))

    async def _tags(self, request: Request, state: ServerState) -> Response:
        await self._shelf.look_again()
        models = list(self._shelf.models.values())
        return json_response(OllamaModels([listed(each.name, await facts_of(each.source.path)) for each in models]))

    async def _running(self, request: Request, state: ServerState) -> Response:
        found = [
            listed(each.name, await facts_of(each.source.path), self._loaded(each))
            for each in list(self._shelf.models.values())
            if each.phase == "loaded"
        ]
        return json_response(OllamaModels(found))

    async def _show(self, request: Request, state: ServerState, body: OllamaModelBody) -> Response:
        model = await self._shelf.named(body.model)
        context = None if model.plan is None else model.plan.context
        return shown_response(model.name, await facts_of(model.source.path), context)

    async def _pull(self, request: Request, state: ServerState, body: OllamaModelBody) -> Response:
        return await pull_unless(request, state, body, self._shelf.models.keys())

    def _loaded(self, model: ShelvedModel) -> LoadedModel:
        context = None if model.plan is None else model.plan.context
        seconds = self._shelf.idle_seconds_of(model)
        if seconds > MOST_SECONDS:
            return LoadedModel(model.num_bytes, context)
        idle_seconds = time.monotonic() - model.used_at if model.is_idle else 0.0
        return LoadedModel(model.num_bytes, context, time_text(time.time() + max(0.0, seconds - idle_seconds)))


def _wish_of(content: bytes) -> _Wish:
    """Return the fields of a body. The model's process refuses a body of another form."""
    try:
        return msgspec.json.decode(content, type=_Wish)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Wish()
