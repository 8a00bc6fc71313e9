"""Contexts that no answer uses: a few are kept for the next answers, the memory of others goes back to the system."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from infer.runner.closing import closed
from infer.runner.context import CachedContext

MAX_IDLE = 2  # as many answers at once find their cache there and their steps recorded


@final
class ContextPool:
    """Every operation is one of a deque's, which no other thread and no collection of garbage comes between."""

    def __init__(self, make: Callable[[], CachedContext]) -> None:
        self._make: Callable[[], CachedContext] | None = make
        self._idle: deque[CachedContext] = deque(maxlen=MAX_IDLE)  # one more drops the oldest

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self) -> CachedContext:
        """An empty one: the last that was given back, if any is idle. Raises ClosedError."""
        make = self._make
        if make is None:
            raise closed()
        with suppress(IndexError):
            return self._idle.pop()
        return make()

    def give_back(self, context: CachedContext) -> None:
        """One that an exception left in the midst of a step is dropped."""
        if not context.is_sound:
            return
        context.clear()
        self._idle.append(context)
        if self._make is None:
            self._idle.clear()

    def give_back_once(self, held: list[CachedContext]) -> None:
        """All of the list, which is empty then: again does nothing. What an exception comes in between is dropped."""
        while held:
            self.give_back(held.pop())

    def close(self) -> None:
        """What is idle, and what is yet to be given back, is dropped."""
        self._make = None
        self._idle.clear()
