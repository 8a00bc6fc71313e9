"""Load the model on its own thread, so that the port answers meanwhile. This thread is the first to import torch."""

import asyncio
import ctypes
import logging
import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import infer
from infer.errors import InferError
from infer.serving.server.server_state import ServerState
from infer.text.grammar.trial import trial_lane

log = logging.getLogger("infer.server")
OnProgress = Callable[[int, int], None]
Load = Callable[[OnProgress], "infer.AsyncLLM"]
_WARM_UP_TOKENS = 64


async def load_model(state: ServerState, load: Load) -> None:
    """Load the model, and return when it is ready. If it cannot be loaded, mark the state as failed and return."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def count(num_done: int, total: int) -> None:
        state.progress = num_done / max(total, 1)

    def run() -> None:
        try:
            _link_torch()
            if find_spec("llguidance") is not None:
                trial_lane("llguidance").start()
            llm = load(count)
            log.debug("fingerprint %s", llm.host.system_fingerprint)  # computed now, because it takes some time
        except Exception as error:
            if not isinstance(error, InferError):
                log.exception("the model cannot be loaded")
            loop.call_soon_threadsafe(state.fail, error)
        else:
            loop.call_soon_threadsafe(state.become_ready, llm)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="infer-load", daemon=True).start()
    await done.wait()


def warmed(llm: "infer.LLM") -> "infer.AsyncLLM":
    """Return the model for asynchronous use after one short answer or text, so that the first request is fast."""
    token_ids = [0] * min(_WARM_UP_TOKENS, llm.max_seq_len // 2)
    if llm.architecture.reads_whole_texts:
        llm.embed([token_ids])
    else:
        llm.generate(token_ids, max_new_tokens=4, ignore_eos=True, temperature=0)
    return infer.AsyncLLM(llm)


def _link_torch() -> None:
    """Link torch's library with a call of C, which does not hold the interpreter's lock.

    An import would hold it for a quarter of a second while the linker works, and the port would not answer.
    """
    if (spec := find_spec("torch")) is not None and spec.origin is not None:
        library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
        if library.exists():
            ctypes.CDLL(None).dlopen(str(library).encode(), os.RTLD_LAZY)
