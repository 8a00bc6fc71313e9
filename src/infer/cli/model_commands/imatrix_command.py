"""`infer imatrix`: the importance matrix of a model over texts, in a file for quantisation."""

from collections.abc import Iterator
from functools import reduce

from infer.cli.bench.importance import collect_importance
from infer.cli.options.command_options import ImatrixOptions
from infer.cli.options.option_files import MAX_PROMPTS_BYTES, read_text
from infer.cli.terminal.signals import exit_on_signal, keeping_garbage
from infer.cli.terminal.terminal import Spinner, note
from infer.errors import InvalidRequestError
from infer.files.gguf.importance_matrix import ImportanceMatrix, open_importance_matrix


def run_imatrix(options: ImatrixOptions) -> None:
    """Write the importance matrix over the texts, added to the earlier ones.

    Raises InvalidRequestError if there is nothing to add up, or the file exists or cannot be written.
    """
    if not (options.texts or options.in_files):
        raise InvalidRequestError("no texts are given: name files after the model, or - for stdin")
    if options.output.exists() and not options.force:
        raise InvalidRequestError(f"{options.output} exists: name another file with -o, or give --force to replace it")
    if not options.output.parent.is_dir():
        raise InvalidRequestError(f"{options.output} cannot be written: {options.output.parent} is not a folder")
    with exit_on_signal():
        matrices = [open_importance_matrix(path) for path in options.in_files]
        if options.texts:
            matrices.insert(0, _collect(options))
    total = reduce(ImportanceMatrix.merged, matrices)
    try:
        total.write(options.output)
    except OSError as error:
        raise InvalidRequestError(f"{options.output} cannot be written: {error.strerror}") from error
    if not options.quiet:
        note(f"{len(total.squares)} tensors over {total.num_chunks:,} chunks of {total.chunk_size}: {options.output}")


def _collect(options: ImatrixOptions) -> ImportanceMatrix:
    with keeping_garbage(), Spinner("collecting", shown=not options.quiet) as spinner:
        return collect_importance(
            options.model,
            _texts(options),
            chunk_size=options.chunk_size,
            parse_special=options.parse_special,
            threads=options.threads,
            on_chunk=spinner.progress,
        )


def _texts(options: ImatrixOptions) -> Iterator[tuple[str, str]]:
    for path in options.texts:
        yield str(path), read_text(path, "the text", MAX_PROMPTS_BYTES)
