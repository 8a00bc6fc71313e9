"""`infer embed`: texts as vectors, in a `.npy` file or as JSON lines."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import infer
from infer.cli.answers.given_texts import GivenText
from infer.cli.options.command_options import EmbedOptions
from infer.cli.terminal.signals import exit_on_signal
from infer.cli.terminal.terminal import Spinner, TextWriter, note
from infer.engine.texts.text_ids import VectorOptions
from infer.engine.texts.text_tasks import embed, together
from infer.errors import InvalidRequestError

_TEXTS_PER_CALL = 64  # per update of the progress bar


def run_embed(model: "infer.LLM", texts: list[GivenText], options: EmbedOptions) -> None:
    """Write one vector per text: a `.npy` file of all, or one JSON line per text."""
    normalize = False if options.no_normalize else None
    asked = VectorOptions(options.pooling, options.prompt_name, options.dimensions, normalize, options.truncate)
    host, found = model._opened, list[torch.Tensor]()
    if not (options.quiet or host.facts.heads.embedder or options.pooling):
        note("the model was not trained for embeddings: the vectors are means of its states")
    with exit_on_signal(), Spinner("embedding", shown=not options.quiet) as spinner:
        task = embed(host, [each.text for each in texts], asked)
        ids = task.prepare(lambda: None)
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            end = min(start + _TEXTS_PER_CALL, len(texts))
            found += host.loop.call(together([(task, ids.part(start, end))])).get()
            spinner.progress(end, len(texts))
    if ids.warning and not options.quiet:
        note(ids.warning)
    vectors = torch.cat(found)
    if options.output is not None and options.output.suffix == ".npy":
        with _opened(options.output, "wb") as file:
            np.save(file, vectors.numpy())
    else:
        write_lines(texts, ({"embedding": vector.tolist()} for vector in vectors), options.output)


def write_lines(texts: Sequence[GivenText], found: Iterable[dict[str, Any]], output: Path | None) -> None:
    """Write one JSON line per text, with its place and id, to a file or to stdout."""
    records = (
        {"index": index} | ({} if each.id is None else {"id": each.id}) | own
        for index, (each, own) in enumerate(zip(texts, found, strict=True))
    )
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if output is not None:
        with _opened(output, "w") as file:
            file.writelines(lines)
        return
    writer = TextWriter(sys.stdout)
    for line in lines:
        writer.write(line)


def _opened(path: Path, mode: str) -> Any:
    """Open an output. Raises InvalidRequestError if it cannot be written."""
    try:
        return path.open(mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise InvalidRequestError(f"the output {path} cannot be written: {error.strerror}") from error
