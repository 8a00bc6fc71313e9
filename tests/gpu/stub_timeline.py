"""Measure for how long a device would idle between two steps while the host plans. Print the milliseconds, as JSON.

Answers decode beside prompts that are read in chunks. Kernels go through Triton's launcher to the stub of libcuda,
which runs nothing. A step takes a fixed time of a device's clock. The host's clock is the processor time of its thread,
and moves on to the end of a step that the host waits for. Run it as `stub_program`. Arguments are numbers of answers.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Self, final
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from infer import SamplingParams
from infer.compute import ops
from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import Event, Graphs, Recording
from infer.engine.engine import Engine
from infer.engine.step.sequence import Sequence
from infer.engine.step.steps import LaunchedStep
from path_cases import CONTEXT, Case, Way, World, make_runner, make_sequence, make_world
from stub_program import StubDriver

STEP_SECONDS, CHUNK = 6e-3, 16
NUM_STEPS, NUM_PROMPTS, WARM_UP = 90, 9, 20


@final
class Timeline(Graphs):
    """A device with a clock of its own. A forward takes `STEP_SECONDS`, and all other work no time."""

    def __init__(self) -> None:
        self._skipped = self.busy_until = 0.0
        self.gaps = list[float]()
        self.after_sampler: Callable[[], object] = lambda: None

    def now(self) -> float:
        return time.thread_time() + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.now())

    def record(self, work: Callable[[], Tensor]) -> Recording:
        result = work()
        return Recording(self._forward if result.is_floating_point() else self._sampler, result)

    def _forward(self) -> None:
        self.gaps.append(max(0.0, self.now() - self.busy_until))
        self.busy_until = max(self.now(), self.busy_until) + STEP_SECONDS

    def _sampler(self) -> None:
        self.after_sampler()

    def mirror(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def event(self) -> Event:
        return _Moment(self)

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()


@final
class _Moment:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._moment = timeline, 0.0

    def record(self) -> None:
        self._moment = self._timeline.busy_until

    def synchronize(self) -> None:
        self._timeline.wait_until(self._moment)

    def seconds_since(self, earlier: Self) -> float:
        return self._moment - earlier._moment


def sequences_of(world: World, num_answers: int) -> Iterator[Sequence]:
    """Yield answers that decode, and then prompts with one token each."""
    params = SamplingParams(temperature=0.8, max_new_tokens=CONTEXT, ignore_eos=True)
    for number in range(num_answers + NUM_PROMPTS):
        is_answer = number < num_answers
        prompt = tuple((7 * number + place) % 200 for place in range(3 if is_answer else 9 * CHUNK))
        own = replace(params, seed=number, max_new_tokens=CONTEXT - 3 if is_answer else 1)
        yield make_sequence(world, Case(str(number), prompt, own), Way(chunk=num_answers + CHUNK))


@torch.inference_mode()
def measured(world: World, num_answers: int) -> dict[str, Any]:
    """Return for how long the device idled before each step."""
    timeline = Timeline()
    with patch("infer.compute.backends.cuda.backend.Repeats", lambda: timeline):
        runner = make_runner(world, Way(), num_slots=num_answers + 1, step_tokens=128)
    assert isinstance(runner._captured, CapturedForward)
    timeline.after_sampler = sampler_of(runner._captured)
    engine = Engine(runner, max_steps=1)
    for sequence in sequences_of(world, num_answers):
        sequence.is_streamed = False  # so a step's prompts are limited by their tokens, not by a measured time
        engine.submit(sequence)
    while len(timeline.gaps) < NUM_STEPS:
        engine.step()
    gaps = [1000 * gap for gap in timeline.gaps[WARM_UP:]]
    mixed = [step.kind for step in engine.scheduler.taken][WARM_UP:]
    return {"mean": mean(gaps), "median": median(gaps), "mixed": mixed.count("mixed") / len(mixed)}


def sampler_of(captured: CapturedForward) -> Callable[[], object]:
    """Return a function that writes what the kernel after the sampler would write: each row has the token 0."""
    counts = captured._verifier._words.counts
    return lambda: counts.fill_(1)


def main() -> None:
    triton.runtime.driver.set_active(StubDriver())
    found = []
    with tempfile.TemporaryDirectory() as folder, ops.using("cuda"):
        world = make_world("llama", Path(folder))
        for num_answers in map(int, sys.argv[1:]):
            with patch.object(LaunchedStep, "may_be_followed", False):
                before = measured(world, num_answers)
            found.append({"answers": num_answers, "one by one": before, "behind": measured(world, num_answers)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
