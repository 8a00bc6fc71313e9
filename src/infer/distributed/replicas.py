"""All replicas of a server: their readiness, their queued work, and the choice of one for each request."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import final

from infer.distributed.exchange import Exchange
from infer.distributed.replica import Replica
from infer.distributed.router import NUM_PAGES, ReplicaRouter, RoutedPrompt
from infer.errors import InferError
from infer.server.server_state import ServerState

log = logging.getLogger("infer.server")
_PAUSE_SECONDS = 10.0  # before one is tried again


@final
class Replicas:
    """For the event loop only. `commands` start the replicas, each with its own socket. A single one has a spare."""

    def __init__(self, state: ServerState, commands: Sequence[Sequence[str]], sockets: Sequence[socket.socket]) -> None:
        self._state, self._router = state, ReplicaRouter(NUM_PAGES)
        self._replicas = [
            Replica(str(index), own, command, self._notice, state.settings.watchdog_seconds)
            for index, (own, command) in enumerate(zip(sockets, commands, strict=True))
        ]
        self._queued = {replica.name: 0.0 for replica in self._replicas}  # tokens
        self._is_any_ready = asyncio.Event()
        self._lives = list[asyncio.Task[None]]()

    @property
    def are_several(self) -> bool:
        return len(self._replicas) > 1

    async def start(self) -> None:
        """Start the replicas, and return when one is ready or the state has failed.

        If a replica cannot start while no other serves, now or later, the state fails.
        """
        self._lives = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        waits = [asyncio.create_task(event.wait()) for event in (self._is_any_ready, self._state.has_failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        """Yield an exchange with the replica that the prompt goes to, once one is ready.

        Raises GoneError if that replica dies meanwhile.
        """
        while not (ready := {each.name: each for each in self._choosable()}):
            await self._is_any_ready.wait()
        name = self._router.choose(prompt, {name: self._queued[name] for name in ready})
        self._router.sent(prompt, name)
        self._queued[name] += prompt.work
        try:
            async with ready[name].exchange() as exchange:
                yield exchange
                ready[name].num_answered += 1
        finally:
            self._queued[name] -= prompt.work

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        """Return status and body by name, for the replicas that are ready and answer within a second."""
        asked = self._choosable()
        answers = await asyncio.gather(*(replica.try_get(target) for replica in asked))
        return {replica.name: answer for replica, answer in zip(asked, answers, strict=True) if answer is not None}

    def terminate(self) -> None:
        """Send SIGTERM to all replicas, which then drain."""
        for replica in self._replicas:
            replica.terminate()

    def kill(self) -> None:
        for replica in self._replicas:
            replica.kill()

    async def _keep(self, replica: Replica) -> None:
        """Keep a replica alive. If it cannot start, try again while others serve."""
        while True:
            try:
                await replica.live(has_spare=not self.are_several)
                return
            except (InferError, OSError) as error:
                if not self._is_any_ready.is_set():
                    self._state.fail(error)
                    return
                log.error("replica %s: %s", replica.name, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _choosable(self) -> list[Replica]:
        """Return the replicas that are ready. Those that hang are included only if all hang."""
        ready = [each for each in self._replicas if each.is_ready]
        return [each for each in ready if not each.hangs] or ready

    def _notice(self, replica: Replica) -> None:
        if not replica.is_ready:
            self._router.forget(replica.name)
        for each in self._replicas:
            if each.hangs and each not in self._choosable():
                each.drop_requests()
        if any(each.is_ready for each in self._replicas):
            self._is_any_ready.set()
        else:
            self._is_any_ready.clear()
        if self._state.phase in ("loading", "ready"):
            self._state.phase = "ready" if self._is_any_ready.is_set() else "loading"
