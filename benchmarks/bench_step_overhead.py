"""What a step of decoding costs outside of compiled code, and what a sequence costs that joins or leaves.

    python benchmarks/bench_step_overhead.py               smollm2, 1 and 16 sequences
    python benchmarks/bench_step_overhead.py --rounds 500

Milliseconds, medians over rounds, as JSON. `step` is the wall time of a step of one token a sequence, sampled, less
that of the compiled walk; `multi_step` is the same of two steps without a return. `join` and `leave` are what
the columns take where a sequence comes or goes, and what the first step after it takes more than the others.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from infer import SamplingParams, load_model
from infer.backends.cpu.threads import team
from infer.bench.speed import make_prompt
from infer.operands.step import Part
from infer.ops import backend_of
from infer.runner.context import CachedContext
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

PROMPT_TOKENS = 16
PARAMS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}


class Sequences:
    """Of a context, each with a prompt, of which some take part in a step."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.model, _ = load_model(name)
        vocab_size, capacity = self.model.architecture.vocab_size, 4 * PROMPT_TOKENS
        self.context = CachedContext(self.model, capacity, num_rows=num_slots)
        self.columns = SamplingColumns(num_slots, vocab_size)
        self.history = History(num_slots, capacity, vocab_size)
        self.prompt = make_prompt(self.model, PROMPT_TOKENS, seed=0)
        for slot in range(num_slots):
            self.context.extend(slot, self.prompt)
            self.join(slot)

    def join(self, slot: int) -> None:
        self.history.begin(slot, self.prompt)
        self.columns.write(slot, SamplingParams(seed=slot, **PARAMS), PROMPT_TOKENS)

    def step(self, slots: Sequence[int]) -> None:
        self.columns.select(slots)
        self.context.sample([Part(slot, [5]) for slot in slots], self.columns, self.history)

    def multi_step(self, slots: Sequence[int]) -> None:
        self.columns.select(slots)
        self.context.chain([(slot, 5) for slot in slots], 2, self.columns, self.history, ())

    def overhead(self, run: Callable[[], None]) -> float:
        """Milliseconds outside of compiled code."""
        for slot in range(len(self.context.lengths)):
            self.context.truncate(slot, PROMPT_TOKENS)
            self.history.begin(slot, self.prompt)
        walked, started = team().walk_seconds, time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        return 1e3 * (seconds - (team().walk_seconds - walked))


@torch.inference_mode()
def measure(sequences: Sequences, count: int, rounds: int) -> dict[str, float]:
    slots = list(range(count))

    def join() -> None:
        sequences.join(count - 1)
        sequences.step(slots)

    runs: dict[str, Callable[[], None]] = {
        "step": lambda: sequences.step(slots),
        "multi_step": lambda: sequences.multi_step(slots),
        "leave": lambda: sequences.step(slots[1:] or [1]),
        "back": lambda: sequences.step(slots),
        "join": join,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with backend_of(sequences.model.device).threads():
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(sequences.overhead(run))
    found = {name: median(each) for name, each in times.items()}
    for name in ("join", "leave"):
        found[name] -= found["step"]
    del found["back"]
    return {"sequences": count, **{name: round(milliseconds, 3) for name, milliseconds in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    sequences = Sequences(options.model, max(options.sequences) + 1)
    measure(sequences, 1, 3)  # warms up
    for count in options.sequences:
        print(json.dumps(measure(sequences, count, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
