"""`infer rerank`: sort documents by their relevance to a query."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import infer
from infer.cli.answers.given_texts import GivenText
from infer.cli.options.command_options import RerankOptions
from infer.cli.terminal.signals import exit_on_signal
from infer.cli.terminal.terminal import Spinner, TextWriter, note
from infer.errors import TruncationWarning


def run_rerank(model: "infer.LLM", texts: list[GivenText], options: RerankOptions) -> None:
    """Write the documents by their relevance, each with its score and its place, or as JSON lines."""
    documents, writer = [each.text for each in texts], TextWriter(sys.stdout)
    with exit_on_signal(), Spinner("ranking", shown=not options.quiet), noting_cuts(options.quiet):
        found = model.rerank(options.query, documents, options.top_n, options.instruction, truncate=options.truncate)
    for each in found:
        own = {} if (row_id := texts[each.index].id) is None else {"id": row_id}
        record = {"index": each.index, **own, "score": each.score, "document": each.document}
        line = json.dumps(record, ensure_ascii=False) if options.as_json else f"{each.score:.4f}  {each.document}"
        writer.write(f"{line}\n")


@contextmanager
def noting_cuts(is_quiet: bool) -> Iterator[None]:
    """Return a context that prints a note on stderr at its end if texts were truncated."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", TruncationWarning)
        yield
    for each in () if is_quiet else found:
        note(str(each.message))
