"""A loop over a given engine, and answers at it."""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from infer.engine.engine import Engine
from infer.engine.requests import loop as loop_module
from infer.engine.requests.answer import Answer
from infer.engine.requests.loop import Loop
from infer.engine.requests.stream import Stream
from infer.engine.step.sequence import Lease, Sequence


def loop_of(engine: Engine) -> Loop:
    """Return a loop that owns the engine. It ends when it is dropped."""
    loop = Loop()
    loop.own(engine, engine.runner.model.backend)
    return loop


def until_idle(loop: Loop) -> None:
    """Wait until all answers have ended. Calls in turn would keep the thread from looking at paused answers."""
    loop.run(bool)
    while loop.thread.answers:
        time.sleep(0.001)


def until_freed() -> None:
    """Wait until the threads of dropped models have freed them."""
    gc.collect()
    living = {each.thread for each in loop_module._living}
    for thread in threading.enumerate():
        if thread.name == "infer-loop" and thread not in living:
            thread.join()


@contextmanager
def beside(calls: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Run each call on its own thread during the body of `with`, and raise the first exception of any thread."""
    raised = list[BaseException]()

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def in_threads(calls: Iterable[Callable[[], object]]) -> None:
    """Run each call on a thread of its own, and raise the first exception of any."""
    with beside(calls):
        pass


def open_stream(loop: Loop, sequence: Sequence, lease: Lease | None = None, on_prefill: Any = None) -> Stream:
    """Return a stream of a sequence, which is submitted when it is first read."""
    return Stream(Answer(loop, sequence, lease=lease), on_prefill)
