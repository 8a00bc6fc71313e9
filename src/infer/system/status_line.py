"""The status line of a process that makes a person wait: one line of stderr on a terminal, removed at the end.

If several parts of the process need the line, the newest one gets it. If stderr is not a terminal, only notices are
written, as lines that stay.
"""

import sys
from dataclasses import dataclass
from typing import final

EIGHTHS = " ▏▎▍▌▋▊▉"
PROGRESS_WIDTH = 20


def bar(share: float, width: int) -> str:
    """Return a bar of up to `width` characters, accurate to an eighth of a character."""
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * width * len(EIGHTHS)), len(EIGHTHS))
    return "█" * whole + EIGHTHS[eighths].strip()


@final
class StatusLine:
    """One claim to the status line, until it is closed."""

    def __init__(self) -> None:
        _open.append(self)

    @property
    def is_shown(self) -> bool:
        return self is _open[-1] and _is_terminal() and not _speech.is_silent

    def show(self, text: str) -> None:
        if self.is_shown:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        self.show("")
        _open.remove(self)


_open: list[StatusLine] = []


@dataclass
class _Speech:
    is_silent: bool = False


_speech = _Speech()


def silence(is_silent: bool = True) -> None:
    """Suppress notices and status lines from now on, for `--quiet`, or allow them again."""
    _speech.is_silent = is_silent


def write_notice(text: str) -> None:
    """Write a separate line, after removing the status line.

    It is also written to a terminal, because it explains a wait.
    """
    if not _speech.is_silent and sys.stderr is not None:
        sys.stderr.write(f"\r\x1b[K{text}\n" if _is_terminal() else f"{text}\n")
        sys.stderr.flush()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
