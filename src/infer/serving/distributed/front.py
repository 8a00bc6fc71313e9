"""The process that clients talk to, without a model, and its routes. Its child processes have models and may die.

`Front` is that of `--isolate` and `--replicas`. `ShelfFront` is that of several models, each in a process of its own.
In Ollama's API, `keep_alive` says for how long a model stays loaded.
"""

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchanges, Failover
from infer.serving.distributed.replica import Replicas, answers_of
from infer.serving.distributed.router import RoutedBody, read_routed
from infer.serving.distributed.shelf import Shelf, ShelfWork
from infer.serving.distributed.shelved_model import TASKS_BY_OPERATION, ModelSource, ShelvedModel
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.fields import Parameters
from infer.serving.protocols.ollama import (
    MOST_SECONDS,
    LoadedModel,
    OllamaModelBody,
    OllamaModels,
    OllamaOutput,
    OllamaShape,
    listed,
    seconds_of,
    time_text,
    without_prompt,
)
from infer.serving.server.app import DESCRIBED, ROUTES
from infer.serving.server.connection import call_of
from infer.serving.server.endpoint import ApiRequest, ApiRoute, Handler, json_response, post, read_apart
from infer.serving.server.process import Life, run_process
from infer.serving.server.routes import ollama, status, web_files
from infer.serving.server.routes.openapi import description_routes
from infer.serving.server.routes.served_models import ModelStatus, ServedModel, ServedModels, facts_of, served_model
from infer.serving.server.server_state import ServerState
from infer.system.atomic import locked_folder

_NOT_REPEATABLE = ("", "embeddings", "rerank", "classify")  # operations that sample nothing
_HUNG = b'{"status":"hung"}'  # the answer if no replica answers
_SESSION_HEADERS = ("x-session-id", "x-session-affinity")  # OpenCode sends the second one
_EVENTS = "/v1/engine/events"  # these requests watch a model, but do not use it
# Routes without a model, if this server has no other handler.
_OWN = [*status.OWN_ROUTES, *web_files.ROUTES, *(each for each in ollama.ROUTES if not each.operation)]


def run_replicas(state: ServerState, listener: socket.socket, commands: Sequence[Sequence[str]]) -> int:
    """Serve with one child per command, and return the exit status.

    The number of the descriptor of the child's socket is appended to its command.
    """
    with locked_folder("infer-front-") as folder:
        replicas = Replicas(commands, folder, state)
        life = Life(replicas.start, on_drain=replicas.terminate, on_end=replicas.kill)
        return run_process(state, listener, Front(replicas).table, life)


async def read_body(request: Request, route: ApiRoute) -> RoutedBody:
    """Return the body of a request to a route. Raises BodyError."""
    session = next((request.headers[name] for name in _SESSION_HEADERS if name in request.headers), "")
    tenant = call_of(request).key_name
    is_repeatable = route.operation not in _NOT_REPEATABLE
    reading = partial(read_routed, await request.body(), session, tenant, is_repeatable=is_repeatable)
    return await read_apart(reading, await request.body())


def fronted(own: Mapping[str, Handler], hand_on: Handler) -> list[ApiRoute]:
    """Return the routes of a process without a model: with its own handlers by path, and `hand_on` for the others."""
    return [
        each._replace(handler=own[each.path], operation="")
        if each.path in own
        else each._replace(handler=partial(hand_on, route=each), body=None, operation="")
        for each in ROUTES
    ]


@final
class Front:
    """The handlers of all routes, in the process that clients talk to."""

    def __init__(self, replicas: Exchanges) -> None:
        self._replicas = replicas

    @property
    def table(self) -> list[ApiRoute]:
        """The routes. All requests are forwarded, except those to /health, /ready and /metrics."""
        own = {"/health": status.health, "/ready": self._ready, "/metrics": self._read_metrics}
        return fronted(own, self._hand_on)

    async def _hand_on(self, request: ApiRequest, route: ApiRoute) -> Response:
        request.server.check_ready()
        asked = await read_body(request, route)
        return await Failover(request, route, asked, partial(self._replicas.exchange, asked.prompt)).response()

    async def _ready(self, request: ApiRequest) -> Response:
        """Return the answer of a replica that is ready, or of another one if none is."""
        if request.server.phase != "ready":
            return await status.ready(request)
        answers = (await self._replicas.get(b"/ready")).values()
        code, body = min(answers, default=(503, _HUNG))
        return Response(body, code, media_type="application/json")

    async def _read_metrics(self, request: ApiRequest) -> Response:
        """Return the metrics of the replicas and of this process, which count requests that reached no replica.

        If there are several replicas, the metrics of each have its name.
        """
        found = {name: body.decode() for name, (_, body) in (await self._replicas.get(b"/metrics")).items()}
        are_several = self._replicas.are_several
        texts = [(text, {"replica": name} if are_several else {}) for name, text in found.items()]
        return status.metrics_response(await asyncio.to_thread(request.server.metrics.merged, texts))


def run_shelf(state: ServerState, listener: socket.socket, sources: Sequence[ModelSource], work: ShelfWork) -> int:
    """Serve the models, and return the exit status."""
    with locked_folder("infer-shelf-") as folder:
        shelf = Shelf(sources, state.settings, work, folder)

        async def load() -> None:
            try:
                await shelf.start()
            except InferError as error:
                state.fail(error)
            else:
                state.phase = "ready"

        life = Life(load, on_drain=shelf.terminate, on_end=shelf.kill)
        return run_process(state, listener, ShelfFront(shelf).table, life)


class ModelBody(Parameters, kw_only=True):
    """A request to load or to unload a model."""

    model: str


@final
class ShelfFront:
    """The handlers of all routes. A request is for the model that its body or its query names.

    Without a name, it is for the first model that can do the task of its route.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    @property
    def table(self) -> list[ApiRoute]:
        changes = [
            post("/models/load", self._load, "Load a model, and answer when it is ready", ModelBody, ServedModel),
            post("/models/unload", self._unload, "Unload a model after its last answer", ModelBody, ServedModel),
        ]
        own = {each.path: each.handler for each in (*_OWN, *description_routes([*DESCRIBED, *changes]))}
        own |= {"/metrics": self._read_metrics, "/ready": self._ready}
        own |= {"/v1/models": self._list, "/v1/models/{id:path}": self._show}
        own |= {"/api/tags": self._tags, "/api/ps": self._running, "/api/show": self._describe}
        own |= {"/api/pull": partial(ollama.pull, known=self._shelf.models)}
        return [*fronted(own, self._hand_on), *changes]

    async def _hand_on(self, request: ApiRequest, route: ApiRoute) -> Response | OllamaOutput:
        """Forward a request.

        One of Ollama's without a prompt only loads its model, or unloads it if its `keep_alive` is 0.
        """
        request.server.check_ready()
        asked, is_ollama = await read_body(request, route), issubclass(route.shape, OllamaShape)
        only_loads, call = is_ollama and asked.without_prompt, request.call
        name = asked.model if is_ollama else asked.model or request.query_params.get("model")
        tasks = () if only_loads else TASKS_BY_OPERATION.get(route.operation, ("generate",))
        model = await self._shelf.able(name, tasks)
        if route.path == _EVENTS:
            if model.phase != "loaded" or model.replica is None:
                raise ApiError(503, f"the model {model.name!r:.80} is not loaded", code="not_loaded")
            return await Failover(request, route, asked, model.replica.exchange).response()
        seconds = seconds_of(asked.keep_alive) if is_ollama else None
        if only_loads and seconds == 0:
            await self._shelf.unload(model, call.key_name)
            call.model, is_chat = model.name, route.path == "/api/chat"
            return without_prompt(model.name, call.created, is_chat=is_chat, is_unloaded=True)

        def keep() -> None:  # not earlier, because the model may be unloaded until then
            if is_ollama:
                model.idle_seconds, model.idle_tenant = seconds, call.key_name

        exchange = partial(self._shelf.exchange, model, call.key_name, keep)
        return await Failover(request, route, asked, exchange).response()

    async def _list(self, request: ApiRequest) -> ServedModels:
        await self._shelf.look_again()
        await self._shelf.read_headers()
        shown = await asyncio.gather(*(_shown(model, request.server) for model in self._shelf.models.values()))
        return ServedModels(shown, allow_pull=request.server.settings.allow_pull)

    async def _show(self, request: ApiRequest) -> ServedModel:
        return await _shown(await self._shelf.named(request.path_params["id"]), request.server)

    async def _tags(self, request: ApiRequest) -> OllamaModels:
        await self._shelf.look_again()
        models = list(self._shelf.models.values())
        return OllamaModels([listed(each.name, await facts_of(each.source.path)) for each in models])

    async def _running(self, request: ApiRequest) -> OllamaModels:
        models = [each for each in self._shelf.models.values() if each.phase == "loaded"]
        return OllamaModels(
            [listed(each.name, await facts_of(each.source.path), self._loaded(each)) for each in models]
        )

    async def _describe(self, request: ApiRequest, body: OllamaModelBody) -> Response:
        model = await self._shelf.named(body.model)
        return ollama.shown_response(model.name, await facts_of(model.source.path), model.context)

    def _loaded(self, model: ShelvedModel) -> LoadedModel:
        seconds = self._shelf.idle_seconds_of(model)
        if seconds > MOST_SECONDS:
            return LoadedModel(model.num_bytes, model.context)
        idle_seconds = time.monotonic() - model.used_at if model.is_idle else 0.0
        return LoadedModel(model.num_bytes, model.context, time_text(time.time() + max(0.0, seconds - idle_seconds)))

    async def _load(self, request: ApiRequest, body: ModelBody) -> ServedModel:
        model = await self._shelf.named(body.model)
        async with self._shelf.admitted(model, request.call.key_name):
            return await _shown(model, request.server)

    async def _unload(self, request: ApiRequest, body: ModelBody) -> ServedModel:
        model = await self._shelf.named(body.model)
        await self._shelf.unload(model, request.call.key_name)
        return await _shown(model, request.server)

    async def _ready(self, request: ApiRequest) -> Response:
        """Answer 503 also if the process of a loaded model does not answer."""
        silent = [name for name, found in (await self._ask_loaded(b"/ready")).items() if found is None]
        models = self._shelf.models
        hung = [name for name in silent if models[name].phase == "loaded"]  # others were unloaded meanwhile
        if hung and request.server.phase == "ready":
            return json_response(status.Health("hung", models=hung), status=503)
        return await status.ready(request)

    async def _ask_loaded(self, target: bytes) -> dict[str, tuple[int, bytes] | None]:
        """Return status and body of each loaded model, or None for a model that does not answer within a second."""
        loaded = [each.replica for each in self._shelf.models.values() if each.phase == "loaded"]
        return await answers_of([replica for replica in loaded if replica is not None], target)

    async def _read_metrics(self, request: ApiRequest) -> Response:
        """Return the metrics of all loaded models, with their names, and those of this process."""
        answers = await self._ask_loaded(b"/metrics")
        texts = [(found[1].decode(), {"model": name}) for name, found in answers.items() if found is not None]
        return status.metrics_response(await asyncio.to_thread(request.server.metrics.merged, texts))


async def _shown(model: ShelvedModel, state: ServerState) -> ServedModel:
    path, plan, error = model.source.path, model.plan, None if model.failure is None else str(model.failure)
    facts = None if plan is None else await facts_of(path)
    found = served_model(state, model.name, path, model.context, facts)
    found.status = ModelStatus(model.phase, await _progress(model), error)
    found.is_pinned = model.source.is_pinned
    if plan is not None:
        found.takes, found.memory_bytes = list(plan.takes), plan.num_bytes
    return found


async def _progress(model: ShelvedModel) -> float | None:
    """Return the loaded share of a model that is loading."""
    if model.phase != "loading" or model.replica is None:
        return None
    found = await model.replica.try_get(b"/health")
    return 0.0 if found is None else float(json.loads(found[1]).get("progress", 0.0))
