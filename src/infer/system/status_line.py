"""What a process shows on a terminal while it makes someone wait: one line of stderr, removed in the end.

Several may want the line at once: the newest has it. Where stderr is no terminal, notices are written, lines that stay.
"""

import sys
from dataclasses import dataclass
from typing import final

EIGHTHS = " ▏▎▍▌▋▊▉"
PROGRESS_WIDTH = 20


def bar(share: float, width: int) -> str:
    """A bar of up to `width` characters, to an eighth of one."""
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * width * len(EIGHTHS)), len(EIGHTHS))
    return "█" * whole + EIGHTHS[eighths].strip()


@final
class StatusLine:
    """One who wants the line, until it is closed."""

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
    """No notice and no line from now on: what `--quiet` asks for."""
    _speech.is_silent = is_silent


def write_notice(text: str) -> None:
    """A line of its own; before it, whatever is shown goes. A terminal has it as well: it says why someone waits."""
    if not _speech.is_silent and sys.stderr is not None:
        sys.stderr.write(f"\r\x1b[K{text}\n" if _is_terminal() else f"{text}\n")
        sys.stderr.flush()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
