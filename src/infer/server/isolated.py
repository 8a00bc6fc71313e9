"""`--isolate`: clients talk to a process that has no model, and the model lives in a child that may die.

The child is this server at a socket of its own; requests are handed to it (`forward`). When it dies, its streams end
with an error, and a spare takes its place, which has loaded torch but no model, and waits for a byte on stdin.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import final

from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InferError
from infer.server.app import ROUTES
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.exposition import with_samples
from infer.server.forward import forward
from infer.server.health import health, ready
from infer.server.messages import failure_event
from infer.server.metrics_page import metrics_response
from infer.server.process import Life, run_process
from infer.server.sse import failure_events
from infer.server.state import ServerState

_POLL_SECONDS, _ANSWER_SECONDS = 0.05, 1.0
_SHORT_LIFE = 10.0  # seconds: a child that lived no longer is not started again at once
_MOST_SHORT = 5  # of them in a row
_ASKED = b"GET /ready HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"


def await_turn() -> bool:
    """In a child: load what takes long, then wait until its parent needs it; False if that ends first."""
    import_module("infer.llm")
    return bool(os.read(0, 1))


def run_isolated(state: ServerState, listener: socket.socket, command: Sequence[str]) -> int:
    """`command` starts a child; the number of its socket's descriptor is added. The exit status."""
    with tempfile.TemporaryDirectory(prefix="infer-") as folder:
        path = str(Path(folder) / "engine")
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(path)
            own.listen(1024)
            child = Child(state, own, [*command, str(own.fileno())], path)
            life = Life(child.start, child.keep, child.terminate)
            try:
                return asyncio.run(run_process(state, listener, life, lambda state: None, child.table))
            finally:
                child.kill()


@final
class Child:
    def __init__(self, state: ServerState, own: socket.socket, command: Sequence[str], path: str) -> None:
        self._state, self._own, self._command, self._path = state, own, command, path
        self._process: asyncio.subprocess.Process | None = None
        self._spare: asyncio.subprocess.Process | None = None
        self._is_ending = False

    @property
    def table(self) -> list[ApiRoute]:
        """All routes, handed on, but those that say how this process is."""
        own = {"/health": health, "/ready": self._ready, "/metrics": self._read_metrics}
        return [each._replace(handler=own.get(each.path, self._forward), operation="") for each in ROUTES]

    async def start(self) -> None:
        """Until it is ready. Where it ends before, the state has failed."""
        spare, self._spare = self._spare, None
        self._process = process = await self._spawn() if spare is None or spare.returncode is not None else spare
        assert process.stdin is not None
        process.stdin.write(b"\n")
        while process.returncode is None:
            if await self._is_ready():
                if self._state.phase == "loading":
                    self._state.phase = "ready"
                self._spare = await self._spawn()
                return
            await asyncio.sleep(_POLL_SECONDS)
        if not self._is_ending:
            self._state.fail(InferError(f"the engine's process ended with status {process.returncode}"))

    async def _spawn(self) -> asyncio.subprocess.Process:
        fds = (self._own.fileno(),)
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )

    async def keep(self) -> None:
        """Start it again when it dies, until it does so too often."""
        num_short = 0
        while self._state.phase != "failed" and self._process is not None:
            began = time.monotonic()
            await self._process.wait()
            if self._is_ending:
                return
            num_short = num_short + 1 if time.monotonic() - began < _SHORT_LIFE else 0
            if num_short > _MOST_SHORT:
                self._state.fail(InferError("the engine's process dies again and again"))
                return
            self._state.phase, self._state.progress = "loading", 0.0
            await self.start()

    def terminate(self) -> None:
        """It drains."""
        self._is_ending = True
        _signal(self._process, signal.SIGTERM)
        _signal(self._spare, signal.SIGKILL)

    def kill(self) -> None:
        for process in (self._process, self._spare):
            _signal(process, signal.SIGKILL)

    async def _is_ready(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path)
                writer.write(_ASKED)
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return answer.startswith(b"HTTP/1.1 200")

    async def _forward(self, request: Request, state: ServerState) -> Response:
        state.check_ready()
        fail = failure_event if request.url.path == "/v1/messages" else failure_events
        return await forward(request, self._path, fail)

    async def _ready(self, request: Request, state: ServerState) -> Response:
        return await (self._forward if state.phase == "ready" else ready)(request, state)

    async def _read_metrics(self, request: Request, state: ServerState) -> Response:
        """The engine's, and what never came to it."""
        text = b""
        with suppress(ApiError):
            text = bytes((await self._forward(request, state)).body)
        return metrics_response(with_samples(text.decode(), state.metrics.families_of_http(), process="front"))


def _signal(process: asyncio.subprocess.Process | None, number: int) -> None:
    if process is not None and process.returncode is None:
        os.kill(process.pid, number)
