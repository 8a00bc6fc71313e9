"""`infer bench`: print the measurements as tables and bars for a terminal, or as one JSON object."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer import __version__
from infer.bench.profile import Profile, StepOperation, profile
from infer.bench.speed import Speed, Workload, measure
from infer.cli.command_options import BenchOptions
from infer.cli.model_loading import cache_values
from infer.cli.terminal import Spinner, TextWriter
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.model.from_checkpoint import device_backend
from infer.system.status_line import bar

LEVELS = "▁▂▃▄▅▆▇█"


def run_bench(options: BenchOptions) -> None:
    """Load the model, measure it, and print the results."""
    workload = Workload(options.prompt_tokens, options.num_tokens, options.context, options.repeats)
    name, backend = options.model, device_backend(options.device)
    if not backend.computes_on_host:
        raise InvalidRequestError(
            f"bench measures the host's memory, but {options.device} has its own memory: use --device cpu"
        )
    with Spinner(f"loading {name}") as spinner:
        llm = LLM(
            name,
            dtype=options.dtype,
            weights=options.weights,
            precision=options.precision,
            **cache_values(options),
            device=options.device,
            threads=options.threads,
            max_seq_len=workload.max_seq_len,
            on_progress=spinner.progress,
        )
    setting = {key: getattr(options, key) for key in ("model", "device", "dtype", "weights", "precision")}
    setting["instruction_set"] = backend.instruction_set()
    writer = TextWriter(sys.stdout)
    # Before measuring: a reader that closes the pipe after one line ends it here.
    if not (options.profile or options.as_json):
        writer.write(model_line(setting, backend.num_threads()) + "\n")
    with Spinner(f"profiling {name}" if options.profile else f"measuring {name}") as spinner:
        measured = profile(llm, workload, spinner.progress) if options.profile else None
        speed = measure(llm, workload, spinner.progress) if measured is None else None
    if options.as_json:
        found = {"speed": speed.to_json()} if speed else {"profile": [each.to_json() for each in measured or ()]}
        text = json.dumps({"infer_version": __version__} | setting | found, ensure_ascii=False)
    elif speed is not None:
        text = "\n".join(speed_lines(speed))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        text = "\n\n".join("\n".join(profile_lines(each, width)) for each in measured or ())
    writer.write(text)
    writer.end_line()


def model_line(setting: Mapping[str, Any], threads: int) -> str:
    chosen = [f"{name} {setting[name]}" for name in ("weights", "dtype") if setting[name] != "auto"]
    remarks = [f"{threads} threads", setting["instruction_set"] or setting["device"], setting["precision"], *chosen]
    return _row("model", setting["model"], ", ".join(filter(None, remarks)))


def speed_lines(speed: Speed) -> Iterator[str]:
    workload = speed.workload
    percentiles = (speed.inter_token_p50_s, speed.inter_token_p95_s, speed.inter_token_p99_s)
    milliseconds = ", ".join(
        f"{name} {1e3 * s:.2f}" for name, s in zip(("p50", "p95", "p99"), percentiles, strict=True)
    )
    num_bytes = f"{speed.weight_bytes / 1e6:.1f} MB of weights + {speed.kv_bytes / 1e6:.1f} MB of keys and values"
    rows = [
        ("prefill", f"{speed.prefill_tokens_per_second:.1f} tok/s", f"{workload.prompt_tokens} tokens"),
        ("TTFT", f"{1e3 * speed.ttft_s:.1f} ms", ""),
        ("decode", f"{speed.decode_tokens_per_second:.1f} tok/s", f"{workload.new_tokens} tokens at {workload.depth}"),
        ("between tokens", f"{1e3 * speed.inter_token_p50_s:.2f} ms", milliseconds),
        ("reads", f"{speed.achieved_bandwidth / 1e9:.1f} GB/s", f"{num_bytes} per token"),
        (
            "bandwidth",
            f"{speed.read_bandwidth / 1e9:.1f} GB/s",
            f"measured between the runs; {speed.bandwidth_share:.1%} used",
        ),
        ("peak resident", f"{speed.peak_resident_bytes / 1e6:.0f} MB", ""),
    ]
    yield from (_row(*row) for row in rows)


def _row(name: str, value: str, remark: str) -> str:
    return f"{name:<15}{value:>14}   {remark}".rstrip()


def profile_lines(found: Profile, width: int) -> Iterator[str]:
    """Yield a table with one bar per operation, and rows of columns for the layers."""
    each = "per token" + (f", {1e3 * found.seconds * found.num_tokens:.1f} ms in all" if found.num_tokens > 1 else "")
    where = f"of {found.num_tokens}" if found.num_tokens > 1 else f"at {found.context}"
    yield f"{found.name} {where}: {1e6 * found.seconds:.1f} µs {each}, {found.num_calls} commands"
    if found.num_tokens == 1:
        yield f"  the limit is {found.read_bandwidth / 1e9:.1f} GB/s, measured with as many threads before and after"
    reads = found.num_tokens == 1
    rates = f"{'MB':>8}{'GB/s':>8}{'of limit':>10}" if reads else f"{'MFLOP':>8}{'GFLOP/s':>8}"
    yield f"  {'operation':<10}{'calls':>6}{'µs/token':>10}{'share':>8}{rates}"
    room = max(8, width - (64 if reads else 54))
    longest = max(operation.seconds for operation in found.operations)
    for operation in sorted(found.operations, key=lambda operation: -operation.seconds):
        share = operation.seconds / found.seconds
        numbers = f"{operation.calls:>6}{1e6 * operation.seconds:>10.1f}{share:>8.1%}{_rate(operation, found)}"
        yield f"  {operation.kind:<10}{numbers}  {bar(operation.seconds / longest, room)}"
    layers = [(name, seconds) for name, seconds in found.layers if name[0] == "L"]
    if layers:
        times = [seconds for _, seconds in layers]
        yield f"  layers, {1e6 * min(times):.1f} to {1e6 * max(times):.1f} µs"
        for start in range(0, len(times), max(8, width - 16)):
            part = layers[start : start + max(8, width - 16)]
            yield f"  {part[0][0]:>4} {columns([seconds for _, seconds in part], max(times))} {part[-1][0]}"


def _rate(operation: StepOperation, found: Profile) -> str:
    """Return the number of bytes that an operation reads, their rate, and its share of the limit.

    In a prefill, many tokens share each read, so it returns the number of floating-point operations and their rate.
    """
    reads = found.num_tokens == 1
    amount = operation.num_bytes if reads else operation.num_flops
    if not amount:
        return f"{'–':>8}{'–':>8}" + (f"{'–':>10}" if reads else "")
    rate = amount / operation.seconds
    share = f"{rate / found.read_bandwidth:>10.1%}" if reads else ""
    return f"{amount / 1e6:>8.2f}{rate / 1e9:>8.1f}{share}"


def columns(values: Sequence[float], highest: float) -> str:
    """Return one character per value, from ▁ for the smallest to █ for the highest."""
    return "".join(LEVELS[round((len(LEVELS) - 1) * value / highest)] for value in values)
