"""One JSON line per request, at its end, with OpenTelemetry's names. It never has the text of a prompt or an answer."""

import logging
import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.server.call import Call, call_of
from infer.server.server_state import ServerState

log, server_log = logging.getLogger("infer.access"), logging.getLogger("infer.server")


def with_access_log(app: ASGIApp, state: ServerState) -> ASGIApp:
    """Return the app with an access log. The layer also counts requests and lists the calls in progress."""

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        call = call_of(HTTPConnection(scope))
        state.calls.add(call)
        try:
            await app(scope, receive, send)
        finally:
            state.calls.discard(call)
            if not (call.is_forwarded or call.is_probe):
                count_call(state, call)

    return call_app


def count_call(state: ServerState, call: Call) -> None:
    """Log the call, learn from it, and count it. If one of these fails, the others are still done."""
    for note in (_log, partial(_learn, state), state.metrics.count_call):
        try:
            note(call)
        except Exception:
            server_log.exception("request %s cannot be counted", call.id)


def _log(call: Call) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info(msgspec.json.encode(entry_of(call)).decode())


def _learn(state: ServerState, call: Call) -> None:
    for sequence in call.sequences:
        state.door.lengths.learn(call.key_name, len(sequence.pieces))
    if call.entry is not None and call.sequences and (arrivals := call.sequences[0].timer.arrivals):
        call.entry.learn_wait(arrivals[0] - call.sequences[0].submitted_at)


def entry_of(call: Call) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status or 499,
        "http.server.request.duration": round(time.perf_counter() - call.received_at, 6),
        "infer.request.id": call.id,
    }
    optional = {
        "infer.request.client_id": call.client_id,
        "enduser.id": call.key_name,
        "error.type": call.error_code,
        "infer.disconnect_phase": call.left_in,
    }
    entry |= {name: value for name, value in optional.items() if value}
    return entry | (_answers(call) if call.sequences else {})


def _answers(call: Call) -> dict[str, Any]:
    results = [sequence.result() for sequence in call.sequences]
    arrivals = [arrivals[0] for sequence in call.sequences if (arrivals := sequence.timer.arrivals)]
    began = [sequence.timer.began for sequence in call.sequences if sequence.timer.began is not None]
    entry = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": results[0].prompt_tokens,
        "gen_ai.usage.output_tokens": sum(result.generated_tokens for result in results),
        "gen_ai.usage.cache_read.input_tokens": results[0].reused_tokens,
        "gen_ai.response.finish_reasons": [result.finish_reason for result in results],
    }
    if began:
        entry["infer.queue_seconds"] = round(min(began) - call.sequences[0].submitted_at, 6)
    if arrivals:
        entry["gen_ai.server.time_to_first_token"] = round(min(arrivals) - call.received_at, 6)
    return entry
