"""Time to the first token, decode rate and memory of one model, for workloads of fixed lengths.

    python benchmarks/bench_generation.py --suite quick            short-greedy, medium-greedy
    python benchmarks/bench_generation.py --suite standard         quick and prefill-heavy, decode-heavy, medium-sampled
    python benchmarks/bench_generation.py --suite full             all seven configs
    python benchmarks/bench_generation.py --prompt-tokens 256 --max-new-tokens 256 --temperature 0.8
    python benchmarks/bench_generation.py --prompt "Once upon a time" --max-new-tokens 64
    python benchmarks/bench_generation.py --config short-greedy --no-kv-cache
    python benchmarks/bench_generation.py --compare A.json B.json

Seed 42, two warm-ups, three trials; medians over the trials, latencies over all their steps. EOS is ignored, so that
every trial generates the same number of tokens. The memory's speed is measured between the trials. Each config also
leaves a JSON report in benchmarks/reports/, with --plot a picture of the time per token against length beside it, and
with --log NOTE a row in benchmarks/log/GENERATION_LOG.md.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from command_line import REPORTS, available_cores, make_parser
from generation_report import append_log, compare, log_row, picture, table
from infer import LLM, GenerationResult, SamplingParams, __version__
from infer.bench.speed import kv_bytes, weight_bytes_by_kind
from infer.outputs import GenerationTiming, percentile
from machine import device_line, read_rate, resident_bytes, unmeasured_bytes
from workload import CONFIGS, SEED, SUITES, Config, make_synthetic_prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from recompute import generate_recomputed

COLD_START = (
    "from infer import LLM, SamplingParams; import sys; "
    "next(LLM(sys.argv[1], device=sys.argv[2], dtype=sys.argv[3]).stream('Once upon a time', SamplingParams()))"
)


@dataclass(frozen=True)
class Setting:
    """What all configs of one run share."""

    model: str
    dtype: str
    device: str
    threads: int
    kv_cache: bool
    warmups: int
    trials: int
    load_seconds: float
    post_load_bytes: int
    cold_start_seconds: float | None


def measure(llm: LLM, setting: Setting, config: Config, prompt: list[int]) -> dict[str, Any]:
    params = SamplingParams(**config.sampling, max_new_tokens=config.new_tokens, seed=SEED, ignore_eos=True)
    is_cuda = setting.device.startswith("cuda")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()

    def run() -> GenerationResult:
        if setting.kv_cache:
            return llm.generate(prompt, params)
        return generate_recomputed(llm, prompt, params)

    for _ in range(setting.warmups):
        run()
    peak = torch.cuda.max_memory_allocated() if is_cuda else unmeasured_bytes(setting.threads)
    results, rates = [], []
    for _ in range(setting.trials):
        rates += [] if is_cuda else [read_rate(setting.threads)]
        results.append(run())
    report = summarize(setting, config, results) | {"peak_memory_gb": peak / 2**30}
    return report | bandwidth(llm, setting, report, rates)


def bandwidth(llm: LLM, setting: Setting, report: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """What decoding reads a second, and its share of what the memory gave; of a GPU the first alone."""
    names = ("achieved_gb_per_s", "read_bandwidth_gb_per_s", "bandwidth_share")
    if not setting.kv_cache:
        return dict.fromkeys(names)
    length = report["prompt_tokens"] + report["generated_tokens"] // 2
    num_bytes = sum(weight_bytes_by_kind(llm.model).values()) + kv_bytes(llm.model, length)
    achieved = num_bytes * report["decode_throughput_median_tps"] / 1e9
    read = max(rates) / 1e9 if rates else None
    return dict(zip(names, (achieved, read, achieved / read if read else None), strict=True))


def summarize(setting: Setting, config: Config, results: list[GenerationResult]) -> dict[str, Any]:
    timings = [result.timing for result in results]
    steps = [(seconds, i + 1) for timing in timings for i, seconds in enumerate(timing.inter_token_times_s)]
    prompt_tokens = results[0].prompt_tokens
    milliseconds = [seconds * 1e3 for seconds, _ in steps] or [0.0]
    fastest, slowest = (min(steps), max(steps)) if steps else ((0.0, 0), (0.0, 0))
    return {
        "config": config.name,
        "kv_cache": setting.kv_cache,
        "model": setting.model,
        "dtype": setting.dtype,
        "device": setting.device,
        "device_name": device_line(setting.device, setting.threads),
        "threads": setting.threads,
        "infer_version": __version__,
        "torch_version": torch.__version__,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": results[0].generated_tokens,
        "sampling": config.sampling,
        "seed": SEED,
        "warmups": setting.warmups,
        "trials": setting.trials,
        "ttft_median_ms": median(t.ttft_s for t in timings) * 1e3,
        "prompt_throughput_median_tps": median(prompt_tokens / t.prefill_time_s for t in timings),
        "decode_time_median_s": median(t.total_time_s - t.prefill_time_s for t in timings),
        "decode_throughput_median_tps": median(_steps_per_second(t) for t in timings),
        "sampling_share_median": median(t.sampling_time_s / t.total_time_s for t in timings),
        "per_step_latency_mean_ms": mean(milliseconds),
        "per_step_latency_p50_ms": percentile(milliseconds, 50),
        "per_step_latency_p95_ms": percentile(milliseconds, 95),
        "per_step_latency_p99_ms": percentile(milliseconds, 99),
        "per_step_latency_min_ms": fastest[0] * 1e3,
        "per_step_latency_min_at": prompt_tokens + fastest[1],
        "per_step_latency_max_ms": slowest[0] * 1e3,
        "per_step_latency_max_at": prompt_tokens + slowest[1],
        "wall_median_s": median(t.total_time_s for t in timings),
        "end_to_end_throughput_tps": median(r.generated_tokens / r.timing.total_time_s for r in results),
        "load_s": setting.load_seconds,
        "cold_start_s": setting.cold_start_seconds,
        "post_load_memory_gb": setting.post_load_bytes / 2**30,
        "per_step_ms": [1e3 * median(each) for each in zip(*(t.inter_token_times_s for t in timings), strict=False)],
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _steps_per_second(timing: GenerationTiming) -> float:
    """Of all steps: the rate that `infer` shows leaves out the first two."""
    seconds = timing.decode_time_s + timing.sampling_time_s
    return len(timing.decode_times_s) / seconds if seconds else 0.0


def measure_cold_start(model: str, device: str, dtype: str) -> float:
    """From the start of a fresh process to its first token; kernels are compiled by then."""
    start = time.perf_counter()
    command = [sys.executable, "-c", COLD_START, model, device, dtype]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, model="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--suite", choices=list(SUITES))
    parser.add_argument("--config", choices=list(CONFIGS), help="one config of the suites")
    parser.add_argument("--prompt", help="a text, as it is")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="a synthetic prompt of exactly so many tokens")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--no-kv-cache", action="store_true", help="compute the whole sequence again for each token")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="two reports, no run")
    parser.add_argument("--plot", action="store_true", help="a picture of the time per token beside the report")
    parser.add_argument("--log", metavar="NOTE", help="add a row with this remark to the log")
    parser.add_argument("--no-cold-start", action="store_true")
    parser.add_argument("--no-report", action="store_true", help="print only")
    return parser.parse_args()


def ad_hoc_config(arguments: argparse.Namespace) -> Config:
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    sampling |= {"repetition_penalty": arguments.repetition_penalty}
    if arguments.top_k is not None:
        sampling["top_k"] = arguments.top_k
    return Config("ad-hoc", arguments.prompt_tokens, arguments.max_new_tokens, sampling)


def load(arguments: argparse.Namespace) -> tuple[LLM, Setting]:
    start = time.perf_counter()
    llm = LLM(arguments.model, device=arguments.device, dtype=arguments.dtype, threads=arguments.threads)
    load_seconds = time.perf_counter() - start
    is_cuda = arguments.device.startswith("cuda")
    post_load_bytes = torch.cuda.memory_allocated() if is_cuda else resident_bytes()
    llm.generate("Once upon a time", SamplingParams(max_new_tokens=2))  # compiles what is not yet compiled
    cold_start = None
    if not arguments.no_cold_start:
        cold_start = measure_cold_start(arguments.model, arguments.device, arguments.dtype)
    return llm, Setting(
        model=arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads or available_cores(),
        kv_cache=not arguments.no_kv_cache,
        warmups=arguments.warmups,
        trials=arguments.trials,
        load_seconds=load_seconds,
        post_load_bytes=post_load_bytes,
        cold_start_seconds=cold_start,
    )


def main() -> None:
    arguments = parse_arguments()
    if arguments.compare:
        print(compare(arguments.compare))
        return
    names = SUITES[arguments.suite] if arguments.suite else [arguments.config] if arguments.config else []
    configs = [CONFIGS[name] for name in names] or [ad_hoc_config(arguments)]
    llm, setting = load(arguments)
    for config in configs:
        if arguments.prompt is not None and not names:
            prompt = llm.tokenizer.encode(arguments.prompt)
        else:
            prompt = make_synthetic_prompt(llm.tokenizer.encode, config.prompt_tokens)
        report = measure(llm, setting, config, prompt)
        print(table(report), flush=True)
        if not arguments.no_report:
            REPORTS.mkdir(exist_ok=True)
            path = REPORTS / f"generation-{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
            path.write_text(json.dumps(report, indent=1) + "\n")
            if arguments.plot:
                path.with_suffix(".svg").write_text(picture(report))
        if arguments.log is not None:
            append_log([log_row(report, arguments.log)])


if __name__ == "__main__":
    main()
