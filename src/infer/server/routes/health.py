"""`/health` reports if the process is alive, and `/ready` if it accepts requests."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer.server.endpoint import ApiRoute
from infer.server.server_state import ServerState

_STUCK = 4  # times sooner than the watchdog ends the process, its health is bad


async def health(request: Request, state: ServerState) -> Response:
    """Answer 503 while the model is loading, and if the engine hangs or has failed: a supervisor may restart it."""
    return JSONResponse(_report(state), 200 if is_alive(state) else 503)


async def ready(request: Request, state: ServerState) -> Response:
    """Answer 503 while the model is loading, while the server drains, and if the engine hangs or has failed.

    A busy server is ready: the door refuses requests that are too much, with the time to retry.
    """
    is_ready = state.phase == "ready" and not _is_hung(state)
    return JSONResponse(_report(state), 200 if is_ready else 503)


def is_alive(state: ServerState) -> bool:
    return state.phase in ("ready", "draining") and not _is_hung(state)


def _is_hung(state: ServerState) -> bool:
    """Return True if a step takes more than a quarter of the watchdog's limit.

    A step normally takes a tenth of a second.
    """
    began = state.step_began
    return began is not None and time.monotonic() - began > state.settings.watchdog_seconds / _STUCK


def _report(state: ServerState) -> dict[str, object]:
    status = "ok" if state.phase == "ready" else state.phase
    report: dict[str, object] = {"status": "hung" if _is_hung(state) else status}
    return report | ({"progress": round(state.progress, 3)} if state.phase == "loading" else {})


ROUTES = [
    ApiRoute("GET", "/health", health, is_open=True),
    ApiRoute("GET", "/ready", ready, is_open=True),
]
