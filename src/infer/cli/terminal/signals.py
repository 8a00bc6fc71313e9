"""Signals of the command line: Ctrl-C and SIGTERM stop an answer, a load or the process, and Ctrl-Z suspends it."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import final

Handler = Callable[[int, FrameType | None], None]
_ENDING = (signal.SIGINT, signal.SIGTERM)


@final
class Terminated(BaseException):
    """Raised by SIGTERM."""


@dataclass
class Cancellation:
    """A request to stop, which the first SIGINT or SIGTERM makes. The second signal raises."""

    event: threading.Event = field(default_factory=threading.Event)
    signal_number: int | None = None

    @property
    def exit_status(self) -> int:
        return 0 if self.signal_number is None else 128 + self.signal_number

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.signal_number = number
        self.event.set()


@contextmanager
def cancel_on_signal() -> Iterator[Cancellation]:
    """Let Ctrl-C and SIGTERM within the context stop the generation after its current step.

    The text up to that step is kept.
    """
    cancellation = Cancellation()
    with handling(dict.fromkeys(_ENDING, cancellation.on_signal)):
        yield cancellation


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM within the context end the process immediately.

    Otherwise an interrupted import would leave an incomplete module.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\r\x1b[K")
        os._exit(128 + number)

    with handling(dict.fromkeys(_ENDING, leave)):
        yield


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle these signals within the context, except signals that the process inherited as ignored."""
    previous = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def keeping_garbage() -> Iterator[None]:
    """Disable garbage collection within the context, and keep its objects for as long as the command runs.

    Torch and a vocabulary have half a million objects. To search them costs 0.15 s while they load, and 50 ms each time
    in an answer.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def raise_on_sigterm() -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)


def ignore_signals() -> None:
    """Ignore signals in the last moments, when nothing is left to stop and a traceback would only disturb."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
