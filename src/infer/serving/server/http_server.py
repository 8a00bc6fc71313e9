"""uvicorn's server with our own connections, and without its signal handlers."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, final

import uvicorn

from infer.serving.server.access_log import count_call
from infer.serving.server.app import ROUTES, make_app
from infer.serving.server.connection import Connection
from infer.serving.server.endpoint import ApiRoute
from infer.serving.server.server_state import ServerState

_TICK_SECONDS = 1.0  # the longest tick: an idle process should rarely wake


@final
class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        settings = state.settings
        self._tick_seconds = min(_TICK_SECONDS, settings.watchdog_seconds / 4, settings.reader_seconds / 4)
        self.listening, self._stopping = asyncio.Event(), asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stop the server. Must be called on the event loop's thread."""
        self.should_exit = True
        self._stopping.set()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection from this process, over a pair of sockets.

        The server must be `listening`, but needs no address to listen on.
        """
        ours, theirs = socket.socketpair()
        protocol: Any = self.config.http_protocol_class
        accept = partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        await asyncio.get_running_loop().connect_accepted_socket(accept, theirs)
        return await asyncio.open_connection(sock=ours)

    async def main_loop(self) -> None:
        self.listening.set()
        while not self.should_exit:
            await self.on_tick(0)  # sets the date that answers have
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.check_reader()
            due = time.monotonic() + self._tick_seconds
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._tick_seconds)
            self._state.tick(time.monotonic() - due)
        self._state.ticked_at = None


def make_http_server(state: ServerState, table: Sequence[ApiRoute] = ROUTES) -> HttpServer:
    settings = state.settings
    http: Any = partial(Connection, settings, partial(count_call, state))
    config = uvicorn.Config(
        make_app(state, table),
        loop="asyncio",
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a malformed request has a line in the access log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=round(settings.drain_seconds),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    return HttpServer(config, state)
