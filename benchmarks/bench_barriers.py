"""Measure the cost of a barrier between threads, and predict a token's time on more cores than this machine has.

    python benchmarks/bench_barriers.py
    python benchmarks/bench_barriers.py --barriers 7

A token meets some barriers in each layer (`test_dispatch_table` counts them). Threads count their arrivals in one word,
beyond 16 threads in groups of 8, and the last one releases the others (`threads/barrier`). So with n threads, a barrier
takes

    n <= 16:   n * t + n * r              arrivals one after another; the release reaches the others one after another
    n > 16:    (8 + n / 8) * t + n * r    groups arrive side by side, then their last threads

`t` is the time in which a written cache line moves to another core. It is half of a barrier of two threads, measured
here for neighbours. `r` is the time of one read of the released line. The weights take bytes / bandwidth. Nothing is
said of threads that are late, so the real share of barriers is larger. Predictions are checked by nobody yet.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from harness import make_parser, print_head, write_report
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.thread_records import STATE
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import ThreadPool, aligned

NUM_COMMANDS = 50_000  # so many that the start of a run counts for nothing
NOTHING = np.dtype([("unused", np.int64)])
GROUP, MOST_UNGROUPED = 8, 16


class Machine(NamedTuple):
    """A machine that is assumed: the bandwidth of its memory, and the times of a cache line that moves."""

    name: str
    num_threads: int
    gigabytes: float  # per second, of all threads
    transfer: float  # nanoseconds until another core has a written line
    read: float  # nanoseconds of one more reader


MACHINES = (
    Machine("desktop, 2 channels DDR5", 16, 70, 80, 10),
    Machine("server, 8 channels DDR4", 32, 170, 100, 12),
    Machine("server, 12 channels DDR5", 64, 400, 100, 12),
    Machine("two sockets, 8 channels each", 64, 340, 250, 25),
)
MODELS = (("135M, Q4_1", 30, 0.09), ("1B, Q4_K", 16, 0.75), ("8B, Q4_K", 32, 4.6))  # layers, gigabytes of a token


def make_nothing() -> Callable[..., None]:
    """Return a command that does nothing."""

    def nothing(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        pass

    return nothing


def nanoseconds(pool: ThreadPool, num_threads: int, rounds: int) -> float:
    """Return the time of a command that does nothing, with the barrier after it. A lone thread meets none."""
    address = compiled_address("bench_barriers:make_nothing", NOTHING)
    command = Command(address, np.zeros(1, NOTHING), BARRIER, "nothing")
    table, state, times = DispatchTable([command] * NUM_COMMANDS), aligned(1, STATE), []
    state["num_tokens"] = 1
    for _ in range(rounds):
        began = time.perf_counter_ns()
        pool.run(table, state, num_threads)
        times.append((time.perf_counter_ns() - began) / NUM_COMMANDS)
    return median(times)


def barrier(machine: Machine) -> float:
    """Return the predicted nanoseconds of a barrier of all threads."""
    count = machine.num_threads
    arrivals = count if count <= MOST_UNGROUPED else GROUP + -(-count // GROUP)
    return arrivals * machine.transfer + count * machine.read


def predict(machine: Machine, per_layer: int) -> dict[str, dict[str, float]]:
    """Return for each model the milliseconds of a token's weights and of its barriers, and the barriers' share."""
    found = {}
    for name, num_layers, gigabytes in MODELS:
        reading, waiting = 1e3 * gigabytes / machine.gigabytes, 1e-6 * num_layers * per_layer * barrier(machine)
        found[name] = {"weights": reading, "barriers": waiting, "share": waiting / (reading + waiting)}
    return found


def main() -> None:
    parser = make_parser(__doc__, rounds=20, threads=True)
    parser.add_argument("--barriers", type=int, default=6, help="barriers of a token in each layer (6)")
    options = parser.parse_args()
    print_head(options, "nanoseconds, then milliseconds of a token")
    pool, measured = ThreadPool(options.threads), {}
    for count in range(1, options.threads + 1):
        measured[count] = nanoseconds(pool, count, options.rounds)
        print(f"{count} threads: {measured[count]:.0f} ns for a command that does nothing, and its barrier")
    pool.close()
    predicted = {machine.name: predict(machine, options.barriers) for machine in MACHINES}
    for machine in MACHINES:
        print(f"\n{machine.name}, {machine.num_threads} threads, predicted: a barrier {barrier(machine):.0f} ns")
        for name, each in predicted[machine.name].items():
            times = f"weights {each['weights']:6.2f} ms, barriers {each['barriers']:5.2f} ms"
            print(f"  {name:12} {times}, {each['share']:.0%}")
    write_report(options, measured=measured, predicted=predicted)


if __name__ == "__main__":
    main()
