"""A child process with the model, which is started again when it dies.

The child is the same server, on its own socket, and gives all answers. Clients talk to its parent, which has no model.
With a spare, the replica is back sooner. A spare is a process that has loaded torch but no model, and waits for a byte
on stdin.

While the child has requests, its health is checked each second. A process that gives no answer twice in a row hangs: it
was stopped, or its disk hangs. Its requests go to another replica, and it is killed after the watchdog's seconds.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import final

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange, GoneError, ReplicaFailedError, connected
from infer.system.processes.child_process import end_after_parent

log = logging.getLogger("infer.server")
_POLL_SECONDS, _NOTICE_SECONDS, _ANSWER_SECONDS = 0.05, 0.002, 1.0
_CHECK_SECONDS = 1.0
_MOST_MISSED = 2  # health checks without an answer, in a row, after which a replica counts as hanging
_SHORT_LIFE = 10.0  # seconds: a shorter life without an answer is a failure
_MOST_SHORT = 5  # failures in a row, after which the process is not started again
_GRACE_SECONDS = 1.0  # for a child to end by itself after its parent has died


def await_turn() -> bool:
    """Load heavy modules in a child process, then wait until its parent needs it.

    Return False if the parent ends first. The process does not outlive its parent, in any phase.
    """
    end_after_parent(_GRACE_SECONDS)
    import_module("infer.llm")
    return bool(os.read(0, 1))


@final
class Replica:
    """A replica of the server. `command` starts it; the number of its socket's descriptor is appended.

    `on_change` is called when the replica becomes ready, when it begins or ceases to hang, and when it has died.
    """

    def __init__(
        self,
        name: str,
        own: socket.socket,
        command: Sequence[str],
        on_change: Callable[["Replica"], None],
        watchdog_seconds: float,
    ) -> None:
        self.name, self.is_ready = name, False
        self._watchdog_seconds, self._num_missed = watchdog_seconds, 0
        self._silent_seconds = 0.0  # duration of the checks that it missed in a row
        self.num_answered = 0  # requests of clients, since it is ready
        self._own, self._on_change = own, on_change
        self._command = [*command, str(own.fileno())]
        self._process: asyncio.subprocess.Process | None = None
        self._spare: asyncio.subprocess.Process | None = None
        self._exchanges = set[Exchange]()
        self._ready_at = 0.0
        self._is_ending = False

    async def live(self, *, has_spare: bool) -> None:
        """Run the replica until it is terminated, and start it again when it dies.

        Raises InferError if it cannot start, or dies many times in a row.
        """
        num_short = 0
        while not self._is_ending:
            served_seconds = await self._run(has_spare=has_spare)
            is_short = served_seconds < _SHORT_LIFE and not self.num_answered
            num_short = num_short + 1 if is_short else 0
            if num_short > _MOST_SHORT:
                raise InferError(f"the engine's process died {num_short} times in a row within {_SHORT_LIFE:g} s")

    @property
    def hangs(self) -> bool:
        """True if the replica is alive but does not answer."""
        return self._num_missed >= _MOST_MISSED

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """Yield an exchange for one request.

        Raises GoneError if the replica dies meanwhile, or if its requests are dropped.
        """
        was_ready, process = self.is_ready, self._process
        exchange = await connected(self._own.getsockname())
        self._exchanges.add(exchange)
        try:
            if was_ready and not self.is_ready:
                raise GoneError
            yield exchange
        except GoneError as error:
            if isinstance(error, ReplicaFailedError):  # the process would end by itself, but later
                _signal(process, signal.SIGKILL)
            await self._notice_death()
            raise
        finally:
            self._exchanges.discard(exchange)
            exchange.close()

    async def get(self, target: bytes) -> tuple[int, bytes]:
        """Return status and body. Raises GoneError."""
        async with self.exchange() as exchange:
            return await exchange.get(target)

    async def try_get(self, target: bytes) -> tuple[int, bytes] | None:
        """Return status and body, or None if there is no answer within a second."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self.get(target)
        except (GoneError, TimeoutError):
            return None

    def drop_requests(self) -> None:
        """Close all exchanges, so that GoneError is raised wherever an answer is being read."""
        for exchange in self._exchanges:
            exchange.close()

    def terminate(self) -> None:
        """Send SIGTERM to the process, which then drains, and kill the spare."""
        self._is_ending = True
        _signal(self._process, signal.SIGTERM)
        _signal(self._spare, signal.SIGKILL)

    def kill(self) -> None:
        for process in (self._process, self._spare):
            _signal(process, signal.SIGKILL)

    async def _run(self, *, has_spare: bool) -> float:
        """Run one process from its start to its end, and return the seconds for which it was ready.

        Raises InferError if it ends with an error before it is ready.
        """
        spare, self._spare = self._spare, None
        self._process = process = await self._spawn() if spare is None or spare.returncode is not None else spare
        assert process.stdin is not None
        process.stdin.write(b"\n")
        self.num_answered = self._num_missed = 0
        self._silent_seconds = 0.0
        becoming_ready = asyncio.create_task(self._become_ready(has_spare=has_spare))
        watching = asyncio.create_task(self._watch(process))
        status = await process.wait()
        becoming_ready.cancel()
        watching.cancel()
        self._num_missed = 0
        was_ready, self.is_ready = self.is_ready, False
        served_seconds = time.monotonic() - self._ready_at if was_ready else 0.0
        self.drop_requests()
        self._on_change(self)
        if status > 0 and not (was_ready or self._is_ending):
            raise InferError(f"the engine's process ended with status {status}")
        return served_seconds

    async def _notice_death(self) -> None:
        """Wait for at most a second until the death is noticed.

        It is noticed a moment after that of a connection; until then, the socket would accept new ones.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                while self.is_ready and not self.hangs:
                    await asyncio.sleep(_NOTICE_SECONDS)

    async def _become_ready(self, *, has_spare: bool) -> None:
        while not await self._says_ready():
            await asyncio.sleep(_POLL_SECONDS)
        self.is_ready, self._ready_at = True, time.monotonic()
        self._on_change(self)
        if has_spare:
            self._spare = await self._spawn()

    async def _says_ready(self) -> bool:
        answer = await self.try_get(b"/ready")
        return answer is not None and answer[0] == 200

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Check the replica's health while it is ready and has requests, or hangs.

        Time is counted in checks, because this process may be stopped as well.
        """
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if not self.is_ready or not (self._exchanges or self._num_missed):
                continue
            did_hang, asked_at = self.hangs, time.monotonic()
            is_missed = await self.try_get(b"/health") is None
            self._num_missed = self._num_missed + 1 if is_missed else 0
            waited_seconds = min(time.monotonic() - asked_at, _ANSWER_SECONDS)
            self._silent_seconds = self._silent_seconds + _CHECK_SECONDS + waited_seconds if is_missed else 0.0
            if self.hangs != did_hang:
                log.error("replica %s %s", self.name, "does not answer" if self.hangs else "answers again")
                self._on_change(self)
            if self.hangs and self._silent_seconds >= self._watchdog_seconds:
                log.error("replica %s did not answer for %g s: killing it", self.name, self._watchdog_seconds)
                _signal(process, signal.SIGKILL)

    async def _spawn(self) -> asyncio.subprocess.Process:
        fds = (self._own.fileno(),)
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )


def _signal(process: asyncio.subprocess.Process | None, number: int) -> None:
    if process is not None and process.returncode is None:
        os.kill(process.pid, number)
