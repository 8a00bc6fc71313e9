"""What bench_serving found: figures of each run, medians over rounds, goals, as a table, as JSON and as a picture."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from statistics import mean, median
from typing import Any

from serving_trace import Answer, Ask, Scenario

OURS, PEER = "infer", "llama.cpp"
COLOR_BY_SIDE = {OURS: "#2563eb", PEER: "#9aa0a6"}
DELIVERY_SECONDS = 1e-3  # tokens that come within it come at once
FIRST_TOKEN_SECONDS, GAP_SECONDS = 1.0, 0.1  # what a good answer keeps: of its gaps, 95 of 100
PERCENTS = (50, 95, 99)
PERCENTILES = range(1, 101)


@dataclass(frozen=True)
class Goal:
    """A figure to reach. `is_ratio`: beside the peer."""

    scenario: str
    metric: str
    bound: float
    is_least: bool = False
    is_ratio: bool = False

    def __str__(self) -> str:
        beside = f" beside {PEER}" if self.is_ratio else ""
        return f"{self.scenario}: {self.metric}{beside} {'≥' if self.is_least else '≤'} {self.bound:g}"

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_least else value <= self.bound


GOALS = (
    Goal("closed 8", "× one client", 3.8, is_least=True),
    Goal("closed 8", "tok/s", 2.0, is_least=True, is_ratio=True),
    Goal("closed-1024 8", "× one client", 2.0, is_least=True),
    Goal("shared-prefix", "first token p99 (ms)", 60.0),
    Goal("long-prompt", "short: first token (ms)", 150.0),
    Goal("long-prompt", "long: × alone", 1.25),
    Goal("long-prompt", "streams: gap p99 (ms)", 40.0),
    Goal("tenants", "Jain over tenants", 0.95, is_least=True),
    Goal("poisson", "answers unlike solo", 0.0),
    Goal("poisson", "longest wait × mean", 3.0),
    Goal("one-client", "× LLM.stream", 0.97, is_least=True),
    Goal("one-client", "first token beside LLM.stream (ms)", 3.0),
    Goal("one-client", "answers unlike LLM.stream", 0.0),
    Goal("start", "port answers after (s)", 0.4),
    Goal("idle", "% of a core", 0.2),
    Goal("at-once", "refusal p99 (ms)", 100.0),
    Goal("at-once", "goodput of capacity", 0.95, is_least=True),
    Goal("cancels", "requests that go on", 0.0),
    Goal("cancels", "resident, × before", 1.01),
    Goal("slow-readers", "rate of others × alone", 0.95, is_least=True),
)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest that at least so many percent do not pass; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def first_token(answer: Answer) -> float:
    return answer.arrivals[0] - answer.ready


def deliveries(answer: Answer) -> list[float]:
    """When something came: several tokens of a step without a return arrive at once, and their reader waits between."""
    later = [now for before, now in pairwise(answer.arrivals) if now - before > DELIVERY_SECONDS]
    return [*answer.arrivals[:1], *later]


def gaps(answer: Answer) -> list[float]:
    return [now - before for before, now in pairwise(deliveries(answer))]


def is_good(answer: Answer) -> bool:
    return first_token(answer) <= FIRST_TOKEN_SECONDS and percentile(gaps(answer), 95) <= GAP_SECONDS


def jain(shares: Sequence[float]) -> float:
    """1 where all are equal, 1 / n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def figures(scenario: Scenario, answers: Sequence[Answer], state: dict[str, Any]) -> dict[str, float]:
    """Of one run."""
    pairs = [(ask, answer) for ask, answer in zip(scenario.asks, answers, strict=True) if answer.arrivals]
    if scenario.name == "long-prompt":
        found = dict(_of_long_prompt(pairs))
    elif scenario.name == "tenants":
        found = dict(_of_tenants(pairs))
    else:
        found = dict(_of_load([pair for pair in pairs if pair[0].role != "first"]))
    found["failed"] = sum(answer.error is not None for answer in answers)
    found["reused tokens"] = sum(answer.stats.get("reused_tokens", 0) for answer in answers)
    return found | dict(_of_engine(state))


def _of_load(pairs: Sequence[tuple[Ask, Answer]]) -> Iterator[tuple[str, float]]:
    answers = [answer for _, answer in pairs]
    seconds = max(answer.ended for answer in answers) - min(answer.ready for answer in answers)
    yield "tok/s", sum(len(answer.arrivals) for answer in answers) / seconds
    yield "good tok/s", sum(len(answer.arrivals) for answer in answers if is_good(answer)) / seconds
    yield "answers/s", len(answers) / seconds
    waits, all_gaps = [first_token(answer) for answer in answers], [gap for answer in answers for gap in gaps(answer)]
    for percent in PERCENTS:
        yield f"first token p{percent} (ms)", 1e3 * percentile(waits, percent)
    for percent in PERCENTS:
        yield f"gap p{percent} (ms)", 1e3 * percentile(all_gaps, percent)
    yield "longest wait × mean", max(waits) / mean(waits)
    rates = defaultdict[str, list[float]](list)
    for ask, answer in pairs:
        rates[ask.tenant].append(len(answer.arrivals) / (answer.ended - answer.ready))
    if len(rates) > 1:
        yield "Jain over tenants", jain([mean(each) for each in rates.values()])


def _of_long_prompt(pairs: Sequence[tuple[Ask, Answer]]) -> Iterator[tuple[str, float]]:
    by_role = defaultdict[str, list[Answer]](list)
    for ask, answer in pairs:
        by_role[ask.role].append(answer)
    (alone,), (long,), (short,) = (by_role[role] for role in ("long alone", "long", "short"))
    yield "short: first token (ms)", 1e3 * first_token(short)
    yield "long: total (s)", long.ended - long.ready
    yield "long: × alone", (long.ended - long.ready) / (alone.ended - alone.ready)
    during = [
        now - before
        for stream in by_role["stream"]
        for before, now in pairwise(deliveries(stream))
        if before < long.ended and now > long.ready
    ]
    for percent in PERCENTS:
        yield f"streams: gap p{percent} (ms)", 1e3 * percentile(during, percent)


def _of_tenants(pairs: Sequence[tuple[Ask, Answer]]) -> Iterator[tuple[str, float]]:
    """Tokens from when all of them are served until one of them has nothing that waits."""
    by_tenant = defaultdict[str, list[Answer]](list)
    for ask, answer in pairs:
        by_tenant[ask.tenant].append(answer)
    begun = [[answer.arrivals[0] for answer in answers] for answers in by_tenant.values()]
    start, end = max(map(min, begun)), min(map(max, begun))
    shares = [
        sum(start <= now <= end for answer in answers for now in answer.arrivals) for answers in by_tenant.values()
    ]
    yield "Jain over tenants", jain(shares)
    for tenant, answers in by_tenant.items():
        yield f"{tenant}: first token p50 (ms)", 1e3 * percentile([first_token(answer) for answer in answers], 50)


def _of_engine(state: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if "preemptions" in state:
        yield "preemptions", state["preemptions"]
    if state.get("predicted_over_measured"):
        for percent, value in zip((10, 50, 90), state["predicted_over_measured"], strict=True):
            yield f"step predicted / measured p{percent}", value


@dataclass
class Report:
    cpu: str
    threads: int
    model: str
    runs_on: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    # scenario → metric → side → one a round
    values: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    # scenario → side → milliseconds of all rounds
    waits: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    gaps: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, scenario: str, side: str, found: dict[str, float], answers: Sequence[Answer] = ()) -> None:
        for metric, value in found.items():
            self.values.setdefault(scenario, {}).setdefault(metric, {}).setdefault(side, []).append(value)
        told = [answer for answer in answers if answer.arrivals]
        for kept, values in (
            (self.waits, [first_token(answer) for answer in told]),
            (self.gaps, [gap for answer in told for gap in gaps(answer)]),
        ):
            kept.setdefault(scenario, {}).setdefault(side, []).extend(round(1e3 * value, 3) for value in values)

    def median(self, scenario: str, metric: str, side: str) -> float | None:
        values = self.values.get(scenario, {}).get(metric, {}).get(side)
        return median(values) if values else None

    def ratio(self, scenario: str, metric: str) -> float | None:
        """How many times ours is the peer's: the median of the rounds' own ratios."""
        sides = self.values.get(scenario, {}).get(metric, {})
        pairs = list(zip(sides.get(OURS, ()), sides.get(PEER, ()), strict=False))
        return median(ours / peer for ours, peer in pairs) if pairs and all(peer for _, peer in pairs) else None

    def table(self) -> str:
        lines = [f"{self.cpu}, {self.threads} threads, {self.model}; medians of rounds, sides in turns", ""]
        lines += [f"{side:12} runs on {instructions}" for side, instructions in self.runs_on.items()]
        lines += ["", f"{'scenario':16} {'figure':32} {OURS:>10} {PEER:>10} {'ratio':>7}"]
        for scenario, metrics in self.values.items():
            for metric in metrics:
                shown = [self.median(scenario, metric, side) for side in (OURS, PEER)]
                ratio = self.ratio(scenario, metric)
                cells = " ".join(f"{'' if value is None else f'{value:.2f}':>10}" for value in shown)
                lines.append(f"{scenario:16} {metric:32} {cells} {'' if ratio is None else f'{ratio:.2f}×':>7}")
        lines += ["", "goals"]
        for goal, value in self.goals():
            lines.append(f"{goal!s:62} {value:>8.2f}  {'met' if goal.is_met(value) else 'missed'}")
        return "\n".join(lines)

    def goals(self) -> Iterator[tuple[Goal, float]]:
        """Those whose figures were measured."""
        for goal in GOALS:
            ours = self.median(goal.scenario, goal.metric, OURS)
            value = self.ratio(goal.scenario, goal.metric) if goal.is_ratio else ours
            if value is not None:
                yield goal, value

    def write(self, folder: Path, kind: str = "serving") -> tuple[Path, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        spreads = {"waits": self.waits, "gaps": self.gaps}
        content = {"timestamp": now.isoformat(timespec="seconds")} | asdict(self)
        for name, kept in spreads.items():
            content[name] = {
                scenario: {
                    side: [percentile(values, percent) for percent in range(1, 101)] for side, values in each.items()
                }
                for scenario, each in kept.items()
            }
        content["goals"] = [
            {"goal": str(goal), "value": value, "is_met": goal.is_met(value)} for goal, value in self.goals()
        ]
        stem = folder / f"{kind}-{now:%Y%m%d-%H%M%S}"
        report, picture = stem.with_suffix(".json"), stem.with_suffix(".svg")
        report.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        picture.write_text(self.picture())
        return report, picture

    def picture(self) -> str:
        """Tokens per second by clients; then the spread of first tokens and of gaps under the open load."""
        title = f"{self.model} on {self.cpu}, {self.threads} threads"
        parts = [
            '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="330" font-family="sans-serif" font-size="11">',
            '<rect width="960" height="330" fill="white"/>',
            f'<text x="12" y="20" font-size="14">{escape(title)}</text>',
        ]
        for index, (name, curves, is_log) in enumerate(self._panels()):
            parts += _panel(12 + 316 * index, name, curves, is_log=is_log)
        for index, (side, color) in enumerate(COLOR_BY_SIDE.items()):
            parts.append(f'<text x="{760 + 70 * index}" y="20" fill="{color}">{escape(side)}</text>')
        return "\n".join([*parts, "</svg>", ""])

    def _panels(self) -> Iterator[tuple[str, dict[str, list[tuple[float, float]]], bool]]:
        rates: dict[str, list[tuple[float, float]]] = {side: [] for side in COLOR_BY_SIDE}
        for scenario in self.values:
            name, _, clients = scenario.partition(" ")
            for side in COLOR_BY_SIDE:
                rate = self.median(scenario, "tok/s", side)
                if name == "closed" and rate is not None:
                    rates[side].append((float(clients), rate))
        yield "tokens per second by clients", rates, False
        for title, kept in (("first token, ms: share of answers", self.waits), ("gap, ms: share", self.gaps)):
            spread = kept.get("poisson", {})
            yield (
                title,
                {
                    side: [(max(0.1, percentile(values, percent)), percent) for percent in PERCENTILES]
                    for side, values in spread.items()
                    if values
                },
                True,
            )


def _panel(left: float, title: str, curves: dict[str, list[tuple[float, float]]], *, is_log: bool) -> Iterator[str]:
    """Lines in a box of 290 × 250; the x axis in powers of two or ten."""
    top, bottom, width = 56, 296, 270
    points = [point for curve in curves.values() for point in curve]
    yield f'<text x="{left + 20}" y="44">{escape(title)}</text>'
    if not points:
        return
    low, high = log2(min(x for x, _ in points)), log2(max(x for x, _ in points))
    most = max(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + 20 + width * (log2(x) - low) / max(high - low, 1e-9), bottom - (bottom - top) * y / most

    yield f'<path d="M{left + 20},{top} V{bottom} H{left + 20 + width}" fill="none" stroke="#666"/>'
    yield f'<text x="{left + 24}" y="{top + 4}" fill="#666">{most:.0f}</text>'
    ticks = {10**power for power in range(-1, 6)} if is_log else {x for x, _ in points}
    for tick in sorted(ticks):
        if low <= log2(tick) <= high:
            x, _ = place(tick, 0)
            yield f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle" fill="#666">{tick:g}</text>'
    for side, curve in curves.items():
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        yield f'<polyline points="{line}" fill="none" stroke="{COLOR_BY_SIDE[side]}" stroke-width="2"/>'
