"""`infer embed`, `rerank` and `classify`: texts as vectors, sorted by their relevance to a query, or labelled."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import infer
from infer.cli.options.command_options import ClassifyOptions, EmbedOptions, RerankOptions
from infer.cli.options.option_files import GivenText, refusing
from infer.cli.terminal.process_streams import exit_on_signal
from infer.cli.terminal.terminal import Spinner, TextWriter, json_text, note
from infer.engine.texts.text_ids import VectorOptions
from infer.engine.texts.text_tasks import embed, together
from infer.errors import TruncationWarning

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
    lines = (json_text(record) + "\n" for record in records)
    if output is not None:
        with _opened(output, "w") as file:
            file.writelines(lines)
        return
    writer = TextWriter(sys.stdout)
    for line in lines:
        writer.write(line)


def _opened(path: Path, mode: str) -> Any:
    """Open an output. Raises InvalidRequestError if it cannot be written."""
    with refusing(f"the output {path} cannot be written"):
        return path.open(mode, encoding=None if "b" in mode else "utf-8")


def run_rerank(model: "infer.LLM", texts: list[GivenText], options: RerankOptions) -> None:
    """Write the documents by their relevance, each with its score and its place, or as JSON lines."""
    documents, writer = [each.text for each in texts], TextWriter(sys.stdout)
    with exit_on_signal(), Spinner("ranking", shown=not options.quiet), noting_cuts(options.quiet):
        found = model.rerank(options.query, documents, options.top_n, options.instruction, truncate=options.truncate)
    for each in found:
        own = {} if (row_id := texts[each.index].id) is None else {"id": row_id}
        record = {"index": each.index, **own, "score": each.score, "document": each.document}
        line = json_text(record) if options.as_json else f"{each.score:.4f}  {each.document}"
        writer.write(f"{line}\n")


@contextmanager
def noting_cuts(is_quiet: bool) -> Iterator[None]:
    """Return a context that prints a note on stderr at its end if texts were truncated."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", TruncationWarning)
        yield
    for each in () if is_quiet else found:
        note(str(each.message))


def run_classify(model: "infer.LLM", texts: list[GivenText], options: ClassifyOptions) -> None:
    """Write one JSON line per text: its labels, the most probable first, and their probabilities."""
    given = [each.text if each.text_pair is None else (each.text, each.text_pair) for each in texts]
    with exit_on_signal(), Spinner("classifying", shown=not options.quiet), noting_cuts(options.quiet):
        found = model.classify(given, truncate=options.truncate)
    write_lines(texts, (each.to_json() for each in found), options.output)
