"""`infer rerank`: documents by their relevance to a query; and the texts that it and `infer embed` read."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import infer
from infer.cli.command_options import RerankOptions
from infer.cli.option_files import MAX_PROMPTS_BYTES, read_text
from infer.cli.signals import exit_on_signal
from infer.cli.terminal import Spinner, TextWriter, note
from infer.errors import InvalidRequestError, TruncationWarning


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


def run_rerank(model: "infer.LLM", texts: list[GivenText], options: RerankOptions) -> None:
    """Write the documents by their relevance, each with its score and its place, or as one JSON line each."""
    documents, writer = [each.text for each in texts], TextWriter(sys.stdout)
    with exit_on_signal(), Spinner("ranking", shown=not options.quiet), _noting_cuts(options.quiet):
        found = model.rerank(options.query, documents, options.top_n, options.instruction, truncate=options.truncate)
    for each in found:
        own = {} if (row_id := texts[each.index].id) is None else {"id": row_id}
        record = {"index": each.index, **own, "score": each.score, "document": each.document}
        line = json.dumps(record, ensure_ascii=False) if options.as_json else f"{each.score:.4f}  {each.document}"
        writer.write(f"{line}\n")


@contextmanager
def _noting_cuts(is_quiet: bool) -> Iterator[None]:
    """Return a context after which a note on stderr says that texts were cut."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", TruncationWarning)
        yield
    for each in () if is_quiet else found:
        note(str(each.message))
