"""`infer doctor --html`: the findings, and the size and values of each kind of matrix by layer, as a page."""

from collections.abc import Sequence
from math import prod, sqrt
from pathlib import Path

from infer.cli.model_commands.layer_charts import by_kind_and_layer, labels_of
from infer.models.catalog.doctor import Diagnosis
from infer.models.catalog.tensor_checks import TensorSummary
from infer.serving.web_ui.report_page import Bars, ChartRow, chart_rows, facts, page, remarks, section, tall_chart

_EXPLANATION = (
    "One bar per layer. The largest value is divided by the root mean square: a bar far above its neighbours is an "
    "outlier, which costs the other values of its block precision. Orange: a finding."
)


def doctor_page(found: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    matrices = [each for each in found.summaries if len(each.info.shape) > 1]
    num_bytes = sum(each.info.file_bytes for each in found.summaries)
    num_values = sum(prod(each.info.shape) for each in found.summaries)
    name = Path(found.path).name
    sections = [
        facts(
            [
                ("parameters", f"{num_values:,}"),
                ("size", _megabytes(num_bytes)),
                ("bits per weight", f"{8 * num_bytes / max(num_values, 1):.2f}"),
                ("tensors", f"{found.num_tensors:,}"),
                ("tokens", f"{found.num_tokens:,}"),
                ("findings", f"{len(found.findings):,}"),
            ]
        ),
        section(
            "Findings",
            "",
            remarks(
                [(each.place, f"{each.problem}: {each.fix}") for each in found.findings], instead="No faults found."
            ),
        ),
    ]
    layers = by_kind_and_layer({each.name: each for each in matrices})
    if layers:
        bad = {each.requantise or each.place.partition(" ")[0] for each in found.findings}
        sections.append(section("Size by layer", "", tall_chart(_sizes(list(layers.values())))))
        rows = [_row(kind, by_layer, bad) for kind, by_layer in layers.items()]
        sections.append(section("Kinds of matrices", _EXPLANATION, chart_rows(rows)))
    others = [each for each in matrices if not each.name.startswith("model.layers.")]
    if others:
        tiles = [(each.info.name, f"{each.info.type}, {_megabytes(each.info.file_bytes)}") for each in others]
        sections.append(section("Matrices outside of layers", "", facts(tiles)))
    return page(f"infer doctor: {name}", found.path, sections)


def _sizes(kinds: Sequence[dict[int, list[TensorSummary]]]) -> Bars:
    """Return the bytes of all matrices of each layer."""
    layers = sorted({layer for kind in kinds for layer in kind})
    sizes = [sum(each.info.file_bytes for kind in kinds for each in kind.get(layer, ())) / 1e6 for layer in layers]
    return Bars("MB of matrices", sizes, labels_of(layers))


def _row(kind: str, by_layer: dict[int, list[TensorSummary]], bad: set[str]) -> ChartRow:
    """Return the charts of a kind. `bad` has the names of tensors with findings, as the files name them."""
    layers = sorted(by_layer)
    labels, groups = labels_of(layers), [by_layer[layer] for layer in layers]
    marked = {index for index, group in enumerate(groups) if any(each.info.name in bad for each in group)}
    counts = [max(sum(each.num_values for each in group), 1) for group in groups]
    sizes = [sum(each.info.file_bytes for each in group) for group in groups]
    rms = [sqrt(sum(each.squares for each in group) / count) for group, count in zip(groups, counts, strict=True)]
    peaks = [max(each.largest for each in group) / (own or 1.0) for group, own in zip(groups, rms, strict=True)]
    bits = [8 * size / count for size, count in zip(sizes, counts, strict=True)]
    types = ", ".join(sorted({each.info.type for group in groups for each in group}))
    charts = [
        Bars("bits per weight", bits, labels, marked),
        Bars("root mean square", rms, labels, marked),
        Bars("largest value / root mean square", peaks, labels, marked),
    ]
    return ChartRow(kind, f"{types}, {_megabytes(sum(sizes))}", charts)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
