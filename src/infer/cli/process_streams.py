"""The standard streams of a command, its signals, and the end of its process.

A missing stream becomes /dev/null, so that no file that is opened later takes its descriptor. Text that stderr refuses
is lost, because this cannot be reported. If stdout refuses text, an OSError with the file name "stdout" is raised.
Ctrl-C and SIGTERM stop an answer, a load or the process, and Ctrl-Z suspends it.

While an answer is written, keys that are typed are hidden, so that they do not appear in its text. The next prompt
reads them. The terminal is restored on every exit, and while Ctrl-Z has stopped the process.
"""

import atexit
import errno
import gc
import io
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, TextIO, final

STDOUT = "stdout"
Handler = Callable[[int, FrameType | None], None]
_ENDING = (signal.SIGINT, signal.SIGTERM)
_LOCAL_FLAGS = 3  # index of the local flags in the list that termios returns


@final
class StandardOutput(io.FileIO):
    """The file of stdout or stderr. If the descriptor is non-blocking, a write waits until it accepts more."""

    def __init__(self, descriptor: int, *, is_lossy: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_lossy = is_lossy

    def write(self, content: Any, /) -> int:
        try:
            while (count := super().write(content)) is None:  # it would block
                select.select([], [self], [])
        except OSError as error:
            if self._is_lossy:
                return memoryview(content).nbytes
            error.filename = STDOUT
            raise
        return count


def prepare_streams() -> None:
    """Give this process three usable streams. A stream that a caller has replaced stays unchanged."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free descriptor, which is the stream's own
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdout = _prepared(sys.stdout, 1)
    sys.stderr = _prepared(sys.stderr, 2)


def raise_if_reader_has_gone() -> None:
    """Raise BrokenPipeError if stdout is a pipe whose reader has gone.

    This can be detected before anything is written.
    """
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        is_gone = any(events & select.POLLERR for _, events in poll.poll(0))
    except (OSError, ValueError):  # no descriptor: the caller replaced the stream
        return
    if is_gone:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), STDOUT)


def silence_stdout() -> None:
    """Discard the buffered text after the reader has gone, so that the exit prints no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = io.StringIO()
    finally:
        os.close(nowhere)


def end_process(status: int) -> NoReturn:
    """End the process immediately, after the exit functions.

    Helper processes are stopped, and a model's memory is freed without destroying its objects. The output does not wait
    for the exit functions, and what these write is shown, too.
    """
    ignore_signals()
    _flush()
    atexit._run_exitfuncs()
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _prepared(stream: TextIO, descriptor: int) -> TextIO:
    """Return a stream that writes a question mark for each character that the terminal does not have.

    Such a character must not stop an answer.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
        return stream
    stream.flush()
    file = io.BufferedWriter(StandardOutput(descriptor, is_lossy=descriptor == 2))
    return io.TextIOWrapper(
        file, stream.encoding, "replace", line_buffering=stream.line_buffering, write_through=stream.write_through
    )


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
def waking_on_signals() -> Iterator[int]:
    """Yield a descriptor that can be read after a signal within the context. This thread must be the main thread.

    A signal that arrives just before a wait does not end it, unless the wait is also for this descriptor.
    """
    woken, waking = os.pipe()
    with open(woken, "rb", buffering=0), open(waking, "wb", buffering=0):
        os.set_blocking(waking, False)
        before = signal.set_wakeup_fd(waking)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(before)


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


@contextmanager
def keys_hidden() -> Iterator[None]:
    """Switch off the echo of stdin's terminal within the context, even that of Ctrl-C as ^C."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    hidden = [*before]
    hidden[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHOCTL)

    def stop(number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: stop the process with the terminal restored. When it continues, `go_on` runs as well."""
        _set(descriptor, before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, stop)

    def go_on(number: int, frame: FrameType | None) -> None:
        _set(descriptor, hidden)

    with handling({signal.SIGTSTP: stop, signal.SIGCONT: go_on}):
        _set(descriptor, hidden)
        try:
            yield
        finally:
            _set(descriptor, before)


def _set(descriptor: int, attributes: list[Any]) -> None:
    """Set the terminal's attributes, unless another process owns the terminal, because then it would stop this one."""
    with suppress(OSError, termios.error):
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
