"""Many clients at once: `LLM` beside llama.cpp with continuous batching, on the same traces, in turns.

    python benchmarks/bench_serving.py                              all scenarios, three rounds
    python benchmarks/bench_serving.py --quick                      one round of short traces, no closed-1024
    python benchmarks/bench_serving.py --scenarios closed poisson --poisson-seconds 60

    closed           1, 2, 4, 8 and 16 clients that ask again when answered, 128 tokens in and 128 out
    closed-1024      1 and 8 clients, 1,024 tokens in
    shared-prefix    8 clients whose prompts begin with the same 1,024 tokens, after one that was answered
    long-prompt      a prompt of 8,000 tokens alone; again beside four streams, and a short prompt 200 ms later
    tenants          two, of whom one sends ten times as much at once, with few pages
    poisson          prompts and answers of mixed length that come at random, at 0.8 of what 8 clients in a closed loop
                     get; of ten clients one leaves early, one has a grammar, one asks for log-probabilities (llama.cpp
                     answers those as plain). Pages are few, so that sequences are preempted.

Both sides wait in processes of their own and sample greedily. A client's times are those at which a token reaches it; a
gap is the time between deliveries: tokens that arrive within a millisecond are one. Good tokens are those of answers
whose first token came within a second, and 95 of 100 gaps within 100 ms. A share of the answers under load is asked
again alone and compared. A table, the goals, and a report in benchmarks/reports/.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_peers import Side, SideError, Worker, find_llama_python, make_peer, requantise_with, say, worker
from command_line import REPORTS, make_parser
from infer import __version__
from machine import cpu_model
from peer_models import MODELS, MissingModelError, PeerModel, make_model
from serving_report import OURS, PEER, Report, figures
from serving_trace import (
    CONTEXT,
    LONG_PROMPT,
    Answer,
    Ask,
    Scenario,
    at_poisson_times,
    by_clients,
    closed,
    long_prompt,
    mixed,
    shared_prefix,
    tenants,
)

WORKER = Path(__file__).with_name("serving_worker.py")
SCENARIOS = ("closed", "closed-1024", "shared-prefix", "long-prompt", "tenants", "poisson")
SHARE_OF_CAPACITY = 0.8
PREFIXES = {"reuse_prefixes": True}
FEW_PAGES = PREFIXES | {"context": 2048, "pool_pages": 40}  # of 64 tokens: two of the longest requests


@dataclass(frozen=True)
class Extent:
    """How much is asked."""

    rounds: int
    clients: tuple[int, ...]
    each: int  # requests of a client
    num_sharing: int
    prefix_tokens: int
    long_tokens: int
    poisson_seconds: float
    num_checked: int  # answers under load that are asked again alone


def scenarios(names: list[str], extent: Extent, turn: int) -> Iterator[Scenario]:
    """All but poisson, with other prompts in every round."""
    seed = 100_000 * (turn + 1)
    if "closed" in names:
        for count in extent.clients:
            asks = closed(count, 128, 128, extent.each, seed + 1000 * count)
            yield Scenario(f"closed {count}", asks, slots=max(8, count), options=PREFIXES)
    if "closed-1024" in names:
        for count in (1, 8):
            yield Scenario(f"closed-1024 {count}", closed(count, 1024, 128, 1, seed + 90 * count), options=PREFIXES)
    if "shared-prefix" in names:
        yield Scenario(
            "shared-prefix",
            shared_prefix(extent.num_sharing, extent.prefix_tokens, 128, seed + 50_000),
            options=PREFIXES,
        )
    if "long-prompt" in names:
        yield Scenario("long-prompt", long_prompt(extent.long_tokens, seed + 60_000), options=PREFIXES)
    if "tenants" in names:
        yield Scenario("tenants", tenants(seed + 70_000), options=FEW_PAGES)


class Sides:
    """The processes of both. A model is loaded again where a scenario has other options."""

    def __init__(self, stack: ExitStack, sides: list[Side], model: PeerModel, threads: int, report: Report) -> None:
        self._model, self._threads, self._report = model, threads, report
        self._workers = {side.name: stack.enter_context(worker(side)) for side in sides}
        self._loaded: dict[str, dict[str, Any]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._workers)

    def run(self, name: str, scenario: Scenario) -> tuple[list[Answer], dict[str, Any]]:
        """Raises SideError."""
        peer = self._workers[name]
        self._load(name, peer, scenario)
        found = peer.ask(do="serve", asks=[asdict(ask) for ask in scenario.asks])
        return [Answer(**each) for each in found["answers"]], found["state"]

    def drop(self, name: str) -> None:
        del self._workers[name]

    def _load(self, name: str, peer: Worker, scenario: Scenario) -> None:
        options = {
            "path": str(self._model.path), "threads": self._threads, "context": CONTEXT, "slots": scenario.slots,
        } | scenario.options  # fmt: skip
        if self._loaded.get(name) != options:
            self._report.runs_on[name] = peer.ask(do="load", **options)["runs_on"]
            self._loaded[name] = options
            peer.ask(do="serve", asks=[asdict(ask) for ask in closed(4, 64, 32, 1, seed=1)])  # warms up


def measure(sides: Sides, names: list[str], extent: Extent, report: Report) -> None:
    rate = 0.0
    for turn in range(extent.rounds):
        for scenario in scenarios(names, extent, turn):
            run_sides(sides, scenario, report)
        for name in ("closed", "closed-1024"):
            add_ratios(report, name, turn)
        if "poisson" in names:
            asks = list(mixed(100_000 if rate else 32, seed=turn + 1))
            if not rate:
                rate = SHARE_OF_CAPACITY * capacity(sides, asks)
                say(f"poisson: {rate:.2f} requests a second")
                asks = list(mixed(100_000, seed=turn + 1))
            report.settings["poisson_rate"] = rate
            arriving = at_poisson_times(asks[: round(rate * extent.poisson_seconds)], rate, seed=turn + 1)
            scenario = Scenario("poisson", arriving, options=FEW_PAGES)
            answers = run_sides(sides, scenario, report)
            if OURS in answers:
                unlike = count_unlike(sides, scenario, answers[OURS], extent.num_checked)
                report.add("poisson", OURS, {"answers unlike solo": unlike})


def run_sides(sides: Sides, scenario: Scenario, report: Report) -> dict[str, list[Answer]]:
    found = {}
    for name in sides.names:
        started = time.perf_counter()
        try:
            answers, state = sides.run(name, scenario)
            say(f"{scenario.name}: {name}, {time.perf_counter() - started:.0f} s")
            report.add(scenario.name, name, figures(scenario, answers, state), answers)
            found[name] = answers
        except (SideError, ValueError) as error:
            say(f"{name} is left out from {scenario.name} on: {error}")
            sides.drop(name)
    return found


def capacity(sides: Sides, asks: list[Ask]) -> float:
    """Requests a second that our side answers in a closed loop of 8 clients."""
    scenario = Scenario("capacity", by_clients(asks, 8), options=FEW_PAGES)
    answers, _ = sides.run(OURS if OURS in sides.names else sides.names[0], scenario)
    return len(answers) / max(answer.ended for answer in answers)


def count_unlike(sides: Sides, scenario: Scenario, answers: list[Answer], num_checked: int) -> int:
    """Of answers under load, how many have other tokens than the request has alone."""
    step = max(1, len(answers) // num_checked)
    chosen = range(0, len(answers), step)
    alone = by_clients([scenario.asks[index] for index in chosen], 1)
    found, _ = sides.run(OURS, replace(scenario, asks=alone))
    return sum(answers[index].token_ids != mine.token_ids for index, mine in zip(chosen, found, strict=True))


def add_ratios(report: Report, name: str, turn: int) -> None:
    """Of tokens per second to those of one client in the same round."""
    base = report.values.get(f"{name} 1", {}).get("tok/s", {})
    for scenario in [scenario for scenario in report.values if scenario.startswith(f"{name} ")]:
        for side, rates in report.values[scenario]["tok/s"].items():
            if len(rates) > turn and len(base.get(side, ())) > turn:
                report.add(scenario, side, {"× one client": rates[turn] / base[side][turn]})


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, threads=True, rounds=3)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--model", choices=MODELS, default="smollm2-q4_1")
    parser.add_argument("--poisson-seconds", type=float, default=60.0)
    parser.add_argument("--llama-python", metavar="PATH", help="of an environment with llama-cpp-python")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--quick", action="store_true", help="one round of short traces")
    parser.add_argument("--output", type=Path, default=REPORTS, metavar="FOLDER")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    extent = Extent(arguments.rounds, (1, 2, 4, 8, 16), 2, 8, 1024, LONG_PROMPT, arguments.poisson_seconds, 60)
    if arguments.quick:
        extent = Extent(1, (1, 8), 1, 4, 512, 1000, 10.0, 8)
        arguments.scenarios = [name for name in arguments.scenarios if name != "closed-1024"]
    requantise, sides = None, [Side(OURS, (sys.executable, str(WORKER), "infer"))]
    if not arguments.alone:
        if llama_python := find_llama_python(arguments.llama_python):
            sides.insert(0, Side(PEER, (llama_python, str(WORKER), "llama")))
            requantise = requantise_with(make_peer(llama_python))
        else:
            say("no environment with llama-cpp-python (--llama-python): infer is measured alone")
    try:
        model = make_model(arguments.model, requantise)
    except MissingModelError as error:
        sys.exit(f"{arguments.model}: {error}")
    report = Report(cpu_model(), arguments.threads, arguments.model)
    report.settings = asdict(extent) | {"version": __version__}
    with ExitStack() as stack:
        measure(Sides(stack, sides, model, arguments.threads, report), arguments.scenarios, extent, report)
    print(report.table())
    print(f"\nwritten to {' and '.join(str(path) for path in report.write(arguments.output))}")


if __name__ == "__main__":
    main()
