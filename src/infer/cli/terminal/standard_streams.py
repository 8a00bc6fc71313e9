"""The standard streams of a command, and the end of its process.

A missing stream becomes /dev/null, so that no file that is opened later takes its descriptor. Text that stderr refuses
is lost, because this cannot be reported. If stdout refuses text, an OSError with the file name "stdout" is raised.
"""

import atexit
import errno
import io
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn, TextIO, final

STDOUT = "stdout"
_STREAMS = ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY))


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
    for descriptor, name, flags in _STREAMS:
        if getattr(sys, name) is None:
            _open_nothing(descriptor, name, flags)
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

    Helper processes are stopped, and a model's memory is freed without destroying its objects.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(status)


def _open_nothing(descriptor: int, name: str, flags: int) -> None:
    nowhere = os.open(os.devnull, flags)
    try:
        os.fstat(descriptor)
    except OSError:  # still free: a file that is opened later must not take the stream's place
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        nowhere = descriptor
    setattr(sys, name, open(nowhere, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


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
