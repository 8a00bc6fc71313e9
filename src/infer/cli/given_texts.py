"""The texts that `infer embed` and `infer rerank` read: one per line of a file or of stdin."""

import json
from pathlib import Path
from typing import NamedTuple

from infer.cli.option_files import MAX_PROMPTS_BYTES, read_text
from infer.errors import InvalidRequestError


class GivenText(NamedTuple):
    """A text, and the `id` that its JSON line gives it."""

    text: str
    id: str | int | None = None


def read_texts(path: Path) -> list[GivenText]:
    """Return the texts of a file, one per line, or of stdin for `-`. Lines of a `.jsonl` file are JSON.

    An empty line is an empty text, so that vectors keep the numbers of their lines.
    """
    text = read_text(path, "the texts", MAX_PROMPTS_BYTES).removeprefix("\ufeff")
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise InvalidRequestError(f"the texts {path} are empty: give one per line")
    if path.suffix == ".jsonl":
        return [_json_text(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    return [GivenText(line.removesuffix("\r")) for line in lines]


def _json_text(line: str, where: str) -> GivenText:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    match found:
        case str():
            return GivenText(found)
        case {"text": str(text), "id": str(row_id) | int(row_id)}:
            return GivenText(text, row_id)
        case {"text": str(text)}:
            return GivenText(text)
    raise InvalidRequestError(f'{where} must be a string or an object with "text", got {line.strip():.60}')
