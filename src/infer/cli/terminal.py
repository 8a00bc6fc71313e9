"""What the command line asks of a terminal: streaming text, bars, a spinner, signals.

Nothing here writes to a stream that is no terminal, except the text itself.
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
    """SIGTERM came."""


@runtime_checkable
class TextStream(Protocol):
    """What is needed of stdout, or of what a test puts in its place."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@final
class TextWriter:
    """Text as it comes, flushed piece by piece; where there is something to wrap, words go to the next line whole."""

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
        """End the line that was begun, if one was."""
        if self._in_line:
            self.write("\n")


@final
class WaitingSign:
    """A dim sign on stderr from a question to the first word of its answer, with the share of a long prompt that is
    read and the tokens of reasoning; gone without a trace, and nothing where stderr is no terminal."""

    def __init__(self, *, shown: bool = True) -> None:
        self._num_tokens = 0
        self._line = StatusLine() if shown and has_cursor(sys.stderr) else None
        self._show("…")

    def progress(self, done: int, total: int) -> None:
        if 0 < done < total:
            share = done / total
            self._show(f"… {bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %")

    def count_token(self) -> None:
        """One that adds nothing to the text."""
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
    """A sign of life on stderr while a slow thing runs, with a bar once its progress is known; nothing where stderr is
    no terminal."""

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
        """Raises BrokenPipeError where nobody reads stdout any more: what follows would be for nothing."""
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
    """A terminal that can write over a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def note(text: str) -> None:
    """What is not the model's text goes to stderr; where that is a terminal, dim and with whole words."""
    if not text:
        return
    if sys.stderr.isatty():
        wrap = WordWrap(lambda: columns_of(sys.stderr))
        text = wrap.feed(text) + wrap.finish()
    is_dim = has_cursor(sys.stderr) and not os.environ.get("NO_COLOR")
    click.echo(click.style(text, dim=True) if is_dim else text, err=True)


def columns_of(stream: TextIO) -> int:
    """The width of a terminal now; 0 where it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


@dataclass
class Cancellation:
    """Set by the first SIGINT or SIGTERM; the second one raises."""

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
    """Within, Ctrl-C and SIGTERM ask the generation to stop after its current step, so that its text is kept."""
    cancellation = Cancellation()
    with _handling(cancellation.on_signal):
        yield cancellation


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM end the process at once: an import cut short leaves half a module."""

    def leave(number: int, frame: FrameType | None) -> None:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\r\x1b[K")
        os._exit(128 + number)

    with _handling(leave):
        yield


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Both signals go to the handler, unless whoever started the process had them ignored."""
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
    """Within, nothing looks for garbage, and what was made stays as long as the command: torch's and a vocabulary's
    half a million objects cost 0.15 s to look through while they load, and 50 ms at a time in an answer."""
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
    """For the last moments, when nothing is left to stop and a traceback could only disturb."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
