"""The prompts that a command answers: one, or a file of many."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from infer.cli.option_files import MAX_PROMPTS_BYTES, read_text
from infer.cli.piped import asked_text, piped_text, warn_of_unread_stdin
from infer.errors import InvalidRequestError
from infer.sampling_params import ALIASES

Prompt = str | list[dict[str, str]]


class Asked(NamedTuple):
    """One prompt of many, and its own sampling parameters."""

    where: str
    prompt: Prompt
    values: dict[str, Any]


def one_prompt(options: Mapping[str, Any]) -> Prompt:
    """Return the prompt from the argument, the option or the file that gives it, else from stdin or the terminal.

    Text from a pipe is appended to a PROMPT after an empty line. With --prompt, stdin is not read, for scripts whose
    stdin is something else.
    """
    names = {"words": "PROMPT", "prompt": "--prompt", "prompt_file": "--prompt-file", "prompts_file": "--prompts-file"}
    given = [name for name in names if options.get(name) not in (None, ())]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(names[name] for name in given)} are both given: give one")
    if len(words := options["words"]) > 1:
        raise click.UsageError(f"the prompt must be one argument, got {len(words)}: put it in quotes (a model is -m)")
    if options["system"] is not None and not options["chat"]:
        raise click.UsageError("--system needs --chat")
    return _framed(_prompt_text(given[0] if given else None, options), options)


def _prompt_text(source: str | None, options: Mapping[str, Any]) -> str:
    if source == "prompts_file":
        return ""
    if source == "prompt_file":
        return read_text(options["prompt_file"], "the prompt file")
    if source == "prompt":
        warn_of_unread_stdin(quiet=options["quiet"])
        return str(options["prompt"])
    piped = piped_text(is_needed=source is None, quiet=options["quiet"])
    if source == "words":
        word = str(options["words"][0])
        return f"{word}\n\n{piped}" if piped else word
    text = asked_text() if piped is None else piped
    if not text.strip():
        where = "" if piped is None else "stdin is empty; "
        raise InvalidRequestError(f'no prompt: {where}give one, as in infer generate "Once upon a time"')
    return text


def many_prompts(path: Path, options: Mapping[str, Any]) -> list[Asked]:
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
        asked.append(Asked(where, _framed(text, options), values))
    if not asked:
        raise InvalidRequestError(f"the prompts file {path} holds no prompt")
    return asked


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
