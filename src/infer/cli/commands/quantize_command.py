"""`infer quantize` and `infer imatrix`: a model as a GGUF file of another type, and the importance matrix for it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from math import prod
from pathlib import Path

from infer.cli.bench.text_measures import collect_importance
from infer.cli.command_options import ImatrixOptions, QuantizeOptions
from infer.cli.option_files import MAX_PROMPTS_BYTES, check_writable, read_text, refusing
from infer.cli.process_streams import exit_on_signal, keeping_garbage
from infer.cli.terminal import Spinner, columns_of_rows, megabytes, note, print_report
from infer.compute.quantization.file_types import FILE_TYPES
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.compute.quantization.quantisers import QUANTISED_TYPES
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint, resolve
from infer.files.gguf.gguf import read_whole_gguf
from infer.files.gguf.importance_matrix import ImportanceMatrix, open_importance_matrix, read_importance_matrix
from infer.files.gguf.quantised_file import (
    QuantisableModel,
    QuantisationRequest,
    choose_types,
    model_of_gguf,
    write_quantised,
)
from infer.models.gguf_export.plan import export_plan
from infer.system.cores import check_num_threads, default_num_threads

_MIXTURES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}  # short names


def run_quantize(options: QuantizeOptions) -> None:
    """Write the file, and report its size and the types of its tensors."""
    threads = default_num_threads() if options.threads is None else check_num_threads(options.threads)
    request = _request(options)
    path = resolve(options.source)
    _check_output(options.output, path, force=options.force or options.dry_run)
    model = open_quantisable(path)
    if request.importance and not any(tensor.name in request.importance for tensor in model.tensors):
        raise InvalidRequestError(f"{options.imatrix} has no tensor of {path.name}: make it with infer imatrix")
    types = choose_types(model, request)
    if not options.dry_run:
        with _naming(options.output), Spinner("quantising") as spinner:
            write_quantised(options.output, model, request, types, threads, spinner.progress)
    if not options.quiet:
        print_report(None, columns_of_rows(list(_rows(model, types)), "<>><"), as_json=False)


def open_quantisable(path: Path) -> QuantisableModel:
    """Return the metadata and the tensors of a GGUF file, or of a folder in the form of a GGUF file.

    Raises ModelError if the files cannot be read, or if GGUF has no form for the model.
    """
    if not path.is_dir():
        return model_of_gguf(read_whole_gguf(path))
    return export_plan(open_checkpoint(path))


def _request(options: QuantizeOptions) -> QuantisationRequest:
    name = _MIXTURES.get(options.type.upper(), options.type.upper())
    if name not in FILE_TYPES:
        raise InvalidRequestError(f"--type must be one of {', '.join(FILE_TYPES)}, got {options.type!r}")
    return QuantisationRequest(
        name,
        [_pattern(text) for text in options.tensor_type],
        _type("--output-tensor-type", options.output_tensor_type),
        _type("--token-embedding-type", options.token_embedding_type),
        options.pure,
        options.requantize,
        {} if options.imatrix is None else read_importance_matrix(options.imatrix),
        None if options.imatrix is None else options.imatrix.name,
    )


def _pattern(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(f"--tensor-type {text}: {pattern!r} is not a regular expression: {error}") from error
    found = _type(f"--tensor-type {text}", name)
    if not (equals and pattern) or found is None:
        raise InvalidRequestError(f"--tensor-type must be PATTERN=TYPE, such as ffn_down=Q6_K, got {text!r}")
    return pattern, found


def _type(option: str, name: str | None) -> str | None:
    if name is not None and name.upper() not in QUANTISED_TYPES:
        raise InvalidRequestError(f"{option}: the type must be one of {', '.join(QUANTISED_TYPES)}, got {name!r}")
    return None if name is None else name.upper()


def _check_output(output: Path, source: Path, *, force: bool) -> None:
    """Raise InvalidRequestError if the output is the source, a folder, or a file that may not be replaced."""
    check_writable(output, "the output ")
    if output.exists() and output.samefile(source):
        raise InvalidRequestError(f"the output {output} is the input: name another file")
    if output.exists() and not force:
        raise InvalidRequestError(f"the output {output} exists: name another file, or give --force to replace it")


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Name the output in an error of the system. Raises InvalidRequestError if the output's folder is wrong."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise InvalidRequestError(f"the output {output} cannot be written: {error.strerror}") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(output)) from error


def _rows(model: QuantisableModel, types: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the size, the bits per weight and the types before and after."""
    before = {tensor.name: tensor.type for tensor in model.tensors}
    count = sum(prod(tensor.shape) for tensor in model.tensors)
    for label, chosen in (("before", before), ("after", types)):
        size = sum(
            prod(tensor.shape[:-1]) * BLOCK_TYPES[chosen[tensor.name]].row_bytes(tensor.shape[-1])
            for tensor in model.tensors
        )
        kinds = ", ".join(f"{number} {type}" for type, number in Counter(chosen.values()).most_common())
        yield label, megabytes(size), f"{8 * size / max(count, 1):.2f} bits per weight", kinds


def run_imatrix(options: ImatrixOptions) -> None:
    """Write the importance matrix over the texts, added to the earlier ones.

    Raises InvalidRequestError if there is nothing to add up, or the file exists or cannot be written.
    """
    if not (options.texts or options.in_files):
        raise InvalidRequestError("no texts are given: name files after the model, or - for stdin")
    if options.output.exists() and not options.force:
        raise InvalidRequestError(f"{options.output} exists: name another file with -o, or give --force to replace it")
    check_writable(options.output)
    with exit_on_signal():
        matrices = [open_importance_matrix(path) for path in options.in_files]
        if options.texts:
            texts = ((str(path), read_text(path, "the text", MAX_PROMPTS_BYTES)) for path in options.texts)
            own = {name: getattr(options, name) for name in ("chunk_size", "parse_special", "threads")}
            with keeping_garbage(), Spinner("collecting") as spinner:
                matrices.insert(0, collect_importance(options.model, texts, **own, on_chunk=spinner.progress))
    total = reduce(ImportanceMatrix.merged, matrices)
    with refusing(f"{options.output} cannot be written"):
        total.write(options.output)
    if not options.quiet:
        note(f"{len(total.squares)} tensors over {total.num_chunks:,} chunks of {total.chunk_size}: {options.output}")
