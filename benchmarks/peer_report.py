"""What bench_peers found: medians, ratios and shares of the limit, as a table, as JSON and as a picture."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median

from machine import Limits
from peer_models import PeerModel

PEER = "llama.cpp"
OURS = ("infer exact", "infer fast")
_SIDE_WIDTH = 18
COLOR_BY_SIDE = {PEER: "#9aa0a6", "infer exact": "#2563eb", "infer fast": "#f59e0b"}


@dataclass(frozen=True)
class Measure:
    name: str
    kind: str  # the time that counts: prefill or decode
    prompt_tokens: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens if self.kind == "prefill" else self.new_tokens


@dataclass(frozen=True)
class Result:
    model: str
    threads: int
    measure: str
    side: str
    unit: str
    values: list[float]  # one a round

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass
class Report:
    cpu: str
    cores: int
    models: list[PeerModel] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    limits: list[tuple[str, Limits]] = field(default_factory=list)  # by model, one a round
    results: list[Result] = field(default_factory=list)
    runs_on: dict[str, str] = field(default_factory=dict)  # by side: the instructions that it uses

    def add(self, result: Result) -> None:
        self.results.append(result)

    def cases(self) -> list[tuple[str, int, str]]:
        return list(dict.fromkeys((r.model, r.threads, r.measure) for r in self.results))

    def of(self, model: str, threads: int, measure: str) -> dict[str, Result]:
        case = (model, threads, measure)
        return {r.side: r for r in self.results if (r.model, r.threads, r.measure) == case}

    def ratio(self, result: Result) -> float | None:
        """How many times better than the best peer: of rates, or of costs the other way round."""
        sides = self.of(result.model, result.threads, result.measure)
        peers = [other.median for name, other in sides.items() if name.startswith(PEER)]
        if not peers or result.side not in OURS:
            return None
        return result.median / max(peers) if result.unit == "tok/s" else min(peers) / result.median

    def limit(self, model: str, threads: int, measure_name: str) -> float | None:
        """Tokens per second that the machine allows: bytes over bandwidth, or products over torch's best matmul."""
        limits = [limit for name, limit in self.limits if (name, limit.threads) == (model, threads)]
        measure = next((m for m in self.measures if m.name == measure_name), None)
        if measure is None or not limits:
            return None
        file = next(m for m in self.models if m.name == model)
        if measure.kind == "prefill":
            flops = [max(x.bfloat16_flops_per_second, x.float32_flops_per_second) for x in limits]
            return median(flops) / (2 * file.layer_parameters)
        context = measure.prompt_tokens + measure.new_tokens / 2
        bytes_per_token = file.weight_bytes + context * file.kv_bytes
        return median(x.read_bytes_per_second for x in limits) / bytes_per_token

    def table(self) -> str:
        lines = [f"{self.cpu}, {self.cores} cores available; medians of each side's rounds, which alternate", ""]
        lines += [f"{side:{_SIDE_WIDTH}} runs on {instructions}" for side, instructions in self.runs_on.items()]
        for threads in sorted({limit.threads for _, limit in self.limits}):
            mine = [limit for _, limit in self.limits if limit.threads == threads]
            lines.append(
                f"threads {threads}: read {median(x.read_bytes_per_second for x in mine) / 1e9:.1f} GB/s, matmul "
                f"bf16 {median(x.bfloat16_flops_per_second for x in mine) / 1e9:.0f} and "
                f"f32 {median(x.float32_flops_per_second for x in mine) / 1e9:.0f} GFLOP/s"
            )
        lines += [
            "",
            f"{'model':20} {'thr':>3} {'measure':15} {'side':{_SIDE_WIDTH}} {'median':>10} {'':5} {'ratio':>6} "
            f"{'of limit':>8}",
        ]
        for case in self.cases():
            limit = self.limit(*case)
            for result in self.of(*case).values():
                ratio = self.ratio(result)
                shown_ratio = "" if ratio is None else f"{ratio:.2f}×"
                share = "" if limit is None else f"{result.median / limit:.0%}"
                lines.append(
                    f"{result.model:20} {result.threads:>3} {result.measure:15} {result.side:{_SIDE_WIDTH}} "
                    f"{result.median:>10.2f} {result.unit:5} {shown_ratio:>6} {share:>8}"
                )
        return "\n".join(lines)

    def write(self, folder: Path) -> tuple[Path, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        content = {
            "timestamp": now.isoformat(timespec="seconds"),
            "cpu": self.cpu,
            "cores": self.cores,
            "runs_on": self.runs_on,
            "limits": [asdict(limit) | {"model": model} for model, limit in self.limits],
            "models": [asdict(m) | {"path": m.path.name} for m in self.models],
            "results": [
                asdict(r)
                | {"median": r.median, "ratio": self.ratio(r), "limit": self.limit(r.model, r.threads, r.measure)}
                for r in self.results
            ],
        }
        stem = folder / f"peers-{now:%Y%m%d-%H%M%S}"
        report, picture = stem.with_suffix(".json"), stem.with_suffix(".svg")
        report.write_text(json.dumps(content, indent=1) + "\n")
        picture.write_text(self.picture())
        return report, picture

    def machine(self) -> str:
        ours = next((self.runs_on[side] for side in OURS if side in self.runs_on), "")
        return f"{self.cpu}, {self.cores} cores, {ours}"

    def picture(self) -> str:
        """Bars of tokens per second relative to the peer, or to the first side where there is no peer."""
        rows = [case for case in self.cases() if next(iter(self.of(*case).values())).unit == "tok/s"]
        height = 46 + sum(14 * len(self.of(*case)) + 14 for case in rows)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="900" height="{height}" fill="white"/>',
            f'<text x="12" y="20" font-size="14">tokens per second against llama.cpp: {escape(self.machine())}</text>',
        ]
        widest = max((bar for case in rows for *_, bar in self.bars(*case)), default=1.0)
        y = 36
        for case in rows:
            model, threads, measure = case
            parts.append(f'<text x="12" y="{y + 11}">{escape(f"{model}, {measure}, {threads} thr")}</text>')
            for side, label, bar in self.bars(*case):
                width = 430 * bar / widest
                color = COLOR_BY_SIDE.get(side, "#c4c7cc")
                parts.append(f'<rect x="270" y="{y}" width="{width:.1f}" height="12" fill="{color}"/>')
                parts.append(f'<text x="{276 + width:.1f}" y="{y + 10}">{escape(label)}</text>')
                y += 14
            y += 14
        return "\n".join([*parts, "</svg>", ""])

    def bars(self, model: str, threads: int, measure: str) -> Iterator[tuple[str, str, float]]:
        results = self.of(model, threads, measure)
        base = next(iter(results.values()))
        for result in results.values():
            ratio = self.ratio(result)
            label = f"{result.side} {result.median:.0f}" + ("" if ratio is None else f" ({ratio:.2f}×)")
            yield result.side, label, result.median / base.median
