"""A trace as SVG: a column per stage, whose height is all of the probability, and a band per candidate.

    labels ── raw ══ penalty ══ temperature ══ top-k ══ top-p ── labels, noise
                                                ╲         ╲
                                              removed   removed

A band's height is its token's probability, in every column on the same scale, removed ones included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from infer.cli.words import heading, percent, quoted, shortened, tail
from infer.outputs import SampleTrace, TraceCandidate

MARGIN, TOP = 28.0, 128.0
RANK_WIDTH, LABEL_WIDTH, COLUMN, GAP, TAPER = 42.0, 176.0, 50.0, 64.0, 54.0
RACE_WIDTH, ROW_HEIGHT = 220.0, 26.0
LEAST_WIDTH, LEAST_HEIGHT = 960.0, 312.0  # with room for the title
DRAIN_GAP = 34.0  # between the columns and what was removed
LABEL_CHARACTERS = 15

INK, FAINT, GRID = "#0f172a", "#64748b", "#e2e8f0"
DARK, LIGHT = (30, 58, 138), (147, 197, 253)  # the first candidate's band and the last one's
CHOSEN, OTHERS, REMOVED = "#f97316", "#e2e8f0", "#b6bcc6"
SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"


@final
@dataclass(frozen=True)
class Band:
    """A candidate, or all other tokens: the band's height in each column, and the share that each stage dropped."""

    name: str
    color: str
    shares: Sequence[float]
    dropped: Sequence[float]  # at stage i, of shares[i − 1]
    opacity: float = 0.42


@final
@dataclass(frozen=True)
class Layout:
    """The positions of all parts of the picture. Columns reach from TOP to TOP + height."""

    num_stages: int
    num_rows: int
    most_removed: float
    is_greedy: bool

    @property
    def height(self) -> float:
        return max(LEAST_HEIGHT, ROW_HEIGHT * self.num_rows)

    @property
    def drain(self) -> float:
        """The top of the removed probability."""
        return TOP + self.height + DRAIN_GAP

    def column(self, stage: int) -> float:
        return MARGIN + RANK_WIDTH + LABEL_WIDTH + TAPER + stage * (COLUMN + GAP)

    @property
    def end(self) -> float:
        """The right edge of the last column."""
        return self.column(self.num_stages - 1) + COLUMN

    def row(self, index: int) -> float:
        """Return the middle of a label's line. Labels share the height evenly, so that none overlap."""
        return TOP + self.height * (index + 0.5) / self.num_rows

    @property
    def race(self) -> float:
        return self.end + TAPER + LABEL_WIDTH + 16

    @property
    def width(self) -> float:
        return max(LEAST_WIDTH, self.race + RACE_WIDTH + MARGIN)

    @property
    def total_height(self) -> float:
        below = DRAIN_GAP + self.height * self.most_removed if self.most_removed else 0.0
        return TOP + self.height + below + 44


def make_picture(trace: SampleTrace, model: str) -> str:
    """Return the whole SVG file."""
    bands = _bands(trace)
    layout = Layout(len(trace.stages), len(bands), max(stage.removed for stage in trace.stages), trace.seed is None)
    width, height = layout.width, layout.total_height
    title = f"How {quoted(trace.chosen.text)} was sampled after {quoted(tail(trace.text_before, 60))}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{SANS}" font-size="12" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="white"/>',
        *_gradients(bands),
        *_title(trace, model),
        *_headings(trace, layout),
        *_tapers(bands, layout),
        *_flows(bands, layout),
        *_columns(bands, layout),
        *_removed(trace, layout),
        *_labels(trace, bands, layout),
        *_race(trace, layout),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _bands(trace: SampleTrace) -> list[Band]:
    count = len(trace.candidates)
    bands = []
    for index, candidate in enumerate(trace.candidates):
        is_chosen = candidate.token_id == trace.token_id
        shares = candidate.probabilities
        drops = (
            shares[i - 1] if i and stage.name == candidate.dropped_by else 0.0 for i, stage in enumerate(trace.stages)
        )
        color = CHOSEN if is_chosen else _mixed(index / max(count - 1, 1))
        bands.append(Band(quoted(candidate.text), color, shares, tuple(drops), 0.55 if is_chosen else 0.42))
    removed = [max(0.0, stage.removed - sum(band.dropped[i] for band in bands)) for i, stage in enumerate(trace.stages)]
    return [*bands, Band("all others", OTHERS, [stage.others for stage in trace.stages], removed, 0.7)]


def _mixed(part: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(DARK, LIGHT, strict=True))


def _title(trace: SampleTrace, model: str) -> Iterator[str]:
    before, after = quoted(tail(trace.text_before, 56)), shortened(quoted(trace.chosen.text), 20)
    how = "greedy" if trace.seed is None else f"seed {trace.seed}"
    yield (
        f'<text x="{MARGIN:g}" y="38" font-size="17" font-weight="600" xml:space="preserve">'
        f'<tspan font-family="{MONO}">{escape(before)}</tspan><tspan fill="{FAINT}"> → </tspan>'
        f'<tspan font-family="{MONO}" fill="{CHOSEN}">{escape(after)}</tspan></text>'
    )
    where = f"{tail(model, 32)}, position {trace.position}, {how}. Band height is probability, grey what was removed."
    yield _text(MARGIN, 60.0, where, fill=FAINT)


def _headings(trace: SampleTrace, layout: Layout) -> Iterator[str]:
    for index, stage in enumerate(trace.stages):
        x = layout.column(index) + COLUMN / 2
        yield _text(x, TOP - 42, heading(stage.name), anchor="middle", weight=600)
        if stage.value is not None:
            yield _text(x, TOP - 26, f"{stage.value:g}", anchor="middle", fill=FAINT)
        yield _text(x, TOP - 10, f"{stage.num_kept:,} left", anchor="middle", fill=FAINT, size=11.0)
    race = "argmax" if layout.is_greedy else "noise"
    yield _text(layout.race, TOP - 42, race, weight=600)
    what = "● logit" if layout.is_greedy else "○ logit → ● logit + noise"
    yield _text(layout.race, TOP - 26, what, fill=FAINT)
    yield _text(layout.race, TOP - 10, "the largest is chosen", fill=FAINT, size=11.0)


def _gradients(bands: Sequence[Band]) -> Iterator[str]:
    """Yield a gradient from a band's colour to the grey of removed probability, for each band that is dropped."""
    yield "<defs>"
    for index, band in enumerate(bands):
        if any(band.dropped):
            yield (
                f'<linearGradient id="d{index}"><stop stop-color="{band.color}" stop-opacity="{band.opacity}"/>'
                f'<stop offset="0.6" stop-color="{REMOVED}" stop-opacity="0.55"/>'
                f'<stop offset="1" stop-color="{REMOVED}" stop-opacity="0.8"/></linearGradient>'
            )
    yield "</defs>"


def _spans(bands: Sequence[Band], stage: int, top: float, height: float) -> list[tuple[float, float]]:
    """Return the top and the bottom of each band in a column."""
    spans = []
    for band in bands:
        bottom = top + height * band.shares[stage]
        spans.append((top, bottom))
        top = bottom
    return spans


def _flows(bands: Sequence[Band], layout: Layout) -> Iterator[str]:
    """Yield the flows from column to column, and down to the removed probability."""
    for stage in range(1, layout.num_stages):
        left, right = layout.column(stage - 1) + COLUMN, layout.column(stage)
        befores = _spans(bands, stage - 1, TOP, layout.height)
        afters = _spans(bands, stage, TOP, layout.height)
        drain = layout.drain
        for index, (band, before, after) in enumerate(zip(bands, befores, afters, strict=True)):
            dropped = layout.height * band.dropped[stage]
            cut = before[1] - dropped
            if after[1] > after[0]:
                yield _ribbon(left, (before[0], cut), right, after, band.color, band.opacity)
            if dropped > 0:
                yield _ribbon(left, (cut, before[1]), right, (drain, drain + dropped), f"url(#d{index})", 1.0)
                drain += dropped


def _columns(bands: Sequence[Band], layout: Layout) -> Iterator[str]:
    for stage in range(layout.num_stages):
        x = layout.column(stage)
        for band, (top, bottom) in zip(bands, _spans(bands, stage, TOP, layout.height), strict=True):
            if bottom - top < 0.05:
                continue
            share = percent(band.shares[stage])
            line = 1.0 if bottom - top > 3 else 0.0  # a white seam between bands that have room for it
            yield (
                f'<rect x="{x:.1f}" y="{top:.2f}" width="{COLUMN:g}" height="{bottom - top - line:.2f}" '
                f'fill="{band.color}"><title>{escape(band.name)} {escape(share)}</title></rect>'
            )
            if bottom - top >= 14:
                fill = INK if band.color == OTHERS or _is_light(band.color) else "white"
                y = (top + bottom) / 2 + 3.5
                yield _text(x + COLUMN / 2, y, share, anchor="middle", fill=fill, size=10.5)


def _is_light(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return color != CHOSEN and 0.3 * red + 0.59 * green + 0.11 * blue > 135


def _removed(trace: SampleTrace, layout: Layout) -> Iterator[str]:
    for index, stage in enumerate(trace.stages):
        x, middle = layout.column(index), layout.column(index) + COLUMN / 2
        if stage.moved >= 0.0005:
            yield _text(middle, TOP + layout.height + 16, f"moved {stage.moved:.1%}", "middle", FAINT, size=10.0)
        if stage.removed > 0:
            height = max(1.0, layout.height * stage.removed)
            size = f'width="{COLUMN:g}" height="{height:.2f}"'
            yield f'<rect x="{x:.1f}" y="{layout.drain:.1f}" {size} fill="{REMOVED}"/>'
            share = f"−{percent(stage.removed)}".replace("−<", "<")
            yield _text(middle, layout.drain + height + 15, share, "middle", "#475569", weight=600)


def _tapers(bands: Sequence[Band], layout: Layout) -> Iterator[str]:
    """Yield the tapers from labels to the first column, and from the last column to the labels of remaining bands."""
    first = _spans(bands, 0, TOP, layout.height)
    last = _spans(bands, layout.num_stages - 1, TOP, layout.height)
    for index, band in enumerate(bands):
        point = (layout.row(index) - 1, layout.row(index) + 1)
        left = layout.column(0)
        yield _ribbon(left - TAPER, point, left, first[index], band.color, band.opacity)
        if band.shares[-1] > 0:
            yield _ribbon(layout.end, last[index], layout.end + TAPER, point, band.color, band.opacity)


def _labels(trace: SampleTrace, bands: Sequence[Band], layout: Layout) -> Iterator[str]:
    left, right = layout.column(0) - TAPER - 8, layout.end + TAPER + 8
    for index, band in enumerate(bands):
        y = layout.row(index) + 4
        candidate = trace.candidates[index] if index < len(trace.candidates) else None
        is_chosen = candidate is not None and candidate.token_id == trace.token_id
        fill, weight = (CHOSEN, 700) if is_chosen else (FAINT if candidate is None else INK, 400)
        name = shortened(band.name, LABEL_CHARACTERS)
        family = None if candidate is None else MONO
        yield _text(left - 56, y, name, "end", fill, weight=weight, family=family)
        yield _text(left, y, percent(band.shares[0]), "end", FAINT, size=11.0)
        if candidate is not None:
            yield _text(MARGIN - 4, y, f"{candidate.rank}", "start", "#94a3b8", size=10.0)
        if band.shares[-1] > 0:
            yield _text(right, y, percent(band.shares[-1]), "start", FAINT, size=11.0)
            yield _text(right + 52, y, name, "start", fill, weight=weight, family=family)
        elif candidate is not None:
            yield _text(right, y, f"dropped by {heading(candidate.dropped_by or '')}", "start", "#94a3b8", size=11.0)


def _race(trace: SampleTrace, layout: Layout) -> Iterator[str]:
    """Yield each survivor's logit and its score with noise, on one scale. The dashed line is the winning score."""
    running = [(i, c, c.logits[-1], c.score) for i, c in enumerate(trace.candidates) if c.score is not None]
    values = [value for _, _, logit, score in running for value in (logit, score) if value is not None]
    low, high = min(values), max(values)

    def place(value: float) -> float:
        return layout.race + 8 + (RACE_WIDTH - 24) * (value - low) / max(high - low, 1e-9)

    goal = place(trace.chosen.score if trace.chosen.score is not None else high)
    bottom = TOP + layout.height
    yield (
        f'<line x1="{goal:.1f}" x2="{goal:.1f}" y1="{TOP:g}" y2="{bottom:.1f}" stroke="{CHOSEN}" '
        'stroke-opacity="0.5" stroke-dasharray="3 4"/>'
    )
    for index, candidate, logit, score in running:
        if logit is not None and score is not None:
            yield from _runner(trace, candidate, layout.row(index), place(logit), place(score))
    for value, anchor in ((low, "start"), (high, "end")):
        yield _text(place(value), bottom + 16, f"{value:.1f}", anchor, FAINT, size=10.5)


def _runner(trace: SampleTrace, candidate: TraceCandidate, y: float, start: float, end: float) -> Iterator[str]:
    is_chosen = candidate.token_id == trace.token_id
    color = CHOSEN if is_chosen else "#3b6fd4"
    noise = "" if candidate.noise is None else f", noise {candidate.noise:+.2f}"
    yield f"<g><title>{escape(quoted(candidate.text))} logit {candidate.logits[-1]:.2f}{noise}</title>"
    if candidate.noise is not None:
        yield (
            f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
            f'stroke-width="{2.5 if is_chosen else 1.5}" stroke-opacity="0.7"/>'
        )
        yield f'<circle cx="{start:.1f}" cy="{y:.1f}" r="3.2" fill="white" stroke="{color}" stroke-width="1.4"/>'
    yield f'<circle cx="{end:.1f}" cy="{y:.1f}" r="{6 if is_chosen else 4}" fill="{color}"/></g>'


def _ribbon(
    left: float, before: tuple[float, float], right: float, after: tuple[float, float], fill: str, opacity: float
) -> str:
    middle = (left + right) / 2
    there = f"C{middle:.1f} {before[0]:.2f} {middle:.1f} {after[0]:.2f} {right:.1f} {after[0]:.2f}"
    back = f"C{middle:.1f} {after[1]:.2f} {middle:.1f} {before[1]:.2f} {left:.1f} {before[1]:.2f}"
    path = f"M{left:.1f} {before[0]:.2f}{there}V{after[1]:.2f}{back}Z"
    return f'<path d="{path}" fill="{fill}" fill-opacity="{opacity:g}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    fill: str = INK,
    *,
    size: float = 12.0,
    weight: int = 400,
    family: str | None = None,
) -> str:
    style = "" if family is None else f' font-family="{family}" xml:space="preserve"'
    style += "" if weight == 400 else f' font-weight="{weight}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size:g}"{style}>'
        f"{escape(text)}</text>"
    )
