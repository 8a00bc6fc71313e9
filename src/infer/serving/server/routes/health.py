"""`/health` reports if the process is alive, `/ready` if it accepts requests, and `/metrics` what it counts."""

import time
from functools import partial
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.server.endpoint import get, json_response
from infer.serving.server.server_state import ServerState

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SNAPSHOT_SECONDS = 1.0  # for an engine to show its work
_STUCK = 4  # /health is bad after 1/4 of the time after which the watchdog ends the process


class Health(Struct):
    """State of the server. `progress` is the loaded share of a model that is loading; `models` are those that hang."""

    status: Literal["ok", "loading", "draining", "failed", "hung"]
    progress: float | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET


async def health(request: Request, state: ServerState) -> Response:
    """Answer 503 while the model is loading, and if the engine hangs or has failed: a supervisor may restart it."""
    return json_response(_report(state), status=200 if is_alive(state) else 503)


async def ready(request: Request, state: ServerState) -> Response:
    """Answer 503 while the model is loading, while the server drains, and if the engine hangs or has failed.

    A busy server is ready: the door refuses excess requests, with the time to retry.
    """
    is_ready = state.phase == "ready" and not _is_hung(state)
    return json_response(_report(state), status=200 if is_ready else 503)


def is_alive(state: ServerState) -> bool:
    return state.phase in ("ready", "draining") and not _is_hung(state)


def _is_hung(state: ServerState) -> bool:
    """Return True if a step takes more than a quarter of the watchdog's limit.

    A step normally takes a tenth of a second.
    """
    began = state.step_began
    return began is not None and time.monotonic() - began > state.settings.watchdog_seconds / _STUCK


def _report(state: ServerState) -> Health:
    progress = round(state.progress, 3) if state.phase == "loading" else UNSET
    return Health("hung" if _is_hung(state) else "ok" if state.phase == "ready" else state.phase, progress)


async def read_metrics(request: Request, state: ServerState) -> Response:
    """Return the metrics. An engine that hangs stops no scrape: its last snapshot is shown."""
    host = None if state.loaded is None else state.loaded.host
    engine = None if host is None else host.engine_if_any
    snapshot = None
    if host is not None and engine is not None:
        snapshot = await state.snapshots.latest(partial(host.answers.run, engine.snapshot), _SNAPSHOT_SECONDS)
    return metrics_response(state.metrics.text(host, snapshot))


def metrics_response(text: str) -> Response:
    return Response(text, headers={"Content-Type": _TYPE})


ROUTES = [
    get("/health", health, "200 while the model can answer", answer=Health, is_open=True),
    get("/ready", ready, "200 while requests are accepted", answer=Health, is_open=True),
    get("/metrics", read_metrics, "List the metrics, for Prometheus", answer="text/plain"),
]
