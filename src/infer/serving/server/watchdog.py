"""The watchdog: if a step or the event loop hangs, write all stacks and end the process for a supervisor.

Code that holds Python's lock stops the watchdog's thread too. Then a thread of `faulthandler`, which needs no lock,
does the same, with status 1.
"""

import faulthandler
import os
import threading
import time
from typing import final

from infer.serving.server.server_state import ServerState

STATUS = 3  # exit status of the process
_NUM_CHECKS = 8  # checks within the time limit of a step


def start_watchdog(state: ServerState) -> None:
    """Start the watchdog on its own thread, which runs until the process ends."""
    threading.Thread(target=_watch, args=[state], name="infer-watchdog", daemon=True).start()


def _watch(state: ServerState) -> None:
    """End the process if the event loop or a step hangs.

    Time is counted in checks, so a process that was stopped meanwhile does not count as hanging, unless it was stopped
    for the whole limit.
    """
    loop, step = _Stillness(), _Stillness()
    while True:
        faulthandler.dump_traceback_later(state.settings.watchdog_seconds, exit=True)
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
        """Return how often in a row this value was seen before. None resets the count to 0."""
        self._count = self._count + 1 if seen is not None and seen == self._last else 0
        self._last = seen
        return self._count
