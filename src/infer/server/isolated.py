"""`--isolate`: clients talk to a process that has no model, and the model lives in a child that may die.

The child is this server at a socket of its own; requests are handed to it (`forward`). When it dies, its streams end
with an error, and another child is started at the same socket.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InferError
from infer.server.app import ROUTES
from infer.server.endpoint import ApiRoute
from infer.server.forward import forward
from infer.server.messages import failure_event
from infer.server.process import Life, run_process
from infer.server.sse import failure_events
from infer.server.state import ServerState

_POLL_SECONDS, _ANSWER_SECONDS = 0.05, 5.0
_SHORT_LIFE = 10.0  # seconds: a child that lived no longer is not started again at once
_MOST_SHORT = 5  # of them in a row
_ASKED = b"GET /ready HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"


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
        self._is_ending = False

    @property
    def table(self) -> list[ApiRoute]:
        """All routes, handed on, but those that say how this process is."""
        return [each if each.is_open else each._replace(handler=self._forward, operation="") for each in ROUTES]

    async def start(self) -> None:
        """Until it is ready. Where it ends before, the state has failed."""
        fds = (self._own.fileno(),)
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )
        while process.returncode is None:
            if await self._is_ready():
                if self._state.phase == "loading":
                    self._state.phase = "ready"
                return
            await asyncio.sleep(_POLL_SECONDS)
        if not self._is_ending:
            self._state.fail(InferError(f"the engine's process ended with status {process.returncode}"))

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
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, number)

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
