"""The texts that `infer embed`, `infer rerank` and `infer classify` read: one per line of a file or of stdin."""

import json
from pathlib import Path
from typing import NamedTuple

from infer.cli.options.option_files import MAX_PROMPTS_BYTES, read_text
from infer.errors import InvalidRequestError


class GivenText(NamedTuple):
    """A text, and the `id` and the second text of a pair that its JSON line gives it."""

    text: str
    id: str | int | None = None
    text_pair: str | None = None


def read_texts(path: Path) -> list[GivenText]:
    """Return the texts of a file, one per line, or of stdin for `-`. Lines of a `.jsonl` file are JSON.

    An empty line is an empty text, so that vectors keep the numbers of their lines.
    """
    text = read_text(path, "the texts", MAX_PROMPTS_BYTES).removeprefix("\ufeff")
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise InvalidRequestError(f"the file {path} has no texts: write one per line")
    if path.suffix == ".jsonl":
        return [_json_text(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    return [GivenText(line.removesuffix("\r")) for line in lines]


def _json_text(line: str, where: str) -> GivenText:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if isinstance(found, str):
        return GivenText(found)
    if isinstance(found, dict) and isinstance(text := found.get("text"), str):
        row_id, second = found.get("id"), found.get("text_pair")
        return GivenText(
            text, row_id if isinstance(row_id, str | int) else None, second if isinstance(second, str) else None
        )
    raise InvalidRequestError(f'{where} must be a string or an object with "text", got {line.strip():.60}')
