"""Measure only the CPU's kernels: products with weights, and attention.

    python benchmarks/bench_kernels.py products                       GMAC/s of one thread, by type and precision
    python benchmarks/bench_kernels.py attention --contexts 512 2048 --tokens 1 8 64 --kv-types f16 q8
    python benchmarks/bench_kernels.py products --cpu haswell --sources ../before/src src --sets avx2 avx512vnni

products    `cache`: one token × weights that stay in the second cache; `memory`: one token × weights larger than all
            caches; `prompt`: 64 tokens
attention   GMAC/s with SmolLM2's heads, in as many layers, so that no layer stays in a cache; rotation not included. A
            multiplication counts if the token sees its position

A figure is the fastest of several runs, and the median over the rounds. Each source tree and instruction set has a
process of its own; ratios are to the first one.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from harness import add_code_options, answer_lines, code_workers, compare, make_parser, print_head, write_report

SIZES = {"cache": (512, 1, 40), "memory": (131072, 1, 1), "prompt": (512, 64, 1)}  # rows, tokens, repeats
COLUMNS = 768
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 9, 3, 64, 30  # SmolLM2's
PAGE_TOKENS, STEP_TOKENS = 64, 512

Measure = Callable[[], float]


@cache
def product(type_: str, precision: Any, size: str) -> Measure:
    """Return a function that measures the GMAC/s of one recorded projection."""
    from infer.compute import ops
    from infer.compute.backends.cpu.recording import record
    from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
    from infer.compute.backends.cpu.threads.pool import thread_pool
    from infer.compute.operands.weights import Projection
    from random_weights import make_weight

    rows, tokens, repeats = SIZES[size]
    packed = ops.prepare(Projection((make_weight(type_, rows, COLUMNS),)), torch.device("cpu"), precision)
    with record(tokens, 1) as run:
        ops.norm_project(torch.randn(tokens, COLUMNS), None, packed)
    run.state["num_tokens"] = tokens
    table, times = DispatchTable(run.commands), np.zeros(len(run.commands), np.int64)
    table.arguments["times"], table.arguments["repeats"] = times.ctypes.data, repeats
    products = rows * COLUMNS * tokens * repeats

    def measure(_packed: Any = packed) -> float:
        """Return the time of the matmul, computed from its share of the cycles."""
        times[:] = 0
        began = time.perf_counter()
        thread_pool().run(table, run.state, 1)
        seconds = time.perf_counter() - began
        return float(products / (seconds * times[-1] / times.sum()) / 1e9)

    return measure


@cache
def attention(kv_type: str, context: int, tokens: int) -> Measure:
    """Return a function that measures the GMAC/s of all layers' attention after a context."""
    from infer.compute import ops
    from infer.compute.backends.cpu.capture.forward import CapturedForward
    from infer.compute.kvcache.paged import PagedCache
    from infer.compute.operands.mixers import Attention
    from infer.compute.operands.step import Step
    from infer.compute.operands.weights import Heads, RopeTable
    from infer.compute.quantization.kv_layout import Pages

    angles = torch.arange(context + tokens + 1)[:, None] / 10000.0 ** torch.linspace(0, 1, HEAD_DIM // 2)
    rope = RopeTable(angles.cos()[None], angles.sin()[None])
    heads = Heads(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rope, None, None)
    num_pages, none = -(-(context + tokens) // PAGE_TOKENS), torch.zeros(1, dtype=torch.int64)
    pages = Pages(PAGE_TOKENS, torch.arange(num_pages)[None], none, none, none, none)
    layer = Attention(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, None, 1.0)
    cache = PagedCache([layer] * NUM_LAYERS, 1, context + tokens, kv_type, torch.device("cpu"), step_tokens=STEP_TOKENS)
    layers = [replace(each, pages=pages) for each in cache.memory.layers]
    features = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = ops.Activations(torch.randn(STEP_TOKENS, features, generator=torch.Generator().manual_seed(0)))

    def forward(step: Step) -> torch.Tensor:
        return [ops.attend(qkv, heads, each, step).floats for each in layers][-1]

    captured = CapturedForward(forward, STEP_TOKENS, 1)
    for start in range(0, context, STEP_TOKENS):
        captured.run(Step.of([1] * min(STEP_TOKENS, context - start), start))
    step = Step.of([1] * tokens, context)
    seen = sum(context + index + 1 for index in range(tokens))
    products = 2 * seen * NUM_HEADS * HEAD_DIM * NUM_LAYERS

    def measure(_cache: Any = cache) -> float:
        began = time.perf_counter()
        cycles = captured.profile(step)
        seconds = time.perf_counter() - began
        attended = sum(spent for label, spent in cycles if not label.endswith("rotate"))
        return float(products / (seconds * attended / sum(spent for _, spent in cycles)) / 1e9)

    return measure


def make_measures(options: argparse.Namespace) -> dict[str, Measure]:
    """Return a measure per case. Its weights and caches are made when it is called first."""
    if options.what == "products":
        kinds = itertools.product(options.types, ("exact", "fast"), SIZES)
        return {" ".join(kind): lambda kind=kind: product(*kind)() for kind in kinds}
    sizes = itertools.product(options.kv_types, options.contexts, options.tokens)
    return {f"{kv} context {c} tokens {n}": lambda each=(kv, c, n): attention(*each)() for kv, c, n in sizes}


def work(options: argparse.Namespace) -> None:
    """Answer each request with the best figure of some runs of a case."""
    from infer.llm import set_num_threads

    set_num_threads(options.threads)
    measures = make_measures(options)
    answer_lines(measure=lambda case: max(measures[case]() for _ in range(options.runs)))


def main() -> None:
    parser = make_parser(__doc__, threads=1, rounds=5)
    parser.add_argument("what", choices=("products", "attention"))
    add_code_options(parser)
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q4_0", "Q8_0", "Q4_K", "Q6_K"], help="of weights")
    parser.add_argument("--kv-types", nargs="+", default=["f16"], help="of keys and values")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048], help="tokens")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512], help="that attend in one step")
    parser.add_argument("--runs", type=int, default=8, help="of a case, in a round; the fastest counts")
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    print_head(options, "GMAC/s")
    with code_workers(options) as workers:
        cases = list(make_measures(options))
        figures = compare(cases, workers, options.rounds, lambda case, side, _: workers[side].ask("measure", case=case))
    write_report(options, figures=figures.to_json())


if __name__ == "__main__":
    main()
