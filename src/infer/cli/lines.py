"""Messages from a terminal or a pipe: one line each, or several.

A backslash at a line's end goes on with the next; a line that begins with three double quotes opens a block that
three close.
"""

import sys
from typing import final

import click

BLOCK = '"""'


@final
class Lines:
    """Reads messages from stdin. Interactive (prompt, history, completion) where stdin and stdout are terminals."""

    def __init__(self, completions: list[str]) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            _use_readline(completions)

    def read(self) -> str | None:
        """The next message; None at the end of input. At a terminal Ctrl-C drops what was typed."""
        while True:
            try:
                return self._message()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                click.secho("\n(Ctrl-D or /quit leaves)", err=True, dim=True)

    def _message(self) -> str | None:
        line = self._line("> ")
        if line is None:
            if self.interactive:
                click.echo(err=True)
            return None
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

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.interactive else "")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: byte {error.start} of a line is wrong") from error


def _use_readline(completions: list[str]) -> None:
    """History and completion for this session; nothing that was said is written to disk."""
    try:
        import readline
    except ImportError:
        return

    def complete(text: str, state: int) -> str | None:
        matches = [name for name in completions if name.startswith(text)]
        return matches[state] if state < len(matches) and readline.get_begidx() == 0 else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
