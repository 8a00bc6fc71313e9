"""`--isolate` and `--replicas`: clients talk to a process without a model. Its children have the model and may die."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from starlette.requests import Request
from starlette.responses import Response

from infer.serving.distributed.exchange import Exchanges, Failover
from infer.serving.distributed.replica import Replicas
from infer.serving.distributed.router import RoutedBody, read_routed
from infer.serving.server.app import ROUTES
from infer.serving.server.connection import call_of
from infer.serving.server.endpoint import ApiRequest, ApiRoute, Handler, read_apart
from infer.serving.server.process import Life, run_process
from infer.serving.server.routes.status import health, metrics_response, ready
from infer.serving.server.server_state import ServerState
from infer.system.atomic import locked_folder

_NOT_REPEATABLE = ("", "embeddings", "rerank", "classify")  # operations that sample nothing
_HUNG = b'{"status":"hung"}'  # the answer if no replica answers
_SESSION_HEADERS = ("x-session-id", "x-session-affinity")  # OpenCode sends the second one


def run_replicas(state: ServerState, listener: socket.socket, commands: Sequence[Sequence[str]]) -> int:
    """Serve with one child per command, and return the exit status.

    The number of the descriptor of the child's socket is appended to its command.
    """
    with locked_folder("infer-front-") as folder:
        replicas = Replicas(commands, folder, state.settings.watchdog_seconds, partial(follow, state))
        life = Life(replicas.start, on_drain=replicas.terminate, on_end=replicas.kill)
        return run_process(state, listener, Front(replicas).table, life)


def follow(state: ServerState, replicas: Replicas) -> None:
    """Give the server the phase of its replicas."""
    if replicas.failure is not None:
        state.fail(replicas.failure)
    elif state.phase in ("loading", "ready"):
        state.phase = "ready" if replicas.is_ready else "loading"


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
        own = {"/health": health, "/ready": self._ready, "/metrics": self._read_metrics}
        return fronted(own, self._hand_on)

    async def _hand_on(self, request: ApiRequest, route: ApiRoute) -> Response:
        request.server.check_ready()
        asked = await read_body(request, route)
        return await Failover(request, route, asked, partial(self._replicas.exchange, asked.prompt)).response()

    async def _ready(self, request: ApiRequest) -> Response:
        """Return the answer of a replica that is ready, or of another one if none is."""
        if request.server.phase != "ready":
            return await ready(request)
        answers = (await self._replicas.get(b"/ready")).values()
        status, body = min(answers, default=(503, _HUNG))
        return Response(body, status, media_type="application/json")

    async def _read_metrics(self, request: ApiRequest) -> Response:
        """Return the metrics of the replicas and of this process, which count requests that reached no replica.

        If there are several replicas, the metrics of each have its name.
        """
        found = {name: body.decode() for name, (_, body) in (await self._replicas.get(b"/metrics")).items()}
        are_several = self._replicas.are_several
        texts = [(text, {"replica": name} if are_several else {}) for name, text in found.items()]
        return metrics_response(await asyncio.to_thread(request.server.metrics.merged, texts))
