"""A report as one HTML page that needs no other file, host or script: facts, lists, and bars by layer.

It has the colours of the server's page, light or dark as in the reader's system. A bar's value appears when the pointer
is over the bar.
"""

import re
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

_CHART_HEIGHT = 40  # units of the picture, which is stretched
_LEAST_HEIGHT = 0.6  # so that a small value can be seen
_STYLE = """
*, ::before, ::after { box-sizing:border-box }
body { margin:0 auto;max-width:72rem;padding:1.6rem 1.2rem 3rem;background:var(--paper);color:var(--ink);
  font-variant-numeric:tabular-nums }
h1 { margin:0;font-size:1.35rem;letter-spacing:-.01em;overflow-wrap:anywhere }
h2 { margin:2rem 0 .5rem;font-size:1.05rem }
p { margin:.3rem 0 .8rem;max-width:46rem }
.faint, figcaption { color:var(--faint) }
dl { display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.7rem;margin:1.2rem 0 0 }
dl div { padding:.55rem .8rem;border:var(--edge);border-radius:.6rem;background:var(--panel) }
dt { color:var(--faint);font-size:.82rem }
dd { margin:0;font-weight:600;overflow-wrap:anywhere }
ul { list-style:none;margin:0;padding:0;display:grid;gap:.45rem }
li { padding:.5rem .8rem;border:var(--edge);border-left:.25rem solid var(--chosen);border-radius:.45rem;
  background:var(--panel);overflow-wrap:anywhere }
li b { font-family:var(--mono);font-size:.88rem }
.good { border-left-color:var(--green) }
figure { margin:0;min-width:0 }
figcaption { font-size:.78rem;white-space:nowrap;overflow:hidden;text-overflow:ellipsis }
svg { display:block;width:100%;height:2.6rem;border-bottom:var(--edge) }
.tall svg { height:7.5rem }
rect { fill:var(--band) }
rect:hover { fill:var(--blue) }
rect.marked { fill:var(--chosen) }
.row { display:grid;grid-template-columns:12rem repeat(var(--charts),minmax(0,1fr));gap:.3rem 1.2rem;align-items:end;
  padding:.6rem 0;border-top:var(--edge) }
.row > div { align-self:center;min-width:0;font-size:.82rem }
.row > div b { display:block;font-family:var(--mono);font-size:.88rem;font-weight:600;overflow-wrap:anywhere }
.row.head { color:var(--faint);font-size:.82rem;border-top:0;padding:0 }
.row.head > span:first-child { grid-column:2 }
.row figcaption span { display:none }
@media (max-width:46rem) {
  body { padding:1rem .9rem 2rem }
  .row { grid-template-columns:1fr;gap:.45rem }
  .row.head { display:none }
  .row figcaption span { display:inline }
  dl { grid-template-columns:repeat(auto-fill,minmax(9rem,1fr)) }
}
"""


class Bars(NamedTuple):
    """One bar per value, starting at zero. Values are at least 0.

    Attributes:
        title: The quantity with its unit.
        labels: The name of each bar.
        marked: Indices of bars that stand out.
    """

    title: str
    values: Sequence[float]
    labels: Sequence[str]
    marked: Collection[int] = ()

    @property
    def span(self) -> str:
        """The range of the values, in words."""
        low, high = (f"{each:.3g}" for each in (min(self.values), max(self.values)))
        return low if low == high else f"{low} to {high}"


class ChartRow(NamedTuple):
    """Several charts side by side, after a name and a note."""

    name: str
    note: str
    charts: Sequence[Bars]


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """Return the page. `sections` are results of the other functions."""
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_palette()}{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="faint">{escape(subtitle)}</p>
{body}
</body>
</html>
"""


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return names with values, as tiles."""
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f"<dl>{tiles}</dl>"


def section(heading: str, explanation: str, content: str) -> str:
    note = f'<p class="faint">{escape(explanation)}</p>' if explanation else ""
    return f"<section><h2>{escape(heading)}</h2>{note}{content}</section>"


def remarks(items: Sequence[tuple[str, str]], *, instead: str) -> str:
    """Return a list of places, each with a text, or `instead` if there are none."""
    if not items:
        return f'<ul><li class="good">{escape(instead)}</li></ul>'
    return f"<ul>{''.join(f'<li><b>{escape(place)}</b> {escape(text)}</li>' for place, text in items)}</ul>"


def tall_chart(bars: Bars) -> str:
    return f'<div class="tall">{_figure(bars)}</div>'


def chart_rows(rows: Sequence[ChartRow]) -> str:
    """Return rows of charts, with the titles of the first row above. All rows have the same number of charts."""
    titles = "".join(f"<span>{escape(bars.title)}</span>" for bars in rows[0].charts)
    head = f'<div class="row head">{titles}</div>'
    return f'<div style="--charts:{len(rows[0].charts)}">{head}{"".join(map(_row, rows))}</div>'


def _row(row: ChartRow) -> str:
    name = f'<div><b>{escape(row.name)}</b><span class="faint">{escape(row.note)}</span></div>'
    return f'<div class="row">{name}{"".join(map(_figure, row.charts))}</div>'


def _figure(bars: Bars) -> str:
    caption = f"<figcaption><span>{escape(bars.title)}: </span>{escape(bars.span)}</figcaption>"
    return f"<figure>{_picture(bars)}{caption}</figure>"


def _picture(bars: Bars) -> str:
    top, described = max(bars.values) or 1.0, escape(f"{bars.title}: {bars.span}", quote=True)
    shapes = []
    for index, (value, label) in enumerate(zip(bars.values, bars.labels, strict=True)):
        height = max(_CHART_HEIGHT * value / top, _LEAST_HEIGHT if value else 0)
        mark = ' class="marked"' if index in bars.marked else ""
        shapes.append(
            f'<rect{mark} x="{index + 0.08:.2f}" y="{_CHART_HEIGHT - height:.2f}" width="0.84" height="{height:.2f}">'
            f"<title>{escape(label)}: {value:.4g}</title></rect>"
        )
    box = f'viewBox="0 0 {len(bars.values)} {_CHART_HEIGHT}" preserveAspectRatio="none"'
    return f'<svg role="img" aria-label="{described}" {box}>{"".join(shapes)}</svg>'


def _palette() -> str:
    """Return the colours and fonts of the server's page."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    found = re.match(r":root \{.*?\n\}", style, re.DOTALL)
    assert found is not None
    return found[0]
