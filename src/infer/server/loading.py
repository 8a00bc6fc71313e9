"""The model is loaded on a thread of its own, which is the first to import torch: the port answers meanwhile."""

import asyncio
import logging
import threading
from collections.abc import Callable

import infer
from infer.errors import InferError
from infer.server.state import ServerState

log = logging.getLogger("infer.server")
OnProgress = Callable[[int, int], None]
Load = Callable[[OnProgress], "infer.AsyncLLM"]


async def load_model(state: ServerState, load: Load) -> None:
    """Until the model is ready, or cannot be loaded: then the state has failed."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def count(num_done: int, total: int) -> None:
        state.progress = num_done / max(total, 1)

    def run() -> None:
        try:
            llm = load(count)
            llm.host.engine.max_running = state.settings.slots
        except Exception as error:
            if not isinstance(error, InferError):
                log.exception("the model cannot be loaded")
            loop.call_soon_threadsafe(state.fail, error)
        else:
            loop.call_soon_threadsafe(state.become_ready, llm)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="infer-load", daemon=True).start()
    await done.wait()
