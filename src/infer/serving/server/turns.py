"""Turns for the routes that count tokens: one piece of work at a time per tenant, and a few in total.

A text of 2 MB takes one core for a second. One client's texts must not occupy the threads that prepare all requests.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar, final

from infer.serving.server.door import retry_headers
from infer.serving.server.http_errors import ApiError
from infer.system.processes.child_process import asking_for

_Found = TypeVar("_Found")
_RETRY_SECONDS = 1.0


@final
class Turns:
    """For the event loop only. The tenant that has waited longest is next, unless it already has a turn."""

    def __init__(self, most_running: int = 2, most_waiting: int = 32) -> None:
        """Let at most `most_running` pieces of work run, and at most `most_waiting` per tenant wait."""
        self._most_running, self._most_waiting = most_running, most_waiting
        self._running = set[str]()
        self._waiting = deque[tuple[str, asyncio.Future[None]]]()

    async def run(self, tenant: str, work: Callable[[], _Found]) -> _Found:
        """Return the result of `work`, which runs on a thread.

        If the caller is cancelled, its turn ends when the thread has finished. Raises ApiError 429 if too much work of
        the tenant is waiting.
        """
        await self._enter(tenant)

        def run() -> _Found:
            with asking_for(tenant):
                return work()

        task = asyncio.ensure_future(asyncio.to_thread(run))
        task.add_done_callback(lambda done: self._leave(tenant, done))
        return await asyncio.shield(task)

    async def _enter(self, tenant: str) -> None:
        if Counter(name for name, _ in self._waiting)[tenant] >= self._most_waiting:
            message = f"the server is busy: {self._most_waiting} of your texts already wait, try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=retry_headers(_RETRY_SECONDS))
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting = deque(each for each in self._waiting if each[1] is not turn)
            else:  # the turn was given at the same moment
                self._end(tenant)
            raise

    def _admit(self) -> None:
        for entry in list(self._waiting):
            tenant, turn = entry
            if len(self._running) < self._most_running and tenant not in self._running:
                self._running.add(tenant)
                self._waiting.remove(entry)
                turn.set_result(None)

    def _leave(self, tenant: str, done: "asyncio.Future[_Found]") -> None:
        done.cancelled() or done.exception()  # mark the error as retrieved, because the caller may be gone
        self._end(tenant)

    def _end(self, tenant: str) -> None:
        self._running.discard(tenant)
        self._admit()
