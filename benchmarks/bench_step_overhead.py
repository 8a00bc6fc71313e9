"""Measure the cost of a step outside of compiled code, and the cost of a sequence that joins or leaves.

    python benchmarks/bench_step_overhead.py               smollm2, 1 and 16 sequences
    python benchmarks/bench_step_overhead.py --rounds 500

Milliseconds, medians over rounds, as JSON. `step` is the wall time of `Engine.step` for one sampled token per
sequence, less the time of the compiled run: planning, columns, the call, accepting, text, the cache. `multi_step` is
the same per step when several steps run without a return to Python, as many as the engine chooses. `join` and `leave`
are what a step takes more if a sequence joins in it (with a prompt of one token) or leaves.
"""

import json
import time
from dataclasses import replace
from statistics import median

import torch

from harness import make_parser, write_report
from infer import SamplingParams, load_model, load_tokenizer
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.request import Request, limits_of
from infer.engine.step.sequence import Sequence

PARAMS = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.05, ignore_eos=True, max_new_tokens=None
)


class Load:
    """An engine with `count` sequences that decode."""

    def __init__(self, name: str, count: int, max_steps: int | None = 1) -> None:
        self.model, _ = load_model(name, max_seq_len=2048)
        self.tokenizer, self.num_asked = load_tokenizer(name), 0
        runner = Runner(self.model, 2048, num_slots=count + 1, pool_pages=32 * (count + 1))
        self.engine = Engine(runner, max_steps=max_steps)
        self.first = self.submit()
        for _ in range(count - 1):
            self.submit()
        for _ in range(4):
            self.engine.step()

    def submit(self) -> Sequence:
        self.num_asked += 1
        limits = limits_of(self.model, self.tokenizer)
        params = replace(PARAMS, seed=self.num_asked)
        request = Request(self.tokenizer, (5,), params, limits.max_seq_len, limits.vocab_size)
        return self.engine.submit(Sequence(request))

    def overhead(self) -> float:
        """Return the milliseconds of a step outside of compiled code."""
        computed, started = thread_pool().run_seconds, time.perf_counter()
        self.engine.step()
        return 1e3 * (time.perf_counter() - started - (thread_pool().run_seconds - computed))


def measure(name: str, count: int, rounds: int) -> dict[str, float]:
    load = Load(name, count)
    times: dict[str, list[float]] = {"step": [], "join": [], "leave": []}
    for _ in range(rounds):
        times["step"].append(load.overhead())
        guest = load.submit()
        times["join"].append(load.overhead())
        load.overhead()
        load.engine.cancel(guest)
        times["leave"].append(load.overhead())
        load.overhead()
    found = {what: median(each) for what, each in times.items()}
    load, each_step = Load(name, count, None), list[float]()
    while len(load.first.pieces) < 1000:
        before = len(load.first.pieces)
        milliseconds = load.overhead()
        each_step.append(milliseconds / (len(load.first.pieces) - before))
    found["multi_step"] = median(each_step)
    found["join"] -= found["step"]
    found["leave"] -= found["step"]
    return {"sequences": count, **{what: round(milliseconds, 3) for what, milliseconds in found.items()}}


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=100)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    found = []
    for count in options.sequences:
        found.append(measure(options.model, count, options.rounds))
        print(json.dumps(found[-1]), flush=True)
    write_report(options, milliseconds=found)


if __name__ == "__main__":
    main()
