"""The commands that answer a file of texts into lines: `infer batch`, `embed`, `rerank` and `classify`.

When the same `infer batch` runs again, it continues where it stopped.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np

import infer
from infer.cli.command_options import BatchOptions, ClassifyOptions, EmbedOptions, RerankOptions
from infer.cli.option_files import GivenText, refusing
from infer.cli.process_streams import cancel_on_signal, exit_on_signal
from infer.cli.terminal import Spinner, TextWriter, has_cursor, json_text, note
from infer.engine.texts.text_ids import VectorOptions
from infer.errors import InvalidRequestError, TruncationWarning
from infer.serving.batch_file.batch_rows import BatchSettings, Line, Row, read_rows
from infer.serving.batch_file.output_file import OutputFile
from infer.serving.batch_file.workers import answer_by_workers
from infer.serving.protocols.bodies import seed_of
from infer.system.cores import num_processors
from infer.system.status_line import PROGRESS_WIDTH, StatusLine, bar, write_notice

_TEXTS_PER_CALL = 64  # per update of the progress bar
_REDRAW_SECONDS, _NOTICE_SECONDS = 0.2, 30.0

Load = Callable[[], Any]  # returns the `LLM` that the options describe


@final
class Progress:
    """A bar with the rate and the remaining time if stderr is a terminal, else an occasional line."""

    def __init__(self, total: int) -> None:
        self.num_done, self.num_failed, self._total = 0, 0, total
        self._started = self._shown_at = time.monotonic()
        self.line, self._is_bar = StatusLine(), has_cursor(sys.stderr)
        self._seconds = _REDRAW_SECONDS if self._is_bar else _NOTICE_SECONDS

    def timed(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows. The clock starts when the first row is requested, after the model is loaded."""
        self._started = time.monotonic()
        yield from rows

    def count(self, *, has_failed: bool) -> None:
        self.num_done += 1
        self.num_failed += has_failed
        if time.monotonic() - self._shown_at < self._seconds:
            return
        self._shown_at = time.monotonic()
        left = _duration((self._total - self.num_done) / self.rate)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        told = f"{self.num_done} of {self._total} rows, {self.rate:.1f} rows/s, {left} left{failed}"
        if self._is_bar:
            self.line.show(f"{bar(self.num_done / self._total, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {told}")
        else:
            write_notice(told)

    @property
    def rate(self) -> float:
        """Number of rows per second."""
        return self.num_done / max(time.monotonic() - self._started, 1e-9)


def run_batch(options: BatchOptions, values: Mapping[str, Any], load: Load) -> int:
    """Answer the rows and return the exit status: that of a signal, 1 if a row failed or has no line, or 0."""
    source, quiet = options.source, options.quiet
    ids = _ids_of(source)
    settings = BatchSettings(options.model, options.seed or 0, options.batch_size, values)
    with OutputFile(options.output, options.model, retry_errors=options.retry_errors) as output:
        _check_seed(source, output, settings)
        todo = ids - output.finished
        num_failed, progress = output.num_failed, Progress(len(todo))
        if output.finished and not quiet:
            note(f"{len(ids & output.finished)} of {len(ids)} rows are already answered")

        def write(line: Line) -> None:
            output.write(line.text)
            progress.count(has_failed=line.has_failed)

        with closing(progress.line), cancel_on_signal() as cancellation:
            event = cancellation.event
            rows = progress.timed(row for row in _rows(source) if row.id in todo and not event.is_set())
            if todo and options.workers == 1:
                from infer.serving.batch_file.answering import answer_rows

                with load() as llm:
                    answer_rows(llm, rows, replace(settings, cancel=event), write)
            elif todo:
                each = num_processors() // (options.workers * options.settings.tensor_parallel)
                given = {"model": options.model, **vars(options.settings)}
                given["threads"] = options.settings.threads or max(1, each)
                answer_by_workers(rows, settings, given, options.workers, write, event.is_set)
        is_whole = progress.num_done == len(todo)
        if not (quiet and is_whole):
            note(_summary(progress, len(todo), num_failed))
    return cancellation.exit_status or int(num_failed + progress.num_failed > 0 or not is_whole)


def _rows(path: Path) -> Iterator[Row]:
    if path.exists() and not path.is_file():
        raise InvalidRequestError(f"the input {path} must be a regular file, because it is read twice")
    try:
        with refusing(f"the input {path} cannot be read"), path.open(encoding="utf-8") as file:
            yield from read_rows(file)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the input {path} is not UTF-8: {error.reason}") from error


def _ids_of(path: Path) -> set[str]:
    """Return the ids of all rows.

    Raises InvalidRequestError if two rows have one id, because their lines could not be distinguished.
    """
    ids = set[str]()
    for row in _rows(path):
        if row.id in ids:
            raise InvalidRequestError(f"the input {path} has two rows with the id {row.id!r:.60}: ids must differ")
        ids.add(row.id)
    if not ids:
        raise InvalidRequestError(f"the input {path} has no row")
    return ids


def _check_seed(path: Path, output: OutputFile, settings: BatchSettings) -> None:
    """Raise InvalidRequestError if the output has answers with another `--seed`."""
    if not output.seeds or "seed" in settings.values:
        return
    for row in _rows(path):
        seed = output.seeds.get(row.id)
        if seed is not None and "seed" not in row.values and seed != seed_of(settings.seed, row.id):
            raise InvalidRequestError(
                f"{output.path} has answers with another --seed than {settings.seed}: give the same seed, "
                "name another output, or remove it"
            )


def _summary(progress: Progress, total: int, num_failed_before: int) -> str:
    num_failed = num_failed_before + progress.num_failed
    if progress.num_done < total:
        return f"stopped: {progress.num_done} of {total} rows are answered; the same command answers the others"
    failed = f", {num_failed} of all failed: answer them again with --retry-errors" if num_failed else ""
    return f"{total} rows answered, {progress.rate:.1f} rows/s{failed}" if total else f"nothing is left to do{failed}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def run_embed(model: "infer.LLM", texts: list[GivenText], options: EmbedOptions) -> None:
    """Write one vector per text: a `.npy` file of all, or one JSON line per text."""
    import torch

    from infer.engine.texts.text_tasks import embed, together

    normalize = False if options.no_normalize else None
    asked = VectorOptions(options.pooling, options.prompt_name, options.dimensions, normalize, options.truncate)
    host, found = model.host, list[torch.Tensor]()
    if not (options.quiet or host.facts.heads.embedder or options.pooling):
        note("the model was not trained for embeddings: the vectors are means of its states")
    with exit_on_signal(), Spinner("embedding") as spinner:
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
    with nullcontext(TextWriter(sys.stdout)) if output is None else _opened(output, "w") as writer:
        for record in records:
            writer.write(f"{json_text(record)}\n")


def _opened(path: Path, mode: str) -> Any:
    """Open an output. Raises InvalidRequestError if it cannot be written."""
    with refusing(f"the output {path} cannot be written"):
        return path.open(mode, encoding=None if "b" in mode else "utf-8")


def run_rerank(model: "infer.LLM", texts: list[GivenText], options: RerankOptions) -> None:
    """Write the documents by their relevance, each with its score and its place, or as JSON lines."""
    documents, writer = [each.text for each in texts], TextWriter(sys.stdout)
    with exit_on_signal(), Spinner("ranking"), noting_cuts(options.quiet):
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
    with exit_on_signal(), Spinner("classifying"), noting_cuts(options.quiet):
        found = model.classify(given, truncate=options.truncate)
    write_lines(texts, (each.to_json() for each in found), options.output)
