"""infer beside llama.cpp and transformers: the same files and threads, interleaved round by round in one run.

    python benchmarks/bench_peers.py                          everything: hours on two cores
    python benchmarks/bench_peers.py --quick                  one model, in a few minutes
    python benchmarks/bench_peers.py --models smollm2-q4_1 llama-1b-q4_0 --threads 2 --rounds 3

llama.cpp comes from an environment that has llama-cpp-python: --llama-python, $LLAMA_CPP_PYTHON, or .venv-peers.
Without one, infer is measured alone. Several builds, as NAME=PATH, run side by side, each without and with flash
attention; ratios are to the fastest of them in each case. transformers runs the weights dequantised. INFER_ISA chooses
our instruction set: give the peer a build of the same one (and torch ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA). Every
side is a process that waits while another one works. In each round the machine's own limits are measured too: what a
share of the limit is a share of.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from command_line import REPORTS, available_cores, make_parser
from machine import cpu_model, measure_limits
from peer_models import MODELS, MissingModelError, PeerModel, make_model
from peer_report import PEER, Measure, Report, Result

BENCHMARKS = Path(__file__).parent
WORKER = BENCHMARKS / "peer_worker.py"
TORCH_ALONE = "import os, resource, torch; print(); print(int(open('/proc/self/statm').read().split()[1]) * {page})"

MEASURES = (
    Measure("decode", "decode", 16, 128),
    Measure("prefill 512", "prefill", 512, 0),
    Measure("prefill 2000", "prefill", 2000, 0),
    Measure("prefill 8000", "prefill", 8000, 0),
    Measure("decode at 128", "decode", 128, 32),
    Measure("decode at 1024", "decode", 1024, 32),
    Measure("decode at 4096", "decode", 4096, 32),
)


@dataclass(frozen=True)
class Side:
    name: str
    command: tuple[str, ...]
    variant: str = ""  # an engine's own: `peer_worker`
    has_cold_start: bool = True


class SideError(Exception):
    """A side said what is wrong with it, or ended."""


@dataclass
class Worker:
    """A side's process and its two pipes."""

    process: subprocess.Popen[str]
    times_by_measure: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"ended with status {self.process.wait()}"}
        if "error" in answer:
            raise SideError(answer["error"])
        return answer


@contextmanager
def worker(side: Side) -> Iterator[Worker]:
    with subprocess.Popen(
        side.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def find_llama_python(given: str | None = None) -> str | None:
    candidates = [given, os.environ.get("LLAMA_CPP_PYTHON"), BENCHMARKS.parent / ".venv-peers" / "bin" / "python"]
    for candidate in filter(None, candidates):
        check = [str(candidate), "-c", "import llama_cpp"]
        try:
            if subprocess.run(check, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0:
                return str(candidate)
        except OSError:
            pass
        say(f"{candidate} has no llama-cpp-python")
    return None


def find_peers(builds: list[str]) -> list[Side]:
    """Two sides for each [NAME=]PATH; without any, for what `find_llama_python` finds."""
    peers = []
    for build in builds or [""]:
        name, separator, path = build.rpartition("=")
        if python := find_llama_python(path or None):
            name = f"{PEER} {name}" if separator else PEER
            peers += [make_peer(python, name), make_peer(python, f"{name} flash", "flash")]
    return peers


def make_peer(llama_python: str, name: str = PEER, variant: str = "") -> Side:
    return Side(name, (llama_python, str(WORKER), "llama"), variant, has_cold_start=not variant)


def make_references() -> list[Side]:
    if find_spec("transformers") is None:
        say("transformers is left out: pip install transformers")
        return []
    command = (sys.executable, str(WORKER), "transformers")
    return [
        Side(f"transformers {name}", command, dtype, has_cold_start=False)
        for name, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    ]


def make_ours() -> list[Side]:
    ours = (sys.executable, str(WORKER), "infer")
    return [Side("infer exact", ours, "exact"), Side("infer fast", ours, "fast")]


def compare(
    model: PeerModel, sides: list[Side], threads: int, measures: list[Measure], rounds: int, report: Report
) -> None:
    """Load every side, then measure them in turns."""
    context = max(measure.prompt_tokens + measure.new_tokens for measure in measures) + 16
    with ExitStack() as stack:
        workers: dict[Side, Worker] = {}
        for side in sides:
            started = stack.enter_context(worker(side))
            try:
                options = {"path": str(model.path), "threads": threads, "context": context, "variant": side.variant}
                report.runs_on[side.name] = started.ask(do="load", **options)["runs_on"]
                workers[side] = started
            except SideError as error:
                say(f"{side.name} is left out: {error}")
        for round_number in range(-1, rounds):  # round −1 warms up
            limits = measure_limits(threads)
            if round_number >= 0:
                report.limits.append((model.name, limits))
            for measure in measures[:2] if round_number < 0 else measures:
                for side, started in list(workers.items()):
                    seed = 1000 * round_number + measure.prompt_tokens
                    request = {"prompt_tokens": measure.prompt_tokens, "new_tokens": measure.new_tokens, "seed": seed}
                    try:
                        seconds = started.ask(do="measure", **request)
                    except SideError as error:
                        say(f"{side.name} is left out of {measure.name}: {error}")
                        del workers[side]
                        continue
                    if round_number >= 0:
                        started.times_by_measure.setdefault(measure.name, []).append(seconds[measure.kind])
        for measure in measures:
            for side, started in workers.items():
                if times := started.times_by_measure.get(measure.name):
                    rates = [measure.num_tokens / seconds for seconds in times]
                    report.add(Result(model.name, threads, measure.name, side.name, "tok/s", rates))


def compare_cold(model: PeerModel, sides: list[Side], threads: int, rounds: int, report: Report) -> None:
    """From the start of a process to its first token, and what is resident after a few more."""
    values: dict[tuple[str, str], list[float]] = {}
    alone = Side("import torch", (sys.executable, "-c", TORCH_ALONE.format(page=os.sysconf("SC_PAGE_SIZE"))))
    for _ in range(rounds):
        for side in [*(side for side in sides if side.has_cold_start), alone]:
            options = {"path": str(model.path), "threads": threads, "context": 512, "variant": side.variant}
            command = side.command if side is alone else (*side.command, "cold", json.dumps(options))
            try:
                first_token, resident = time_cold(command)
            except SideError as error:
                say(f"{side.name} is left out of the cold start: {error}")
                continue
            values.setdefault((side.name, "cold start"), []).append(first_token)
            values.setdefault((side.name, "resident"), []).append(resident / 2**20)
    for (name, measure), numbers in values.items():
        report.add(Result(model.name, threads, measure, name, "s" if measure == "cold start" else "MiB", numbers))


def time_cold(command: tuple[str, ...]) -> tuple[float, int]:
    """Seconds to the first line, and the number on the second."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        seconds = time.perf_counter() - start
        resident = process.stdout.readline()
        lines = process.stderr.read().strip().splitlines()
    if not first or not resident:
        raise SideError(lines[-1] if lines else "no token")
    return seconds, int(resident)


def requantise_with(side: Side) -> Any:
    def requantise(source: Path, file_type: str, target: Path) -> None:
        say(f"making {target.stem}")
        with worker(side) as peer:
            peer.ask(do="requantize", source=str(source), target=str(target), file_type=file_type)

    return requantise


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--measures", nargs="+", choices=[m.name for m in MEASURES] + ["cold"], metavar="NAME")
    parser.add_argument("--sides", nargs="+", metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, available_cores()}))
    parser.add_argument("--llama-python", nargs="+", default=[], metavar="[NAME=]PATH", help="with llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="SmolLM2 as Q4_K_M, three rounds, no long contexts")
    parser.add_argument("--output", type=Path, default=REPORTS, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models = arguments.models or ["smollm2-q4_k_m"]
        arguments.measures = arguments.measures or ["decode", "prefill 512", "cold"]
        arguments.rounds = min(arguments.rounds, 3)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    peers = find_peers(arguments.llama_python)
    if not peers:
        say("no environment with llama-cpp-python (--llama-python): infer is measured alone")
    sides = [*peers, *make_references(), *make_ours()]
    requantise = requantise_with(peers[0]) if peers else None
    if arguments.sides and (unknown := set(arguments.sides) - {side.name for side in sides}):
        sys.exit(f"unknown sides {', '.join(unknown)}: choose from {', '.join(side.name for side in sides)}")
    sides = [side for side in sides if arguments.sides is None or side.name in arguments.sides]
    measures = [m for m in MEASURES if arguments.measures is None or m.name in arguments.measures]
    report = Report(cpu_model(), available_cores())
    for name in arguments.models or MODELS:
        try:
            model = make_model(name, requantise)
        except MissingModelError as error:
            say(f"{name} is left out: {error}")
            continue
        report.models.append(model)
        for threads in arguments.threads:
            say(f"{name} with {threads} threads")
            if measures:
                compare(model, sides, threads, measures, arguments.rounds, report)
            if arguments.measures is None or "cold" in arguments.measures:
                compare_cold(model, sides, threads, arguments.rounds, report)
    report.measures.extend(measures)
    print(report.table())
    print(f"\nwritten to {' and '.join(str(path) for path in report.write(arguments.output))}")


if __name__ == "__main__":
    main()
