"""`infer bench`: print the measurements as tables and bars for a terminal, or as one JSON object.

With --suite, each config has a row, which is printed when it is measured.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from infer import __version__
from infer.cli.bench.profile import Profile, StepOperation, profile
from infer.cli.bench.speed import Speed, StepTime, Workload, measure, workloads
from infer.cli.command_options import BenchOptions
from infer.cli.commands.bench_report import (
    COMPARED,
    Report,
    check_report,
    compare,
    differences,
    make_report,
    read_report,
    write_report,
)
from infer.cli.terminal import Spinner, TextWriter, columns_of_rows, json_text
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint
from infer.llm import LLM
from infer.models.families import make_architecture
from infer.models.from_checkpoint import device_backend
from infer.system.status_line import bar

LEVELS = "▁▂▃▄▅▆▇█"
_WIDTHS = (21, 7, 7, 10, 14, 14, 11, 8, 9)
_HEADINGS = ("config", "prompt", "new", "TTFT ms", "prompt tok/s", "decode tok/s", "all tok/s", "wall s", "peak MB")


def run_bench(options: BenchOptions) -> None:
    """Load the model, measure it, and print the results."""
    check_report(options.report)
    before = None if options.compare is None else read_report(options.compare)
    runs: dict[str, Any] = {"repeats": options.repeats, "warmups": options.warmup, "seed": options.seed}
    workload = Workload(options.prompt_tokens, options.num_tokens, options.context, **runs)
    architecture = make_architecture(open_checkpoint(options.model).config)
    if architecture.reads_whole_texts:
        raise InvalidRequestError(f"{options.model} is an encoder and generates no text: name a decoder")
    if options.suite is None:
        works, skipped = {_name_of(workload): workload}, dict[str, str]()
    else:
        works = workloads(options.suite, **runs)
        works, skipped = _that_fit(options, works, architecture.most_positions)
    backend = device_backend(options.settings.device)
    llm = _load(options, max(each.max_seq_len for each in works.values()))
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
        single = {"infer_version": __version__} | setting | {"speed": next(iter(speeds.values())).to_json()}
        compared = {} if before is None else {
            "compared": compare(before, report), "differences": list(differences(before, report))
        }  # fmt: skip
        writer.write(json_text((report if options.suite else single) | compared))
    elif before is not None:
        writer.write("\n" + "\n".join(comparison_lines(before, report)))
    writer.end_line()
    if options.report is not None:
        print(f"infer: wrote {write_report(options.report, report)}", file=sys.stderr)


def _name_of(workload: Workload) -> str:
    """Return the name of a config without a suite, which is the same for the same sizes."""
    size = f"{workload.prompt_tokens}/{workload.new_tokens}"
    return size if workload.depth == workload.prompt_tokens else f"{size} at {workload.depth}"


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


def _load(options: BenchOptions, max_seq_len: int) -> LLM:
    with Spinner(f"loading {options.model}") as spinner:
        settings = replace(options.settings, max_seq_len=max_seq_len)
        return LLM(options.model, **vars(settings), on_progress=spinner.progress)


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
        writer.write(memory_line(next(iter(speeds.values()))) + "\n")
    return speeds


def _show_profile(
    llm: LLM, workload: Workload, setting: Mapping[str, Any], writer: TextWriter, *, as_json: bool
) -> None:
    with Spinner(f"profiling {setting['model']}") as spinner:
        measured = profile(llm, workload, spinner.progress)
    if as_json:
        found = {"infer_version": __version__, **setting, "profile": [each.to_json() for each in measured]}
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
    each = "per token" + (f", {1e3 * found.seconds * found.num_tokens:.1f} ms in all" if found.num_tokens > 1 else "")
    where = f"of {found.num_tokens}" if found.num_tokens > 1 else f"at {found.context}"
    yield f"{found.name} {where}: {1e6 * found.seconds:.1f} µs {each}, {found.num_calls} commands"
    if found.num_tokens == 1:
        yield f"  the limit is {found.read_bandwidth / 1e9:.1f} GB/s: as many bytes, read before and after"
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


def columns(values: Sequence[float], highest: float) -> str:
    """Return one character per value, from ▁ for the smallest to █ for the highest."""
    return "".join(LEVELS[round((len(LEVELS) - 1) * value / highest)] for value in values)


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


def memory_line(speed: Speed) -> str:
    line = f"memory after load: {speed.loaded_resident_bytes / 1e6:.0f} MB of the process"
    return line if speed.loaded_gpu_bytes is None else f"{line}, {speed.loaded_gpu_bytes / 1e6:.0f} MB of the GPU"


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
