"""`infer perplexity`, `compare` and `doctor`: how well models predict a text, and the faults of their files.

Each prints rows or lines, or one JSON object. The last two can also write a page with charts by layer: the first shows
where the predictions and the weights of two models differ, the second the findings, and the size and the values of each
kind of matrix. The file of a page is checked before the work and written at its end.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import click

import infer
from infer.cli.bench.text_measures import Divergence, Perplexity, measure_divergence, measure_perplexity
from infer.cli.command_options import CompareOptions, DoctorOptions, PerplexityOptions
from infer.cli.commands.models_command import run_machine
from infer.cli.option_files import check_writable, write_whole
from infer.cli.process_streams import exit_on_signal
from infer.cli.prompts import is_given
from infer.cli.terminal import Spinner, columns_of_rows, megabytes, print_report
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint
from infer.model_settings import SETTINGS, ModelSettings
from infer.models.catalog.doctor import Diagnosis, TensorSummary, examine, weight_errors
from infer.serving.web_ui.report_page import Bars, ChartRow, chart_rows, facts, page, remarks, section, tall_chart

_OF_BOTH = frozenset(
    {"reference", "named", "model", "text", "context", "as_json", "html", "threads", "device", "quiet", "verbose"}
)
_MAX_LINES = 20  # shown per kind of finding
Item = TypeVar("Item")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
_MOST_BARS = 128
_EXPLANATION = (
    "One bar per layer. The largest value is divided by the root mean square: a bar far above its neighbours is an "
    "outlier, which costs the other values of its block precision. Orange: a finding."
)


def run_perplexity(model: "infer.LLM", text: str, options: PerplexityOptions) -> None:
    """Write the perplexity of a text."""
    with exit_on_signal(), Spinner("predicting") as spinner:
        measured = measure_perplexity(model, text, options.context, spinner.progress)
    rows = [("perplexity", _value(measured)), ("over", _extent(measured))]
    print_report(measured, columns_of_rows(rows, "<<"), as_json=options.as_json)


def run_compare(reference: "infer.LLM", model: "infer.LLM", text: str, options: CompareOptions) -> None:
    """Write how far a model's predictions are from those of a reference."""
    with exit_on_signal(), Spinner("comparing") as spinner:
        divergence = measure_divergence(reference, model, text, options.context, spinner.progress)
    rows = list(_rows(divergence))
    if options.html is not None:
        with exit_on_signal(), Spinner("comparing weights") as spinner:
            both = open_checkpoint(options.reference), open_checkpoint(options.model)
            errors = {} if both[0].path == both[1].path else weight_errors(*both, spinner.progress)
        content = comparison_page((options.model, options.reference), divergence, rows, errors)
        write_whole(options.html, content.encode(), "the page ")
    print_report(divergence, columns_of_rows(rows, "<<"), as_json=options.as_json)


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


def _rows(divergence: Divergence) -> Iterator[tuple[str, str]]:
    yield "perplexity", _value(divergence.other)
    yield "of the reference", _value(divergence.reference)
    yield "mean KL", f"{divergence.mean_kl:.3g} nats"
    yield "median, 99 %, max", f"{divergence.median_kl:.3g}, {divergence.kl_99:.3g}, {divergence.largest_kl:.3g}"
    yield "same likeliest", f"{100 * divergence.same_likeliest:.2f} % of the tokens"
    yield "change of p", f"{100 * divergence.rms_change:.3g} %, root mean square for the right token"
    yield "largest error", f"{divergence.largest_logit_error:.3g} of a logit"
    yield "over", _extent(divergence.reference)


def _extent(measured: Perplexity) -> str:
    return f"{measured.num_tokens:,} tokens in {measured.num_windows:,} windows of {measured.context}"


def _value(measured: Perplexity) -> str:
    return f"{measured.perplexity:.4f} ± {measured.standard_error:.4f}"


def run_doctor(options: DoctorOptions) -> int:
    """Write the findings, and a page to --html. Return the exit status: 1 if there are findings.

    With --machine, write a report on this machine.
    """
    if options.machine:
        if options.html is not None:
            raise InvalidRequestError("--machine has no page: leave out --html")
        run_machine(options)
        return 0
    check_writable(options.html, "the page ")
    with exit_on_signal(), Spinner("reading") as spinner:
        diagnosis = examine(options.model, spinner.progress)
    if options.html is not None:
        write_whole(options.html, doctor_page(diagnosis).encode(), "the page ")
    print_report(diagnosis.to_json(), finding_lines(diagnosis), as_json=options.as_json)
    return 1 if diagnosis.findings else 0


def finding_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield one line per finding, at most twenty of one kind, and then the tensors to quantise again."""
    if not diagnosis.findings:
        yield f"no faults found in {diagnosis.num_tensors:,} tensors and {diagnosis.num_tokens:,} tokens"
        return
    counts = Counter[str]()
    for finding in diagnosis.findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= _MAX_LINES:
            yield str(finding)
    for kind, count in counts.items():
        if count > _MAX_LINES:
            yield f"and {count - _MAX_LINES:,} more of this kind: {kind} (--json lists all)"
    if names := diagnosis.requantise:
        more = f" and {len(names) - _MAX_LINES:,} more" if len(names) > _MAX_LINES else ""
        yield f"quantise again: {', '.join(names[:_MAX_LINES])}{more}"


def by_kind_and_layer(items: Mapping[str, Item]) -> dict[str, dict[int, list[Item]]]:
    """Return the items of layers by kind and then by layer, in order, according to the names of tensors.

    All experts of a layer are of one kind.
    """
    items_by_kind: dict[str, dict[int, list[Item]]] = {}
    for name, item in items.items():
        if (match := _LAYER.fullmatch(name)) is not None:
            kind = _NUMBER.sub("", f".{match[2]}").removeprefix(".").removesuffix(".weight")
            items_by_kind.setdefault(kind, {}).setdefault(int(match[1]), []).append(item)
    return {kind: dict(sorted(by_layer.items())) for kind, by_layer in items_by_kind.items()}


def _labels(layers: Iterable[int]) -> list[str]:
    return [f"layer {layer}" for layer in layers]


def comparison_page(
    names: tuple[str, str], divergence: Divergence, rows: Sequence[tuple[str, str]], errors: Mapping[str, float]
) -> str:
    """Return the page of a comparison.

    Args:
        names: The model and the reference.
        divergence: The measures.
        rows: The measures as rows of names and values.
        errors: Relative errors of matrices by our names, empty if the two are not files of the same model.
    """
    first = divergence.reference.context // 2 + 1
    by_position = "The mean Kullback-Leibler divergence of the tokens at each position of a window, in nats."
    by_window = "The mean of each part of the text, from beginning to end. A part of another kind is easy to see."
    sections = [
        facts(rows),
        section("Divergence by position", by_position, _divergence_chart("position", first, divergence.kl_by_position)),
        section("Divergence by window", by_window, _divergence_chart("window", 1, divergence.kl_by_window)),
    ]
    explanation = "The norm of the difference, as a share of the norm of the reference's matrix. One bar per layer."
    charts = [_error_row(kind, by_layer) for kind, by_layer in by_kind_and_layer(errors).items()]
    others = {name.removesuffix(".weight"): error for name, error in errors.items() if "layers." not in name}
    tiles = [(name, f"{100 * error:.3g} %") for name, error in others.items()]
    sections += _matrices("Error of the weights", explanation, charts, tiles)
    return page(f"infer compare: {names[0]}", f"reference: {names[1]}", sections)


def _matrices(heading: str, explanation: str, rows: list[ChartRow], others: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a section with charts of the matrices of layers, and one with facts about the other matrices."""
    if rows:
        yield section(heading, explanation, chart_rows(rows))
    if others:
        yield section("Matrices outside of layers", "", facts(others))


def _error_row(kind: str, by_layer: dict[int, list[float]]) -> ChartRow:
    errors = [100 * sqrt(fmean(each**2 for each in group)) for group in by_layer.values()]
    return ChartRow(kind, f"{fmean(errors):.3g} % on average", [Bars("error in %", errors, _labels(by_layer))])


def _divergence_chart(thing: str, first: int, values: Sequence[float]) -> str:
    """Return a chart of the means over ranges of values, which are at most `_MOST_BARS`."""
    size = -(-len(values) // _MOST_BARS)
    ranges = [(start, min(start + size, len(values))) for start in range(0, len(values), size)]
    places = [(first + start, first + end - 1) for start, end in ranges]
    labels = [f"{thing} {low}" if low == high else f"{thing}s {low} to {high}" for low, high in places]
    return tall_chart(Bars("mean KL", [fmean(values[start:end]) for start, end in ranges], labels))


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    matrices = [each for each in diagnosis.summaries if len(each.info.shape) > 1]
    num_bytes = sum(each.info.file_bytes for each in diagnosis.summaries)
    num_values = sum(prod(each.info.shape) for each in diagnosis.summaries)
    name = Path(diagnosis.path).name
    tiles = [
        ("parameters", f"{num_values:,}"),
        ("size", megabytes(num_bytes)),
        ("bits per weight", f"{8 * num_bytes / max(num_values, 1):.2f}"),
        ("tensors", f"{diagnosis.num_tensors:,}"),
        ("tokens", f"{diagnosis.num_tokens:,}"),
        ("findings", f"{len(diagnosis.findings):,}"),
    ]
    texts = [(each.place, f"{each.problem}: {each.fix}") for each in diagnosis.findings]
    sections = [facts(tiles), section("Findings", "", remarks(texts, instead="No faults found."))]
    layers = by_kind_and_layer({each.name: each for each in matrices})
    bad = {each.requantise or each.place.partition(" ")[0] for each in diagnosis.findings}
    rows = [_kind_row(kind, by_layer, bad) for kind, by_layer in layers.items()]
    others = [each for each in matrices if not each.name.startswith("model.layers.")]
    tiles = [(each.info.name, f"{each.info.type}, {megabytes(each.info.file_bytes)}") for each in others]
    if layers:
        sections.append(section("Size by layer", "", tall_chart(_sizes(list(layers.values())))))
    sections += _matrices("Kinds of matrices", _EXPLANATION, rows, tiles)
    return page(f"infer doctor: {name}", diagnosis.path, sections)


def _sizes(kinds: Sequence[dict[int, list[TensorSummary]]]) -> Bars:
    """Return the bytes of all matrices of each layer."""
    layers = sorted({layer for kind in kinds for layer in kind})
    sizes = [sum(each.info.file_bytes for kind in kinds for each in kind.get(layer, ())) / 1e6 for layer in layers]
    return Bars("MB of matrices", sizes, _labels(layers))


def _kind_row(kind: str, by_layer: dict[int, list[TensorSummary]], bad: set[str]) -> ChartRow:
    """Return the charts of a kind. `bad` has the names of tensors with findings, as the files name them."""
    bits, rms, peaks, marked = list[float](), list[float](), list[float](), set[int]()
    for index, group in enumerate(by_layer.values()):
        count = max(sum(each.num_values for each in group), 1)
        bits.append(8 * sum(each.info.file_bytes for each in group) / count)
        rms.append(sqrt(sum(each.squares for each in group) / count))
        peaks.append(max(each.largest for each in group) / (rms[-1] or 1.0))
        if any(each.info.name in bad for each in group):
            marked.add(index)
    matrices = [each for group in by_layer.values() for each in group]
    types = ", ".join(sorted({each.info.type for each in matrices}))
    titles = {"bits per weight": bits, "root mean square": rms, "largest value / root mean square": peaks}
    charts = [Bars(title, values, _labels(by_layer), marked) for title, values in titles.items()]
    return ChartRow(kind, f"{types}, {megabytes(sum(each.info.file_bytes for each in matrices))}", charts)
