"""The watchdog: where a step or the event loop hangs, all stacks are written, and the process ends for a supervisor."""

import faulthandler
import os
import threading
import time
from typing import final

from infer.server.state import ServerState

STATUS = 3  # of the process
_NUM_CHECKS = 8  # in the time that a step has


def start_watchdog(state: ServerState) -> None:
    """On a thread of its own, while the process lives."""
    threading.Thread(target=_watch, args=[state], name="infer-watchdog", daemon=True).start()


def _watch(state: ServerState) -> None:
    """Time is counted in checks: a process that was stopped meanwhile does not hang."""
    loop, step = _Stillness(), _Stillness()
    while True:
        time.sleep(state.settings.watchdog_seconds / _NUM_CHECKS)
        if max(loop.count(state.ticked_at), step.count(state.step_began)) >= _NUM_CHECKS:
            faulthandler.dump_traceback()
            os._exit(STATUS)


@final
class _Stillness:
    def __init__(self) -> None:
        self._last: float | None = None
        self._count = 0

    def count(self, seen: float | None) -> int:
        """How often in a row this was seen before; None is nothing."""
        self._count = self._count + 1 if seen is not None and seen == self._last else 0
        self._last = seen
        return self._count
