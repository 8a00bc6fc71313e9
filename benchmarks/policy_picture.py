"""Pictures of what `kv_policies.py` has measured: needles by policy and depth, and perplexity far beyond the context.

    python benchmarks/policy_picture.py REPORT.json ...
    python benchmarks/policy_picture.py BEFORE.json AFTER.json --labels "as they are" "to the context"

Reports of needles are tables one below the other, those of stability lines in one picture, beside the last of them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from command_line import make_parser

WIDTH, LEFT = 760, 150
CELL, ROW, NUM_DEPTHS = 48, 26, 10
HEIGHT, TOP, BOTTOM, RIGHT = 360, 40, 50, 40
COLORS = ("#dc2626", "#2563eb", "#f59e0b", "#0891b2")
TICKS = (5, 10, 20, 50, 100, 200, 500, 1000)

Report = dict[str, Any]


def head(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    )


def text(x: float, y: float, words: str, options: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {options}>{escape(words)}</text>'


# Needles


def needle_picture(reports: Sequence[Report]) -> str:
    """A table for each report: how many needles each policy finds at each depth, the more the darker."""
    parts, y = list[str](), 8.0
    for report in reports:
        parts += needle_table(report, y)
        y += 62 + ROW * len(report["needles"])
    return "\n".join([head(y), *parts, "</svg>", ""])


def needle_table(report: Report, top: float) -> Iterator[str]:
    settings = report["settings"]
    title = f"{settings['model']}: needles found in {settings['length']:,} tokens, by depth"
    yield text(12, top + 14, title, 'font-size="14"')
    for depth in range(NUM_DEPTHS):
        x = LEFT + CELL * (depth + 0.5)
        yield text(x, top + 34, f"{(2 * depth + 1) / 20:.0%}", 'text-anchor="middle" fill="#6b7280"')
    yield text(LEFT + CELL * NUM_DEPTHS + 12, top + 34, "found", 'fill="#6b7280"')
    for number, each in enumerate(report["needles"]):
        y = top + 40 + ROW * number
        yield text(LEFT - 10, y + 17, f"{each['policy']} {each['budget'] or ''}", 'text-anchor="end"')
        for depth in range(NUM_DEPTHS):
            answers = each["found"][depth::NUM_DEPTHS]
            rate, x = sum(answers) / len(answers), LEFT + CELL * depth
            yield (
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="#2563eb" '
                f'fill-opacity="{0.05 + 0.9 * rate:.2f}"/>'
            )
            ink = "white" if rate > 0.5 else "#374151"
            yield text(x + CELL / 2 - 1, y + 16, f"{sum(answers)}", f'text-anchor="middle" fill="{ink}"')
        x = LEFT + CELL * NUM_DEPTHS + 12
        yield text(x, y + 17, f"{sum(each['found'])} of {len(each['found'])}")


# Stability


def stability_picture(reports: Sequence[Report], labels: Sequence[str]) -> str:
    """Perplexity of each stretch of a text against where it ends, a line for each report; as a logarithm."""
    lines = [[(each["num_tokens"], each["perplexity"]) for each in report["stability"]] for report in reports]
    longest = max(num_tokens for line in lines for num_tokens, _ in line)
    rates = [rate for line in lines for _, rate in line]
    low, high = math.log(min(*rates, 5.0)), math.log(max(*rates, 20.0))

    def x(num_tokens: int) -> float:
        return 60 + (WIDTH - 60 - RIGHT) * num_tokens / longest

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (math.log(rate) - low) / (high - low)

    settings = reports[-1]["settings"]
    title = f"{settings['model']}, sliding, window {max(settings['budgets']):,}: perplexity of each 1,024 tokens"
    parts = [head(HEIGHT), text(12, 20, title, 'font-size="14"')]
    for tick in (tick for tick in TICKS if low <= math.log(tick) <= high):
        parts.append(f'<line x1="60" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e7eb"/>')
        parts.append(text(54, y(tick) + 4, f"{tick}", 'text-anchor="end"'))
    for num_tokens in range(0, longest + 1, 8192):
        parts.append(text(x(num_tokens), HEIGHT - 24, f"{num_tokens:,}", 'text-anchor="middle"'))
    for number, (line, label) in enumerate(zip(lines, labels, strict=True)):
        color, points = COLORS[number], " ".join(f"{x(at):.1f},{y(rate):.1f}" for at, rate in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(text(72, TOP + 16 * (number + 1), label, f'fill="{color}"'))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--labels", nargs="+", default=[], help="of the lines of stability, one for each report")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.reports]
    stem = arguments.reports[-1].with_suffix("")
    if needles := [report for report in reports if report["needles"]]:
        _write(stem.with_name(f"{stem.name}-needles.svg"), needle_picture(needles))
    if stable := [report for report in reports if report["stability"]]:
        labels = arguments.labels or [path.stem for path in arguments.reports]
        if len(labels) != len(stable):
            raise SystemExit(f"policy_picture: {len(stable)} reports of stability, but {len(labels)} labels")
        _write(stem.with_name(f"{stem.name}-stability.svg"), stability_picture(stable, labels))


def _write(path: Path, picture: str) -> None:
    path.write_text(picture)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
