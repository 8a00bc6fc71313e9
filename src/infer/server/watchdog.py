"""A step that takes far too long is a process that hangs: its stacks are written, and it ends for a supervisor."""

import asyncio
import faulthandler
import os

from infer.server.state import ServerState

STATUS = 3  # of the process
_SECONDS = 0.5


async def watch(state: ServerState) -> None:
    """Until the engine has failed."""
    while state.phase != "failed":
        await asyncio.sleep(_SECONDS)
        if state.stuck_seconds > state.settings.watchdog_seconds:
            faulthandler.dump_traceback()
            os._exit(STATUS)
