"""What callers get, by how they ask: alone, in batches, threads, tasks, as slow readers, beside busy Python.

    python benchmarks/bench_callers.py                               this tree: a minute a round
    python benchmarks/bench_callers.py --sources ../before/src src   two trees in turn, and the ratios to the first
    python benchmarks/bench_callers.py --only decode "first token"   some of the ways

Each source tree is a process of its own. They take turns, and the first of a round is the last of the next.
Figures are medians of all rounds; a ratio is the median of the rounds' ratios. All trees must give the same tokens.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from statistics import median
from typing import Any

from command_line import REPORTS, make_parser
from infer import LLM, AsyncLLM, SamplingParams
from machine import cpu_model, write_report

PROMPTS = [[100 + index] * 10 for index in range(32)]
PREFILL_TOKENS, FIRST_TOKENS = 512, 16
Answers = list[list[int]]
Found = tuple[Answers, float]  # tokens, and what is measured


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)


class Ways:
    """Each method of `MEASURED` asks in one way. Its argument makes the prompts of a round its own."""

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
        lengths = [10 + index * 7 % 40 for index in range(64)]
        prompts = [[100 + index] * 8 for index in range(64)]
        return _rate(lambda: self._batch(prompts, lengths))

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
        """A reader that takes 1 ms of Python a token."""

        def read() -> Answers:
            found = list[int]()
            for piece in self.llm.stream(PROMPTS[0], greedy(120)):
                _burn(0.001)
                found.append(piece.token_id)
            return [found]

        return _rate(read)

    def first_token(self, number: int) -> Found:
        """First tokens a second: 1 ms is 1,000 a second."""
        seconds, found = list[float](), Answers()
        for index in range(FIRST_TOKENS):
            began = time.perf_counter()
            stream = self.llm.stream([index + 5] * 4, greedy(2))
            found.append([next(stream).token_id])
            seconds.append(time.perf_counter() - began)
            stream.close()
        return found, 1 / median(seconds)

    def busy_python(self, number: int) -> Found:
        """One answer beside a main thread that never waits."""
        return _rate(lambda: _beside_busy_main(self._one))

    def busy_python_in_turns(self, number: int) -> Found:
        """The same with a switch interval of 0.5 ms, a tenth of Python's own, which a program may set."""
        with _switching_each(0.0005):
            return _rate(lambda: _beside_busy_main(self._one))

    def _one(self) -> Answers:
        return [self.llm.generate(PROMPTS[0], greedy(64)).token_ids]

    def _batch(self, prompts: list[list[int]], lengths: list[int]) -> Answers:
        results = self.llm.generate_all(prompts, [greedy(length) for length in lengths], batch_size=16)
        return [result.token_ids for result in results]


MEASURED: dict[str, Callable[[Ways, int], Found]] = {
    "decode, one caller": Ways.decode,
    f"prefill of {PREFILL_TOKENS}": Ways.prefill,
    "generate_all of 64": Ways.batch_of_64,
    "generate_all of 1,000": Ways.batch_of_1000,
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
    """Tokens per second of what is asked for."""
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
    """Answer each line of input, a way and a number, with what was measured and a digest of the tokens."""
    ways = Ways(options.model, options.threads)
    print(flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        answers, figure = MEASURED[name](ways, number)
        digest = blake2b(repr(answers).encode(), digest_size=8).hexdigest()
        print(json.dumps({"figure": figure, "digest": digest, "threads": threading.active_count()}), flush=True)


def start(source: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source)}
    command = [sys.executable, __file__, "--work", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str], name: str, number: int) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(json.dumps([name, number]), file=worker.stdin, flush=True)
    found: dict[str, Any] = json.loads(worker.stdout.readline())
    return found


def measure(options: argparse.Namespace) -> None:
    workers = {source: start(source) for source in options.sources}
    for worker in workers.values():
        assert worker.stdout is not None
        worker.stdout.readline()
    figures = {name: {source: list[float]() for source in workers} for name in options.only}
    for name in figures:
        for number in range(-1, options.rounds):  # the first warms up
            digests = set[str]()
            for source in list(workers)[:: 1 if number % 2 else -1]:
                found = ask(workers[source], name, number)
                digests.add(found["digest"])
                if number >= 0:
                    figures[name][source].append(found["figure"])
            assert len(digests) == 1, f"{name}: other tokens"
        show(name, figures[name])
    for worker in workers.values():
        worker.communicate()
    if options.save:
        settings = {"model": options.model, "threads": options.threads, "rounds": options.rounds}
        write_report(REPORTS, "callers", settings, {"figures": figures})


def show(name: str, found: dict[str, list[float]]) -> None:
    first, *others = found.values()
    columns = [f"{median(first):8.1f}"]
    for each in others:
        ratios = [now / before for before, now in zip(first, each, strict=True)]
        columns.append(f"{median(each):8.1f} ({median(ratios):.2f} ×, {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{name:26} {'   '.join(columns)}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=10)
    parser.add_argument("--sources", nargs="+", default=["src"], help="source trees of infer")
    parser.add_argument("--only", nargs="+", default=list(MEASURED), metavar="WAY", help=", ".join(MEASURED))
    parser.add_argument("--save", action="store_true", help="write a report")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in MEASURED]:
        parser.error(f"--only {unknown[0]!r} is none of: {', '.join(MEASURED)}")
    if options.work:
        work(options)
    else:
        print(f"{options.model}, {options.threads} threads, {cpu_model()}; tokens per second")
        measure(options)


if __name__ == "__main__":
    main()
