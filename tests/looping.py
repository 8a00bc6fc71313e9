"""A loop over a given engine, and answers at it."""

import gc
import threading
from typing import Any

from infer.engine import loop as loop_module
from infer.engine.engine import Engine
from infer.engine.lease import Lease
from infer.engine.loop import Loop
from infer.engine.mailbox import Mailbox
from infer.engine.sequence import Sequence
from infer.engine.stream import OpenAnswer, Stream


def loop_of(engine: Engine) -> Loop:
    """Return a loop that owns the engine. It ends when it is dropped."""
    loop = Loop()
    loop.own(engine)
    return loop


def until_freed() -> None:
    """Wait until the models that were dropped are freed: their loops' threads do it."""
    gc.collect()
    living = {each._thread for each in loop_module._living}
    for thread in threading.enumerate():
        if thread.name == "infer-loop" and thread not in living:
            thread.join()


def open_stream(loop: Loop, sequence: Sequence, lease: Lease | None = None, on_prefill: Any = None) -> Stream:
    """Return a stream of a sequence, which is submitted when it is first read."""
    mailbox = Mailbox(shows_prefill=on_prefill is not None)
    return Stream(OpenAnswer(loop, sequence, mailbox, lease), on_prefill)
