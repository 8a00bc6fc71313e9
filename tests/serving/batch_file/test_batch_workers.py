"""Rows handed out to processes that die. The processes here have no model: they answer immediately, and die at the
rows that the test names."""

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from infer.engine.requests.request_options import RequestOptions
from infer.errors import InferError
from infer.serving.batch_file import workers
from infer.serving.batch_file.row import Row
from infer.serving.batch_file.settings import BatchSettings, Line
from infer.serving.batch_file.workers import answer_by_workers

SETTINGS = BatchSettings("m", 0, 1, {}, RequestOptions())
ROWS = [Row(str(number)) for number in range(40)]


def answer_or_die(pipe: Connection, settings: BatchSettings, load: Mapping[str, Any]) -> None:
    """Take the place of a process with a model. `load["deaths"]` are how many processes die at a row, by its id."""
    if "cannot load" in load:
        pipe.send("no such model")
        return
    while True:
        try:
            rows = pipe.recv()
        except EOFError:
            return
        for row in rows:
            for number in range(load["deaths"].get(row.id, 0)):
                if not (died := Path(load["folder"], f"{row.id} {number}")).exists():
                    died.touch()
                    os._exit(3)
            pipe.send(Line(row.id, f"{row.id}\n", False))


@pytest.fixture(autouse=True)
def _without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_work", answer_or_die)


def answered(load: dict[str, Any], num_workers: int) -> list[str]:
    """Return the ids of the lines, in the order of the rows."""
    found = list[str]()
    answer_by_workers(iter(ROWS), SETTINGS, load, num_workers, lambda line: found.append(line.row_id), lambda: False)
    return sorted(found, key=int)


@pytest.mark.slow
def test_the_rows_of_a_process_that_died_are_answered_once_by_others(tmp_path: Path) -> None:
    """This includes the rows that the process had received in advance."""
    load = {"folder": tmp_path, "deaths": {"2": 1, "39": 1}}
    assert answered(load, num_workers=2) == [row.id for row in ROWS]
    assert len(list(tmp_path.iterdir())) == 2


def test_processes_that_die_end_no_run_while_there_are_answers_between(tmp_path: Path) -> None:
    load = {"folder": tmp_path, "deaths": {"0": 2, "9": 1, "19": 2}}
    assert answered(load, num_workers=1) == [row.id for row in ROWS]
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.slow
def test_three_processes_that_die_one_after_the_other_end_a_run(tmp_path: Path) -> None:
    load = {"folder": tmp_path, "deaths": {"5": 3}}
    with pytest.raises(InferError, match=r"3 processes died in a row \(exit status 3\), perhaps because the memory"):
        answered(load, num_workers=1)


@pytest.mark.slow
def test_a_process_that_cannot_load_the_model_ends_the_run_with_its_reason() -> None:
    with pytest.raises(InferError, match="no such model"):
        answered({"cannot load": True}, num_workers=1)
