"""One side of beside.py: it answers each request with one figure of one source tree.

    PYTHONPATH=TREE/src python benchmarks/beside_worker.py

It runs with source trees of all ages. So it uses only what `infer` exports, except in `single_steps`.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from statistics import median
from typing import Any

import infer
from bench_callers import MEASURED, Ways, greedy
from harness import answer_lines

WAYS = {
    "decode": "decode, one caller",
    "prefill": "prefill of 512",
    "generate-all": "generate_all of 64",
    "threads": "8 threads, the same 64",
    "tasks": "32 tasks, generate",
    "first-token": "first token",
}
REPEATS = {"decode": 3, "prefill": 3, "first-token": 3}  # of rows that take less than a second
TEXT, TEXT_TOKENS = "The capital of France is", 64
HOST_STEPS, HOST_RUNS, MOST_SEQUENCES = 200, 5, 60
PAGES = HOST_STEPS // 64 + 2  # of a sequence


class Models:
    """The models of one source tree. The small model is loaded when it is first needed."""

    def load(self, model: str, small_model: str, threads: int) -> str:
        """Load the model, and return the file of the package `infer`."""
        self._ways = Ways(model, threads)
        self._load_small = cache(
            lambda: infer.LLM(small_model, threads=threads, max_seq_len=512, pool_pages=MOST_SEQUENCES * PAGES)
        )
        return str(infer.__file__)

    def greedy_answer(self) -> list[Any]:
        """Return the greedy tokens of a text, and for each token the log-probabilities of the five likeliest ones."""
        answer = self._ways.llm.generate(TEXT, temperature=0, max_new_tokens=TEXT_TOKENS, ignore_eos=True, logprobs=5)
        return [answer.token_ids, [token.top for token in answer.logprobs or []]]

    def measure(self, row: str, number: int) -> float:
        """Return the figure of a row in the unit of beside.py. `number` is that of the round."""
        if row.startswith("host-"):
            return self._host_microseconds(int(row.removeprefix("host-")))
        rate = median(MEASURED[WAYS[row]](self._ways, number)[1] for _ in range(REPEATS.get(row, 1)))
        return 1e3 / rate if row == "first-token" else rate

    def _host_microseconds(self, count: int) -> float:
        """Return the time of a step of `count` sequences with a model so small that its forward takes a tenth of it."""
        llm = self._load_small()
        with single_steps():
            return median(_step_microseconds(llm, count) for _ in range(HOST_RUNS))


def _step_microseconds(llm: infer.LLM, count: int) -> float:
    began = time.perf_counter()
    results = llm.generate_all([[5]] * count, greedy(HOST_STEPS), batch_size=count)
    seconds = time.perf_counter() - began
    if any(result.stats.multi_steps for result in results):
        raise RuntimeError("a step did not return to Python: single_steps() has no effect on this tree")
    return 1e6 * seconds / HOST_STEPS


@contextmanager
def single_steps() -> Iterator[None]:
    """Let all engines of this process return to Python after each step.

    No option does that. So the attribute is set on each object of infer that has it; its class may move.
    """
    ours = (each for each in gc.get_objects() if str(type(each).__module__).startswith("infer."))
    planners: list[Any] = [each for each in ours if hasattr(each, "_max_steps")]
    if not planners:
        raise RuntimeError("nothing in this tree has `_max_steps`: name its successor in single_steps()")
    before = [each._max_steps for each in planners]
    for each in planners:
        each._max_steps = 1
    try:
        yield
    finally:
        for each, steps in zip(planners, before, strict=True):
            each._max_steps = steps


if __name__ == "__main__":
    side = Models()
    with suppress(KeyboardInterrupt):
        answer_lines(load=side.load, greedy_answer=side.greedy_answer, measure=side.measure)
