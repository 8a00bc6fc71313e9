"""Output of the command line: streaming text, notes, tables, bars and a spinner. Pipes get no bars or spinners."""

import itertools
import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self, TextIO, final

import click

from infer.cli.process_streams import raise_if_reader_has_gone
from infer.cli.streamed_text import MIN_WIDTH, MarkdownStyle, WordWrap
from infer.system.status_line import PROGRESS_WIDTH, StatusLine, bar

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# Control characters that a model wrote are made visible, not sent: they could move the cursor or set the title.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(128, 160), 65533)


@final
class TextWriter:
    """Writes text as it is generated, and flushes each piece.

    With `wrap`, a word that does not fit moves to the next line completely.
    """

    def __init__(self, stream: TextIO, wrap: WordWrap | None = None, style: MarkdownStyle | None = None) -> None:
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
        """End the current line if it has been begun."""
        if self._in_line:
            self.write("\n")


@final
class PrefillLine:
    """A sign on stderr until the first word of an answer: it shows the share of a long prompt that has been read.

    In a chat it is dim, appears with the question, and counts the tokens of reasoning. At the end it is erased. If
    stderr is not a terminal, nothing is shown.
    """

    def __init__(self, *, shown: bool = True, is_chat: bool = False) -> None:
        self._num_tokens, self._sign = 0, "…" if is_chat else "prompt"
        self._is_dim = is_chat and has_styles(sys.stderr)
        self._line = StatusLine() if shown and has_cursor(sys.stderr) else None
        if is_chat:
            self._show(self._sign)

    def show(self, done: int, total: int) -> None:
        if 0 < done < total:
            self._show(f"{self._sign} {progress_bar(done, total)}")

    def count_token(self) -> None:
        """Count a token that adds nothing to the text."""
        self._num_tokens += 1
        if self._num_tokens > 1:
            self._show(f"{self._sign} {self._num_tokens} tokens")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _show(self, text: str) -> None:
        if self._line is not None:
            self._line.show(f"\x1b[2m{text}\x1b[22m" if self._is_dim else text)


@final
class Spinner:
    """A sign on stderr that something slow is running, with a bar when its progress is known.

    If stderr is not a terminal, nothing is shown.
    """

    def __init__(self, message: str) -> None:
        self._message, self._detail = message, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True) if has_cursor(sys.stderr) else None

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def progress(self, done: int, total: int) -> None:
        """Set the progress.

        Raises BrokenPipeError if stdout's reader has gone, because the rest of the work would be useless.
        """
        raise_if_reader_has_gone()
        self._detail = f" {progress_bar(done, total)}"

    def _spin(self) -> None:
        line = StatusLine()
        for sign in itertools.cycle(SPINNER):
            line.show(f"{sign} {self._message}{self._detail}")
            if self._stopped.wait(0.1):
                line.close()
                return


def progress_bar(done: int, total: int) -> str:
    share = done / max(total, 1)
    return f"{bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %"


def columns_of_rows(rows: Sequence[Sequence[str]], alignments: str) -> Iterator[str]:
    """Yield rows as lines whose columns are aligned: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True))
        yield "  ".join(cells).rstrip()


def megabytes(num_bytes: int, decimals: int = 1) -> str:
    return f"{num_bytes / 1e6:,.{decimals}f} MB"


def q8_remark(context: int) -> str:
    """Return the recommendation of keys and values in q8, from this context on, with the KL of the measured models."""
    return f"--kv-type q8 decodes faster from {context:,} tokens on, with a mean KL of 0.0002 to 0.002"


def experts_remark(memory_bytes: int, path: Path) -> str:
    """Return the memory for a model's experts, and the file from which the others are read."""
    return f"{megabytes(memory_bytes)} of experts in memory, the others in {path} (--experts-memory)"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def print_report(record: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a record as one line of JSON, or the lines."""
    TextWriter(sys.stdout).write("".join(f"{line}\n" for line in ([json_text(record)] if as_json else lines)))


def json_text(record: object) -> str:
    """Return JSON of plain values, or of a dataclass."""
    return json.dumps(record, ensure_ascii=False, default=asdict)


def has_cursor(stream: TextIO) -> bool:
    """Return True for a terminal that can overwrite a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def has_styles(stream: TextIO) -> bool:
    """Return True for a terminal that shows styles, unless the user wants none."""
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


def note(text: str) -> None:
    """Write text that the model did not generate to stderr. On a terminal, it is dim and wrapped at words."""
    if not text:
        return
    if sys.stderr.isatty():
        wrap = WordWrap(lambda: columns_of(sys.stderr))
        text = wrap.feed(text) + wrap.finish()
    click.echo(click.style(text, dim=True) if has_styles(sys.stderr) else text, err=True)


def ask_line(question: str) -> str:
    """Return the line that a person types at the terminal, with its end, or "" at the end of input."""
    click.echo(question, nl=False, err=True)
    line = ""
    try:
        line = sys.stdin.readline()
    finally:
        if not line:  # the end of input, or Ctrl-C
            click.echo(err=True)
    return line


def text_of_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of two columns as a note. On a terminal, long values are wrapped within their column."""
    width, columns = max(len(name) for name, _ in rows), columns_of(sys.stderr) if sys.stderr.isatty() else 0
    lines = []
    for name, value in rows:
        head = f"  {name:<{width}}  "
        wrap = textwrap.TextWrapper(columns, head, " " * len(head), break_on_hyphens=False)
        lines.append(wrap.fill(value) if columns >= len(head) + MIN_WIDTH else head + value)
    return "\n".join(lines)


def columns_of(stream: TextIO) -> int:
    """Return the current width of a terminal, or 0 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
