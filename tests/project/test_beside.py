"""The comparison with an older commit: its table, and a run of every row on a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import cases

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import beside
from harness import Figures
from random_weights import write_gguf

pytestmark = pytest.mark.slow

BESIDE = [sys.executable, beside.__file__]


def figures_of(row: str, **rounds: list[float]) -> Figures:
    found = Figures([beside.OLD, beside.NEW])
    for side, figures in rounds.items():
        for figure in figures:
            found.add(row, side, figure)
    return found


def test_a_line_has_medians_and_the_ratios_of_the_same_rounds() -> None:
    found = figures_of("decode", old=[100.0, 200.0, 50.0], new=[110.0, 240.0, 45.0])
    line = beside.table_line(found, "decode").split()
    assert " ".join(line) == "decode tok/s 100.00 110.00 1.10 × 0.90 to 1.20 higher"


def test_a_line_says_which_direction_is_better() -> None:
    for row, unit in beside.UNITS.items():
        line = beside.table_line(figures_of(row, old=[1.0], new=[2.0]), row)
        assert line.endswith("higher" if unit == "tok/s" else "lower")


def test_a_side_that_failed_has_no_ratio() -> None:
    assert beside.table_line(figures_of("http", new=[3.0]), "http").split(maxsplit=1)[1] == "only new was measured"
    assert beside.table_line(figures_of("http"), "http").split(maxsplit=1)[1] == "only no side was measured"


class Answering:
    """A side with a fixed answer to the question for its bits."""

    def __init__(self, token_ids: list[int], logprobs: list[float]) -> None:
        self.worker, self._bits = self, [token_ids, logprobs]

    def ask(self, do: str) -> list[Any]:
        assert do == "greedy_answer"
        return self._bits


@cases(
    "new said",
    (Answering([1, 2, 3], [0.5]), "3 greedy tokens and their log-probabilities are equal"),
    (Answering([1, 2, 4], [0.5]), "the greedy tokens differ after 2 of 3"),
    (Answering([1, 2], [0.5]), "the greedy tokens differ after 2 of 3"),
    (Answering([1, 2, 3], [0.25]), "3 greedy tokens are equal, their log-probabilities differ"),
)
def test_the_bits_of_both_sides_are_compared(new: Answering, said: str) -> None:
    sides: dict[str, Any] = {beside.OLD: Answering([1, 2, 3], [0.5]), beside.NEW: new}
    assert beside.compare_bits(sides) == f"bits: {said}"


def test_an_unknown_commit_is_refused_in_one_line() -> None:
    ended = subprocess.run([*BESIDE, "no-such-commit"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith("'no-such-commit' is no commit of this repository")


def test_the_last_commit_runs_beside_this_tree_and_its_work_tree_is_removed(tmp_path: Path) -> None:
    rows = [row for row in beside.UNITS if row not in {"prefill", "http", "host-16", "host-60"}]
    write_gguf(tmp_path / "model.gguf", beside.TINY_CONFIG, 1, "F32", beside.TINY_CONFIG["vocab_size"])
    ended = subprocess.run(
        [*BESIDE, "HEAD", "--model", tmp_path / "model.gguf", "--rounds", "1", "--only", *rows],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = {line.split()[0]: line for line in ended.stdout.splitlines()}
    assert lines["old:"].split()[1] == lines["new:"].split()[1]
    for row in rows:
        assert re.search(r" \d+\.\d\d × ", lines[row]), ended.stdout + ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert str(tmp_path) not in beside.git("worktree", "list")
