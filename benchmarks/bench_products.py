"""How fast weights are multiplied with activations: GMAC/s of the matmul command on one thread, by type and precision.

    python benchmarks/bench_products.py                                  Q4_1, Q4_0, Q8_0, Q4_K, Q6_K with the best set
    python benchmarks/bench_products.py --sets avx2 avx512vnni --types Q4_1
    python benchmarks/bench_products.py --cpu haswell --sources ../before/src src

`cache`: one token × weights that stay in the second cache; `memory`: one token × weights larger than the caches;
`prompt`: 64 tokens. A figure is the fastest of many short runs. Every instruction set and source tree is a process of
its own, and they take turns. `--cpu` compiles for a CPU that has less than this one.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from command_line import make_parser

SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # f16 in a block, if not at its start
WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
CASES = {"cache": (512, 1, 40), "memory": (131072, 1, 1), "prompt": (512, 64, 1)}  # rows, tokens, repeats
COLUMNS = 768
FEATURES = {"haswell": "+avx,+avx2,+fma,+f16c", "alderlake": "+avx,+avx2,+fma,+f16c,+avxvnni"}
FEATURES["skylake-avx512"] = f"{FEATURES['haswell']},+avx512f,+avx512bw"


def make_weight(type_: str, rows: int) -> Any:
    """Random integers under scales of 0.01."""
    from infer.operands.weights import StoredWeight
    from infer.quantization.ggml_types import BLOCK_TYPES

    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if type_ in floats:
        return StoredWeight(type_, (rows, COLUMNS), torch.randn(rows, COLUMNS).to(floats[type_]))
    random, block_type = np.random.default_rng(0), BLOCK_TYPES[type_]
    data = random.integers(0, 256, (rows, block_type.row_bytes(COLUMNS)), dtype=np.uint8)
    blocks = data.reshape(rows, -1, block_type.block_bytes)
    if type_ == "MXFP4":
        blocks[:, :, 0] = 120
    for at in SCALES_AT.get(type_, (0, 2) if type_ in WITH_MINIMUM else (0,)):
        blocks[:, :, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return StoredWeight(type_, (rows, COLUMNS), torch.from_numpy(data))


class Product:
    """One projection, recorded."""

    def __init__(self, type_: str, precision: str, rows: int, tokens: int, repeats: int) -> None:
        from infer import ops
        from infer.backends.cpu.recording import record
        from infer.backends.cpu.table import Walk
        from infer.operands.weights import Projection

        projection = Projection((make_weight(type_, rows),))
        packed = ops.prepare(projection, torch.device("cpu"), precision)  # type: ignore[arg-type]
        with record(tokens, 1) as run:
            ops.norm_project(torch.randn(tokens, COLUMNS), None, packed)
        run.state["num_tokens"] = tokens
        self.run, self.walk, self.keeps = run, Walk(run.commands), packed
        self.times = np.zeros(len(run.commands), np.int64)
        self.walk.arguments["times"], self.walk.arguments["repeats"] = self.times.ctypes.data, repeats
        self.products = rows * COLUMNS * tokens * repeats

    def rate(self) -> float:
        """Of one run: the matmul's share of the walk's cycles is its share of the time."""
        from infer.backends.cpu.threads import team

        self.times[:] = 0
        began = time.perf_counter()
        team().run(self.walk, self.run.state, 1)
        seconds = time.perf_counter() - began
        return float(self.products / (seconds * self.times[-1] / self.times.sum()) / 1e9)


def work(types: Sequence[str], runs: int) -> None:
    """Answer each line of input with the rates of a round."""
    from infer import ops

    ops.set_num_threads(1)
    products = {
        f"{type_} {precision} {case}": Product(type_, precision, *sizes)
        for type_ in types
        for precision in ("exact", "fast")
        for case, sizes in CASES.items()
    }
    print(flush=True)
    for _ in sys.stdin:
        print(json.dumps({key: max(one.rate() for _ in range(runs)) for key, one in products.items()}), flush=True)


def start(source: str, set_: str | None, options: argparse.Namespace) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source)}
    if set_ is not None:
        environment["INFER_ISA"] = set_
    if options.cpu is not None:
        environment |= {"NUMBA_CPU_NAME": options.cpu, "NUMBA_CPU_FEATURES": FEATURES[options.cpu]}
    command = [sys.executable, __file__, "--work", "--runs", str(options.runs), "--types", *options.types]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The best of all rounds, by worker and case."""
    sides = list(itertools.product(options.sources, options.sets))
    workers = {f"{source} {set_ or ''}".strip(): start(source, set_, options) for source, set_ in sides}
    best: dict[str, dict[str, float]] = {name: {} for name in workers}
    for worker in workers.values():
        worker.stdout.readline()  # type: ignore[union-attr]
    for _ in range(options.rounds):
        for name, worker in workers.items():
            print(file=worker.stdin, flush=True)
            for case, rate in json.loads(worker.stdout.readline()).items():  # type: ignore[union-attr]
                best[name][case] = max(rate, best[name].get(case, 0))
    for worker in workers.values():
        worker.communicate()
    return best


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
    parser.add_argument("--sets", nargs="+", default=[None], help="instruction sets, as INFER_ISA names them")
    parser.add_argument("--sources", nargs="+", default=["src"], help="source trees of infer")
    parser.add_argument("--cpu", choices=FEATURES, help="compile for this CPU")
    parser.add_argument("--runs", type=int, default=8, help="of a case, in a round")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.types, options.runs)
        return
    best = measure(options)
    first = next(iter(best.values()))
    print(f"GMAC/s, one thread; × of {next(iter(best))}")
    for case in first:
        rates = (f"{rates[case]:7.1f} ({rates[case] / first[case]:.2f} ×)" for rates in best.values())
        print(f"{case:22}", *rates)


if __name__ == "__main__":
    main()
