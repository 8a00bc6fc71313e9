"""Waiting until a server's engine has nothing to do any more."""

import time

from served import SECONDS, Served


def until_idle(served: Served) -> None:
    """Fails where a sequence goes on though nobody asks."""
    engine = served.state.llm().llm._opened.engine
    for _ in range(round(SECONDS / 0.01)):
        if not engine.snapshot().sequences:
            return
        time.sleep(0.01)
    raise AssertionError(f"these go on: {engine.snapshot().sequences}")
