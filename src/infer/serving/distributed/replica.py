"""A child process with the model, which is started again when it dies.

The child is the same server, on its own socket, and gives all answers. Clients talk to its parent, which has no model.
With a spare, the replica is back sooner. A spare is a process that has loaded torch but no model, and waits for a byte
on stdin.

While the child has requests, its health is checked each second. A process that gives no answer twice in a row hangs: it
was stopped, or its disk hangs. Its requests go to another replica, and it is killed after the watchdog's seconds.

`Replicas` are all replicas of a server: their readiness, their queued work, and the choice of one for each request.
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
from pathlib import Path
from typing import final

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange, GoneError, ReplicaFailedError
from infer.serving.distributed.router import NUM_PAGES, ReplicaRouter, RoutedPrompt
from infer.serving.server.server_state import Changes, ServerState
from infer.system.child_process import end_after_parent

log = logging.getLogger("infer.server")
_POLL_SECONDS, _NOTICE_SECONDS, _ANSWER_SECONDS = 0.05, 0.002, 1.0
_CHECK_SECONDS = 1.0
_MOST_MISSED = 2  # health checks without an answer, in a row, after which a replica counts as hanging
_SHORT_LIFE = 10.0  # seconds: a shorter life without an answer is a failure
_MOST_SHORT = 5  # failures in a row, after which the process is not started again
_GRACE_SECONDS = 1.0  # for a child to end by itself after its parent has died
_PAUSE_SECONDS = 10.0  # before a failed replica is started again


def await_turn() -> bool:
    """Load heavy modules in a child process, then wait until its parent needs it.

    Return False if the parent ends first. The process does not outlive its parent, in any phase.
    """
    end_after_parent(_GRACE_SECONDS)
    import_module("infer.llm")
    return bool(os.read(0, 1))


def socket_in(folder: Path, number: int) -> socket.socket:
    """Return a new socket in a folder that listens for requests to a process."""
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(folder / str(number)))
    own.listen(1024)
    return own


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
        self.name, self.is_ready, self._is_settled = name, False, asyncio.Event()
        self._watchdog_seconds, self._num_missed = watchdog_seconds, 0
        self._silent_seconds = 0.0  # duration of the checks that it missed in a row
        self.num_answered = 0  # requests of clients, since it is ready
        self.own, self._on_change = own, on_change
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
        try:
            while not self._is_ending:
                served_seconds = await self._run(has_spare=has_spare)
                is_short = served_seconds < _SHORT_LIFE and not self.num_answered
                num_short = num_short + 1 if is_short else 0
                if num_short > _MOST_SHORT:
                    raise InferError(f"the engine's process died {num_short} times in a row within {_SHORT_LIFE:g} s")
        finally:
            self._is_settled.set()

    async def until_ready(self) -> bool:
        """Return True when the process is ready, or False if it ends before that and is not started again."""
        await self._is_settled.wait()
        return self.is_ready

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
        try:
            exchange = Exchange(*await asyncio.open_unix_connection(self.own.getsockname()))
        except OSError:
            raise GoneError from None
        self._exchanges.add(exchange)
        try:
            if was_ready and not self.is_ready:
                raise GoneError
            yield exchange
            self.num_answered += was_ready
        except GoneError as error:
            if isinstance(error, ReplicaFailedError):  # the process would end by itself, but later
                _signal(process, signal.SIGKILL)
            await self._notice_death()
            raise
        finally:
            self._exchanges.discard(exchange)
            exchange.close()

    async def try_get(self, target: bytes) -> tuple[int, bytes] | None:
        """Return status and body, or None if there is no answer within a second."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self.exchange() as exchange:
                return await exchange.get(target)
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
        self.num_answered = 0
        becoming_ready = asyncio.create_task(self._become_ready(has_spare=has_spare))
        watching = asyncio.create_task(self._watch(process))
        status = await process.wait()
        becoming_ready.cancel()
        watching.cancel()
        self._num_missed, self._silent_seconds = 0, 0.0
        was_ready, self.is_ready = self.is_ready, False
        self._is_settled.clear()
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
        while (answer := await self.try_get(b"/ready")) is None or answer[0] != 200:
            await asyncio.sleep(_POLL_SECONDS)
        self.is_ready, self._ready_at = True, time.monotonic()
        self._is_settled.set()
        self._on_change(self)
        if has_spare:
            self._spare = await self._spawn()

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
        fds = (self.own.fileno(),)
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )


async def answers_of(replicas: Sequence[Replica], target: bytes) -> dict[str, tuple[int, bytes] | None]:
    """Return status and body by name, or None for a replica that does not answer within a second."""
    answers = await asyncio.gather(*(replica.try_get(target) for replica in replicas))
    return {replica.name: answer for replica, answer in zip(replicas, answers, strict=True)}


def _signal(process: asyncio.subprocess.Process | None, number: int) -> None:
    if process is not None and process.returncode is None:
        os.kill(process.pid, number)


@final
class Replicas:
    """For the event loop only. `commands` start the replicas, whose sockets are in `folder`.

    The server has the phase of its replicas. A single replica has a spare process.
    """

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, state: ServerState) -> None:
        self._state, self._router = state, ReplicaRouter(NUM_PAGES)
        self._replicas = [
            Replica(str(index), socket_in(folder, index), command, self._notice, state.settings.watchdog_seconds)
            for index, command in enumerate(commands)
        ]
        self._queued = {replica.name: 0.0 for replica in self._replicas}  # queued tokens per replica
        self._changes, self._lives = Changes(), list[asyncio.Task[None]]()

    @property
    def is_ready(self) -> bool:
        return any(each.is_ready for each in self._replicas)

    @property
    def are_several(self) -> bool:
        return len(self._replicas) > 1

    async def start(self) -> None:
        """Start the replicas, and return when one is ready, or when the server has failed because none can start."""
        self._lives = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        for life in self._lives:
            life.add_done_callback(lambda _: self._changes.announce())
        await self._changes.until(lambda: self.is_ready or any(life.done() for life in self._lives))

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        """Yield an exchange with the replica chosen for the prompt, when a replica is ready.

        Raises GoneError if that replica dies meanwhile.
        """
        await self._changes.until(self._choosable)
        ready = {each.name: each for each in self._choosable()}
        name = self._router.choose(prompt, {name: self._queued[name] for name in ready})
        self._router.sent(prompt, name)
        self._queued[name] += prompt.work
        try:
            async with ready[name].exchange() as exchange:
                yield exchange
        finally:
            self._queued[name] -= prompt.work

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        """Return status and body by name, for the replicas that are ready and answer within a second."""
        answers = await answers_of(self._choosable(), target)
        return {name: answer for name, answer in answers.items() if answer is not None}

    def terminate(self) -> None:
        """Send SIGTERM to all replicas, which then drain."""
        for replica in self._replicas:
            replica.terminate()

    def kill(self) -> None:
        for replica in self._replicas:
            replica.kill()
            replica.own.close()

    async def _keep(self, replica: Replica) -> None:
        """Keep a replica alive. If it cannot start, try again while others serve."""
        while True:
            try:
                await replica.live(has_spare=not self.are_several)
                return
            except (InferError, OSError) as error:
                if not self.is_ready:
                    self._state.fail(error)
                    return
                log.error("replica %s: %s", replica.name, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _choosable(self) -> list[Replica]:
        """Return the ready replicas. Hanging replicas are included only if all hang."""
        ready = [each for each in self._replicas if each.is_ready]
        return [each for each in ready if not each.hangs] or ready

    def _notice(self, replica: Replica) -> None:
        if not replica.is_ready:
            self._router.forget(replica.name)
        for each in self._replicas:
            if each.hangs and each not in self._choosable():
                each.drop_requests()
        if self._state.phase in ("loading", "ready"):
            self._state.phase = "ready" if self.is_ready else "loading"
        self._changes.announce()
