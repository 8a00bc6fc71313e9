"""Measure only the CPU's kernels of gated delta nets: convolution, gates, recurrence, and the norm of their result.

    python benchmarks/bench_delta_net.py                            one thread and all cores, Qwen3.5-4B's heads
    python benchmarks/bench_delta_net.py --key-heads 16 --value-heads 16

Milliseconds per layer, medians over rounds in which every case has its turn. There are so many layers that they do
not stay in a cache. A page has 64 tokens: its first token folds the page before into a new state.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from harness import available_cores, compare, make_parser, print_head, write_report
from infer.compute import ops
from infer.compute.backends.cpu.recording import record
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.kvcache.groups import page_bytes
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.recurrent_cache import DeltaNetCache
from infer.compute.operands.weights import DeltaNetWeights, Norm
from infer.compute.quantization.kv_layout import Pages

NUM_LAYERS, CONTEXT = 16, 640
CASES = {  # first position, tokens
    "prompt of 512": (0, 512),
    "token at place 1": (65, 1),
    "token at place 31": (95, 1),
    "token at place 63": (127, 1),
    "token that begins a page": (128, 1),
    "four drafts at place 30": (94, 4),
}


def make_weights(net: GatedDeltaNet) -> DeltaNetWeights:
    """Return random weights whose gates forget in 1 to 1,000 tokens, as a trained layer's do."""
    steps = torch.exp(torch.empty(net.num_value_heads).uniform_(-6.9, -2.3))
    return DeltaNetWeights(
        net=net,
        taps=torch.randn(net.num_taps, net.num_channels) * 0.5,
        dt_bias=torch.log(torch.expm1(steps)),
        decay=-torch.empty(net.num_value_heads).uniform_(1, 16),
        norm=Norm(torch.ones(net.value_dim), 1e-6),
    )


def make_cache(net: GatedDeltaNet) -> DeltaNetCache:
    num_pages = CONTEXT // STATE_TOKENS
    memory = torch.zeros(num_pages, page_bytes(net, "f32", STATE_TOKENS), dtype=torch.uint8)
    none = torch.zeros(1, dtype=torch.int64)
    return DeltaNetCache.of_memory(
        memory, net, Pages(STATE_TOKENS, torch.arange(num_pages)[None], none, none, none, none)
    )


def recorded(
    projected: torch.Tensor, weights: DeltaNetWeights, caches: Sequence[DeltaNetCache], start: int, num_threads: int
) -> Callable[[], float]:
    """Return a function that mixes these tokens in each layer, and returns the milliseconds of one layer."""
    count = len(projected)
    with record(count, 1) as run:
        x = run.tensor("projected", *projected.shape)
        x.copy_(projected)
        for cache in caches:
            ops.gated_delta_net(Activations(x), weights, cache, run.step)
    table = DispatchTable(run.commands)

    def measure() -> float:
        run.step.positions[:count] = torch.arange(start, start + count)
        run.step.rows[:count] = 0
        run.state["num_tokens"] = count
        began = time.perf_counter()
        thread_pool().run(table, run.state, num_threads)
        return 1e3 * (time.perf_counter() - began) / len(caches)

    return measure


def main() -> None:
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128, help="of a head's keys and values (128)")
    options = parser.parse_args()
    torch.manual_seed(0)
    net = GatedDeltaNet(options.key_heads, options.value_heads, options.dim, options.dim, num_taps=4)
    weights, caches = make_weights(net), [make_cache(net) for _ in range(NUM_LAYERS)]
    projected = torch.randn(512, net.num_channels + net.value_features + 2 * net.num_value_heads)
    print_head(options, "milliseconds per layer")
    sides = {f"{count} threads": count for count in sorted({1, available_cores()})}
    ops.set_num_threads(max(sides.values()))
    measures = {
        (case, side): recorded(projected[:count], weights, caches, start, sides[side])
        for (case, (start, count)), side in itertools.product(CASES.items(), sides)
    }
    for side in sides:
        measures["prompt of 512", side]()  # fills the pages that the other cases read
    found = compare(CASES, sides, options.rounds, lambda case, side, turn: measures[case, side]())
    write_report(options, results=found.to_json())


if __name__ == "__main__":
    main()
