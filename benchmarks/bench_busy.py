"""Decode beside busy neighbours: the team, which adapts, against one thread, interleaved in one run.

    python benchmarks/bench_busy.py [--model FILE.gguf] [--neighbours 0 1 2] [--rounds 7] [--threads N]

Goal: never slower than one thread. Both sides are processes that wait while the other one works; a neighbour is a
process that does nothing but run. Both sides must give the same tokens, whatever the machine does to them.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench_peers import WORKER, Side, Worker, worker
from command_line import available_cores, make_parser
from infer.checkpoint.find import resolve
from machine import cpu_model

PROMPT_TOKENS = 16


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(side: Worker, new_tokens: int, seed: int) -> float:
    """Tokens per second."""
    answer = side.ask(do="measure", prompt_tokens=PROMPT_TOKENS, new_tokens=new_tokens, seed=seed)
    return new_tokens / float(answer["decode"])


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=7)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the team")
    options = parser.parse_args()

    print(f"{cpu_model()}, {available_cores()} cores; {options.tokens} tokens, medians of {options.rounds} rounds")
    with ExitStack() as stack:
        command = (sys.executable, str(WORKER), "infer")
        one, team = (stack.enter_context(worker(Side(name, command))) for name in ("one", "team"))
        for side, threads in ((one, 1), (team, options.threads)):
            side.ask(do="load", path=str(resolve(options.model)), threads=threads, context=512, variant="exact")
            measure(side, 16, seed=0)
        rates: dict[int, list[tuple[float, float]]] = {count: [] for count in options.neighbours}
        for index in range(options.rounds):
            for count in options.neighbours:
                with busy_neighbours(count):
                    order = (one, team) if index % 2 == 0 else (team, one)
                    measured = [measure(side, options.tokens, seed=index) for side in order]
                    rates[count].append((measured[0], measured[1]) if index % 2 == 0 else (measured[1], measured[0]))
    print("neighbours   1 thread   team     ratio   lowest   each round: one/team tok/s")
    for count, pairs in rates.items():
        ratios = [team_rate / one_rate for one_rate, team_rate in pairs]
        ones, teams = (statistics.median(column) for column in zip(*pairs, strict=True))
        rounds = " ".join(f"{a:.0f}/{b:.0f}" for a, b in pairs)
        print(f"{count:10d} {ones:10.1f} {teams:8.1f} {statistics.median(ratios):8.2f} {min(ratios):8.2f}   {rounds}")


if __name__ == "__main__":
    main()
