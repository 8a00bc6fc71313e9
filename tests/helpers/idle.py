"""Waiting for a condition, or until a server's engine has nothing to do any more."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from served import SECONDS, Served


def until(is_so: Callable[[], bool]) -> None:
    """Raise TimeoutError if the condition does not hold within the time that tests wait."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def until_idle(served: Served) -> None:
    """Wait until no sequence is active. Fails if one continues although no client waits for it."""
    engine = served.state.llm().llm.host.engine
    until(lambda: not engine.snapshot().sequences)


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test that is a coroutine. It ends within the time that tests wait."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), SECONDS))

    return run
