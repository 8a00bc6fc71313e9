"""How a report of bench_generation is shown: as a table, beside another, as a picture, as a row of the log."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

LOG = Path(__file__).parent / "log" / "GENERATION_LOG.md"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 320, 60, 40, 40

# What --compare shows, and whether more of it is better.
COMPARED = {
    "ttft_median_ms": False,
    "prompt_throughput_median_tps": True,
    "decode_throughput_median_tps": True,
    "per_step_latency_p50_ms": False,
    "per_step_latency_p95_ms": False,
    "per_step_latency_p99_ms": False,
    "bandwidth_share": True,
    "end_to_end_throughput_tps": True,
    "load_s": False,
    "cold_start_s": False,
    "peak_memory_gb": False,
}
SAME = (
    "config",
    "model",
    "dtype",
    "device_name",
    "threads",
    "kv_cache",
    "prompt_tokens",
    "generated_tokens",
    "sampling",
)


def table(report: dict[str, Any]) -> str:
    memory = "GPU memory" if report["device"].startswith("cuda") else "resident"
    sampling = ", ".join(f"{name} {value:g}" for name, value in report["sampling"].items())
    cold_start = "" if report["cold_start_s"] is None else f"Cold start:         {report['cold_start_s']:.2f} s\n"
    reads = ""
    if report["bandwidth_share"] is not None:
        reads = (
            f"Reads:              {report['achieved_gb_per_s']:.1f} GB/s, {report['bandwidth_share']:.0%} of the "
            f"{report['read_bandwidth_gb_per_s']:.1f} measured in between\n"
        )
    return f"""
=== Generation benchmark: {report["config"]} ===
Model:              {report["model"]}
Dtype:              {report["dtype"]}
Device:             {report["device_name"]}
CUDA version:       {torch.version.cuda or "none"}
PyTorch version:    {report["torch_version"]}
infer version:      {report["infer_version"]}
KV cache:           {"on" if report["kv_cache"] else "off"}
Prompt tokens:      {report["prompt_tokens"]}
Generated tokens:   {report["generated_tokens"]} ({report["trials"]} trials after {report["warmups"]} warm-ups)
Sampling:           {sampling}; seed {report["seed"]}

--- Prefill ---
TTFT (median):      {report["ttft_median_ms"]:.1f} ms
Prompt throughput:  {report["prompt_throughput_median_tps"]:.0f} tok/s

--- Decode ---
Total (median):     {report["decode_time_median_s"]:.2f} s
Throughput (median): {report["decode_throughput_median_tps"]:.1f} tok/s
{reads}Sampling:           {report["sampling_share_median"]:.1%} of the time
Per-step latency:
  Mean:             {report["per_step_latency_mean_ms"]:.2f} ms
  P50:              {report["per_step_latency_p50_ms"]:.2f} ms
  P95:              {report["per_step_latency_p95_ms"]:.2f} ms
  P99:              {report["per_step_latency_p99_ms"]:.2f} ms
  Min:              {report["per_step_latency_min_ms"]:.2f} ms (at length {report["per_step_latency_min_at"]})
  Max:              {report["per_step_latency_max_ms"]:.2f} ms (at length {report["per_step_latency_max_at"]})

--- Total ---
Wall time (median): {report["wall_median_s"]:.2f} s
End-to-end:         {report["end_to_end_throughput_tps"]:.1f} tok/s
Load:               {report["load_s"]:.2f} s
{cold_start}
--- Memory ---
Post-load {memory}: {report["post_load_memory_gb"]:.2f} GB
Peak {memory}:      {report["peak_memory_gb"]:.2f} GB"""


def compare(paths: Sequence[Path]) -> str:
    """Two reports side by side; what differs in what they measured is said first."""
    first, second = (json.loads(path.read_text()) for path in paths)
    return "\n".join(_comparison(first, second))


def _comparison(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    for name in SAME:
        if first.get(name) != second.get(name):
            yield f"NOT THE SAME {name}: {first.get(name)} and {second.get(name)}"
    yield f"{first['config']}, {first['timestamp']} and {second['timestamp']}"
    yield f"{'':32}{'A':>12}{'B':>12}{'B / A':>9}"
    for name, is_more_better in COMPARED.items():
        a, b = first.get(name), second.get(name)
        if not a or b is None:
            continue
        verdict = "" if abs(b / a - 1) < 0.02 else "better" if (b > a) == is_more_better else "worse"
        yield f"{name:32}{a:>12.3f}{b:>12.3f}{b / a:>9.3f}  {verdict}".rstrip()


def picture(report: dict[str, Any]) -> str:
    """Median time of each step against the tokens before it, with the line of the median."""
    times: list[float] = report["per_step_ms"]
    start, end = report["prompt_tokens"], report["prompt_tokens"] + len(times)
    top = 1.1 * sorted(times)[int(0.99 * (len(times) - 1))]  # a few held up steps leave the picture

    def x(length: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (length - start) / max(1, end - start)

    def y(milliseconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(milliseconds, top) / top

    points = " ".join(f"{x(start + 1 + index):.1f},{y(each):.1f}" for index, each in enumerate(times))
    middle = report["per_step_latency_p50_ms"]
    title = f"{report['config']}: time per token against length, {report['model']}, {report['device_name']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>',
        *(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e7eb"/>'
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.1f} ms</text>'
            for tick in (top * part / 4 for part in range(5))
        ),
        *(
            f'<text x="{x(length):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{length:.0f}</text>'
            for length in (start + (end - start) * part / 4 for part in range(5))
        ),
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(middle):.1f}" y2="{y(middle):.1f}" stroke="#f59e0b"/>',
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="1"/>',
        f'<text x="{WIDTH - 20}" y="{y(middle) - 4:.1f}" text-anchor="end">median {middle:.2f} ms</text>',
    ]
    return "\n".join([*parts, "</svg>", ""])


def log_row(report: dict[str, Any], note: str) -> str:
    share = "–" if report["bandwidth_share"] is None else f"{report['bandwidth_share']:.0%}"
    return (
        f"| {report['timestamp'][:10]} | {report['config']} | {report['device_name']} | {report['model']} | "
        f"{report['ttft_median_ms']:.0f} ms | {report['prompt_throughput_median_tps']:.0f} | "
        f"{report['decode_throughput_median_tps']:.1f} | {report['per_step_latency_p50_ms']:.2f} / "
        f"{report['per_step_latency_p95_ms']:.2f} / {report['per_step_latency_p99_ms']:.2f} ms | {share} | "
        f"{report['peak_memory_gb']:.2f} GB | {note} |"
    )


def append_log(rows: Sequence[str]) -> None:
    with LOG.open("a", encoding="utf-8") as file:
        file.writelines(f"{row}\n" for row in rows)
