"""Text on stdin: that of a pipe or a file, or a line that is typed at a terminal."""

import fcntl
import os
import select
import stat
import struct
import sys
import termios

from infer.cli.option_files import MAX_PROMPT_BYTES, decode, is_stdin_taken
from infer.errors import InvalidRequestError

HINT_SECONDS = 2.0  # of silence, after which we say what is waited for


def piped_text(*, is_needed: bool, quiet: bool) -> str | None:
    """Return all of stdin without its last line break, or None for a terminal.

    If there is a prompt already, only a pipe or a file is read: a socket that a parent left open would never end.
    """
    descriptor = _descriptor()
    if descriptor is None or is_stdin_taken():
        return ""
    if os.isatty(descriptor):
        return None
    mode = os.fstat(descriptor).st_mode
    if not (is_needed or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if stat.S_ISFIFO(mode) and not quiet and not select.select([descriptor], [], [], HINT_SECONDS)[0]:
        print("infer: reading the prompt from stdin, a pipe (< /dev/null leaves it out)", file=sys.stderr)
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise InvalidRequestError(f"the text on stdin is too long: {MAX_PROMPT_BYTES >> 20} MiB at most")
    return decode(content, "the text on stdin").removesuffix("\n").removesuffix("\r")


def asked_text() -> str:
    """Return one line from the terminal, or "" at its end."""
    print("prompt: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
    return line.removesuffix("\n")


def warn_of_unread_stdin(*, quiet: bool) -> None:
    """Warn if text waits in a pipe: to ignore it silently would look as if it had been read."""
    descriptor = _descriptor()
    if quiet or descriptor is None or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    if waiting:
        print('infer: stdin is not read beside --prompt: as in "… | infer generate TEXT" it is', file=sys.stderr)


def _descriptor() -> int | None:
    """Return stdin's descriptor, or None if stdin is closed or is not a file of the system."""
    try:
        descriptor = sys.stdin.fileno() if sys.stdin is not None else None
        if descriptor is not None:
            os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return descriptor
