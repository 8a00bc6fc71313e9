"""A terminal with a program in it, whose output is read up to each expected text."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from watched import python_command

# The child makes the terminal its own, so that Ctrl-C reaches it as from a keyboard.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
SECONDS = 300.0  # limit of the wait for an output
UNSEEN = termios.ECHO | termios.ECHOCTL
CTRL_C, CTRL_D, CTRL_Z = b"\x03", b"\x04", b"\x1a"
PROMPT = "\x1b[?2004h"  # the line editor begins a prompt with this mark


class Terminal:
    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.descriptor, self.process = descriptor, process
        self.unread, self.shown = b"", ""

    def until(self, *awaited: str) -> str:
        """Return the output since the last call, up to the last of these texts, which follow each other."""
        begin = len(self.shown)
        for text in awaited:
            while text.encode() not in self.unread:
                assert self.read(), f"{text!r} is missing: {self.shown}{self.unread.decode(errors='replace')}"
            shown, _, self.unread = self.unread.partition(text.encode())
            self.shown += shown.decode(errors="replace") + text
        return self.shown[begin:]

    def type(self, keys: bytes | str) -> None:
        os.write(self.descriptor, keys if isinstance(keys, bytes) else keys.encode())

    def ask(self, keys: bytes | str, *awaited: str) -> str:
        """Type keys and Enter, and return the output up to a text: by default up to the next prompt."""
        self.type((keys if isinstance(keys, bytes) else keys.encode()) + b"\r")
        return self.until(*awaited or [PROMPT])

    def press(self, keys: bytes, *awaited: str) -> str:
        """Type keys without Enter, and return the output up to a text."""
        self.type(keys)
        return self.until(*awaited)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def local_flags(self) -> int:
        flags: int = termios.tcgetattr(self.descriptor)[3]
        return flags

    def leave(self) -> str:
        """Leave the chat, and return the rest of the output."""
        self.type(b"/quit\r")
        return self.ended(0)

    def ended(self, status: int) -> str:
        """Wait until the program has ended with this status, and return the rest of the output."""
        while self.read():
            pass
        assert self.process.wait(SECONDS) == status
        rest, self.unread = self.unread.decode(errors="replace"), b""
        self.shown += rest
        return rest

    def read(self) -> bool:
        """Wait for output. Return False if there is no more, because the program has ended."""
        if not select.select([self.descriptor], [], [], SECONDS)[0]:
            return False
        try:
            found = os.read(self.descriptor, 4096)
        except OSError:  # Linux's error for an empty terminal without another end
            return False
        self.unread += found
        return found != b""


@contextmanager
def terminal(command: list[str], columns: int = 80, **environment: str) -> Iterator[Terminal]:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        python_command(_OWN_TERMINAL, *command, seconds=2 * SECONDS),
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env=inherited | {"TERM": "xterm", "PS1": "$ ", "INFER_HISTORY": ""} | environment,
    )
    os.close(child)
    try:
        yield Terminal(parent, process)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def plain(text: str) -> str:
    """Return the text without sequences that move the cursor or set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)
