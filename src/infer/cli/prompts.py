"""What a command is to answer: one prompt, or a file of many."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from infer.errors import InvalidRequestError
from infer.params import ALIASES

Prompt = str | list[dict[str, str]]


class Asked(NamedTuple):
    """One prompt of many, and the sampling parameters that are its own."""

    where: str
    prompt: Prompt
    values: dict[str, Any]


def one_prompt(options: Mapping[str, Any]) -> Prompt:
    names = {"text": "PROMPT", "prompt": "--prompt", "prompt_file": "--prompt-file", "prompts_file": "--prompts-file"}
    given = [name for name in names if options.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(names[name] for name in given)} are both given: give one")
    if options["system"] is not None and not options["chat"]:
        raise click.UsageError("--system needs --chat")
    text = options[given[0]] if given else "Hello, world! I am a"
    if options["prompt_file"] is not None:
        text = read_text(options["prompt_file"], "the prompt file")
    return _framed(str(text), options)


def many_prompts(path: Path, options: Mapping[str, Any]) -> list[Asked]:
    """One a line; of JSON lines where the file's name says so. Empty lines are skipped."""
    lines = read_text(path, "the prompts file").splitlines()
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        text, values = _json_line(line, where) if path.suffix == ".jsonl" else (line, {})
        asked.append(Asked(where, _framed(text, options), values))
    if not asked:
        raise InvalidRequestError(f"the prompts file {path} holds no prompt")
    return asked


def read_text(path: Path, what: str) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{what} {path} is not UTF-8: byte {error.start} is wrong") from error


def _framed(text: str, options: Mapping[str, Any]) -> Prompt:
    if not options["chat"]:
        return text
    system = [] if options["system"] is None else [{"role": "system", "content": options["system"]}]
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
