"""`infer compare --html`: a page that shows where the predictions and the weights of two models differ."""

from collections.abc import Mapping, Sequence
from math import sqrt

from infer.cli.bench.text_quality import Divergence
from infer.cli.model_commands.layer_charts import by_kind_and_layer, labels_of
from infer.serving.web_ui.report_page import Bars, ChartRow, chart_rows, facts, page, section, tall_chart

_MOST_BARS = 128


def comparison_page(
    names: tuple[str, str], found: Divergence, rows: Sequence[tuple[str, str]], errors: Mapping[str, float]
) -> str:
    """Return the page of a comparison.

    Args:
        names: The model and the reference.
        found: The measures.
        rows: The measures as rows of names and values.
        errors: Relative errors of matrices by our names, empty if the two are not files of the same model.
    """
    first = found.reference.context // 2 + 1
    positions, windows = _labels("position", first, found.kl_by_position), _labels("window", 1, found.kl_by_window)
    sections = [
        facts(rows),
        section(
            "Divergence by position",
            "The mean Kullback-Leibler divergence of the tokens at each position of a window, in nats.",
            tall_chart(Bars("mean KL", _means(found.kl_by_position), positions)),
        ),
        section(
            "Divergence by window",
            "The mean of each part of the text, from beginning to end. A part of another kind is easy to see.",
            tall_chart(Bars("mean KL", _means(found.kl_by_window), windows)),
        ),
    ]
    kinds = by_kind_and_layer(errors)
    if kinds:
        explanation = "The norm of the difference, as a share of the norm of the reference's matrix. One bar per layer."
        charts = [_row(kind, by_layer) for kind, by_layer in kinds.items()]
        sections.append(section("Error of the weights", explanation, chart_rows(charts)))
    others = [
        (name.removesuffix(".weight"), f"{100 * error:.3g} %")
        for name, error in errors.items()
        if "layers." not in name
    ]
    if others:
        sections.append(section("Error outside of layers", "", facts(others)))
    return page(f"infer compare: {names[0]}", f"reference: {names[1]}", sections)


def _row(kind: str, by_layer: dict[int, list[float]]) -> ChartRow:
    layers = sorted(by_layer)
    errors = [100 * sqrt(sum(each**2 for each in by_layer[layer]) / len(by_layer[layer])) for layer in layers]
    return ChartRow(
        kind, f"{sum(errors) / len(errors):.3g} % on average", [Bars("error in %", errors, labels_of(layers))]
    )


def _labels(thing: str, first: int, values: Sequence[float]) -> list[str]:
    ranges = [(first + start, first + end - 1) for start, end in _ranges(len(values))]
    return [f"{thing} {low}" if low == high else f"{thing}s {low} to {high}" for low, high in ranges]


def _ranges(count: int) -> list[tuple[int, int]]:
    """Return ranges that cover `count` values, at most `_MOST_BARS`."""
    size = -(-count // _MOST_BARS)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _means(values: Sequence[float]) -> list[float]:
    return [sum(values[start:end]) / (end - start) for start, end in _ranges(len(values))]
