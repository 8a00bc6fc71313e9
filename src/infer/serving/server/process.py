"""The process of a server: it binds its port before it loads anything large, and ends when a supervisor asks.

uvicorn reads and writes HTTP, but its signal handlers are not used. The first SIGTERM, SIGINT or SIGHUP drains the
server; the second ends it immediately.
"""

import asyncio
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.serving.server.app import ROUTES
from infer.serving.server.endpoint import ApiRoute
from infer.serving.server.http_server import HttpServer, make_http_server
from infer.serving.server.loading import Load, load_model
from infer.serving.server.server_state import ServerState
from infer.serving.server.watchdog import start_watchdog
from infer.serving.server_settings import ServerSettings

_BACKLOG = 2048
_POLL_SECONDS = 0.05  # between two checks while the server drains
_LAST_SECONDS = 1.0  # to send the errors that end late answers
OnReady = Callable[[ServerState], None]


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the address. Raises InvalidRequestError if the address is not available."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise InvalidRequestError(f"cannot listen at {where}: {error.strerror}") from error
    # Connections inherit it. asyncio sets it only for a named protocol; without it a small write waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def check_certificate(cert: Path, key: Path) -> None:
    """Raise InvalidRequestError unless the certificate and the key can be read and belong together."""

    def refuse_passphrase() -> str:
        raise InvalidRequestError(f"the key {key} is encrypted: remove its passphrase (openssl pkey -in FILE)")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key {key} does not belong to the certificate {cert}: give the certificate's own key"
            raise InvalidRequestError(message) from error
        raise InvalidRequestError(f"{cert} and {key} must be a certificate and its key in PEM: {error}") from error
    except OSError as error:
        raise InvalidRequestError(f"{cert} or {key} cannot be read: {error.strerror}") from error


def run_server(
    state: ServerState, listener: socket.socket, load: Load, on_ready: OnReady, table: Sequence[ApiRoute] = ROUTES
) -> int:
    """Serve until a signal ends the server, and return the exit status of the process.

    Raises the server's failure, such as the error that stopped the loading of the model.
    """
    life = Life(partial(load_model, state, load), state.has_failed.wait, lambda: None)
    return asyncio.run(run_process(state, listener, life, on_ready, table))


async def run_process(
    state: ServerState, listener: socket.socket, life: "Life", on_ready: OnReady, table: Sequence[ApiRoute]
) -> int:
    return await _Process(state, listener, table).run(life, on_ready)


class Life(NamedTuple):
    """The functions that a process runs.

    `load` returns when the state is ready or has failed, and `watch` when it has failed. `on_drain` is called when a
    signal begins the drain.
    """

    load: Callable[[], Coroutine[Any, Any, None]]
    watch: Callable[[], Coroutine[Any, Any, object]]
    on_drain: Callable[[], None]


@final
class _Process:
    def __init__(self, state: ServerState, listener: socket.socket, table: Sequence[ApiRoute]) -> None:
        self._state, self._listener, self._table = state, listener, table
        self._signals = list[int]()
        self._signalled = asyncio.Event()

    async def run(self, life: Life, on_ready: OnReady) -> int:
        state, server = self._state, make_http_server(self._state, self._table)
        self._watch_signals()
        serving = asyncio.create_task(server.serve([self._listener]))
        await server.listening.wait()
        await self._first_of(asyncio.create_task(life.load()))
        if state.phase == "ready":
            on_ready(state)
            start_watchdog(state)
            await self._first_of(asyncio.create_task(life.watch()))
        if self._signals:
            life.on_drain()
            await self._drain(server)
        server.stop()
        await self._first_of(serving, num_signals=2)
        if state.failure is not None:
            raise state.failure
        return 128 + self._signals[-1] if len(self._signals) > 1 else 0

    def _watch_signals(self) -> None:
        """Note signals and, in a child process, the end of its parent."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._note, number)
        if self._state.settings.is_child:
            loop.add_reader(0, self._end_with_parent)

    def _end_with_parent(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        self._note(signal.SIGTERM)

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP and self._signals:
            return  # a closing terminal sends several signals
        self._signals.append(number)
        self._signalled.set()

    async def _first_of(self, task: "asyncio.Task[Any]", num_signals: int = 1) -> None:
        """Return when the task has ended, or when `num_signals` signals have arrived."""
        while not task.done() and len(self._signals) < num_signals:
            self._signalled.clear()
            waiting = asyncio.create_task(self._signalled.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def _drain(self, server: HttpServer) -> None:
        """Finish the running answers, refuse the waiting ones, and cancel answers that take too long."""
        state, deadline = self._state, time.monotonic() + self._state.settings.drain_seconds
        if state.phase == "ready":
            state.drain()
        while state.has_answers and time.monotonic() < deadline and len(self._signals) < 2:
            await asyncio.sleep(_POLL_SECONDS)
        for call in state.calls:
            call.cancel()
        server.config.timeout_graceful_shutdown = round(max(_LAST_SECONDS, deadline - time.monotonic()))
