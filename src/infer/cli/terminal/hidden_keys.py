"""Hide the keys that are typed at a terminal while an answer is written, so that they do not appear in its text.

The next prompt reads the typed keys. The terminal is restored on every exit, and while Ctrl-Z has stopped the process.
"""

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from infer.cli.terminal.signals import handling

_LOCAL_FLAGS = 3  # index of the local flags in the list that termios returns


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
