"""Measure a few layers of a model that is too large for this machine, with its real shapes and random weights.

    python benchmarks/bench_random.py CONFIG.json                       four layers in Q4_K, one thread and all cores
    python benchmarks/bench_random.py CONFIG.json --layers 8 --type Q8_0 --precision fast

CONFIG.json is a model's config in Hugging Face's form. Medians over rounds, per layer: a prompt of 512 tokens, one
token after it, and 2, 4 or 8 tokens after it, as of drafts or of several sequences. `gigabytes_per_second` is what a
decode step reads of the weights (of experts, those that the token chooses) per second.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from harness import available_cores, make_parser, write_report
from infer.cli.bench.speed import weight_bytes_by_kind
from infer.compute import ops
from infer.compute.backends.cpu.capture.forward import CapturedForward
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache
from infer.models.load import load_transformer
from infer.models.transformer import Transformer
from random_weights import random_layers

PROMPT, CONTEXT, FEW = 512, 1024, (2, 4, 8)


def load(config: Path, num_layers: int, type_: str, precision: ops.Precision) -> Transformer:
    few, weights = random_layers(json.loads(config.read_text()), num_layers, type_, vocab_size=1024)
    return load_transformer(
        few, weights, backend=ops.backend_of(torch.device("cpu")), precision=precision, max_seq_len=CONTEXT
    )


def measure(model: Transformer, num_threads: int, rounds: int) -> dict[str, float]:
    ops.set_num_threads(num_threads)
    cache = make_cache(model, CONTEXT)
    cache.reserve(0, CONTEXT)
    captured = CapturedForward(lambda step: model.forward(replace(step, is_recorded=True), cache), PROMPT, 1)
    token_ids = torch.randint(0, 1024, (PROMPT + rounds,), generator=torch.Generator().manual_seed(0)).tolist()
    captured.run(Step.of(token_ids[:PROMPT]))
    prompt = median(seconds(lambda: captured.run(Step.of(token_ids[:PROMPT]))) for _ in range(3))
    steps = [Step.of([token_ids[at]], at) for at in range(PROMPT, PROMPT + rounds)]
    token = median(seconds(lambda step=step: captured.run(step)) for step in steps)  # type: ignore[misc]
    times = {"decode": token}
    for count in FEW:
        step = Step.of(token_ids[:count], PROMPT)
        times[f"step_of_{count}"] = median(seconds(partial(captured.run, step)) for _ in range(rounds))
    return {f"{name}_ms_per_layer": 1e3 * time / len(model.layers) for name, time in times.items()} | {
        "prompt_ms_per_token_and_layer": 1e3 * prompt / PROMPT / len(model.layers),
        "gigabytes_per_second": sum(weight_bytes_by_kind(model).values()) / token / 1e9,
    }


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = make_parser(__doc__, rounds=60)
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--precision", default="exact", choices=["exact", "fast"])
    options = parser.parse_args()
    model = load(options.config, options.layers, options.type, options.precision)
    results = {f"{count} threads": measure(model, count, options.rounds) for count in {1, available_cores()}}
    print(json.dumps(results, indent=1))
    write_report(options, results=results)


if __name__ == "__main__":
    main()
