"""The kernels on a CUDA GPU: what they compute, and how long it takes.

    python benchmarks/check_gpu.py                                   the sampler: tokens, then timings, a few minutes
    python benchmarks/check_gpu.py --weights                         the ops that read weights (`gpu_weights`)
    python benchmarks/check_gpu.py --all --json benchmarks/reports/gpu.json     every section, within 8 minutes
    python benchmarks/check_gpu.py --all --device cpu --tiny                    the same in the interpreter
    python benchmarks/check_gpu.py --no-timing                       tokens only
    python benchmarks/check_gpu.py --json benchmarks/reports/gpu_sampler.json
    TRITON_INTERPRET=1 python benchmarks/check_gpu.py --device cpu --no-timing --rows 2 --vocab 500     without a GPU
    TRITON_INTERPRET=1 python benchmarks/check_gpu.py --weights --device cpu                            the same

Tokens are compared with `sampling.sampler` on the same device and on the CPU: all three must agree. A timing is the
median of CUDA events around replays of a graph, each replay on another buffer of logits, so that nothing is found in
the cache that a model would not have left there; the torch definition runs eagerly, in turns with it. Goals for 64 rows
of 128,256 on an H200: 20 µs for temperature and noise, 100 µs for top-k with top-p. Exits 1 where a token differs.
"""

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpu_all
import gpu_weights
from command_line import make_parser
from infer import __version__, ops
from infer.sampling import sampler
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.sampling.masks import num_mask_words
from infer.sampling_params import SamplingParams

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "noise": {"temperature": 1.0},
    "temperature": {"temperature": 0.8},
    "top_k + top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.2, "logit_bias": {7: 2.0, 11: -3.0},
    },
    "wide top_p": {"temperature": 2.0, "top_p": 0.99},
    "wide top_k": {"temperature": 2.0, "top_k": 20_000},
    "temperature last": {"temperature": 1.5, "top_p": 0.8, "temperature_last": True},
}  # fmt: skip
GOALS_MICROSECONDS = {"noise": 20.0, "temperature": 20.0, "top_k + top_p": 100.0}
BUFFERS = 4
CONTEXT = 200


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """float32 on the CPU: normal, peaked as a model's, flat, tied as bfloat16's, extreme."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "peaked":
        return normal * 2.0 - 3.0 * torch.rand(num_rows, vocab_size, generator=generator).log()
    if kind == "tied":
        return (normal * 3).bfloat16().float().round()
    return normal * {"normal": 3.0, "flat": 0.01, "extreme": 1e37}[kind]


def make_columns(
    options: dict[str, Any], num_rows: int, vocab_size: int, device: torch.device
) -> tuple[SamplingColumns, History]:
    """Each row with a seed of its own, the same on every device."""
    generator = random.Random(0)
    options = {**options}
    if (options.get("top_k") or 0) >= vocab_size:
        options["top_k"] = vocab_size // 2
    params = [SamplingParams(seed=generator.getrandbits(64), **options) for _ in range(num_rows)]
    columns = SamplingColumns.of(params, vocab_size, num_prompt_tokens=[CONTEXT // 2] * num_rows, device=device)
    history = History(num_rows, 2 * CONTEXT, vocab_size, device)
    for slot in columns.history_slot[columns.history_slot >= 0].tolist():
        history.begin(slot, [generator.randrange(vocab_size) for _ in range(CONTEXT)], CONTEXT // 2)
    return columns, history


def check_tokens(device: torch.device, num_rows: int, vocab_sizes: list[int]) -> Iterator[dict[str, Any]]:
    """One result for each configuration and kind of logits: how many tokens differ."""
    for vocab_size in vocab_sizes:
        for name, options in CONFIGURATIONS.items():
            here, there = (
                make_columns(options, num_rows, vocab_size, where) for where in (torch.device("cpu"), device)
            )
            for seed, kind in enumerate(("normal", "peaked", "flat", "tied", "extreme")):
                logits, positions = make_logits(kind, num_rows, vocab_size, seed), torch.arange(num_rows) + CONTEXT
                words = torch.randint(-(2**31), 2**31, (num_rows, num_mask_words(vocab_size)), dtype=torch.int64)
                allowed = words.to(torch.int32) if kind == "normal" else None
                on_cpu = sampler.choose_tokens(logits, *here, positions, allowed)
                arguments = (logits.to(device), *there, positions.to(device))
                mask = None if allowed is None else allowed.to(device)
                torch_there = sampler.choose_tokens(*arguments, mask).cpu()
                with ops.using("cuda"):
                    ours = ops.choose_tokens(*arguments, mask).cpu()
                yield {
                    "vocab_size": vocab_size,
                    "configuration": name,
                    "logits": kind,
                    "rows": num_rows,
                    "differ_from_torch_on_cpu": int((ours != on_cpu).sum()),
                    "differ_from_torch_on_device": int((ours != torch_there).sum()),
                }


def check_logprobs(device: torch.device, num_rows: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """One result for each kind of sampling and of log-probabilities: how many rows differ from the CPU's in any bit."""
    from infer.backends.cuda.graphs import CudaGraphs, Repeats
    from infer.backends.cuda.logprobs import Logprobs
    from infer.backends.cuda.sampler import choose_lines

    logits, positions = make_logits("peaked", num_rows, vocab_size, 0), torch.arange(num_rows) + CONTEXT
    for name in ("greedy", "temperature", "top_k + top_p", "everything", "wide top_p", "temperature last"):
        for mode in ("raw", "processed"):
            options = CONFIGURATIONS[name] | {"logprobs": 5, "logprobs_mode": mode}
            here, (columns, history) = (
                make_columns(options, num_rows, vocab_size, where) for where in (torch.device("cpu"), device)
            )
            logprobs = Logprobs(device, CudaGraphs(device) if device.type == "cuda" else Repeats())
            records = logprobs.records(columns, num_rows, torch.zeros(1, dtype=torch.int64, device=device))
            token_ids = choose_lines(
                logits.to(device), columns, history, positions.to(device), None, None, records
            ).tolist()
            logprobs.fetch(columns, num_rows)
            ops.backend_of(device).synchronize()
            lines = [range(row, row + 1) for row in range(num_rows)]
            found = logprobs.of(columns, lines, [[token_id] for token_id in token_ids])
            expected = sampler.sample(logits, *here, positions)
            differ = sum(found[row] != [expected.logprob_of(row, 5)] for row in range(num_rows))
            yield {"configuration": name, "log-probabilities": mode, "rows": num_rows, "differ": differ}


def captured(step: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def microseconds(steps: list[Callable[[], Any]]) -> float:
    """Per step, one after another between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in steps:
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / len(steps)


def time_configuration(name: str, device: torch.device, num_rows: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    columns, history = make_columns(CONFIGURATIONS[name], num_rows, vocab_size, device)
    positions = torch.arange(num_rows, device=device) + CONTEXT
    buffers = [make_logits("peaked", num_rows, vocab_size, seed).to(device) for seed in range(BUFFERS)]

    def ours(logits: Tensor) -> Callable[[], Tensor]:
        return lambda: ops.choose_tokens(logits, columns, history, positions)

    def torchs(logits: Tensor) -> Callable[[], Tensor]:
        return lambda: sampler.choose_tokens(logits, columns, history, positions)

    with ops.using("cuda"):
        graphs = [captured(ours(logits)) for logits in buffers]
        sides = {
            "graph": [graph.replay for graph in graphs] * 25,
            "launched": [ours(logits) for logits in buffers] * 5,
            "torch": [torchs(logits) for logits in buffers],
            "read": [lambda x=logits: x.amax() for logits in buffers] * 25,
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds + 1):
            for side, steps in sides.items():
                times[side].append(microseconds(steps))
    medians = {f"{side}_microseconds": statistics.median(values[1:]) for side, values in times.items()}
    goal = GOALS_MICROSECONDS.get(name)
    return {"configuration": name, "rows": num_rows, "vocab_size": vocab_size, **medians, "goal_microseconds": goal}


def check_weights(device: torch.device, has_timing: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Checks and timings of the ops that read weights, printed one by one; in the interpreter of tiny matrices."""
    rows, columns, counts, trials = (2048, 2048, [1, 2, 8, 16, 512], 200)
    if device.type == "cpu":
        rows, columns, counts, trials = (5, 256, [1, 9], 1)
    checks, timings = [], []
    for check in chain(
        gpu_weights.check_values(device, rows, columns, counts),
        gpu_weights.check_invariance(device, rows, columns, counts[-1] + 1, trials),
    ):
        checks.append(check)
        print("right " if check["is_right"] else "WRONG ", *check.values(), flush=True)
    if has_timing and device.type == "cuda":
        for timing in gpu_weights.time_products(device, 8192, 4096, [1, 4, 64, 512]):
            timings.append(timing)
            print(*timing.values(), flush=True)
    return checks, timings


def describe(device: torch.device) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    return {
        "infer": __version__, "torch": torch.__version__, "triton": triton.__version__, "device": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__, rounds=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[1000, 49_152, 128_256, 262_144])
    parser.add_argument("--timing-vocab", type=int, default=128_256)
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--section", choices=list(gpu_all.SECTIONS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA GPU: --device cpu with TRITON_INTERPRET=1 checks the tokens slowly", file=sys.stderr)
        return 2
    if options.section:
        gpu_all.run_section(options.section, device, options.tiny)
        return 0
    if options.all:
        reports = gpu_all.run_all(device, options.tiny)
        if options.json:
            report = {**describe(device), "sections": reports}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return 1 if any(report["wrong"] or report["trouble"] for report in reports) else 0

    if options.weights:
        checks, timings = check_weights(device, not options.no_timing)
        if options.json:
            report = {**describe(device), "checks": checks, "timings": timings}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return 0 if all(check["is_right"] for check in checks) else 1
    checks = []
    for result in check_tokens(device, options.rows, options.vocab):
        checks.append(result)
        is_equal = not (result["differ_from_torch_on_cpu"] or result["differ_from_torch_on_device"])
        print("equal " if is_equal else "DIFFER", *result.values(), flush=True)
    num_wrong = sum(bool(r["differ_from_torch_on_cpu"] or r["differ_from_torch_on_device"]) for r in checks)
    print(f"{len(checks) - num_wrong} of {len(checks)} batches equal")

    timings = []
    if not options.no_timing and device.type == "cuda":
        print("µs per step, median:  graph  launched  torch  one read of the logits  (goal)")
        for name in CONFIGURATIONS:
            timing = time_configuration(name, device, options.rows, options.timing_vocab, options.rounds)
            timings.append(timing)
            values = [timing[f"{side}_microseconds"] for side in ("graph", "launched", "torch", "read")]
            print(f"{name:18}", *(f"{value:10.1f}" for value in values), timing["goal_microseconds"] or "", flush=True)
    if options.json:
        report = {**describe(device), "checks": checks, "timings": timings}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
