"""The process of a server: it binds its port before it loads anything large, and ends when a supervisor asks.

uvicorn reads and writes HTTP with our own connections, and without its signal handlers. The first SIGTERM, SIGINT or
SIGHUP drains the server; the second ends it immediately. The model is loaded on its own thread, so that the port
answers meanwhile. This thread is the first to import torch.

If a step or the event loop hangs, a watchdog writes all stacks and ends the process for a supervisor. Code that holds
Python's lock stops the watchdog's thread too. Then a thread of `faulthandler`, which needs no lock, does the same, with
status 1.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, final

import uvicorn

import infer
from infer.errors import InferError, InvalidRequestError
from infer.serving.server.app import ROUTES, count_call, make_app
from infer.serving.server.connection import Connection
from infer.serving.server.endpoint import ApiRoute
from infer.serving.server.server_state import Changes, ServerState
from infer.serving.server_settings import ServerSettings
from infer.text.grammar.libraries import trial_lane

_BACKLOG = 2048
_POLL_SECONDS = 0.05  # between two checks while the server drains
_LAST_SECONDS = 1.0  # to send the errors that end late answers
OnReady = Callable[[ServerState], None]
STATUS = 3  # exit status of a process that hangs
_NUM_CHECKS = 8  # checks within the time limit of a step
log = logging.getLogger("infer.server")
OnProgress = Callable[[int, int], None]
Load = Callable[[OnProgress], "infer.AsyncLLM"]
_WARM_UP_TOKENS = 64
_TICK_SECONDS = 1.0  # the longest tick: an idle process should rarely wake


@final
class HttpServer(uvicorn.Server):
    def __init__(self, state: ServerState, table: Sequence[ApiRoute] = ROUTES) -> None:
        self._state, settings = state, state.settings
        http: Any = partial(Connection, settings, partial(count_call, state))
        config = uvicorn.Config(
            make_app(state, table),
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
        super().__init__(config)
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


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the address. Raises InvalidRequestError if the address is not available."""
    address = host, port = settings.host.strip("[]"), settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_for_both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_for_both)
    except OSError as error:
        raise InvalidRequestError(f"cannot listen at {host}:{port}: {error.strerror}") from error
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


def run_server(state: ServerState, listener: socket.socket, load: Load, on_ready: OnReady) -> int:
    """Serve a model until a signal ends the server, and return the exit status of the process.

    Raises the server's failure, such as the error that stopped the loading of the model.
    """
    return run_process(state, listener, ROUTES, Life(partial(load_model, state, load), on_ready))


class Life(NamedTuple):
    """The functions that a process runs.

    `load` returns when the state is ready or has failed. `on_drain` is called when a signal begins the drain, and
    `on_end` at the end.
    """

    load: Callable[[], Coroutine[Any, Any, None]]
    on_ready: OnReady = lambda state: None
    on_drain: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None


def run_process(state: ServerState, listener: socket.socket, table: Sequence[ApiRoute], life: Life) -> int:
    """Serve the routes until a signal ends the server, and return the exit status of the process."""
    return asyncio.run(_ServerProcess(state, life).run(listener, table))


@final
class _ServerProcess:
    def __init__(self, state: ServerState, life: Life) -> None:
        self._state, self._life, self._signals, self._changes = state, life, list[int](), Changes()

    async def run(self, listener: socket.socket, table: Sequence[ApiRoute]) -> int:
        state, server = self._state, HttpServer(self._state, table)
        self._watch_signals()
        try:
            serving = asyncio.create_task(server.serve([listener]))
            await server.listening.wait()
            await self._first_of(asyncio.create_task(self._life.load()))
            if state.phase == "ready":
                self._life.on_ready(state)
                threading.Thread(target=_watch, args=[state], name="infer-watchdog", daemon=True).start()
                await self._first_of(asyncio.create_task(state.has_failed.wait()))
            if self._signals:
                self._life.on_drain()
                await self._drain(server)
            server.stop()
            await self._first_of(serving, num_signals=2)
        finally:
            self._life.on_end()
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
        self._changes.announce()

    async def _first_of(self, task: "asyncio.Task[Any]", num_signals: int = 1) -> None:
        """Return when the task has ended, or when `num_signals` signals have arrived."""
        task.add_done_callback(lambda _: self._changes.announce())
        await self._changes.until(lambda: task.done() or len(self._signals) >= num_signals)

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


def _watch(state: ServerState) -> None:
    """End the process if the event loop or a step hangs: its time is the same in several checks in a row.

    Time is counted in checks, so a process that was stopped meanwhile does not count as hanging, unless it was stopped
    for the whole limit.
    """
    seen: tuple[float | None, ...] = (None, None)
    counts = [0, 0]
    while True:
        faulthandler.dump_traceback_later(state.settings.watchdog_seconds, exit=True)
        time.sleep(state.settings.watchdog_seconds / _NUM_CHECKS)
        last, seen = seen, (state.ticked_at, state.step_began)
        same = [now is not None and now == before for now, before in zip(seen, last, strict=True)]
        counts = [count + 1 if is_same else 0 for count, is_same in zip(counts, same, strict=True)]
        if max(counts) >= _NUM_CHECKS:
            faulthandler.dump_traceback()
            os._exit(STATUS)


async def load_model(state: ServerState, load: Load) -> None:
    """Load the model, and return when it is ready. If it cannot be loaded, mark the state as failed and return."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def count(num_done: int, total: int) -> None:
        state.progress = num_done / max(total, 1)

    def run() -> None:
        try:
            _link_torch()
            if find_spec("llguidance") is not None:
                trial_lane("llguidance").start()
            llm = load(count)
            log.debug("fingerprint %s", llm.host.system_fingerprint)  # computed now, because it takes some time
            outcome = partial(state.become_ready, llm)
        except Exception as error:
            outcome = partial(state.fail, error)
            if not (isinstance(error, InferError) or loop.is_closed()):
                log.exception("the model cannot be loaded")
        if not loop.is_closed():  # a server that ended while it loads takes apart what is being imported
            loop.call_soon_threadsafe(outcome)
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="infer-load", daemon=True).start()
    await done.wait()


def warmed(llm: "infer.LLM") -> "infer.AsyncLLM":
    """Return the model for asynchronous use after one short answer or text, so that the first request is fast."""
    token_ids = [0] * min(_WARM_UP_TOKENS, llm.max_seq_len // 2)
    if llm.architecture.reads_whole_texts:
        llm.embed([token_ids])
    else:
        llm.generate(token_ids, max_new_tokens=4, ignore_eos=True, temperature=0)
    return infer.AsyncLLM(llm)


def _link_torch() -> None:
    """Link torch's library with a call of C, which does not hold the interpreter's lock.

    An import would hold it for a quarter of a second while the linker works, and the port would not answer.
    """
    if (spec := find_spec("torch")) is not None and spec.origin is not None:
        library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
        if library.exists():
            ctypes.CDLL(None).dlopen(str(library).encode(), os.RTLD_LAZY)
