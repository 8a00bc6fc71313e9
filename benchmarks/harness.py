"""Parts that the benchmarks share: the command line, workers, turns, figures and the report.

A side is one of the compared things: a source tree, an engine, a setting. While one side works, all others wait. Each
round measures every side, in the reverse order of the round before, so that a busy machine slows all of them alike.
This module imports only the standard library, because workers also run in environments without infer.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Self

REPORTS = Path(__file__).with_name("reports")
# CPUs that Numba can compile for, with their features for LLVM.
FEATURES = {"haswell": "+avx,+avx2,+fma,+f16c", "alderlake": "+avx,+avx2,+fma,+f16c,+avxvnni"}
FEATURES["skylake-avx512"] = f"{FEATURES['haswell']},+avx512f,+avx512bw"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def find_llama_python(given: str | None = None) -> str | None:
    """Return a Python that has llama-cpp-python: the given one, $LLAMA_CPP_PYTHON, or that of .venv-peers."""
    venv = REPORTS.parents[1] / ".venv-peers" / "bin" / "python"
    for candidate in filter(None, [given, os.environ.get("LLAMA_CPP_PYTHON"), str(venv)]):
        check = [candidate, "-c", "import llama_cpp"]
        if os.path.exists(candidate) and not subprocess.run(check, capture_output=True, check=False).returncode:
            return candidate
        say(f"{candidate} has no llama-cpp-python")
    return None


def say(text: str) -> None:
    """Show progress on stderr."""
    print(text, file=sys.stderr, flush=True)


# The command line


def make_parser(
    doc: str | None, *, model: str | None = None, threads: int | bool = False, rounds: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that have the same meaning in every script. `--report` is always present.

    `threads` is the default: a number, or True for all cores.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("--model", default=model, help=f"a name, folder or file that infer loads ({model})")
    if threads:
        count = available_cores() if threads is True else threads
        parser.add_argument("--threads", type=int, default=count, help=f"of the engine ({count})")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds, after a warm-up ({rounds})")
    parser.add_argument(
        "--report", nargs="?", const=REPORTS, type=Path, metavar="PATH",
        help="write a JSON report: a file that ends in .json, or a new file in a folder (benchmarks/reports)",
    )  # fmt: skip
    return parser


def print_head(options: argparse.Namespace, unit: str) -> None:
    """Print the machine, the settings and the unit of the figures that follow."""
    shown = [f"{name} {value}" for name, value in vars(options).items() if name in ("model", "threads", "rounds")]
    print(", ".join([cpu_model(), f"{available_cores()} cores", *shown]) + f"; {unit}", flush=True)


def write_report(options: argparse.Namespace, **results: Any) -> Path | None:
    """Write the results with the version, the CPU and the settings, if `--report` asks for it."""
    if options.report is None:
        return None
    from infer import __version__

    now = datetime.now(UTC)
    path: Path = options.report
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        name = Path(sys.argv[0]).stem.removeprefix("bench_").removeprefix("check_").replace("_", "-")
        path /= f"{name}-{now:%Y%m%d-%H%M%S}.json"
    head = {
        "time": now.isoformat(timespec="seconds"),
        "version": __version__,
        "cpu": cpu_model(),
        "cores": available_cores(),
        "settings": {name: value for name, value in vars(options).items() if name != "report"},
    }
    path.write_text(json.dumps(head | results, indent=1, default=str, ensure_ascii=False) + "\n")
    print(f"written: {path}")
    return path


# Workers


class WorkerError(Exception):
    """A worker reported an error, or ended."""


class Worker:
    """A process that answers one JSON request per line."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, is_quiet: bool = False
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            text=True,
        )

    def ask(self, do: str, **request: Any) -> Any:
        """Return the answer to a request. Raise WorkerError if there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"ended with status {self._process.wait()}"}
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["found"]

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.communicate()


def answer_lines(**handlers: Callable[..., Any]) -> None:
    """Answer each request on stdin with the result of the handler that it names."""
    # The output of libraries goes to stderr, so stdout has only the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"found": handlers[request.pop("do")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def add_code_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which code is compared: source trees and instruction sets."""
    parser.add_argument("--sources", nargs="+", default=["src"], help="source trees of infer")
    parser.add_argument("--sets", nargs="+", default=[""], help="instruction sets, as INFER_ISA names them")
    parser.add_argument("--cpu", choices=FEATURES, help="compile for this CPU, which has less than this one")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)


@contextmanager
def code_workers(options: argparse.Namespace) -> Iterator[dict[str, Worker]]:
    """Run this script with `--work` once per source tree and instruction set."""
    with ExitStack() as stack:
        workers = {}
        for source, isa in itertools.product(options.sources, options.sets):
            environment = {"PYTHONPATH": os.path.abspath(source)} | ({"INFER_ISA": isa} if isa else {})
            if options.cpu is not None:
                environment |= {"NUMBA_CPU_NAME": options.cpu, "NUMBA_CPU_FEATURES": FEATURES[options.cpu]}
            command = [sys.executable, sys.argv[0], "--work", *sys.argv[1:]]
            workers[f"{source} {isa}".strip()] = stack.enter_context(Worker(command, environment))
        yield workers


# Turns and figures


class Figures:
    """Figures by case and side, one per round. Ratios are to the first side that a case has."""

    def __init__(self, sides: Iterable[str]) -> None:
        self._sides = list(sides)
        self._rounds: dict[str, dict[str, list[float]]] = {}

    def add(self, case: str, side: str, figure: float) -> None:
        self._rounds.setdefault(case, {}).setdefault(side, []).append(figure)

    def drop(self, case: str, side: str) -> None:
        """Remove the figures of a side that failed."""
        self._rounds.get(case, {}).pop(side, None)

    @property
    def cases(self) -> list[str]:
        return list(self._rounds)

    def sides(self, case: str) -> list[str]:
        return [side for side in self._sides if side in self._rounds.get(case, {})]

    def median(self, case: str, side: str) -> float:
        return median(self._rounds[case][side])

    def ratios(self, case: str, side: str) -> list[float]:
        """Return each round's ratio to the first side."""
        firsts = self._rounds[case][self.sides(case)[0]]
        return [mine / first for mine, first in zip(self._rounds[case][side], firsts, strict=False) if first]

    def show(self, cases: Iterable[str] | None = None) -> None:
        """Print a line per side: the median, and the median, least and greatest ratio."""
        for case in self.cases if cases is None else cases:
            for number, side in enumerate(self.sides(case)):
                found, line = self.ratios(case, side), f"{case:34} {side:20} {self.median(case, side):10.2f}"
                if number and found:
                    line += f"  {median(found):6.2f} × ({min(found):.2f} to {max(found):.2f})"
                print(line, flush=True)

    def to_json(self) -> dict[str, Any]:
        """Return the median, the median ratio and the rounds of each side of each case."""
        found: dict[str, Any] = {}
        for case in self.cases:
            for side in self.sides(case):
                ratios = self.ratios(case, side)
                found.setdefault(case, {})[side] = {
                    "median": self.median(case, side),
                    "ratio": median(ratios) if ratios else None,
                    "rounds": self._rounds[case][side],
                }
        return found


def turns(sides: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield a round's number and a side, for each side of each round. Round −1 is the warm-up."""
    names = list(sides)
    for number in range(-1, rounds):
        for side in names[:: 1 if number % 2 else -1]:
            yield number, side


def compare(
    cases: Iterable[str],
    sides: Iterable[str],
    rounds: int,
    measure: Callable[[str, str, int], float],
    show: Callable[[Figures, list[str]], None] = Figures.show,
) -> Figures:
    """Measure each case on all sides in turns, and show its medians and ratios. The warm-up is not counted.

    A side that fails in a case is left out of it and of the cases after it.
    """
    names = list(sides)
    figures = Figures(names)
    for case in cases:
        for number, side in turns(names, rounds):
            if side not in names:
                continue
            try:
                figure = measure(case, side, number)
            except WorkerError as error:
                say(f"{side} is left out from {case!r} on: {error}")
                names.remove(side)
                figures.drop(case, side)
                continue
            if number >= 0:
                figures.add(case, side, figure)
        show(figures, [case])
    return figures
