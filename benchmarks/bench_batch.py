"""How decoding scales with the number of sequences: steps of a token for each, in multi-steps as in real use.

    python benchmarks/bench_batch.py                                    1 to 64 sequences after 64, 1,024, 4,096 tokens
    python benchmarks/bench_batch.py --contexts 1024 --shared           the same after a prefix whose pages they share
    python benchmarks/bench_batch.py --sources ../before/src src --sets avx2 avx512vnni --threads 1
    python benchmarks/bench_batch.py --sequences 1 16 --profile         which commands take the time

A figure is the fastest step of all rounds (the forward + the sampling, as the walk's own stamps say), tokens a second,
and × of one sequence's. Each source tree and instruction set is a process of its own; they take turns. Sizes of more
than `--most` tokens in all are left out. `--cpu` compiles for a CPU that has less than this one.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import torch

from bench_products import FEATURES
from command_line import make_parser
from infer import SamplingParams, load_model, ops
from infer.bench.profile import split_label
from infer.bench.speed import make_prompt
from infer.operands.step import Chunk, Step
from infer.runner.runner import Runner
from infer.sampling.columns import SamplingColumns

PART, STEPS = 64, 8  # tokens whose keys and values fill a context, again and again; steps of a multi-step
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


class Load:
    """Slots with so many tokens each, in pages of their own or in those of the first."""

    def __init__(self, options: argparse.Namespace) -> None:
        ops.set_num_threads(options.threads)
        self.model, _ = load_model(options.model, max_seq_len=max(options.contexts) + STEPS + 1)
        self.options, self.columns = options, dict[tuple[int, bool], SamplingColumns]()
        sizes = list(itertools.product(options.contexts, options.sequences))
        most = max(count * (context + 64 + STEPS) for context, count in sizes if count * context <= options.most)
        self.runner = Runner(
            self.model, self.model.max_seq_len, num_slots=max(options.sequences), pool_pages=most // 64 + 1
        )
        self.runner.extend(0, make_prompt(self.model, PART, seed=0))
        self.part = dict(self.runner.cache.export_row(0))

    def fill(self, count: int, context: int) -> None:
        for slot in range(self.runner.num_slots):
            self.runner.truncate(slot, 0)
        tensors = {}
        for name, part in self.part.items():
            repeats = 1 if name == "states" else context // PART
            tensors[name] = part if repeats == 1 else part.repeat(1, repeats, *[1] * (part.dim() - 2))
        for slot in range(count):
            if slot == 0 or not self.options.shared:
                self.runner.import_slot(slot, tensors, context)
            else:
                self.runner.copy_slot(slot, 0)
            self.runner.reserve(slot, STEPS)

    def times(self, count: int, *, is_sampled: bool) -> tuple[float, float]:
        """(forward, sampling) in milliseconds: of each the least of a multi-step."""
        if (count, is_sampled) not in self.columns:
            params: dict[str, Any] = SAMPLED if is_sampled else {"temperature": 0}
            some = [SamplingParams(**params, seed=slot) for slot in range(count)]
            self.columns[count, is_sampled] = SamplingColumns.of(some, self.model.architecture.vocab_size)
        chunks = [Chunk(slot, [5 + slot]) for slot in range(count)]
        with torch.inference_mode():
            _, ends = self.runner.multi_step(chunks, STEPS, self.columns[count, is_sampled], None, ())
        forward = min(end.forward - before.sampling for before, end in itertools.pairwise(ends))
        return 1e3 * forward, 1e3 * min(end.sampling - end.forward for end in ends)

    def profile(self, count: int) -> dict[str, int]:
        """Thread 0's cycles of a step, by kind of command."""
        chunks, found = [Chunk(slot, [5 + slot]) for slot in range(count)], Counter[str]()
        step = Step.of_chunks(chunks, [self.runner.lengths[slot] for slot in range(count)])
        for label, cycles in self.runner._captured.profile(step):  # type: ignore[union-attr]
            name = label.rpartition(".")[2]
            found[split_label(label)[1] if name.startswith("matmul") else name] += cycles
        return dict(found)


def work(options: argparse.Namespace) -> None:
    """Answer each line of input with the figures of a size."""
    load = Load(options)
    print(flush=True)
    for line in sys.stdin:
        count, context = json.loads(line)
        load.fill(count, context)
        runs = [load.times(count, is_sampled=options.sampled) for _ in range(options.runs)]
        found: dict[str, Any] = dict(zip(("forward", "sampling"), map(min, zip(*runs, strict=True)), strict=True))
        if options.profile:
            profiles = [load.profile(count) for _ in range(options.runs)]
            found["profile"] = {kind: min(one[kind] for one in profiles) for kind in profiles[0]}
        print(json.dumps(found), flush=True)


def start(source: str, set_: str | None, options: argparse.Namespace) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source)}
    if set_ is not None:
        environment["INFER_ISA"] = set_
    if options.cpu is not None:
        environment |= {"NUMBA_CPU_NAME": options.cpu, "NUMBA_CPU_FEATURES": FEATURES[options.cpu]}
    command = [sys.executable, __file__, "--work", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str], size: tuple[int, int]) -> dict[str, Any]:
    print(json.dumps(size), file=worker.stdin, flush=True)
    found: dict[str, Any] = json.loads(worker.stdout.readline())  # type: ignore[union-attr]
    return found


def measure(options: argparse.Namespace) -> None:
    sides = list(itertools.product(options.sources, options.sets))
    workers = {f"{source} {set_ or ''}".strip(): start(source, set_, options) for source, set_ in sides}
    for worker in workers.values():
        worker.stdout.readline()  # type: ignore[union-attr]
    every = itertools.product(options.sequences, options.contexts)
    sizes = [(count, context) for count, context in every if count * context <= options.most]
    best: dict[tuple[str, tuple[int, int]], dict[str, Any]] = {}
    for _, size, (name, worker) in itertools.product(range(options.rounds), sizes, workers.items()):
        found = ask(worker, size)
        kept = best.setdefault((name, size), found)
        for key in ("forward", "sampling"):
            kept[key] = min(kept[key], found[key])
        for kind, cycles in found.get("profile", {}).items():
            kept["profile"][kind] = min(kept["profile"][kind], cycles)
    for worker in workers.values():
        worker.communicate()
    for name, size in itertools.product(workers, sizes):
        show(name, size, best[name, size], best.get((name, (1, size[1]))))


def show(name: str, size: tuple[int, int], found: dict[str, Any], one: dict[str, Any] | None) -> None:
    count, context = size
    rate = 1e3 * count / (found["forward"] + found["sampling"])
    scale = f"{rate * (one['forward'] + one['sampling']) / 1e3:5.2f} ×" if one else ""
    times = f"{found['forward']:7.2f} + {found['sampling']:5.2f} ms"
    print(f"{name:28} {count:3} × {context:5}  {times}  {rate:7.0f} tok/s  {scale}")
    for kind, cycles in sorted(found.get("profile", {}).items(), key=lambda pair: -pair[1]):
        print(f"    {kind:12} {found['forward'] * cycles / sum(found['profile'].values()):7.2f} ms")


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 4096], help="multiples of 64")
    parser.add_argument("--shared", action="store_true", help="the context's pages are the same for all")
    parser.add_argument("--sampled", action="store_true", help=f"with {SAMPLED}, not greedy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=[None], help="instruction sets, as INFER_ISA names them")
    parser.add_argument("--sources", nargs="+", default=["src"], help="source trees of infer")
    parser.add_argument("--cpu", choices=FEATURES, help="compile for this CPU")
    parser.add_argument("--runs", type=int, default=4, help="multi-steps of a size, in a round")
    parser.add_argument("--most", type=int, default=1 << 16, help="tokens of all sequences together")
    parser.add_argument("--profile", action="store_true", help="the least of each kind of command")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work(options) if options.work else measure(options)


if __name__ == "__main__":
    main()
