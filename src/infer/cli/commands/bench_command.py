"""`infer bench`: print the measurements as tables and bars for a terminal, or as one JSON object.

With --suite, each config has a row, which is printed when it is measured. A report has the figures of all configs as
JSON, with the machine and the versions. It can be compared with that of an earlier run.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import infer
from infer.cli.bench.profile import Profile, StepOperation, profile
from infer.cli.bench.speed import Speed, StepTime, Workload, measure, workloads
from infer.cli.command_options import BenchOptions
from infer.cli.option_files import check_writable, refusing, write_whole
from infer.cli.terminal import Spinner, TextWriter, columns_of_rows, json_text
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint
from infer.llm import LLM
from infer.models.families import make_architecture
from infer.models.from_checkpoint import device_backend
from infer.system.cores import processor_name
from infer.system.status_line import bar

LEVELS = "▁▂▃▄▅▆▇█"
_WIDTHS = (21, 7, 7, 10, 14, 14, 11, 8, 9)
_HEADINGS = ("config", "prompt", "new", "TTFT ms", "prompt tok/s", "decode tok/s", "all tok/s", "wall s", "peak MB")
Report = dict[str, Any]
# Facts that make two reports hard to compare if they differ.
_CONDITIONS = (
    *("model", "device", "gpu_name", "cpu_name", "threads", "instruction_set", "dtype", "weights", "precision"),
    *("kv_type", "seed", "warmups", "trials"),
)
COMPARED = {  # key of a figure → its heading, and True if more is better
    "ttft_median_ms": ("TTFT ms", False),
    "prompt_throughput_median_tps": ("prompt tok/s", True),
    "decode_throughput_median_tps": ("decode tok/s", True),
    "per_step_latency_p50_ms": ("p50 ms", False),
    "per_step_latency_p99_ms": ("p99 ms", False),
}


def run_bench(options: BenchOptions) -> None:
    """Load the model, measure it, and print the results."""
    if options.report is not None and not options.report.is_dir():
        check_writable(options.report, "the report ")
    before = None if options.compare is None else read_report(options.compare)
    runs: dict[str, Any] = {"repeats": options.repeats, "warmups": options.warmup, "seed": options.seed}
    workload = Workload(options.prompt_tokens, options.num_tokens, options.context, **runs)
    architecture = make_architecture(open_checkpoint(options.model).config)
    if architecture.reads_whole_texts:
        raise InvalidRequestError(f"{options.model} is an encoder and generates no text: name a decoder")
    works, skipped = {workload.name: workload}, dict[str, str]()
    if options.suite is not None:
        works, skipped = _that_fit(options, workloads(options.suite, **runs), architecture.most_positions)
    backend = device_backend(options.settings.device)
    with Spinner(f"loading {options.model}") as spinner:
        settings = replace(options.settings, max_seq_len=max(each.max_seq_len for each in works.values()))
        llm = LLM(options.model, **vars(settings), on_progress=spinner.progress)
    names = ("device", "dtype", "weights", "precision")
    setting = {"model": options.model} | {name: getattr(options.settings, name) for name in names}
    setting["instruction_set"] = backend.instruction_set()
    writer = TextWriter(sys.stdout)
    # Before measuring: a reader that closes the pipe after one line ends it here.
    if not (options.profile or options.as_json):
        writer.write(model_line(setting, backend.num_threads()) + "\n")
    if options.profile:
        _show_profile(llm, workload, setting, writer, as_json=options.as_json)
        return
    speeds = _measure_all(options, llm, works, skipped, writer)
    report = make_report(llm, setting, options.suite, speeds, skipped)
    if options.as_json:
        single = {"infer_version": infer.__version__} | setting | {"speed": next(iter(speeds.values())).to_json()}
        compared = {} if before is None else {
            "compared": compare(before, report), "differences": list(differences(before, report))
        }  # fmt: skip
        writer.write(json_text((report if options.suite else single) | compared))
    elif before is not None:
        writer.write("\n" + "\n".join(comparison_lines(before, report)))
    writer.end_line()
    if options.report is not None:
        print(f"infer: wrote {write_report(options.report, report)}", file=sys.stderr)


def _that_fit(
    options: BenchOptions, works: Mapping[str, Workload], most: int
) -> tuple[dict[str, Workload], dict[str, str]]:
    """Return the workloads that fit the model's context of `most` tokens, and the reasons why others do not.

    Raises InvalidRequestError if none fits.
    """
    skipped = dict[str, str]()
    for name, work in works.items():
        try:
            options.settings.cache.check_length(work.max_seq_len, most)
        except InvalidRequestError:
            skipped[name] = f"needs {work.max_seq_len} tokens, and the model's context has {most}"
    if len(skipped) == len(works):
        raise InvalidRequestError(f"no config of suite {options.suite} fits the model's context of {most} tokens: "
                                  "use -p and -n")  # fmt: skip
    return {name: work for name, work in works.items() if name not in skipped}, skipped


def _measure_all(
    options: BenchOptions, llm: LLM, works: Mapping[str, Workload], skipped: Mapping[str, str], writer: TextWriter
) -> dict[str, Speed]:
    """Measure the workloads, and print the row of each as soon as it is known."""
    is_suite, speeds = options.suite is not None, dict[str, Speed]()
    # The buffers for the bandwidth would count as memory of the next config.
    read_bytes = 0 if is_suite or not llm.model.backend.computes_on_host else None
    if is_suite and not options.as_json:
        writer.write(_suite_row(*_HEADINGS) + "\n")
    for name, work in works.items():
        with Spinner(f"measuring {name if is_suite else options.model}") as spinner:
            speeds[name] = measure(llm, work, spinner.progress, read_bytes=read_bytes)
        if not options.as_json:
            writer.write("\n".join(config_lines(name, speeds[name]) if is_suite else speed_lines(speeds[name])) + "\n")
    if is_suite and not options.as_json:
        writer.write("".join(f"{name:<21}   skipped: {reason}\n" for name, reason in skipped.items()))
        first = next(iter(speeds.values()))
        gpu = "" if first.loaded_gpu_bytes is None else f", {first.loaded_gpu_bytes / 1e6:.0f} MB of the GPU"
        writer.write(f"memory after load: {first.loaded_resident_bytes / 1e6:.0f} MB of the process{gpu}\n")
    return speeds


def _show_profile(
    llm: LLM, workload: Workload, setting: Mapping[str, Any], writer: TextWriter, *, as_json: bool
) -> None:
    with Spinner(f"profiling {setting['model']}") as spinner:
        measured = profile(llm, workload, spinner.progress)
    if as_json:
        found = {"infer_version": infer.__version__, **setting, "profile": [each.to_json() for each in measured]}
        writer.write(json_text(found))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        writer.write("\n\n".join("\n".join(profile_lines(each, width)) for each in measured))
    writer.end_line()


def model_line(setting: Mapping[str, Any], threads: int) -> str:
    chosen = [f"{name} {setting[name]}" for name in ("weights", "dtype") if setting[name] != "auto"]
    remarks = [f"{threads} threads", setting["instruction_set"] or setting["device"], setting["precision"], *chosen]
    return _row("model", setting["model"], ", ".join(filter(None, remarks)))


def speed_lines(speed: Speed) -> Iterator[str]:
    workload, answer = speed.workload, f"{speed.workload.new_tokens} tokens"
    num_bytes = f"{speed.weight_bytes / 1e6:.1f} MB of weights + {speed.kv_bytes / 1e6:.1f} MB of keys and values"
    yield _row("prefill", f"{speed.prefill_tokens_per_second:.1f} tok/s", f"{workload.prompt_tokens} tokens")
    yield _row("TTFT", f"{1e3 * speed.ttft_s:.1f} ms", "")
    yield _row("decode", f"{speed.decode_tokens_per_second:.1f} tok/s", f"{answer} at {workload.depth}")
    yield _row("between tokens", f"{1e3 * speed.inter_token_p50_s:.2f} ms", latencies(speed))
    yield _row("end to end", f"{speed.end_to_end_tokens_per_second:.1f} tok/s", f"{answer} in {speed.wall_s:.2f} s")
    if speed.read_bandwidth:
        yield _row("reads", f"{speed.achieved_bandwidth / 1e9:.1f} GB/s", f"{num_bytes} per token")
        used = f"as many bytes, read between the runs; {speed.bandwidth_share:.1%} used"
        if speed.bandwidth_share == 1:
            used = "decode itself, no read between the runs was faster"
        yield _row("bandwidth", f"{speed.read_bandwidth / 1e9:.1f} GB/s", used)
    loaded = f"{speed.loaded_resident_bytes / 1e6:.0f} MB after load"
    yield _row("peak resident", f"{speed.peak_resident_bytes / 1e6:.0f} MB", loaded)
    if speed.peak_gpu_bytes is not None:
        loaded = f"{(speed.loaded_gpu_bytes or 0) / 1e6:.0f} MB after load"
        yield _row("peak of the GPU", f"{speed.peak_gpu_bytes / 1e6:.0f} MB", loaded)


def _row(name: str, value: str, remark: str) -> str:
    return f"{name:<15}{value:>14}   {remark}".rstrip()


def profile_lines(found: Profile, width: int) -> Iterator[str]:
    """Yield a table with one bar per operation, and rows of columns for the layers."""
    reads = found.num_tokens == 1
    each = "per token" if reads else f"per token, {1e3 * found.seconds * found.num_tokens:.1f} ms in all"
    where = f"at {found.context}" if reads else f"of {found.num_tokens}"
    yield f"{found.name} {where}: {1e6 * found.seconds:.1f} µs {each}, {found.num_calls} commands"
    if reads:
        yield f"  the limit is {found.read_bandwidth / 1e9:.1f} GB/s: as many bytes, read before and after"
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
        longest = max(seconds for _, seconds in layers)
        yield f"  layers, {1e6 * min(seconds for _, seconds in layers):.1f} to {1e6 * longest:.1f} µs"
        for start in range(0, len(layers), max(8, width - 16)):
            part = layers[start : start + max(8, width - 16)]
            heights = "".join(LEVELS[round((len(LEVELS) - 1) * seconds / longest)] for _, seconds in part)
            yield f"  {part[0][0]:>4} {heights} {part[-1][0]}"


def _rate(operation: StepOperation, found: Profile) -> str:
    """Return the number of bytes that an operation reads, their rate, and its share of the limit.

    A rate above the limit is that of a cache, and has no share.
    In a prefill, many tokens share each read, so it returns the number of floating-point operations and their rate.
    """
    reads = found.num_tokens == 1
    amount = operation.num_bytes if reads else operation.num_flops
    if not amount:
        return f"{'–':>8}{'–':>8}" + (f"{'–':>10}" if reads else "")
    rate = amount / operation.seconds
    share = f"{rate / found.read_bandwidth:>10.1%}" if rate <= found.read_bandwidth else f"{'a cache':>10}"
    return f"{amount / 1e6:>8.2f}{rate / 1e9:>8.1f}{share if reads else ''}"


def config_lines(name: str, speed: Speed) -> Iterator[str]:
    """Yield a config's row, and the latency of its steps."""
    peak = speed.peak_resident_bytes if speed.peak_gpu_bytes is None else speed.peak_gpu_bytes
    rates = speed.prefill_tokens_per_second, speed.decode_tokens_per_second, speed.end_to_end_tokens_per_second
    sizes = f"{speed.workload.prompt_tokens}", f"{speed.workload.new_tokens}"
    figures = (f"{figure:.1f}" for figure in (1e3 * speed.ttft_s, *rates))
    yield _suite_row(name, *sizes, *figures, f"{speed.wall_s:.2f}", f"{peak / 1e6:.0f}")
    yield f"  steps in ms: {latencies(speed)}"


def latencies(speed: Speed) -> str:
    times = speed.inter_token_mean_s, speed.inter_token_p50_s, speed.inter_token_p95_s, speed.inter_token_p99_s
    shown = [f"{name} {1e3 * each:.2f}" for name, each in zip(("mean", "p50", "p95", "p99"), times, strict=True)]
    return ", ".join([*shown, _step_text("min", speed.fastest_step), _step_text("max", speed.slowest_step)])


def _step_text(name: str, step: StepTime | None) -> str:
    return f"{name} –" if step is None else f"{name} {1e3 * step.seconds:.2f} (step {step.step}, {step.seq_len} tokens)"


def comparison_lines(before: Report, after: Report) -> Iterator[str]:
    """Yield a table of the figures now as multiples of those of a report, and the conditions that differ."""
    yield f"compared with {before.get('timestamp')}, as now / before:"
    rows = [["config", *(f"{title} {'↑' if is_rate else '↓'}" for title, is_rate in COMPARED.values())]]
    for name, ratios in compare(before, after).items():
        shown = ratios.values() if isinstance(ratios, dict) else [ratios]
        cells = [each if isinstance(each, str) else "–" if each is None else f"{each:.2f} ×" for each in shown]
        rows.append([name, *cells, *[""] * (len(COMPARED) - len(cells))])
    yield from columns_of_rows(rows, "<" + ">" * len(COMPARED))
    yield from differences(before, after)


def _suite_row(name: str, *cells: str) -> str:
    return f"{name:<{_WIDTHS[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True))


def make_report(
    llm: LLM, setting: Mapping[str, Any], suite: str | None, speeds: Mapping[str, Speed], skipped: Mapping[str, str]
) -> Report:
    """Return the report of at least one measured config. `skipped` has the reasons of the others."""
    device, first = llm.model.device, next(iter(speeds.values()))
    return {
        "format": "infer-bench",
        "suite": suite,
        **setting,
        "device": str(device),
        "gpu_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_name": processor_name(),
        "threads": first.threads,
        "kv_type": llm.model.kv_type,
        "max_seq_len": llm.max_seq_len,
        "seed": first.workload.seed,
        "warmups": first.workload.warmups,
        "trials": first.workload.repeats,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "infer_version": infer.__version__,
        "commit": _commit(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda if device.type == "cuda" else None,
        "numba_version": version("numba"),
        "configs": [{"name": name, **_figures(speed)} for name, speed in speeds.items()],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _figures(speed: Speed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": speed.workload.prompt_tokens,
        "generated_tokens": speed.workload.new_tokens,
        "context": speed.workload.depth,
        "sampling": dict(speed.workload.sampling),
        "ttft_median_ms": 1e3 * speed.ttft_s,
        "prompt_throughput_median_tps": speed.prefill_tokens_per_second,
        "decode_throughput_median_tps": speed.decode_tokens_per_second,
        "end_to_end_throughput_median_tps": speed.end_to_end_tokens_per_second,
        "wall_time_median_s": speed.wall_s,
        "per_step_latency_mean_ms": 1e3 * speed.inter_token_mean_s,
        "per_step_latency_p50_ms": 1e3 * speed.inter_token_p50_s,
        "per_step_latency_p95_ms": 1e3 * speed.inter_token_p95_s,
        "per_step_latency_p99_ms": 1e3 * speed.inter_token_p99_s,
    }
    for name, step in (("min", speed.fastest_step), ("max", speed.slowest_step)):
        found[f"per_step_latency_{name}_ms"] = step and 1e3 * step.seconds
        found[f"per_step_latency_{name}_step"] = step and step.step
        found[f"per_step_latency_{name}_seq_len"] = step and step.seq_len
    memory = {
        "post_load_memory_gb": speed.loaded_resident_bytes,
        "peak_memory_gb": speed.peak_resident_bytes,
        "post_load_gpu_memory_gb": speed.loaded_gpu_bytes,
        "peak_gpu_memory_gb": speed.peak_gpu_bytes,
    }
    return found | {name: num_bytes and num_bytes / 1e9 for name, num_bytes in memory.items()}


def _commit() -> str | None:
    """Return the commit of the source tree that runs, or None for an installed package."""
    root = Path(infer.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--verify", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    return None


def write_report(path: Path, report: Report) -> Path:
    """Write a report to a file, or to a new file in a folder, and return the file's path."""
    if path.is_dir():
        when = report["timestamp"][:19].translate({ord(each): None for each in "-:"}).replace("T", "-")
        path /= f"bench-{Path(report['model']).name}-{report['suite'] or 'single'}-{when}.json"
    write_whole(path, json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n", "the report ")
    return path


def read_report(path: Path) -> Report:
    """Return a report of an earlier run. Raises InvalidRequestError if the file is none."""
    with refusing(f"the report {path} cannot be read"), suppress(ValueError, RecursionError):
        report: Report = json.loads(path.read_bytes())
        match report:
            case {"format": "infer-bench", "configs": [*configs]} if all(map(_is_config, configs)):
                return report
    raise InvalidRequestError(f"{path} is not a report of infer bench: write one with --report")


def _is_config(config: Any) -> bool:
    has_name = isinstance(config, dict) and isinstance(config.get("name"), str)
    return has_name and all(isinstance(config.get(key), int | float) for key in COMPARED)


def differences(before: Report, after: Report) -> Iterator[str]:
    """Yield a sentence for each condition in which two reports differ."""
    for name in _CONDITIONS:
        if before.get(name) != after.get(name):
            yield f"{name} differs: {before.get(name)} before, {after.get(name)} now"


def compare(before: Report, after: Report) -> dict[str, dict[str, float | None] | str]:
    """Return, for each config of either report, the ratios of its figures, or a text that says which side lacks it.

    A ratio is the figure now divided by the figure before. It is None if the figure before is 0.
    """
    old, new = ({each["name"]: each for each in report["configs"]} for report in (before, after))
    found: dict[str, dict[str, float | None] | str] = dict.fromkeys(new, "only measured now")
    for name, was in old.items():
        now = new.get(name)
        ratios = now and {key: now[key] / was[key] if was[key] else None for key in COMPARED}
        found[name] = ratios or "only in the report"
    return found
