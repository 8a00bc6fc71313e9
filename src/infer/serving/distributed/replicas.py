"""All replicas of a server: their readiness, their queued work, and the choice of one for each request."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import final

from infer.errors import InferError
from infer.serving.distributed.exchange import Exchange
from infer.serving.distributed.replica import Replica
from infer.serving.distributed.router import NUM_PAGES, ReplicaRouter, RoutedPrompt

log = logging.getLogger("infer.server")
_PAUSE_SECONDS = 10.0  # before a failed replica is started again
_END_SECONDS = 10.0  # for a replica without requests to end after SIGTERM


@final
class Replicas:
    """For the event loop only. `commands` start the replicas, each with its own socket.

    `on_change` is called when the first replica becomes ready, when the last one is lost, and when none can start. If
    `has_spares`, each replica has a spare process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        sockets: Sequence[socket.socket],
        watchdog_seconds: float,
        on_change: Callable[["Replicas"], None],
        *,
        has_spares: bool,
    ) -> None:
        self.failure: Exception | None = None  # the reason why no replica can start
        self._on_change, self._has_spares, self._router = on_change, has_spares, ReplicaRouter(NUM_PAGES)
        self._replicas = [
            Replica(str(index), own, command, self._notice, watchdog_seconds)
            for index, (own, command) in enumerate(zip(sockets, commands, strict=True))
        ]
        self._queued = {replica.name: 0.0 for replica in self._replicas}  # queued tokens per replica
        self._is_any_ready, self._is_settled = asyncio.Event(), asyncio.Event()
        self._lives = list[asyncio.Task[None]]()

    @property
    def is_ready(self) -> bool:
        return self._is_any_ready.is_set()

    @property
    def are_several(self) -> bool:
        return len(self._replicas) > 1

    async def start(self) -> None:
        """Start the replicas, and return when one is ready or `failure` has the reason why none can start."""
        self._lives = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        await self._is_settled.wait()

    async def stop(self) -> None:
        """End the replicas, which have no requests, and return when their processes have ended."""
        self.terminate()
        _, late = await asyncio.wait(self._lives, timeout=_END_SECONDS)
        if late:
            self.kill()
            await asyncio.wait(late)

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        """Yield an exchange with the replica chosen for the prompt, when a replica is ready.

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
        return await self._get(target, self._choosable())

    async def get_while_loading(self, target: bytes) -> list[tuple[int, bytes]]:
        """Return status and body of all replicas that answer within a second, ready or not."""
        return list((await self._get(target, self._replicas)).values())

    async def _get(self, target: bytes, asked: Sequence[Replica]) -> dict[str, tuple[int, bytes]]:
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
                await replica.live(has_spare=self._has_spares)
                self._is_settled.set()  # even if it was ended before it was ready
                return
            except (InferError, OSError) as error:
                if not self.is_ready:
                    self.failure = error
                    self._settle()
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
        if any(each.is_ready for each in self._replicas) == self.is_ready:
            return
        if self.is_ready:
            self._is_any_ready.clear()
            self._on_change(self)
        else:
            self._is_any_ready.set()
            self._settle()

    def _settle(self) -> None:
        self._is_settled.set()
        self._on_change(self)
