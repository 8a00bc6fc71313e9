"""What a process shows on a terminal while it makes someone wait: one line of stderr, removed in the end.

Several may want the line at once: the newest has it. Nothing is written where stderr is no terminal.
"""

import sys
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

    def show(self, text: str) -> None:
        if self is _open[-1] and sys.stderr.isatty():
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        self.show("")
        _open.remove(self)


_open: list[StatusLine] = []
