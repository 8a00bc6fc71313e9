"""The process of a server: its port is bound before anything heavy is loaded, and it ends as a supervisor asks.

uvicorn reads and writes HTTP. Its own signal handling is not used: the first SIGTERM or SIGINT drains, the second ends
at once.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import uvicorn

from infer.errors import InvalidRequestError
from infer.server.app import make_app
from infer.server.connection import Connection
from infer.server.loading import Load, load_model
from infer.server.settings import ServerSettings
from infer.server.state import ServerState

_BACKLOG = 2048
OnReady = Callable[[ServerState], None]


def bind(settings: ServerSettings) -> socket.socket:
    """Raises InvalidRequestError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise InvalidRequestError(f"{where} cannot be listened at: {error.strerror}") from error


@final
class HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(state: ServerState) -> HttpServer:
    settings = state.settings
    config = uvicorn.Config(
        make_app(state),
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(settings.keep_alive_seconds),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    return HttpServer(config)


def run_server(state: ServerState, listener: socket.socket, load: Load, on_ready: OnReady) -> int:
    """Serve until a signal ends it; the exit status of the process."""
    return asyncio.run(_serve(state, listener, load, on_ready))


async def _serve(state: ServerState, listener: socket.socket, load: Load, on_ready: OnReady) -> int:
    server, loop = make_http_server(state), asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    loading = asyncio.create_task(load_model(state, load))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if state.failure is not None:
        raise state.failure
    if state.phase == "ready":
        on_ready(state)
        await stopping
    server.should_exit = True
    await serving
    return 0
