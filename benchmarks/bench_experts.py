"""Speed of experts that are read from a file, beside the speed of the disk.

    python benchmarks/bench_experts.py --layers 6 --part 0.33

Makes layers of experts with random weights of a real shape in the cache folder's disk, and gives them a part of their
bytes as memory. Prints for each token the bytes that were missing, the rate at which they came, the disk's rate, read
in the same way by as many threads, and the largest resident memory. The file is removed at the end.
"""

import argparse
import mmap
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from harness import make_parser, print_head, write_report
from infer.compute import ops
from infer.compute.backends.cpu import operations as cpu
from infer.compute.backends.cpu.experts.expert_store import CpuExpertStore
from infer.compute.backends.cpu.experts.pool_plan import PART_BYTES, PoolPlan, RecordForm
from infer.compute.backends.cpu.recording import record
from infer.compute.backends.cpu.thread_records import fields_of
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.operands.feed_forwards import Router
from infer.compute.operands.weights import ExpertWeights, Norm, Projection, StoredWeight
from infer.compute.quantization.quantisers import quantise

CPU = torch.device("cpu")


def make_layers(plan: PoolPlan, store: CpuExpertStore) -> list[ExpertWeights]:
    """Return the layers. All experts have the same bytes, which no layer of software or disk knows."""
    form = plan.form
    torch.manual_seed(0)
    same = [
        StoredWeight(type_, shape, quantise(torch.randn(shape) * shape[1] ** -0.5, type_))
        for type_, shape in zip(form.types, form.shapes, strict=True)
    ]
    router, layers = Router(plan.num_experts, plan.num_chosen, "softmax", is_normalized=True), list[ExpertWeights]()
    with store.loading():
        for index in plan.layers:
            loaded = store.load(index, lambda expert: same)
            rows = StoredWeight("F32", (plan.num_experts, form.hidden), torch.randn(plan.num_experts, form.hidden))
            logits = ops.prepare(Projection((rows,), label=f"L{index}.router"), CPU)
            gate, up, down = (Projection((weight,), label=f"L{index}.experts") for weight in loaded[:3])
            layers.append(ExpertWeights(router, logits, None, gate, up, down, "silu", None, frames=loaded.frames))
    return layers


def disk_rate(path: Path, seconds: float, num_threads: int) -> float:
    """Return the bytes per second of direct reads of parts, spread over the file."""
    descriptor, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // PART_BYTES
    began, done = time.perf_counter(), [0] * num_threads

    def read(thread: int) -> None:
        room, place = mmap.mmap(-1, PART_BYTES), thread
        while time.perf_counter() - began < seconds:
            done[thread] += os.preadv(descriptor, [room], place * 7919 % (size - 1) * PART_BYTES)
            place += num_threads

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    os.close(descriptor)
    return sum(done) / taken


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=6, help="number of layers (6)")
    parser.add_argument("--experts", type=int, default=128, help="of a layer (128)")
    parser.add_argument("--chosen", type=int, default=8, help="of a token in a layer (8)")
    parser.add_argument("--hidden", type=int, default=2048, help="values of the residual stream (2048)")
    parser.add_argument("--inner", type=int, default=768, help="values within an expert (768)")
    parser.add_argument("--type", default="Q4_1", help="of the experts (Q4_1)")
    parser.add_argument("--part", type=float, default=1 / 3, help="memory, as a part of the experts' bytes (a third)")
    parser.add_argument("--tokens", type=int, default=30, help="of a round (30)")
    own = parser.parse_args()
    print_head(own, "experts from a file")
    with tempfile.TemporaryDirectory(dir=os.environ.get("INFER_CACHE")) as folder:
        thread_pool()  # its kernels are in the usual folder
        os.environ["INFER_CACHE"] = folder
        form = RecordForm((own.type,) * 3, own.hidden, own.inner)
        plan = PoolPlan(form, own.experts, own.chosen, tuple(range(own.layers)))
        plan = plan._replace(num_frames=max(own.chosen, int(plan.num_records * own.part)))
        store = CpuExpertStore([plan], "benchmark", "random", "exact")
        layers = make_layers(plan, store)
        (path,) = Path(folder).glob("experts/*.experts")
        print(f"{path.stat().st_size / 1e9:.2f} GB of experts, {plan.num_bytes / 1e9:.2f} GB of memory for them")
        rounds = list(measure(own, store, layers, path))
    write_report(own, rounds=rounds)


def measure(
    own: argparse.Namespace, store: CpuExpertStore, layers: list[ExpertWeights], path: Path
) -> Iterator[dict[str, float]]:
    """Yield the measures of each round, in which the disk has its turn first."""
    norm, num_bytes = Norm(torch.ones(own.hidden), 1e-6), RecordForm((own.type,) * 3, own.hidden, own.inner).num_bytes
    with record(1, 1) as recording:
        x = recording.tensor("x", 1, own.hidden)
        for layer in layers:
            cpu.add_experts(x, norm, layer, None)
    table, state = DispatchTable(recording.commands), fields_of(recording.state)
    state.num_tokens = 1
    for _ in range(own.rounds + 1):
        rate, before = disk_rate(path, 2, thread_pool().num_threads), store.counts
        began, reading = time.perf_counter(), 0.0
        for _ in range(own.tokens):
            x.normal_()
            thread_pool().run(table, recording.state)
            recording.check()
            reading += state.reading / 1e9
        taken = time.perf_counter() - began
        hits, misses = (now - earlier for now, earlier in zip(store.counts, before, strict=True))
        missing, resident = misses * num_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{own.tokens / taken:.1f} tokens/s, {reading / taken:.0%} of it reads, "
            f"{missing / own.tokens / 1e6:.1f} MB missing a token ({hits / (hits + misses):.0%} found), "
            f"read at {missing / taken / 1e6:.0f} MB/s; the disk gives {rate / 1e6:.0f} MB/s: "
            f"{missing / taken / rate:.2f} of it; resident at most {1024 * resident / 1e9:.2f} GB"
        )
        yield {"seconds": taken, "missing_bytes": missing, "disk_bytes_per_second": rate, "resident_kb": resident}


if __name__ == "__main__":
    main()
