"""`infer perplexity`, `compare` and `doctor`: how well models predict a text, and the faults of their files.

Each prints rows or lines, or one JSON object, and the last two can also write a page.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import click

import infer
from infer.cli.bench.text_quality import Divergence, Perplexity, measure_divergence, measure_perplexity
from infer.cli.commands.report_pages import check_page, comparison_page, doctor_page, write_page
from infer.cli.options.command_options import CompareOptions, DoctorOptions, PerplexityOptions
from infer.cli.options.prompts import is_given
from infer.cli.terminal.process_streams import exit_on_signal
from infer.cli.terminal.terminal import Spinner, TextWriter, columns_of_rows, json_text
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint
from infer.model_settings import SETTINGS, ModelSettings
from infer.models.catalog.doctor import Diagnosis, examine
from infer.models.catalog.weight_errors import weight_errors

_OF_BOTH = frozenset(
    {"reference", "named", "model", "text", "context", "as_json", "html", "threads", "device", "quiet", "verbose"}
)

_MAX_LINES = 20  # shown per kind of finding


def run_perplexity(model: "infer.LLM", text: str, options: PerplexityOptions) -> None:
    """Write the perplexity of a text."""
    with exit_on_signal(), Spinner("predicting", shown=not options.quiet) as spinner:
        found = measure_perplexity(model, text, options.context, spinner.progress)
    _write(found, [_perplexity_row("perplexity", found), _extent_row(found)], as_json=options.as_json)


def run_compare(reference: "infer.LLM", model: "infer.LLM", text: str, options: CompareOptions) -> None:
    """Write how far a model's predictions are from those of a reference."""
    with exit_on_signal(), Spinner("comparing", shown=not options.quiet) as spinner:
        found = measure_divergence(reference, model, text, options.context, spinner.progress)
    rows = list(_rows(found))
    if options.html is not None:
        with exit_on_signal(), Spinner("comparing weights", shown=not options.quiet) as spinner:
            both = open_checkpoint(options.reference), open_checkpoint(options.model)
            errors = {} if both[0].path == both[1].path else weight_errors(*both, spinner.progress)
        write_page(options.html, comparison_page((options.model, options.reference), found, rows, errors))
    _write(found, rows, as_json=options.as_json)


def reference_options(context: click.Context, options: CompareOptions) -> CompareOptions:
    """Return the options of the reference, which are those of its files unless the command line gives them for both.

    Raises InvalidRequestError if the two models are the same.
    """
    given = any(is_given(context, str(each.name)) for each in context.command.params if each.name not in _OF_BOTH)
    if not given and options.model == options.reference:
        raise InvalidRequestError(
            "the two models are the same: name another model after the first, or give an option, such as --kv-type q4"
        )
    own = {name: getattr(options.settings, name) for name in SETTINGS if name in _OF_BOTH}
    return replace(options, model=options.reference, settings=ModelSettings(**own))


def _rows(found: Divergence) -> Iterator[tuple[str, str]]:
    yield _perplexity_row("perplexity", found.other)
    yield _perplexity_row("of the reference", found.reference)
    yield "mean KL", f"{found.mean_kl:.3g} nats"
    yield "median, 99 %, max", f"{found.median_kl:.3g}, {found.kl_99:.3g}, {found.largest_kl:.3g}"
    yield "same likeliest", f"{100 * found.same_likeliest:.2f} % of the tokens"
    yield "change of p", f"{100 * found.rms_change:.3g} %, root mean square for the right token"
    yield "largest error", f"{found.largest_logit_error:.3g} of a logit"
    yield _extent_row(found.reference)


def _extent_row(found: Perplexity) -> tuple[str, str]:
    return "over", f"{found.num_tokens:,} tokens in {found.num_windows:,} windows of {found.context}"


def _perplexity_row(name: str, found: Perplexity) -> tuple[str, str]:
    return name, f"{found.perplexity:.4f} ± {found.standard_error:.4f}"


def _write(found: Perplexity | Divergence, rows: list[tuple[str, str]], *, as_json: bool) -> None:
    lines = [json_text(found.to_json())] if as_json else columns_of_rows(rows, "<<")
    TextWriter(sys.stdout).write("".join(f"{line}\n" for line in lines))


def run_doctor(options: DoctorOptions) -> int:
    """Write the findings, and a page to --html. Return the exit status: 1 if there are findings."""
    check_page(options.html)
    with exit_on_signal(), Spinner("reading") as spinner:
        found = examine(options.model, spinner.progress)
    if options.html is not None:
        write_page(options.html, doctor_page(found))
    text = json_text(found.to_json()) if options.as_json else "\n".join(finding_lines(found))
    TextWriter(sys.stdout).write(f"{text}\n")
    return 1 if found.findings else 0


def finding_lines(found: Diagnosis) -> Iterator[str]:
    """Yield one line per finding, at most twenty of one kind, and then the tensors to quantise again."""
    if not found.findings:
        yield f"no faults found in {found.num_tensors:,} tensors and {found.num_tokens:,} tokens"
        return
    counts = Counter[str]()
    for finding in found.findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= _MAX_LINES:
            yield str(finding)
    for kind, count in counts.items():
        if count > _MAX_LINES:
            yield f"and {count - _MAX_LINES:,} more of this kind: {kind} (--json lists all)"
    if names := found.requantise:
        more = f" and {len(names) - _MAX_LINES:,} more" if len(names) > _MAX_LINES else ""
        yield f"quantise again: {', '.join(names[:_MAX_LINES])}{more}"
