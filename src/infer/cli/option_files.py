"""Files that options name: a regular file, a pipe, a terminal or `-` (stdin), read up to a limit, as a text or as many.

Other devices are refused, because they could be endless.
"""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from infer.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 1 << 20  # the largest schema, grammar or template
MAX_PROMPT_BYTES = 16 << 20
MAX_PROMPTS_BYTES = 256 << 20  # the largest file of many prompts
_STDIN = "infer.stdin"
_BLOCK = 1 << 20


def read_text(path: Path, what: str, limit: int = MAX_PROMPT_BYTES) -> str:
    """Return the file's text, or stdin's for `-`.

    Raises InvalidRequestError, with a message of one line, unless it is UTF-8 text of at most `limit` bytes.
    """
    if str(path) == "-":
        _take_stdin(what)
        return read_stdin(f"{what} -", limit)
    return _decode(read_bytes(path, what, limit), f"{what} {path}", limit)


def read_bytes(path: Path, what: str, limit: int) -> bytes:
    """Return the file's bytes. Raises InvalidRequestError if it cannot be read, or has more than `limit` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: the name has a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequestError(f"{what} {path} cannot be read: {reason}") from error
    try:
        with refusing(f"{what} {path} cannot be read"):
            return _read_checked(descriptor, f"{what} {path}", limit)
    finally:
        os.close(descriptor)


def read_stdin(what: str, limit: int) -> str:
    """Return all of stdin. Raises InvalidRequestError unless it is UTF-8 text of at most `limit` bytes."""
    if sys.stdin is None:  # closed before the process began
        return ""
    with refusing(f"{what} cannot be read"):
        content = sys.stdin.buffer.read(limit + 1)
    return _decode(content, what, limit)


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Raise InvalidRequestError with the problem and the system's reason if it refuses a file within the context."""
    try:
        yield
    except OSError as error:
        raise InvalidRequestError(f"{problem}: {error.strerror}") from error


def check_writable(path: Path | None, what: str = "") -> None:
    """Raise InvalidRequestError, before anything is computed, if a path is given and no file can be written there.

    `what` is written before the path.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder: name a file in it" if path.is_dir() else f"there is no folder {path.parent}"
        raise InvalidRequestError(f"{what}{path} cannot be written: {problem}")


def write_whole(path: Path, content: bytes, what: str = "", mode: int = 0o666) -> None:
    """Write a file, replacing any file of this name. Raises InvalidRequestError if it cannot be written."""
    from infer.system.atomic import replacing

    with refusing(f"{what}{path} cannot be written"), replacing(path, mode) as file:
        file.write(content)


def _decode(content: bytes, what: str, limit: int) -> str:
    _check_size(len(content), what, limit)  # stdin may have more
    try:
        return content.decode("utf-8-sig")  # Windows programs begin files with a byte order mark
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{what} is not UTF-8: byte {error.start} is invalid") from error


def _read_checked(descriptor: int, what: str, limit: int) -> bytes:
    """Return at most one byte more than the limit."""
    status = os.fstat(descriptor)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise InvalidRequestError(f"{what} cannot be read: it is a folder")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or os.isatty(descriptor)):
        raise InvalidRequestError(f"{what} cannot be read: it must be a regular file, a pipe or - for stdin")
    _check_size(status.st_size, what, limit)
    first = _first_bytes(descriptor, what, limit) if stat.S_ISFIFO(mode) else b""
    os.set_blocking(descriptor, True)
    with open(descriptor, "rb", closefd=False) as file:
        return first + file.read(limit + 1 - len(first))


def _first_bytes(descriptor: int, what: str, limit: int) -> bytes:
    """Return the first bytes of a pipe, or none if no bytes have been written yet.

    Raises InvalidRequestError if no process writes to the pipe: opened without waiting, such a pipe is at its end.
    """
    try:
        first = os.read(descriptor, min(limit + 1, _BLOCK))
    except BlockingIOError:
        return b""
    if not first:
        raise InvalidRequestError(f"{what} cannot be read: it is a pipe without a writer")
    return first


def _take_stdin(what: str) -> None:
    """Reserve stdin for one option.

    Raises InvalidRequestError if another option has it, because the second one would find it empty.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return
    if _STDIN in context.meta:
        raise InvalidRequestError(f"{context.meta[_STDIN]} and {what} are both stdin (-): put one of them into a file")
    context.meta[_STDIN] = what


def is_stdin_taken() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and _STDIN in context.meta


def _check_size(num_bytes: int, what: str, limit: int) -> None:
    if num_bytes > limit:
        raise InvalidRequestError(f"{what} is too long: it must have at most {limit >> 20} MiB")


def read_named_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> str | None:
    """Return the text of the file that an option of click names."""
    what = f"the file of --{str(parameter.name).replace('_', '-')}"
    return None if path is None else read_text(path, what, MAX_GRAMMAR_BYTES)


def read_schema(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the schema. A value that begins with a brace is the schema itself; any other value names a file."""
    if value is None or value.lstrip().startswith("{"):
        return value
    return read_named_file(context, parameter, Path(value))


class GivenText(NamedTuple):
    """A text, and the `id` and the second text of a pair that its JSON line gives it."""

    text: str
    id: str | int | None = None
    text_pair: str | None = None


def read_texts(path: Path) -> list[GivenText]:
    """Return the texts of a file, one per line, or of stdin for `-`. Lines of a `.jsonl` file are JSON.

    An empty line is an empty text, so that vectors keep the numbers of their lines.
    """
    text = read_text(path, "the texts", MAX_PROMPTS_BYTES)
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise InvalidRequestError(f"the file {path} has no texts: write one per line")
    if path.suffix == ".jsonl":
        return [_json_text(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    return [GivenText(line.removesuffix("\r")) for line in lines]


def read_row(line: str, where: str, key: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a line of JSON, which is a string or has it at `key`, and the other values of an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if isinstance(row, str):
        return row, {}
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise InvalidRequestError(f'{where} must be a string or an object with "{key}", got {line.strip():.60}')
    return row.pop(key), row


def _json_text(line: str, where: str) -> GivenText:
    text, others = read_row(line, where, "text")
    row_id, second = others.get("id"), others.get("text_pair")
    row_id = row_id if isinstance(row_id, str | int) else None
    return GivenText(text, row_id, second if isinstance(second, str) else None)
