"""`scripts/store_answers.py` replaces only the rows that it is told to replace."""

import sys
from pathlib import Path
from typing import Any

import pytest

import answer_runs
import store_answers
from cases import cases

STORED = {"first": {"ids": [[1, 2]]}, "second": {"bits": "ab"}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of two stored rows, in place of the repository's."""
    path = tmp_path / "answers.json"
    monkeypatch.setattr(answer_runs, "_STORED", path)
    answer_runs.write_stored(STORED)
    return path


def run(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any], *arguments: str) -> int:
    """Run the script on computed rows, and return its exit status."""
    monkeypatch.setattr(store_answers, "all_rows", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["store_answers.py", *arguments])
    return store_answers.main()


def test_a_row_of_a_new_request_is_added(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"first": STORED["first"], "new": {"bits": "cd"}, "second": STORED["second"]}
    assert run(monkeypatch, rows) == 0
    assert list(answer_runs.read_stored().items()) == list(rows.items())
    assert len(file.read_text().splitlines()) == 2 + len(rows)


@cases(
    "rows message",
    ({"first": {"ids": [[1, 3]]}, "second": {"bits": "ab"}}, "first: token 1 of answer 0 is 3, stored is 2"),
    ({"first": {"ids": [[1, 2]]}}, "second: no request has this name"),
)
def test_a_row_changes_only_if_it_is_named(
    rows: dict[str, Any], message: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = message.partition(":")[0]
    other = next(each for each in STORED if each != name)
    for arguments in ([], ["--change", other]):
        assert run(monkeypatch, rows, *arguments) == 1
        assert capsys.readouterr().out.splitlines()[0] == message
        assert answer_runs.read_stored() == STORED
    for word in (name, "all"):
        answer_runs.write_stored(STORED)
        assert run(monkeypatch, rows, "--change", word) == 0
        assert answer_runs.read_stored() == rows


@pytest.mark.usefixtures("file")
def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, dict(STORED), "--change", "firts")
    assert "--change must name rows of the file, got 'firts': use one of first, second" in capsys.readouterr().err
