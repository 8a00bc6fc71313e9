"""Tables of `infer bench --suite`: a row for each config as it is measured, and the comparison with a report."""

from collections.abc import Iterator

from infer.cli.bench.report import COMPARED, Report, compare, differences
from infer.cli.bench.speed import Speed, StepTime

_WIDTHS = (21, 7, 7, 10, 14, 14, 11, 8, 9)
_HEADINGS = ("config", "prompt", "new", "TTFT ms", "prompt tok/s", "decode tok/s", "all tok/s", "wall s", "peak MB")


def heading() -> str:
    return _row(*_HEADINGS)


def config_lines(name: str, speed: Speed) -> Iterator[str]:
    """Yield a config's row, and the latency of its steps."""
    peak = speed.peak_resident_bytes if speed.peak_gpu_bytes is None else speed.peak_gpu_bytes
    rates = speed.prefill_tokens_per_second, speed.decode_tokens_per_second, speed.end_to_end_tokens_per_second
    yield _row(
        name,
        f"{speed.workload.prompt_tokens}",
        f"{speed.workload.new_tokens}",
        f"{1e3 * speed.ttft_s:.1f}",
        *(f"{rate:.1f}" for rate in rates),
        f"{speed.wall_s:.2f}",
        f"{peak / 1e6:.0f}",
    )
    yield f"  steps in ms: {latencies(speed)}"


def latencies(speed: Speed) -> str:
    means = {
        "mean": speed.inter_token_mean_s,
        "p50": speed.inter_token_p50_s,
        "p95": speed.inter_token_p95_s,
        "p99": speed.inter_token_p99_s,
    }
    shown = [f"{name} {1e3 * seconds:.2f}" for name, seconds in means.items()]
    return ", ".join([*shown, *(_step(*each) for each in (("min", speed.fastest_step), ("max", speed.slowest_step)))])


def _step(name: str, step: StepTime | None) -> str:
    return f"{name} –" if step is None else f"{name} {1e3 * step.seconds:.2f} (step {step.step}, {step.seq_len} tokens)"


def memory_line(speed: Speed) -> str:
    line = f"memory after load: {speed.loaded_resident_bytes / 1e6:.0f} MB of the process"
    return line if speed.loaded_gpu_bytes is None else f"{line}, {speed.loaded_gpu_bytes / 1e6:.0f} MB of the GPU"


def comparison_lines(before: Report, after: Report) -> Iterator[str]:
    """Yield a table of the figures now as multiples of those of a report, and the conditions that differ."""
    yield f"compared with {before.get('timestamp')}, as now / before:"
    headings = [f"{title} {'↑' if is_rate else '↓'}" for title, is_rate in COMPARED.values()]
    widths = [max(len(each), 9) for each in headings]
    yield f"{'config':<21}" + "".join(f"{each:>{width + 3}}" for each, width in zip(headings, widths, strict=True))
    for name, ratios in compare(before, after).items():
        if isinstance(ratios, str):
            yield f"{name:<21}   {ratios}"
        else:
            shown = ["–" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios.values()]
            yield f"{name:<21}" + "".join(f"{each:>{width + 3}}" for each, width in zip(shown, widths, strict=True))
    yield from differences(before, after)


def _row(name: str, *cells: str) -> str:
    return f"{name:<{_WIDTHS[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True))
