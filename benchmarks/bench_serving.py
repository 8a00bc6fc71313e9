"""Measure many concurrent clients of infer as a library, as a server, as replicas and through Ray, and of llama.cpp.

    python benchmarks/bench_serving.py                                  `LLM` beside llama.cpp, all traces
    python benchmarks/bench_serving.py --quick --sides LLM serve        one round of short traces
    python benchmarks/bench_serving.py --sides serve isolated replicas --scenarios closed start --clients 1 8
    python benchmarks/bench_serving.py --sides serve ray --threads 1 --scenarios closed start --clients 1

    LLM, llama.cpp                  libraries, each in a process of its own
    serve, isolated, replicas       `infer serve`, with `--isolate`, and with `--replicas 2`
    ray                             `infer ray deploy`; needs `pip install '.[ray]'` in the clone
    llama-server                    llama.cpp's program: $LLAMA_SERVER, or on the path

    closed          clients that ask again when they are answered
    shared-prefix   8 clients whose prompts begin with the same 1,024 tokens, after a client that was answered
    long-prompt     a prompt of 8,000 tokens alone; then again beside four streams, and a short prompt 200 ms later
    poisson         mixed requests at random moments, at 0.8 of what 8 clients in a closed loop get
    start           servers: seconds until the port answers and until the model does, and resident memory
    pause           isolated and replicas: the longest pause of a stream whose engine is killed

All sides sample greedily. A client's times are those at which a token reaches it. A gap is the time between deliveries.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import load
from harness import Figures, Worker, WorkerError, find_llama_python, make_parser, print_head, say, turns, write_report
from load import Answer, Ask
from server_process import ServerError, ServerProcess, running

CLIENTS = str(Path(__file__).with_name("serving_worker.py"))
TRACES = ("closed", "shared-prefix", "long-prompt", "poisson")
SERVER_MEASURES = ("start", "pause")
SERVERS = {"serve": [], "isolated": ["--isolate"], "replicas": ["--replicas", "2"]}
SIDES = ("LLM", "llama.cpp", *SERVERS, "ray", "llama-server")
CONTEXT, SLOTS = 8192, 16
FEW_PAGES = {"context": 2048, "pool_pages": 40}  # pages of 64 tokens for two of the longest requests
WARM_UP = load.closed(4, 64, 32, 1, seed=1)


@dataclass(frozen=True)
class Scenario:
    name: str
    asks: list[Ask]
    options: dict[str, Any] = field(default_factory=dict)  # options of a library


class Side(ABC):
    """One engine that answers traces."""

    @abstractmethod
    def run(self, scenario: Scenario) -> list[Answer]:
        """Raise WorkerError if the side has ended."""

    def facts(self, name: str) -> dict[str, float]:
        """Return the figures of a server that need no trace. A library has none."""
        return {}


class Library(Side):
    """A library. A model is loaded again if a scenario has other options."""

    def __init__(self, worker: Worker, path: Path, threads: int) -> None:
        self._worker = worker
        self._base = {"path": str(path), "threads": threads, "context": CONTEXT, "slots": SLOTS}
        self._loaded: dict[str, Any] = {}

    def run(self, scenario: Scenario) -> list[Answer]:
        options = self._base | {"reuse_prefixes": True} | scenario.options
        if self._loaded != options:
            self._worker.ask("load", **options)
            self._loaded = options
            _serve(self._worker, WARM_UP)
        return _serve(self._worker, scenario.asks)


class Server(Side):
    """A server, and its clients in another process."""

    def __init__(self, server: ServerProcess, worker: Worker) -> None:
        self._server, self._worker = server, worker
        self._worker.ask("load", port=server.port)

    def run(self, scenario: Scenario) -> list[Answer]:
        return _serve(self._worker, scenario.asks)

    def facts(self, name: str) -> dict[str, float]:
        server = self._server
        if name == "start":
            times = {"port answers (s)": server.answers_after, "ready (s)": server.ready_after}
            return times | {"resident (MB)": server.resident_bytes() / 1e6}
        return {"longest gap (s)": self._longest_gap()}

    def _longest_gap(self) -> float:
        """Return the longest time between two lines of a stream after the kill -9 of the engine that writes it."""
        time.sleep(5)  # until there is a spare engine
        asked = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with self._server.post("/v1/completions", asked) as stream:
            stream.readline()
            os.kill(self._server.oldest_child(), signal.SIGKILL)
            last, longest = time.perf_counter(), 0.0
            for _ in iter(stream.readline, b""):
                now = time.perf_counter()
                last, longest = now, max(longest, now - last)
        return longest


def _serve(worker: Worker, asks: list[Ask]) -> list[Answer]:
    return [Answer(**each) for each in worker.ask("serve", asks=[asdict(ask) for ask in asks])]


def make_side(name: str, options: argparse.Namespace, stack: ExitStack, logs: Path) -> Side:
    """Start a side. Raise WorkerError or ServerError, which name a missing part."""
    from infer.files import resolve

    path, python, kind = resolve(options.model), sys.executable, name
    if name == "llama.cpp":
        found = find_llama_python(options.llama_python)
        if found is None:
            raise WorkerError("no environment with llama-cpp-python (--llama-python)")
        python = found
    if name in ("LLM", "llama.cpp"):
        worker = stack.enter_context(Worker([python, CLIENTS, name], is_quiet=name == "llama.cpp"))
        return Library(worker, path, options.threads)
    threads = options.threads // 2 or 1 if name == "replicas" else options.threads
    arguments = ["--port", "PORT", "--model", str(path), "--threads", str(threads)]
    if name == "llama-server":
        program = shutil.which(os.environ.get("LLAMA_SERVER", name))
        if program is None:
            raise WorkerError("there is no such program ($LLAMA_SERVER)")
        shape = ["--parallel", str(SLOTS), "--ctx-size", str(CONTEXT + SLOTS * 1536), "--kv-unified"]
        command = [program, *arguments, *shape, "--threads-batch", str(threads)]
    elif name == "ray":
        command, kind = [python, "-m", "infer", "ray", "deploy", *arguments], "http"
    else:
        command, kind = [python, "-m", "infer", "serve", *arguments, "--no-access-log", *SERVERS[name]], "http"
    server = stack.enter_context(running(command, logs / name))
    return Server(server, stack.enter_context(Worker([python, CLIENTS, kind])))


def scenarios(name: str, options: argparse.Namespace, turn: int) -> Iterator[Scenario]:
    """Yield the traces of a name. Each round has other prompts."""
    seed, is_quick = 100_000 * (turn + 1), options.quick
    match name:
        case "closed":
            for count in options.clients:
                asks = load.closed(count, options.prompt_tokens, options.new_tokens, 2, seed + 1000 * count)
                yield Scenario(f"closed {count}", asks)
        case "shared-prefix":
            yield Scenario(name, load.shared_prefix(8, 512 if is_quick else 1024, 128, seed + 50_000))
        case "long-prompt":
            yield Scenario(name, load.long_prompt(1000 if is_quick else 8000, seed + 60_000))
        case "poisson":
            count = max(1, round(options.rate * (10 if is_quick else 60)))
            arriving = load.at_poisson_times(list(load.mixed(count, seed=turn + 1)), options.rate, seed=turn + 1)
            yield Scenario(name, arriving, FEW_PAGES)


def capacity(side: Side) -> float:
    """Return the requests per second that a side answers in a closed loop of 8 clients."""
    asks = load.by_clients(list(load.mixed(32, seed=1)), 8)
    return len(asks) / max(answer.ended for answer in side.run(Scenario("capacity", asks, FEW_PAGES)))


def measure(name: str, sides: dict[str, Side], options: argparse.Namespace, found: Figures) -> None:
    """Measure a scenario on all sides in turns."""
    for turn, side in turns(sides, options.rounds):
        if side not in sides:
            continue
        try:
            if turn < 0:
                sides[side].run(Scenario("warm-up", WARM_UP))
                continue
            for scenario in scenarios(name, options, turn):
                started, answers = time.perf_counter(), sides[side].run(scenario)
                for metric, value in load.figures(scenario.asks, answers).items():
                    found.add(f"{scenario.name}: {metric}", side, value)
                errors = {answer.error for answer in answers if answer.error}
                say(", ".join([f"{scenario.name}: {side}", f"{time.perf_counter() - started:.0f} s", *errors]))
        except WorkerError as error:
            say(f"{side} is left out from {name} on: {error}")
            del sides[side]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["LLM", "llama.cpp"])
    parser.add_argument("--scenarios", nargs="+", choices=(*TRACES, *SERVER_MEASURES), default=list(TRACES))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="of closed")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of closed")
    parser.add_argument("--new-tokens", type=int, default=128, help="of closed")
    parser.add_argument("--rate", type=float, help="requests per second of poisson, in place of a measured rate")
    parser.add_argument("--llama-python", metavar="PATH", help="of an environment with llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="one round of short traces")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.clients = 1, [1, 8]
    return options


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers end too
    found, sides = Figures(options.sides), dict[str, Side]()
    print_head(options, f"ratios are to {options.sides[0]}")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in options.sides:
            try:
                sides[name] = make_side(name, options, stack, logs)
            except (WorkerError, ServerError) as error:
                say(f"{name} is left out: {error}")
        if "poisson" in options.scenarios and options.rate is None and sides:
            options.rate = 0.8 * capacity(next(iter(sides.values())))
        for name in options.scenarios:
            if name in TRACES:
                measure(name, sides, options, found)
                continue
            for side in sides if name != "pause" else sides.keys() & {"isolated", "replicas"}:
                for metric, value in sides[side].facts(name).items():
                    found.add(f"{name}: {metric}", side, value)
    found.show()
    write_report(options, figures=found.to_json())


if __name__ == "__main__":
    main()
