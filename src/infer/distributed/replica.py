"""A child process with the model, started again when it dies.

It is the same server, at a socket of its own, and gives all answers; clients talk to its parent, which has no model.
With a spare it is back sooner: a process that has loaded torch but no model, and waits for a byte on stdin.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import final

from infer.distributed.exchange import Exchange, GoneError, connected, request_bytes
from infer.errors import InferError

_POLL_SECONDS, _NOTICE_SECONDS, _ANSWER_SECONDS = 0.05, 0.002, 1.0
_SHORT_LIFE = 10.0  # seconds: one that lived no longer, and answered nothing, is not started for ever
_MOST_SHORT = 5  # of them in a row


def await_turn() -> bool:
    """In a child: load what takes long, then wait until its parent needs it; False if that ends first."""
    import_module("infer.llm")
    return bool(os.read(0, 1))


@final
class Replica:
    """`command` starts it; the number of its socket's descriptor is added. `on_change` is called when it becomes ready,
    and when it has died.
    """

    def __init__(
        self, name: str, own: socket.socket, command: Sequence[str], on_change: Callable[["Replica"], None]
    ) -> None:
        self.name, self.is_ready = name, False
        self.num_answered = 0  # requests of clients, since it is ready
        self._own, self._on_change = own, on_change
        self._command = [*command, str(own.fileno())]
        self._process: asyncio.subprocess.Process | None = None
        self._spare: asyncio.subprocess.Process | None = None
        self._exchanges = set[Exchange]()
        self._ready_at = 0.0
        self._is_ending = False

    async def live(self, *, has_spare: bool) -> None:
        """Until it is terminated. Raises InferError where it cannot start, or dies again and again."""
        num_short = 0
        while not self._is_ending:
            served_seconds = await self._run(has_spare=has_spare)
            is_short = served_seconds < _SHORT_LIFE and not self.num_answered
            num_short = num_short + 1 if is_short else 0
            if num_short > _MOST_SHORT:
                raise InferError("the engine's process dies again and again")

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """For one request. Raises GoneError where it dies meanwhile."""
        was_ready = self.is_ready
        exchange = await connected(self._own.getsockname())
        self._exchanges.add(exchange)
        try:
            if was_ready and not self.is_ready:
                raise GoneError
            yield exchange
        except GoneError:
            await self._notice_death()
            raise
        finally:
            self._exchanges.discard(exchange)
            exchange.close()

    async def get(self, target: bytes) -> tuple[int, bytes]:
        """Status and body. Raises GoneError."""
        async with self.exchange() as exchange:
            head = await exchange.head(request_bytes("GET", target, []))
            return head.status, await exchange.body()

    def terminate(self) -> None:
        """It drains."""
        self._is_ending = True
        _signal(self._process, signal.SIGTERM)
        _signal(self._spare, signal.SIGKILL)

    def kill(self) -> None:
        for process in (self._process, self._spare):
            _signal(process, signal.SIGKILL)

    async def _run(self, *, has_spare: bool) -> float:
        """One process, from its start to its end; for how many seconds it was ready."""
        spare, self._spare = self._spare, None
        self._process = process = await self._spawn() if spare is None or spare.returncode is not None else spare
        assert process.stdin is not None
        process.stdin.write(b"\n")
        self.num_answered = 0
        becoming_ready = asyncio.create_task(self._become_ready(has_spare=has_spare))
        status = await process.wait()
        becoming_ready.cancel()
        was_ready, self.is_ready = self.is_ready, False
        served_seconds = time.monotonic() - self._ready_at if was_ready else 0.0
        for exchange in self._exchanges:
            exchange.close()
        self._on_change(self)
        if status > 0 and not (was_ready or self._is_ending):
            raise InferError(f"the engine's process ended with status {status}")
        return served_seconds

    async def _notice_death(self) -> None:
        """It is seen a moment after that of a connection; until then one could connect to the socket."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                while self.is_ready:
                    await asyncio.sleep(_NOTICE_SECONDS)

    async def _become_ready(self, *, has_spare: bool) -> None:
        while not await self._says_ready():
            await asyncio.sleep(_POLL_SECONDS)
        self.is_ready, self._ready_at = True, time.monotonic()
        self._on_change(self)
        if has_spare:
            self._spare = await self._spawn()

    async def _says_ready(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                status, _ = await self.get(b"/ready")
        except (GoneError, TimeoutError):
            return False
        return status == 200

    async def _spawn(self) -> asyncio.subprocess.Process:
        fds = (self._own.fileno(),)
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )


def _signal(process: asyncio.subprocess.Process | None, number: int) -> None:
    if process is not None and process.returncode is None:
        os.kill(process.pid, number)
