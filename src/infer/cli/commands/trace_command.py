"""`infer sample-trace`: show how one token was sampled, as a table or as one JSON object."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

import infer
from infer.cli.options.command_options import TraceOptions
from infer.cli.options.prompts import Prompt
from infer.cli.terminal.streamed_text import display_width, shortened
from infer.cli.terminal.terminal import Spinner, TextWriter, json_text
from infer.outputs import SampleTrace, TraceCandidate
from infer.sampling_params import PARAMETERS, SamplingParams

LABEL_WIDTH = 18  # columns of a token's text
BLUE, ORANGE = 25, 166  # of xterm's 256 colours: bars under the numbers, and those of the chosen token
DROPPED = "×"


@dataclass(frozen=True)
class Cell:
    """A number of the table. On a terminal, `share` of its width is shaded."""

    text: str
    share: float = 0.0
    is_bold: bool = False
    is_dim: bool = False
    color: int = BLUE


def run_trace(model: "infer.LLM", prompt: Prompt, params: SamplingParams, options: TraceOptions) -> None:
    """Trace one token, and print the table."""
    with Spinner(f"step {options.step}", shown=not options.quiet):
        trace = model.sample_trace(prompt, params, step=options.step, num_candidates=options.num_candidates)
    if options.as_json:
        writer = TextWriter(sys.stdout)
        writer.write(json_text({"model": options.model} | trace.to_json()))
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
    yield f"step {trace.step}, after {_quoted(_tail(trace.text_before, 48))}: position {trace.position}, {seed}"
    lines = _lines(trace)
    label_width, *widths = (max(display_width(cell.text) for cell in column) for column in zip(*lines, strict=True))
    for columns in _fitting(widths, None if width is None else width - label_width):
        yield ""
        for label, *cells in lines:
            shown = "".join(f"  {_styled(cells[i], widths[i])}" for i in columns)
            yield f"{_styled(label, label_width, left=True)}{shown}".rstrip()
    yield ""
    chosen = trace.chosen
    yield (
        f"chosen: {_quoted(chosen.text)} ({chosen.token_id}), number {chosen.rank} by its raw logit, "
        f"{_percent(chosen.probabilities[-1])} after the last stage"
    )


def _lines(trace: SampleTrace) -> list[list[Cell]]:
    """Return the lines of the table: a label, and a cell per stage and per number of the race."""
    is_greedy = trace.seed is None
    names = [Cell(_heading(stage.name), is_bold=True) for stage in trace.stages]
    values = [Cell("" if stage.value is None else f"{stage.value:g}", is_dim=True) for stage in trace.stages]
    race = ["logit"] if is_greedy else ["logit", "+ noise", "= score"]
    blank = [Cell("")] * len(race)
    kept = [Cell(f"{stage.num_kept:,}") for stage in trace.stages]
    removed = [Cell(_percent(stage.removed) if stage.removed else "", is_dim=True) for stage in trace.stages]
    rest = [Cell(_percent(stage.others) if stage.others else "", stage.others, is_dim=True) for stage in trace.stages]
    moved = [Cell(_percent(stage.moved) if stage.moved else "", is_dim=True) for stage in trace.stages]
    return [
        [Cell(""), *names, *(Cell(name, is_bold=True) for name in race)],
        [Cell(""), *values, *blank],
        *(_candidate_line(trace, candidate) for candidate in trace.candidates),
        [Cell("others", is_dim=True), *rest, *blank],
        [Cell("tokens left"), *kept, *blank],
        [Cell("mass removed"), *removed, *blank],
        [Cell("mass moved"), *moved, *blank],
    ]


def _candidate_line(trace: SampleTrace, candidate: TraceCandidate) -> list[Cell]:
    is_chosen = candidate.token_id == trace.token_id
    cells = []
    for stage, logit, probability in zip(trace.stages, candidate.logits, candidate.probabilities, strict=True):
        if logit is not None:
            color = ORANGE if is_chosen else BLUE
            cells.append(Cell(_percent(probability), probability, is_bold=is_chosen, color=color))
        else:
            cells.append(Cell(DROPPED if stage.name == candidate.dropped_by else "", is_dim=True))
    logit = candidate.logits[-1]
    race = [logit] if trace.seed is None else [logit, candidate.noise, candidate.score]
    cells += [Cell("" if value is None else f"{value:.2f}", is_bold=is_chosen) for value in race]
    mark = "→" if is_chosen else " "
    label = f"{mark}{candidate.rank:>3} {shortened(_quoted(candidate.text), LABEL_WIDTH)}"
    return [Cell(label, is_bold=is_chosen), *cells]


def _styled(cell: Cell, width: int, *, left: bool = False) -> str:
    padding = " " * (width - display_width(cell.text))
    text = cell.text + padding if left else padding + cell.text
    shaded = round(min(max(cell.share, 0.0), 1.0) * width)
    style: dict[str, Any] = {"bold": cell.is_bold or None, "dim": cell.is_dim or None}
    bar = click.style(text[:shaded], fg="bright_white", bg=cell.color, bold=cell.is_bold or None) if shaded else ""
    rest = text[shaded:]
    return bar + (click.style(rest, **style) if rest.strip() and any(style.values()) else rest)


def _fitting(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Divide the columns into as few groups as fit next to the labels, and return them."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if room is not None and groups[-1] and used + width + 2 > room:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += width + 2
    return groups


def _heading(stage: str) -> str:
    """Return the heading of a stage of the sampler."""
    return PARAMETERS[stage].stage if stage in PARAMETERS else stage


def _percent(share: float) -> str:
    """Return a share in percent, with two decimals. A share that would round to 0 is shown as <0.01%."""
    return "<0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def _quoted(text: str) -> str:
    """Return the text in quotes, on one line, with escapes for characters that do not print."""
    return "'" + "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text) + "'"


def _tail(text: str, count: int) -> str:
    return text if len(text) <= count else "…" + text[1 - count :]
