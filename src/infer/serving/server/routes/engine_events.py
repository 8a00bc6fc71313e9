"""`/v1/engine/events`: a stream of events about the engine's work, until the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.protocols.answers import Json
from infer.serving.protocols.events import event
from infer.serving.protocols.fields import refuse
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import EventStream, get
from infer.serving.server.server_state import ServerState

_SECONDS, _LEAST, _MOST = 0.25, 0.1, 10.0  # the next snapshot shows a drain
OTHERS = "(other)"


async def engine_events(request: Request, state: ServerState) -> Response:
    """Send a snapshot every `interval` seconds (default 0.25) if something has changed."""
    seconds = interval_of(request)
    state.llm()
    events = _snapshots(state, call_of(request).key_name, seconds)
    return EventStream(events, comment_seconds=state.settings.comment_seconds)


def interval_of(request: Request) -> float:
    """Return the interval in seconds. Raises ApiError."""
    given = request.query_params.get("interval")
    try:
        seconds = _SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not _LEAST <= seconds <= _MOST:
        rule = f"a number of seconds from {_LEAST} to {_MOST:.0f}"
        raise refuse(f"interval must be {rule}, got {given!r:.40}", "interval")
    return seconds


def seen_by(tenant: str, snapshot: Json) -> Json:
    """Return a snapshot, as plain values, without the names and the work of other tenants."""
    sequences = [each if each["tenant"] == tenant else each | {"tenant": OTHERS} for each in snapshot["sequences"]]
    work = {name: work for name, work in snapshot["work_by_tenant"].items() if name == tenant}
    return snapshot | {"sequences": sequences, "work_by_tenant": work}


async def _snapshots(state: ServerState, tenant: str, seconds: float) -> AsyncGenerator[bytes, None]:
    last: tuple[Any, ...] | None = None
    while True:
        host = state.llm().host
        snapshot = await state.snapshots.latest(partial(host.answers.run, host.engine.snapshot))
        what_counts = snapshot.num_steps, len(snapshot.sequences), snapshot.pools
        if what_counts != last:
            last = what_counts
            yield event(msgspec.json.encode(seen_by(tenant, snapshot.to_json())))
        await asyncio.sleep(seconds)


_INTERVAL: Json = {"name": "interval", "in": "query", "schema": {"type": "number", "minimum": _LEAST, "maximum": _MOST}}
ROUTES = [
    get(
        "/v1/engine/events",
        engine_events,
        "Stream snapshots of the engine's work",
        answer="text/event-stream",
        parameters=[_INTERVAL],
    )
]
