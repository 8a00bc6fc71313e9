"""Snapshots of the engine, taken once for all listeners."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, final

SECONDS = 0.1  # in which nobody looks again


@final
class Snapshots:
    """Snapshots of type `EngineSnapshot`, for the event loop only. Each waits for the current step to end."""

    def __init__(self) -> None:
        self._taken_at = -math.inf
        self._taking: asyncio.Task[Any] | None = None

    async def latest(self, take: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return a snapshot that is at most a tenth of a second old. All callers in that time get the same one."""
        now, taking = time.monotonic(), self._taking
        if taking is None or (taking.done() and now - self._taken_at >= SECONDS):
            taking = self._taking = asyncio.create_task(take())
            self._taken_at = now
        return await asyncio.shield(taking)
