"""Terminal functions of the command line: streaming text, bars, a spinner, signals.

Bars and spinners are written only to terminals.
"""

import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol, Self, TextIO, final, runtime_checkable

import click

from infer.cli.markdown import MarkdownStyle
from infer.cli.streams import raise_if_reader_has_gone
from infer.cli.wrapping import WordWrap
from infer.system.status_line import PROGRESS_WIDTH, StatusLine, bar

Handler = Callable[[int, FrameType | None], None]

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# Control characters that a model wrote are shown, not obeyed: they could move the cursor or set the title.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(128, 160), 65533)


@final
class Terminated(BaseException):
    """Raised by SIGTERM."""


@runtime_checkable
class TextStream(Protocol):
    """The methods of stdout that are used here, and that a test's replacement needs."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@final
class TextWriter:
    """Writes text as it is generated, and flushes each piece.

    With `wrap`, a word that does not fit moves to the next line as a whole.
    """

    def __init__(self, stream: TextStream, wrap: WordWrap | None = None, style: MarkdownStyle | None = None) -> None:
        self._stream = stream
        self._wrap, self._style = wrap, style
        self._is_terminal = stream.isatty()
        self._in_line = False

    def write(self, text: str) -> None:
        if not text:
            return
        self._in_line = not text.endswith("\n")
        visible = text.translate(_VISIBLE) if self._is_terminal else text
        shown = visible if self._style is None else self._style.feed(visible)
        self._stream.write("".join(shown) if self._wrap is None else self._wrap.feed(shown))
        self._stream.flush()

    def end_line(self) -> None:
        """End the current line if it has been begun."""
        if self._in_line:
            self.write("\n")


@final
class WaitingSign:
    """A dim sign on stderr from a question to the first word of its answer.

    It shows the share of a long prompt that has been read, and the number of reasoning tokens. It disappears without a
    trace. If stderr is not a terminal, there is none.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._num_tokens = 0
        self._line = StatusLine() if shown and has_cursor(sys.stderr) else None
        self._show("…")

    def progress(self, done: int, total: int) -> None:
        if 0 < done < total:
            share = done / total
            self._show(f"… {bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %")

    def count_token(self) -> None:
        """Count a token that adds nothing to the text."""
        self._num_tokens += 1
        if self._num_tokens > 1:
            self._show(f"… {self._num_tokens} tokens")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _show(self, text: str) -> None:
        if self._line is not None:
            self._line.show(text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[22m")


@final
class Spinner:
    """A sign of life on stderr while something slow runs, with a bar when its progress is known.

    If stderr is not a terminal, there is none.
    """

    def __init__(self, message: str, *, shown: bool = True) -> None:
        self._message = message
        self._detail = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if shown and has_cursor(sys.stderr):
            self._thread = threading.Thread(target=self._spin, daemon=True)

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def progress(self, done: int, total: int) -> None:
        """Set the progress.

        Raises BrokenPipeError if nobody reads stdout any more, because the rest would be useless.
        """
        raise_if_reader_has_gone()
        share = done / max(total, 1)
        self._detail = f" {bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %"

    def _spin(self) -> None:
        line = StatusLine()
        for sign in itertools.cycle(SPINNER):
            line.show(f"{sign} {self._message}{self._detail}")
            if self._stopped.wait(0.1):
                line.close()
                return


def has_cursor(stream: TextStream) -> bool:
    """Return True for a terminal that can overwrite a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def note(text: str) -> None:
    """Write text that is not the model's to stderr. On a terminal, it is dim and wrapped at words."""
    if not text:
        return
    if sys.stderr.isatty():
        wrap = WordWrap(lambda: columns_of(sys.stderr))
        text = wrap.feed(text) + wrap.finish()
    is_dim = has_cursor(sys.stderr) and not os.environ.get("NO_COLOR")
    click.echo(click.style(text, dim=True) if is_dim else text, err=True)


def columns_of(stream: TextIO) -> int:
    """Return the current width of a terminal, or 0 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


@dataclass
class Cancellation:
    """A cancellation that the first SIGINT or SIGTERM sets. The second signal raises."""

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

    The text up to there is kept.
    """
    cancellation = Cancellation()
    with _handling(cancellation.on_signal):
        yield cancellation


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM within the context end the process immediately.

    An import that is cut short would leave half a module.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\r\x1b[K")
        os._exit(128 + number)

    with _handling(leave):
        yield


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Send both signals to the handler within the context, unless the process was started with a signal ignored."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, before in previous.items():
        if before is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def keeping_garbage() -> Iterator[None]:
    """Disable garbage collection within the context, and keep what was made for as long as the command runs.

    Torch and a vocabulary have half a million objects. To look through them costs 0.15 s while they load, and 50 ms
    each time in an answer.
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
    """Ignore signals in the last moments, when nothing is left to stop and a traceback could only disturb."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
