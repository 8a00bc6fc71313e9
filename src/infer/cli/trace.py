"""`infer sample-trace`: show how one token was sampled, as a table, as one JSON object or as a picture."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from infer.cli.model import Model
from infer.cli.terminal import Spinner, TextWriter
from infer.cli.trace_picture import make_picture
from infer.cli.words import display_width, heading, percent, quoted, shortened, tail
from infer.errors import InvalidRequestError
from infer.outputs import SampleTrace, TraceCandidate
from infer.sampling_params import SamplingParams

LABEL_WIDTH = 18  # of a token's text
BLUE, ORANGE = 25, 166  # of xterm's 256 colours: bars under the numbers, and those of the chosen token
DROPPED = "×"


@dataclass(frozen=True)
class Cell:
    """A number of the table. On a terminal, `share` is the part of its width that is shaded."""

    text: str
    share: float = 0.0
    is_bold: bool = False
    is_dim: bool = False
    color: int = BLUE


@dataclass(frozen=True)
class Line:
    label: Cell
    cells: Sequence[Cell]


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Raise InvalidRequestError for a file that cannot be written, before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise InvalidRequestError(
            f"{option} must name a .svg file, got {path.name!r}: browsers show SVG, rsvg-convert makes a PNG of it"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidRequestError(f"{option} {path} cannot be written: its folder must exist, and it must be a file")


def write_picture(path: Path, trace: SampleTrace, model: str, option: str = "--plot") -> None:
    """Write the picture of a trace. Raises InvalidRequestError if the file cannot be written."""
    try:
        path.write_text(make_picture(trace, model), encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{option} {path} cannot be written: {error.strerror}") from error


def run_trace(
    model: Model, prompt: str | list[dict[str, str]], params: SamplingParams, options: Mapping[str, Any]
) -> None:
    """Trace one token, draw its picture, and print the table."""
    with Spinner(f"step {options['step']}", shown=not options["quiet"]):
        trace = model.sample_trace(prompt, params, step=options["step"], num_candidates=options["num_candidates"])
    if options["plot"] is not None:
        write_picture(options["plot"], trace, options["model"])
    writer = TextWriter(sys.stdout)
    if options["as_json"]:
        writer.write(json.dumps({"model": options["model"]} | trace.to_json(), ensure_ascii=False))
        writer.end_line()
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if is_terminal else None
    for line in trace_lines(trace, width):
        click.echo(line, color=is_terminal and "NO_COLOR" not in os.environ)


def trace_lines(trace: SampleTrace, width: int | None = None) -> Iterator[str]:
    """Yield the table with styles.

    If it does not fit the width, it is divided into several tables, each with some of the stages.
    """
    seed = "greedy" if trace.seed is None else f"seed {trace.seed}"
    yield f"step {trace.step}, after {quoted(tail(trace.text_before, 48))}: position {trace.position}, {seed}"
    lines = _lines(trace)
    label_width = max(display_width(line.label.text) for line in lines)
    widths = [
        max(display_width(cell.text) for cell in column) for column in zip(*(x.cells for x in lines), strict=True)
    ]
    for columns in _fitting(widths, None if width is None else width - label_width):
        yield ""
        for line in lines:
            cells = "".join(f"  {_styled(line.cells[i], widths[i])}" for i in columns)
            label = _styled(line.label, label_width, left=True)
            yield f"{label}{cells}".rstrip()
    yield ""
    chosen = trace.chosen
    yield (
        f"chosen: {quoted(chosen.text)} ({chosen.token_id}), number {chosen.rank} by its raw logit, "
        f"{percent(chosen.probabilities[-1])} after the last stage"
    )


def _lines(trace: SampleTrace) -> list[Line]:
    is_greedy = trace.seed is None
    names = [Cell(heading(stage.name), is_bold=True) for stage in trace.stages]
    values = [Cell("" if stage.value is None else f"{stage.value:g}", is_dim=True) for stage in trace.stages]
    race = ["logit"] if is_greedy else ["logit", "+ noise", "= score"]
    blank = [Cell("")] * len(race)
    kept = [Cell(f"{stage.num_kept:,}") for stage in trace.stages]
    removed = [Cell(percent(stage.removed) if stage.removed else "", is_dim=True) for stage in trace.stages]
    rest = [Cell(percent(stage.others) if stage.others else "", stage.others, is_dim=True) for stage in trace.stages]
    moved = [Cell(percent(stage.moved) if stage.moved else "", is_dim=True) for stage in trace.stages]
    return [
        Line(Cell(""), [*names, *(Cell(name, is_bold=True) for name in race)]),
        Line(Cell(""), [*values, *blank]),
        *(_candidate_line(trace, candidate) for candidate in trace.candidates),
        Line(Cell("others", is_dim=True), [*rest, *blank]),
        Line(Cell("tokens left"), [*kept, *blank]),
        Line(Cell("mass removed"), [*removed, *blank]),
        Line(Cell("mass moved"), [*moved, *blank]),
    ]


def _candidate_line(trace: SampleTrace, candidate: TraceCandidate) -> Line:
    is_chosen = candidate.token_id == trace.token_id
    cells = []
    for stage, logit, probability in zip(trace.stages, candidate.logits, candidate.probabilities, strict=True):
        if logit is not None:
            color = ORANGE if is_chosen else BLUE
            cells.append(Cell(percent(probability), probability, is_bold=is_chosen, color=color))
        else:
            cells.append(Cell(DROPPED if stage.name == candidate.dropped_by else "", is_dim=True))
    logit = candidate.logits[-1]
    race = [logit] if trace.seed is None else [logit, candidate.noise, candidate.score]
    cells += [Cell("" if value is None else f"{value:.2f}", is_bold=is_chosen) for value in race]
    mark = "→" if is_chosen else " "
    label = f"{mark}{candidate.rank:>3} {shortened(quoted(candidate.text), LABEL_WIDTH)}"
    return Line(Cell(label, is_bold=is_chosen), cells)


def _styled(cell: Cell, width: int, *, left: bool = False) -> str:
    padding = " " * (width - display_width(cell.text))
    text = cell.text + padding if left else padding + cell.text
    shaded = round(min(max(cell.share, 0.0), 1.0) * width)
    style: dict[str, Any] = {"bold": cell.is_bold or None, "dim": cell.is_dim or None}
    bar = click.style(text[:shaded], fg="bright_white", bg=cell.color, bold=cell.is_bold or None) if shaded else ""
    rest = text[shaded:]
    return bar + (click.style(rest, **style) if rest.strip() and any(style.values()) else rest)


def _fitting(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Return the columns in as few groups as fit beside the labels."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if room is not None and groups[-1] and used + width + 2 > room:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += width + 2
    return groups
