"""Measure this tree beside an older commit, in turns: what callers get, and the time of a step outside of the model.

    python benchmarks/beside.py c9a9a12c                               every row: about ten minutes
    python benchmarks/beside.py HEAD --only decode host-60 --rounds 3  some rows; HEAD is without uncommitted changes

The commit is checked out as a git work tree in a temporary folder, which is removed at the end. Each side has a process
of its own and, for `http`, a server. While one side works, the other one waits. Both sides compile their kernels in the
warm-up, which is not counted. A ratio is new / old of one round: the table has the median, the least and the greatest.

    decode         one answer of 160 tokens
    prefill        a prompt of 512 tokens
    generate-all   64 prompts in one call
    threads        the same prompts, from 8 threads
    tasks          32 tasks of one event loop
    http           16 streams from a server, each with two answers of 48 tokens
    first-token    the first token of a short prompt
    host-N         a step of N sequences of a tiny model that returns to Python after each step
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness import Figures, Worker, WorkerError, compare, make_parser, print_head, say, write_report
from load import Answer, closed
from load import figures as figures_of
from server_process import ServerProcess, running
from serving_worker import HttpClients

ROOT = Path(__file__).parents[1]
OLD, NEW = "old", "new"
UNITS = dict.fromkeys(("decode", "prefill", "generate-all", "threads", "tasks", "http"), "tok/s")
UNITS |= {"first-token": "ms", "host-1": "µs", "host-16": "µs", "host-60": "µs"}
NUM_STREAMS, ANSWERS_PER_STREAM = 16, 2
TINY_CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "max_position_embeddings": 2048, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip


# The two trees


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository. Raise CalledProcessError if it fails."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def describe(commit: str) -> str:
    return git("show", "--no-patch", "--format=%h %s", commit)


def describe_this_tree() -> str:
    changes = git("status", "--porcelain", "--", "src")
    return describe("HEAD") + (", with uncommitted changes" if changes else "")


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """Check a commit out in a temporary folder, and remove it afterwards."""
    with TemporaryDirectory(prefix="infer-beside-") as folder:
        tree = Path(folder) / "tree"
        try:
            git("worktree", "add", "--detach", str(tree), commit)
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=False)


class Side:
    """The process of one tree and, if there is one, its server."""

    def __init__(self, worker: Worker, server: ServerProcess | None) -> None:
        self.worker, self._server = worker, server

    def measure(self, row: str, number: int) -> float:
        if row != "http":
            return float(self.worker.ask("measure", row=row, number=number))
        assert self._server is not None
        return _streams_rate(self._server.port, number)


def _streams_rate(port: int, number: int) -> float:
    """Return the tokens per second of all streams. No two rounds have the same prompts."""
    seed = (number + 1) * NUM_STREAMS * ANSWERS_PER_STREAM
    asks = closed(NUM_STREAMS, 32, 48, ANSWERS_PER_STREAM, seed)
    answers = [Answer(**each) for each in HttpClients(port).serve([asdict(ask) for ask in asks])]
    if errors := [answer.error for answer in answers if answer.error]:
        raise WorkerError(errors[0])
    return figures_of(asks, answers)["tok/s"]


@contextmanager
def running_side(tree: Path, folder: Path, options: argparse.Namespace) -> Iterator[Side]:
    """Start the processes of a tree, with their models. Raise WorkerError if they import another tree."""
    environment = {"PYTHONPATH": str(tree / "src")}
    with ExitStack() as stack:
        worker = stack.enter_context(
            Worker([sys.executable, str(ROOT / "benchmarks" / "beside_worker.py")], environment)
        )
        package = worker.ask(
            "load", model=options.model, small_model=str(folder / "tiny.gguf"), threads=options.threads
        )
        if not Path(package).is_relative_to(tree):
            raise WorkerError(f"the process of {tree} imported {package}")
        server = None
        if "http" in options.only:
            command = [sys.executable, "-m", "infer", "serve", options.model, "--threads", str(options.threads)]
            log = folder / f"server-{tree.name}.log"
            started = running([*command, "--port", "PORT"], log, environment={**os.environ, **environment})
            server = stack.enter_context(started)
        yield Side(worker, server)


# The table

HEAD = f"{'row':12} {'unit':6} {OLD:>9} {NEW:>9} {'new/old':>8}   least to greatest   better"


def table_line(figures: Figures, row: str) -> str:
    """Return a row's line: both medians, the median, least and greatest ratio, and the direction that is better."""
    if figures.sides(row) != [OLD, NEW]:
        return f"{row:12} only {' '.join(figures.sides(row)) or 'no side'} was measured"
    old, new, ratios = figures.median(row, OLD), figures.median(row, NEW), figures.ratios(row, NEW)
    better = "higher" if UNITS[row] == "tok/s" else "lower"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{row:12} {UNITS[row]:6} {old:9.2f} {new:9.2f} {median(ratios):7.2f} ×   {spread:17}   {better}"


def compare_bits(sides: Mapping[str, Side]) -> str:
    """Return a line that says if both sides give the same greedy tokens and the same log-probabilities."""
    (old, old_logprobs), (new, new_logprobs) = (side.worker.ask("greedy_answer") for side in sides.values())
    if old != new:
        same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        return f"bits: the greedy tokens differ after {same} of {len(old)}"
    if old_logprobs != new_logprobs:
        return f"bits: {len(old)} greedy tokens are equal, their log-probabilities differ"
    return f"bits: {len(old)} greedy tokens and their log-probabilities are equal"


def measure(options: argparse.Namespace, tree: Path, folder: Path) -> dict[str, Any]:
    """Print the table, and return the report's results."""
    from random_weights import write_gguf

    write_gguf(folder / "tiny.gguf", TINY_CONFIG, 1, "F32", TINY_CONFIG["vocab_size"])
    with running_side(tree, folder, options) as old, running_side(ROOT, folder, options) as new:
        sides = {OLD: old, NEW: new}
        bits = compare_bits(sides)
        print(bits, HEAD, sep="\n", flush=True)
        found = compare(
            options.only, sides, options.rounds,
            lambda row, side, number: sides[side].measure(row, number),
            lambda figures, rows: print(*(table_line(figures, row) for row in rows), sep="\n", flush=True),
        )  # fmt: skip
    return {"bits": bits, "rows": found.to_json()}


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=10)
    parser.add_argument("commit", help="the old side")
    parser.add_argument("--only", nargs="+", default=list(UNITS), choices=UNITS, metavar="NAME", help=", ".join(UNITS))
    options = parser.parse_args()
    try:
        git("rev-parse", "--verify", f"{options.commit}^{{commit}}")
    except subprocess.CalledProcessError:
        parser.error(f"{options.commit!r} is no commit of this repository")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the work tree is removed then, too
    old, new, began = describe(options.commit), describe_this_tree(), time.perf_counter()
    print_head(options, "medians, in turns")
    print(f"{OLD}: {old}\n{NEW}: {new}", flush=True)
    try:
        with work_tree(options.commit) as tree:
            results = measure(options, tree, tree.parent)
    except KeyboardInterrupt:
        sys.exit(130)
    seconds = round(time.perf_counter() - began)
    say(f"{seconds} s")
    write_report(options, old=old, new=new, seconds=seconds, **results)


if __name__ == "__main__":
    main()
