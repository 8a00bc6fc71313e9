"""The first layer of the app: it gives every request a `Call`, sets the ids of its answer, and logs and counts it.

Every request has an id that the server makes. A valid id from the client is returned, and logged next to the server's
id. The log has one JSON line per request, written at its end, with OpenTelemetry's names. It never contains the text of
a prompt or an answer. Its lines leave through a bounded queue and a thread, so that a reader of the log that stalls
stops nothing else.
"""

import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from logging.handlers import QueueHandler
from os import write
from queue import Full, Queue
from select import select
from threading import Thread
from typing import Any, TextIO, final

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.serving.server.call import FINGERPRINT_HEADER, Call, put_call
from infer.serving.server.server_state import ServerState

log, server_log = logging.getLogger("infer.access"), logging.getLogger("infer.server")
_MOST_HEADER = 2048  # characters
_CLEAN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_LINES = 10_000
_FLUSH_SECONDS = 1.0


def with_calls(app: ASGIApp, state: ServerState) -> ASGIApp:
    """Return the app with a call per request. A child process receives ids and names of keys from its parent."""

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # an application of Ray also hears of its lifespan
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        call = Call(new_id(), asked if _CLEAN.fullmatch(asked) else None, scope["method"])
        if state.settings.is_child:
            call.take_over(headers)
        put_call(scope, call)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = call.shown_id
                if state.settings.is_child and state.loaded is not None:
                    headers[FINGERPRINT_HEADER] = state.loaded.llm.system_fingerprint
                if call.warnings:
                    headers["x-infer-warnings"] = _as_header(call.warnings)
            await send(message)

        state.calls.add(call)
        try:
            await app(scope, receive, send_with_id)
        finally:
            state.calls.discard(call)
            if call.entry is not None:
                state.door.leave(call.entry)
            if not (call.is_forwarded or call.is_probe):
                count_call(state, call)

    return call_app


def new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _as_header(warnings: Sequence[str]) -> str:
    """Return the first warnings as a JSON list in ASCII, short enough for every proxy."""
    for count in range(len(warnings), 0, -1):
        if len(found := json.dumps(warnings[:count])) <= _MOST_HEADER:
            return found
    return "[]"


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
        waited = arrivals[0] - call.sequences[0].submitted_at
        state.door.wait_ratio.learn(call.entry.predicted, waited)


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
    results = call.results
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
    if results[0].disk_tokens:
        entry["infer.usage.disk_read.input_tokens"] = results[0].disk_tokens
    if began:
        entry["infer.queue_seconds"] = round(min(began) - call.sequences[0].submitted_at, 6)
    if arrivals:
        entry["gen_ai.server.time_to_first_token"] = round(min(arrivals) - call.received_at, 6)
    return entry


@final
class LogLines(QueueHandler):
    """Writes whole lines to a stream. Lines beyond `MOST_LINES` unwritten ones are dropped, and the next line says so.

    At the end of the process, `logging` flushes the handler, which waits for at most a second.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines = Queue[str](MOST_LINES)
        super().__init__(self._lines)
        # Not through the stream: the end of the process would wait for the lock of its buffer.
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._num_dropped = 0
        Thread(target=self._write, name="infer-log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, line: Any) -> None:
        notice = f"{self._num_dropped} lines of the log were dropped: its reader is too slow\n"
        try:
            self._lines.put_nowait(f"{notice if self._num_dropped else ''}{line}\n")
            self._num_dropped = 0
        except Full:
            self._num_dropped += 1

    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def _put(self, content: bytes) -> int:
        """Return the number of bytes that the stream took. It may be a pipe that another process made non-blocking."""
        try:
            return write(self._descriptor, content)
        except BlockingIOError:
            select([], [self._descriptor], [])
            return 0

    def _write(self) -> None:
        while True:
            content = self._lines.get().encode(self._encoding, "backslashreplace")
            with suppress(OSError):  # the reader has closed the pipe
                while content:
                    content = content[self._put(content) :]
            self._lines.task_done()
