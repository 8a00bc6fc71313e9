"""Measure two models that answer at the same time in separate processes, as in a server of several models.

Each process has all threads and gives way by itself, or the cores are divided between the processes. A round during
which other programs had more than `--most-others` of the processors' time is measured again.

    python benchmarks/bench_shared_cores.py smollm2 gemma3-270m --rounds 5
"""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Figures, Worker, answer_lines, available_cores, make_parser, print_head, say, turns, write_report

ALL, DIVIDED = "all threads each", "cores divided"
CASES = {"decode": (1, 48), "prompt": (60, 2)}  # repetitions of a sentence as the prompt; tokens of an answer
MOST_TRIES = 40


def work(model: str, threads: int) -> None:
    """Answer requests for seconds of generation with tokens per second and the seconds of processor time."""
    from infer import LLM

    llm = LLM(model, threads=threads, max_seq_len=1024)

    def generate(repetitions: int, num_tokens: int, seconds: float) -> tuple[float, float]:
        began, used, count = time.perf_counter(), time.process_time(), 0
        while (taken := time.perf_counter() - began) < seconds:
            prompt = f"{time.time()} " + repetitions * "Once upon a time there was a fox. "
            result = llm.generate(prompt, max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
            count += result.prompt_tokens if repetitions > 1 else result.generated_tokens
        return count / taken, time.process_time() - used

    answer_lines(generate=generate)


def busy_seconds() -> float:
    """Return the seconds that all processors have worked."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def measure(workers: Sequence[Worker], case: str, options: Any) -> list[float]:
    """Return the tokens per second of both models."""
    repetitions, num_tokens = CASES[case]
    asked = {"repetitions": repetitions, "num_tokens": num_tokens, "seconds": options.seconds}
    for _ in range(MOST_TRIES):
        before, began = busy_seconds(), time.perf_counter()
        with ThreadPoolExecutor(len(workers)) as pool:
            found = list(pool.map(lambda worker: worker.ask("generate", **asked), workers))
        own = sum(used for _, used in found)
        others = (busy_seconds() - before - own) / (time.perf_counter() - began) / available_cores()
        if others <= options.most_others:
            return [rate for rate, _ in found]
        time.sleep(options.pause)
    raise SystemExit(f"other programs had {others:.0%} of the processors in the last of {MOST_TRIES} tries")


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--work":
        work(sys.argv[2], int(sys.argv[3]))
        return
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("models", nargs=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement")
    parser.add_argument("--most-others", type=float, default=0.1, help="share of the processors for other programs")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before a round is measured again")
    options = parser.parse_args()
    print_head(options, "tokens per second")
    threads = {ALL: available_cores(), DIVIDED: max(1, available_cores() // 2)}
    figures = Figures(threads)
    with ExitStack() as stack:
        workers = {
            side: [
                stack.enter_context(Worker([sys.executable, sys.argv[0], "--work", model, str(count)]))
                for model in options.models
            ]
            for side, count in threads.items()
        }
        for case in CASES:
            for number, side in turns(workers, options.rounds):
                rates = measure(workers[side], case, options)
                say(f"{case} {side}: {', '.join(f'{rate:.0f}' for rate in rates)}")
                if number >= 0:
                    for model, rate in zip(options.models, rates, strict=True):
                        figures.add(f"{case}, {model}", side, rate)
    figures.show()
    write_report(options, figures=figures.to_json())


if __name__ == "__main__":
    main()
