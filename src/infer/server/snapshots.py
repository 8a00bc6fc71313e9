"""What the engine does, looked at once for all who listen."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, final

SECONDS = 0.1  # in which nobody looks again


@final
class Snapshots:
    """Values of `EngineSnapshot`, for the event loop. Each waits for the step under way."""

    def __init__(self) -> None:
        self._taken_at = -math.inf
        self._taking: asyncio.Task[Any] | None = None

    async def latest(self, take: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return a snapshot that is not older than a tenth of a second, the same for all who ask meanwhile."""
        now, taking = time.monotonic(), self._taking
        if taking is None or (taking.done() and now - self._taken_at >= SECONDS):
            taking = self._taking = asyncio.create_task(take())
            self._taken_at = now
        return await asyncio.shield(taking)
