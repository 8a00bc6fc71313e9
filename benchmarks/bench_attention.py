"""Attention alone: multiplications a second and bytes of keys and values a second, by kv type, context and tokens.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --kv-types f16 q8 --contexts 512 2048 --tokens 1 2 8 64 512 --threads 1
    python benchmarks/bench_attention.py --rows 16 --tokens 16        one token of each of 16 rows
    python benchmarks/bench_attention.py --threads 2 --neighbours 1   beside a process that does nothing but run

The heads are SmolLM2's, the layers as many, so that nothing stays in a cache from one step to the next. The least of
many rounds (beside neighbours the median), rotation not included. A multiplication is a product and its addition; of a
chunk of a prompt only those count that its tokens see. The order of sums, and so the work, is the same for every number
of tokens.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from bench_busy import busy_neighbours
from command_line import make_parser
from infer import ops
from infer.backends.cpu.capture.forward import CapturedForward
from infer.backends.cpu.isa import instruction_set
from infer.kvcache.paged import PagedCache
from infer.llm import set_num_threads
from infer.operands.architecture import Layer
from infer.operands.step import Step
from infer.operands.weights import Heads, RopeTable
from infer.quantization.kv_formats import BLOCK_POSITIONS, KV_TYPES, key_block_bytes, value_block_bytes
from infer.quantization.kv_layout import LayerCache, Pages

PAGE_TOKENS = 64
CALIBRATION_ROUNDS = 20


def make_layers(heads: Heads, count: int, kv_type: str, rows: int, capacity: int) -> list[LayerCache]:
    per_row = -(-capacity // PAGE_TOKENS)
    none = torch.zeros(rows, dtype=torch.int64)
    pages = Pages(PAGE_TOKENS, torch.arange(rows * per_row).view(rows, per_row), none, none, none, none)
    layer = Layer(heads.num_heads, heads.num_kv_heads, heads.head_dim, 1, None, 1.0)
    cache = PagedCache([layer] * count, rows, capacity, kv_type, torch.device("cpu"), step_tokens=512)
    return [replace(layer, pages=pages) for layer in cache.memory.layers]


def measure(
    kv_type: str, heads: Heads, num_layers: int, context: int, tokens: int, rows: int, seconds: float,
    statistic: Callable[[list[int]], float],
) -> dict[str, float]:  # fmt: skip
    dim, features = heads.head_dim, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    layers = make_layers(heads, num_layers, kv_type, rows, context + tokens)
    qkv = torch.randn(512, features, generator=torch.Generator().manual_seed(0))

    def forward(step: Step) -> torch.Tensor:
        return [ops.attend(qkv, heads, layer, step) for layer in layers][-1]

    captured = CapturedForward(forward, 512, 1)
    for row in range(rows):
        for start in range(0, context, 512):
            captured.run(Step.of([1] * min(512, context - start), start, row=row))
    share = tokens // rows
    step = Step.join([Step.of([1] * share, context, row=row) for row in range(rows)])
    found, rates, stop = [], [], time.perf_counter() + seconds
    while time.perf_counter() < stop or len(found) < 3:
        started = time.perf_counter()
        cycles = captured.profile(step)
        rates.append((time.perf_counter() - started) / sum(spent for _, spent in cycles))
        found.append(sum(spent for label, spent in cycles if not label.endswith("rotate")))
    taken = statistic(found) * float(np.min(rates)) / num_layers
    seen = rows * sum(context + index + 1 for index in range(share))
    block_bytes = key_block_bytes(kv_type, dim) + value_block_bytes(kv_type, dim)
    cached = rows * (context + share) * heads.num_kv_heads * block_bytes / BLOCK_POSITIONS
    return {
        "microseconds": 1e6 * taken,
        "gmacs": 2 * seen * heads.num_heads * dim / taken / 1e9,
        "gigabytes_per_second": cached / taken / 1e9,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kv-types", nargs="+", default=["f16"], choices=KV_TYPES)
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--rows", type=int, default=1, help="tokens are shared out over so many sequences")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--heads", nargs=3, type=int, default=[9, 3, 64], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case")
    parser.add_argument("--neighbours", type=int, default=0, help="processes that do nothing but run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_heads, kv_heads, dim = options.heads
    angles = torch.arange(max(options.contexts) + 513)[:, None] / 10000.0 ** torch.linspace(0, 1, dim // 2)
    heads = Heads(num_heads, kv_heads, dim, dim**-0.5, RopeTable(angles.cos()[None], angles.sin()[None]), None, None)
    print(f"{instruction_set().name}, heads {num_heads} / {kv_heads} × {dim}, {options.layers} layers")
    rest = options.rows, options.seconds, median if options.neighbours else min
    with busy_neighbours(options.neighbours):
        for threads in options.threads:
            set_num_threads(threads)
            for kv_type in options.kv_types:
                for context in options.contexts:
                    for tokens in options.tokens:
                        case = {"threads": threads, "kv_type": kv_type, "context": context, "tokens": tokens}
                        found = measure(kv_type, heads, options.layers, context, tokens, *rest)
                        if options.json:
                            print(json.dumps(case | found), flush=True)
                            continue
                        print(
                            f"{threads} threads {kv_type:>4} context {context:>5} tokens {tokens:>3}"
                            f" {found['microseconds']:9.1f} µs a layer {found['gmacs']:6.1f} GMAC/s"
                            f" {found['gigabytes_per_second']:5.1f} GB/s",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
