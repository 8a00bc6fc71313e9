"""Messages from a terminal or a pipe: each has one line, or several.

A backslash at a line's end continues the message on the next line. A line that begins with three double quotes opens a
block that three more close. Text that is pasted at a terminal is one message, however many lines it has.
"""

import errno
import os
import select
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self, final

import click

from infer.cli.line_editor import Complete, LineEditor
from infer.cli.terminal import Handler, note

BLOCK = '"""'
PASTE_SECONDS = 0.05  # in which no one types a line


@final
class Lines:
    """Reads messages from stdin. Interactive (prompt, history, completion) if stdin and stdout are terminals."""

    def __init__(self, complete: Complete) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._editor = LineEditor(complete) if self.interactive else None
        self._wake_descriptor: int | None = None
        self._is_reading = False

    def __enter__(self) -> Self:
        """Notice signals from now on, even one that arrives just before a wait for input.

        Such a signal would not end the wait otherwise.
        """
        reader, self._wake_descriptor = os.pipe()
        os.set_blocking(self._wake_descriptor, False)
        signal.set_wakeup_fd(self._wake_descriptor, warn_on_full_buffer=False)
        self._replaced = {number: signal.getsignal(number) for number in (signal.SIGURG, signal.SIGTSTP)}
        signal.signal(signal.SIGURG, lambda number, frame: None)
        if self.interactive and self._replaced[signal.SIGTSTP] is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._suspend)
        threading.Thread(target=_wake_reader, args=(reader, threading.get_ident()), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, former in self._replaced.items():
            signal.signal(number, former)
        if self._wake_descriptor is not None:
            os.close(self._wake_descriptor)

    def read(self, begin: str = "") -> str | None:
        """Return the next message, or None at the end of input. A line that is edited begins with `begin`.

        At a terminal, Ctrl-C drops what was typed. A second Ctrl-C, when nothing is typed, is the end of input.
        """
        if self._editor is None:
            return self._message()
        if begin:
            self._editor.begin_with(begin)
        is_second = False
        while True:
            try:
                message = self._message()
            except KeyboardInterrupt:
                if is_second and not self._editor.typed():
                    click.echo(err=True)
                    return None
                note("\n(Ctrl-C again, Ctrl-D or /quit leaves)")
                is_second = True
            else:
                self._editor.add_history(message or "")
                return message

    def _message(self) -> str | None:
        line = self._line("> ")
        if line is None:
            if self.interactive:
                click.echo(err=True)
            return None
        if self._editor is not None and not self._editor.marks_pastes and not line.startswith("/"):
            line = self._with_rest_of_paste(line)
        if "\n" in line:
            return line.strip("\n")
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        parts = []
        while line is not None and line.endswith("\\"):
            parts.append(line.removesuffix("\\"))
            line = self._line("| ")
        return "\n".join([*parts, line] if line is not None else parts)

    def _block(self, line: str | None) -> str:
        parts = []
        while line is not None and not line.rstrip().endswith(BLOCK):
            parts.append(line)
            line = self._line("| ")
        if line is not None:
            parts.append(line.rstrip().removesuffix(BLOCK))
        return "\n".join(parts).strip("\n")

    def _with_rest_of_paste(self, line: str) -> str:
        """Return the line with the lines that follow immediately: without marks, these are one paste."""
        parts = [line]
        while select.select([sys.stdin], [], [], PASTE_SECONDS)[0] and (following := self._line("")) is not None:
            parts.append(following)
        return "\n".join(parts)

    def _line(self, prompt: str) -> str | None:
        while True:
            try:
                return self._input(prompt if self.interactive else "")
            except _SuspendedError as suspended:  # readline has given the terminal back
                _stop_process(self._suspend)
                if self._editor is not None:
                    self._editor.begin_with(suspended.typed)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z."""
        if self._is_reading:
            raise _SuspendedError("" if self._editor is None else self._editor.typed())
        _stop_process(self._suspend)

    def _input(self, prompt: str) -> str | None:
        self._is_reading = True
        try:
            line = input(prompt)
            line.encode()  # in the C locale Python takes other bytes as well
            return line
        except UnicodeEncodeError as error:
            where = len(line[: error.start].encode())
            raise click.UsageError(f"stdin is not UTF-8: byte {where} of a line is wrong") from error
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: byte {error.start} of a line is wrong") from error
        except OSError as error:
            if error.filename is not None:  # not stdin: stdout, which says so itself
                raise
            if error.errno == errno.EIO:  # the terminal has gone
                return None
            raise click.UsageError(f"stdin cannot be read: {error.strerror}") from error
        finally:
            self._is_reading = False


class _SuspendedError(Exception):
    """Raised by Ctrl-Z at the prompt, with the text that was typed until then."""

    def __init__(self, typed: str) -> None:
        super().__init__()
        self.typed = typed


def _stop_process(handler: Handler) -> None:
    """Stop the process until it is continued. From then on, `handler` handles Ctrl-Z again."""
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def _wake_reader(descriptor: int, thread_id: int) -> None:
    """Interrupt the thread's wait for input a few times after each signal that is to end the wait."""
    while number := os.read(descriptor, 1):
        if number[0] in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP):
            for seconds in (0.02, 0.1, 0.5):
                time.sleep(seconds)
                signal.pthread_kill(thread_id, signal.SIGURG)
    os.close(descriptor)
