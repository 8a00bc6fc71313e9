"""The input of a chat: an editor at a terminal, plain lines elsewhere."""

import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import Protocol, final, runtime_checkable

import click

from infer.cli.chat.typed_message import LEAVE_HINT, is_open_block, message_of
from infer.cli.terminal.terminal import has_cursor, note

PASTE_SECONDS = 0.05  # lines that arrive within this time were pasted, because nobody types so fast


@runtime_checkable
class ChatInput(Protocol):
    """Reads one message after the other. `is_interactive` is True if a person types them and reads the answers."""

    is_interactive: bool

    def read(self, begin: str = "") -> str | None:
        """Return the next message, or None at the end. An editor shows `begin` as its beginning.

        At a terminal, Ctrl-C discards the typed text. If nothing is typed, a second Ctrl-C ends the input.
        """


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def import_ahead() -> None:
    """Import the packages of the extra `chat` in the background, for a chat at a terminal."""

    def import_all() -> None:
        with suppress(ModuleNotFoundError):
            _has_editor()
            import_module("rich.table")

    if is_terminal() and has_cursor(sys.stdout):
        Thread(target=import_all, daemon=True).start()


@contextmanager
def chat_input(complete: Callable[[str], Iterable[str]]) -> Iterator[ChatInput]:
    """Open the input of a chat: with an editor at a terminal, if the extra `chat` is installed, else plain lines.

    `complete` returns the completions of a line up to the cursor.
    """
    if is_terminal() and has_cursor(sys.stdout) and _has_editor():
        from infer.cli.chat.chat_prompt import ChatPrompt

        yield ChatPrompt(complete)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield PlainInput(reader)
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


def _has_editor() -> bool:
    try:
        import_module("infer.cli.chat.chat_prompt")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("prompt_toolkit"):
            raise
        return False
    return True


@final
class PlainInput:
    """Reads lines from stdin without an editor.

    A signal that arrives just before a wait for input also ends that wait, because it is written to the pipe `wake`.
    """

    def __init__(self, wake: int) -> None:
        self.is_interactive = is_terminal()
        self._wake, self._unread, self._is_at_end = wake, b"", False

    def read(self, begin: str = "") -> str | None:
        is_second = False
        while True:
            try:
                return self._message()
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                self._unread = b""
                click.echo(err=True)
                if is_second:
                    return None
                note(LEAVE_HINT)
                is_second = True

    def _message(self) -> str | None:
        text = self._line("> ")
        if text is None and self.is_interactive:
            click.echo(err=True)
        if text is None:
            return None
        if self.is_interactive and not text.startswith("/") and self._is_ready(PASTE_SECONDS):
            while self._is_ready(PASTE_SECONDS) and (following := self._line("")) is not None:
                text = f"{text}\n{following}"
            return text.strip("\n")
        while is_open_block(text) or text.endswith("\\"):
            following = self._line("| ")
            text = text if is_open_block(text) else text.removesuffix("\\")
            if following is None:
                break
            text = f"{text}\n{following}"
        return message_of(text)

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its end, or None at the end of input."""
        if self.is_interactive:
            click.echo(prompt, nl=False)
        while b"\n" not in self._unread and not self._is_at_end:
            if self._is_ready(None):
                self._take()
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: byte {error.start} of a line is invalid") from error

    def _is_ready(self, seconds: float | None) -> bool:
        """Return True if there is input within the time. After a signal, return False early."""
        if b"\n" in self._unread:
            return True
        try:
            ready, _, _ = select.select([sys.stdin, self._wake], [], [], seconds)
        except (OSError, ValueError):  # no descriptor: the caller replaced the stream
            return True
        if self._wake in ready:
            os.read(self._wake, 4096)
        return sys.stdin in ready

    def _take(self) -> None:
        """Append the available input to the unread bytes."""
        try:
            taken = os.read(sys.stdin.fileno(), 65536)
        except ValueError:
            taken, self._is_at_end = sys.stdin.read().encode(), True
        except OSError as error:
            if error.errno != errno.EIO:  # EIO: the terminal is gone
                raise click.UsageError(f"stdin cannot be read: {error.strerror}") from error
            taken = b""
        self._unread += taken
        self._is_at_end |= not taken
