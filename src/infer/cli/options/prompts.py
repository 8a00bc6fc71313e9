"""The prompts that a command answers: one from an option, a pipe or the terminal, or many from a file."""

import fcntl
import json
import os
import select
import stat
import struct
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from infer.cli.options.option_fields import argument, option
from infer.cli.options.option_files import MAX_PROMPT_BYTES, MAX_PROMPTS_BYTES, is_stdin_taken, read_stdin, read_text
from infer.errors import InvalidRequestError
from infer.sampling_params import ALIASES

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, ids, or messages for the chat template
HINT_SECONDS = 2.0  # without input, after which a message says that stdin is read


@dataclass(frozen=True)
class PromptOptions:
    """The options for one prompt. `chat` and `system` also apply to a file of many prompts."""

    words: tuple[str, ...] = argument(metavar="[PROMPT]")
    prompt: str | None = option(
        "-p", "--prompt", metavar="TEXT", help="The prompt. Unlike with PROMPT, stdin is not read."
    )
    prompt_file: Path | None = option(metavar="FILE", help="Read the prompt from a file; - is stdin.")
    chat: bool = option(help="Send the prompt as a user's message, in the model's chat template.")
    system: str | None = option(metavar="TEXT", help="With --chat: system message before the prompt.")


class FilePrompt(NamedTuple):
    """One prompt of many, and its own sampling parameters."""

    where: str
    prompt: Prompt
    values: dict[str, Any]


def one_prompt(options: PromptOptions, *, prompts_file: Path | None = None, quiet: bool) -> Prompt:
    """Return the prompt from its argument, option or file, else from stdin or the terminal.

    Text from a pipe is appended to a PROMPT after an empty line. With --prompt, stdin is not read, for scripts whose
    stdin is something else.
    """
    sources = {"PROMPT": options.words or None, "--prompt": options.prompt, "--prompt-file": options.prompt_file,
               "--prompts-file": prompts_file}  # fmt: skip
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are both given: give one")
    if len(options.words) > 1:
        count = len(options.words)
        raise click.UsageError(f"the prompt must be one argument, got {count}: put it in quotes (-m names a model)")
    if options.system is not None and not options.chat:
        raise click.UsageError("--system needs --chat")
    return "" if prompts_file is not None else _framed(_prompt_text(options, quiet=quiet), options)


def _prompt_text(options: PromptOptions, *, quiet: bool) -> str:
    if options.prompt_file is not None:
        return read_text(options.prompt_file, "the prompt file")
    if options.prompt is not None:
        _warn_of_unread_stdin(quiet=quiet)
        return options.prompt
    piped = _piped_text(is_needed=not options.words, quiet=quiet)
    if options.words:
        return f"{options.words[0]}\n\n{piped}" if piped else options.words[0]
    text = _asked_text() if piped is None else piped
    if not text.strip():
        where = "" if piped is None else "stdin is empty; "
        raise InvalidRequestError(f'no prompt: {where}give one, as in infer generate "Once upon a time"')
    return text


def many_prompts(path: Path, options: PromptOptions) -> list[FilePrompt]:
    """Return the prompts of a file, one per line. Empty lines are skipped.

    Lines are JSON if the file's name ends in .jsonl.
    """
    lines = read_text(path, "the prompts file", MAX_PROMPTS_BYTES).splitlines()
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        text, values = _json_line(line, where) if path.suffix == ".jsonl" else (line, {})
        asked.append(FilePrompt(where, _framed(text, options), values))
    if not asked:
        raise InvalidRequestError(f"the prompts file {path} has no prompt: write one per line")
    return asked


def _framed(text: str, options: PromptOptions) -> Prompt:
    if not options.chat:
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _json_line(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if isinstance(found, str):
        return found, {}
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise InvalidRequestError(f'{where} must be a string or an object with "prompt", got {line.strip():.60}')
    text = found.pop("prompt")
    return text, {ALIASES.get(str(name), str(name)): value for name, value in found.items()}


def _piped_text(*, is_needed: bool, quiet: bool) -> str | None:
    """Return all of stdin without its last line break, or None for a terminal.

    With a prompt, only a pipe or a file is also read: a socket that a parent left open would never end.
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
        print("infer: reading the prompt from stdin, a pipe (add < /dev/null to ignore it)", file=sys.stderr)
    return read_stdin("the text on stdin", MAX_PROMPT_BYTES).removesuffix("\n").removesuffix("\r")


def _asked_text() -> str:
    """Return one line from the terminal, or "" at the end of input."""
    print("prompt: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
    return line.removesuffix("\n")


def _warn_of_unread_stdin(*, quiet: bool) -> None:
    """Warn if a pipe has unread text: otherwise it would seem to be read."""
    descriptor = _descriptor()
    if quiet or descriptor is None or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    if waiting:
        print('infer: stdin is not read with --prompt; use "… | infer generate TEXT" to read it', file=sys.stderr)


def _descriptor() -> int | None:
    """Return stdin's descriptor, or None if stdin is closed or is not a file of the system."""
    try:
        descriptor = sys.stdin.fileno() if sys.stdin is not None else None
        if descriptor is not None:
            os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return descriptor
