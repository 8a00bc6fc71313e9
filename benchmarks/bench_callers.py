"""Measure the rates of callers of all kinds: alone, in batches, threads, tasks, slow readers, beside busy Python.

    python benchmarks/bench_callers.py                               this tree: a minute per round
    python benchmarks/bench_callers.py --sources ../before/src src   two trees in turn, and the ratios to the first
    python benchmarks/bench_callers.py --only "slow reader" "first token"   some of the ways

Each source tree has a process of its own. Figures are tokens per second; a ratio is the median of the rounds' ratios.
All trees must give the same tokens.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from statistics import median

from harness import (
    add_code_options,
    answer_lines,
    code_workers,
    compare,
    make_parser,
    print_head,
    write_report,
)
from infer import LLM, AsyncLLM, SamplingParams

PROMPTS = [[100 + index] * 10 for index in range(32)]
BATCH_PROMPTS, BATCH_LENGTHS = [[100 + index] * 8 for index in range(64)], [10 + index * 7 % 40 for index in range(64)]
PREFILL_TOKENS, FIRST_TOKENS = 512, 16
Answers = list[list[int]]
Found = tuple[Answers, float]  # tokens, and the measured figure


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)


class Ways:
    """Ways to ask. Each method of `MEASURED` is one way. Its argument makes the prompts of a round unique."""

    def __init__(self, model: str, threads: int) -> None:
        self.llm = LLM(model, threads=threads)
        self.tasks = AsyncLLM(self.llm)

    def decode(self, number: int) -> Found:
        return _rate(lambda: [self.llm.generate(PROMPTS[0], greedy(160)).token_ids])

    def prefill(self, number: int) -> Found:
        prompt = [1000 + (number + index * 7) % 5000 for index in range(PREFILL_TOKENS)]
        answers, rate = _rate(lambda: [self.llm.generate(prompt, greedy(1)).token_ids])
        return answers, rate * PREFILL_TOKENS

    def batch_of_64(self, number: int) -> Found:
        return _rate(lambda: self._batch(BATCH_PROMPTS, BATCH_LENGTHS))

    def batch_of_64_in_threads(self, number: int) -> Found:
        def ask(prompt: list[int], length: int) -> list[int]:
            return self.llm.generate(prompt, greedy(length)).token_ids

        def in_threads() -> Answers:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(ask, BATCH_PROMPTS, BATCH_LENGTHS))

        return _rate(in_threads)

    def batch_of_1000(self, number: int) -> Found:
        lengths = [4 + index * 7 % 9 for index in range(1000)]
        prompts = [[100 + index, 5, index + 200] for index in range(1000)]
        return _rate(lambda: self._batch(prompts, lengths))

    def threads(self, number: int) -> Found:
        def ask(prompt: list[int]) -> list[int]:
            return self.llm.generate(prompt, greedy(48)).token_ids

        return _rate(lambda: _in_threads(ask))

    def streams_of_threads(self, number: int) -> Found:
        def ask(prompt: list[int]) -> list[int]:
            return [piece.token_id for piece in self.llm.stream(prompt, greedy(48))]

        return _rate(lambda: _in_threads(ask))

    def tasks_of_32(self, number: int) -> Found:
        async def ask(prompt: list[int]) -> list[int]:
            return (await self.tasks.generate(prompt, greedy(40))).token_ids

        return _rate(lambda: asyncio.run(_together(ask)))

    def streams_of_32_tasks(self, number: int) -> Found:
        async def ask(prompt: list[int]) -> list[int]:
            return [piece.token_id async for piece in self.tasks.stream(prompt, greedy(40))]

        return _rate(lambda: asyncio.run(_together(ask)))

    def slow_reader(self, number: int) -> Found:
        """Return a reader that takes 1 ms of Python per token."""

        def read() -> Answers:
            found = list[int]()
            for piece in self.llm.stream(PROMPTS[0], greedy(120)):
                _burn(0.001)
                found.append(piece.token_id)
            return [found]

        return _rate(read)

    def first_token(self, number: int) -> Found:
        """Return first tokens per second, 1,000 for 1 ms."""
        seconds, found = list[float](), Answers()
        for index in range(FIRST_TOKENS):
            began = time.perf_counter()
            stream = self.llm.stream([index + 5] * 4, greedy(2))
            found.append([next(stream).token_id])
            seconds.append(time.perf_counter() - began)
            stream.close()
        return found, 1 / median(seconds)

    def busy_python(self, number: int) -> Found:
        """Return one answer, while the main thread never waits."""
        return _rate(lambda: _beside_busy_main(self._one))

    def busy_python_in_turns(self, number: int) -> Found:
        """Do as `busy_python`, with a switch interval of 0.5 ms that a program may set, a tenth of Python's own."""
        with _switching_each(0.0005):
            return _rate(lambda: _beside_busy_main(self._one))

    def _one(self) -> Answers:
        return [self.llm.generate(PROMPTS[0], greedy(64)).token_ids]

    def logprobs_in(self, count: int) -> Found:
        """Return eight concurrent answers, of which `count` have 20 log-probabilities per token."""
        params = [replace(greedy(64), logprobs=20 if row < count else None) for row in range(8)]
        return _rate(lambda: [each.token_ids for each in self.llm.generate_all(PROMPTS[:8], params, batch_size=8)])

    def _batch(self, prompts: list[list[int]], lengths: list[int]) -> Answers:
        results = self.llm.generate_all(prompts, [greedy(length) for length in lengths], batch_size=16)
        return [result.token_ids for result in results]


MEASURED: dict[str, Callable[[Ways, int], Found]] = {
    "decode, one caller": Ways.decode,
    f"prefill of {PREFILL_TOKENS}": Ways.prefill,
    "generate_all of 64": Ways.batch_of_64,
    "8 threads, the same 64": Ways.batch_of_64_in_threads,
    "generate_all of 1,000": Ways.batch_of_1000,
    "generate_all of 8": lambda ways, number: ways.logprobs_in(0),
    "8, one with log-probabilities": lambda ways, number: ways.logprobs_in(1),
    "8, all with log-probabilities": lambda ways, number: ways.logprobs_in(8),
    "8 threads, generate": Ways.threads,
    "8 threads, stream": Ways.streams_of_threads,
    "32 tasks, generate": Ways.tasks_of_32,
    "32 tasks, stream": Ways.streams_of_32_tasks,
    "slow reader": Ways.slow_reader,
    "first token": Ways.first_token,
    "busy main thread": Ways.busy_python,
    "busy main thread, 0.5 ms": Ways.busy_python_in_turns,
}


def _rate(ask: Callable[[], Answers]) -> Found:
    """Return the tokens per second of a request."""
    began = time.perf_counter()
    answers = ask()
    return answers, sum(map(len, answers)) / (time.perf_counter() - began)


def _in_threads(ask: Callable[[list[int]], list[int]]) -> Answers:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, PROMPTS[:8]))


async def _together(ask: Callable[[list[int]], Awaitable[list[int]]]) -> Answers:
    return await asyncio.gather(*map(ask, PROMPTS))


def _burn(seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def _beside_busy_main(ask: Callable[[], Answers]) -> Answers:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        while not asked.done():
            _burn(0.01)
        return asked.result()


@contextmanager
def _switching_each(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def work(options: argparse.Namespace) -> None:
    """Answer each request, a way and a number, with the measured figure and a digest of the tokens."""
    ways = Ways(options.model, options.threads)

    def measure(name: str, number: int) -> tuple[float, str]:
        answers, figure = MEASURED[name](ways, number)
        return figure, blake2b(repr(answers).encode(), digest_size=8).hexdigest()

    answer_lines(measure=measure)


def measure(options: argparse.Namespace) -> None:
    digests: dict[tuple[str, int], str] = {}
    with code_workers(options) as workers:

        def rate(name: str, source: str, number: int) -> float:
            figure, digest = workers[source].ask("measure", name=name, number=number)
            if digests.setdefault((name, number), digest) != digest:
                raise SystemExit(f"{name}: {source} gives other tokens")
            return float(figure)

        figures = compare(options.only, workers, options.rounds, rate)
    write_report(options, tokens_per_second=figures.to_json())


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=10)
    add_code_options(parser)
    parser.add_argument("--only", nargs="+", default=list(MEASURED), metavar="WAY", help=", ".join(MEASURED))
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in MEASURED]:
        parser.error(f"--only {unknown[0]!r} is none of: {', '.join(MEASURED)}")
    if options.work:
        work(options)
    else:
        print_head(options, "tokens per second")
        measure(options)


if __name__ == "__main__":
    main()
