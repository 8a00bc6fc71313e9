"""The state of a server, for its operators: its health, its metrics, its model, and the events of its engine.

`/health` reports if the process is alive, `/ready` if it accepts requests, and `/metrics` what it counts. `/props`
shows the model, the settings that its answers depend on, and its default sampling parameters. `/v1/engine/events` is a
stream of events about the engine's work, until the client disconnects.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.sampling_params import PARAMETERS, SamplingParams
from infer.serving.protocols.events import EVENTS, Count, Json, event
from infer.serving.protocols.fields import refuse
from infer.serving.server.endpoint import ApiRequest, EventStream, get, json_response
from infer.serving.server.server_state import ServerState

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SNAPSHOT_SECONDS = 1.0  # for an engine to show its work
_STUCK = 4  # /health is bad after 1/4 of the time after which the watchdog ends the process
_NEUTRAL = SamplingParams()
# Parameters that are shown even if their value is neutral.
_SHOWN = ("temperature", *(name for name, declared in PARAMETERS.items() if declared.is_filter))
_INTERVAL_SECONDS, _LEAST, _MOST = 0.25, 0.1, 10.0  # of events; the next snapshot shows a drain
OTHERS = "(other)"


class Health(Struct):
    """State of the server. `progress` is the loaded share of a model that is loading; `models` are those that hang."""

    status: Literal["ok", "loading", "draining", "failed", "hung"]
    progress: float | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET


async def health(request: ApiRequest) -> Response:
    """Answer 503 while the model is loading, and if the engine hangs or has failed: a supervisor may restart it."""
    return _report(request.server, is_good=is_alive(request.server))


async def ready(request: ApiRequest) -> Response:
    """Answer 503 while the model is loading, while the server drains, and if the engine hangs or has failed.

    A busy server is ready: the door refuses excess requests, with the time to retry.
    """
    return _report(request.server, is_good=request.server.phase == "ready" and not _is_hung(request.server))


def is_alive(state: ServerState) -> bool:
    return state.phase in ("ready", "draining") and not _is_hung(state)


def _is_hung(state: ServerState) -> bool:
    """Return True if a step takes more than a quarter of the watchdog's limit.

    A step normally takes a tenth of a second.
    """
    began = state.step_began
    return began is not None and time.monotonic() - began > state.settings.watchdog_seconds / _STUCK


def _report(state: ServerState, *, is_good: bool) -> Response:
    progress = round(state.progress, 3) if state.phase == "loading" else UNSET
    report = Health("hung" if _is_hung(state) else "ok" if state.phase == "ready" else state.phase, progress)
    return json_response(report, status=200 if is_good else 503)


async def read_metrics(request: ApiRequest) -> Response:
    """Return the metrics. An engine that hangs stops no scrape: its last snapshot is shown."""
    host = None if request.server.loaded is None else request.server.loaded.host
    return metrics_response(request.server.metrics.text(host, await request.server.snapshot(_SNAPSHOT_SECONDS)))


def metrics_response(text: str) -> Response:
    return Response(text, headers={"Content-Type": _TYPE})


class DefaultSampling(Struct):
    """The sampling parameters whose default is not neutral, for conversations and for texts."""

    chat: dict[str, Any]
    text: dict[str, Any]


class Props(Struct):
    model: str
    description: str
    version: str
    system_fingerprint: str
    can_chat: bool
    max_model_len: Count
    vocab_size: Count
    num_layers: Count
    total_slots: Count
    kv_type: str
    cache_bytes: Count
    draft_model: str | None  # without its folder
    default_sampling: DefaultSampling


async def props(request: ApiRequest) -> Props:
    host, llm = request.server.host(), request.server.llm().llm
    cache = None if host.reads_whole_texts else host.runner.cache
    return Props(
        model=request.server.settings.model,
        description=repr(llm),
        version=infer.__version__,
        system_fingerprint=host.system_fingerprint,
        can_chat=llm.can_chat,
        max_model_len=llm.max_seq_len,
        vocab_size=host.requests.limits.vocab_size,
        num_layers=len(llm.architecture.layers),
        total_slots=request.server.settings.slots,
        kv_type="none" if cache is None else cache.kind,
        cache_bytes=0 if cache is None else cache.num_bytes,
        draft_model=None if (draft := host.settings.draft_model) is None else Path(draft).name,
        default_sampling=DefaultSampling(
            _differing(llm.default_params(is_chat=True)), _differing(llm.default_params())
        ),
    )


def _differing(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float | bool | str | None) and (name in _SHOWN or value != getattr(_NEUTRAL, name))
    }


async def engine_events(request: ApiRequest) -> Response:
    """Send a snapshot every `interval` seconds (default 0.25) if something has changed."""
    seconds = interval_of(request)
    request.server.llm()
    events = _snapshots(request.server, request.call.key_name, seconds)
    return EventStream(events, comment_seconds=request.server.settings.comment_seconds)


def interval_of(request: Request) -> float:
    """Return the interval in seconds. Raises ApiError."""
    given = request.query_params.get("interval")
    try:
        seconds = _INTERVAL_SECONDS if given is None else float(given)
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
        state.host().requests.check_generates()
        snapshot = await state.snapshot()
        what_counts = snapshot.num_steps, len(snapshot.sequences), snapshot.pools
        if what_counts != last:
            last = what_counts
            yield event(seen_by(tenant, snapshot.to_json()))
        await asyncio.sleep(seconds)


_INTERVAL: Json = {"name": "interval", "in": "query", "schema": {"type": "number", "minimum": _LEAST, "maximum": _MOST}}
OWN_ROUTES = [
    get("/health", health, "200 while the model can answer", answer=Health, is_open=True),
    get("/ready", ready, "200 while requests are accepted", answer=Health, is_open=True),
    get("/metrics", read_metrics, "List the metrics, for Prometheus", answer="text/plain"),
]
_EVENTS = "Stream snapshots of the engine's work"
ROUTES = [
    *OWN_ROUTES,
    get("/props", props, "Show the model and its default sampling", answer=Props),
    get("/v1/engine/events", engine_events, _EVENTS, answer=EVENTS, parameters=[_INTERVAL]),
]
