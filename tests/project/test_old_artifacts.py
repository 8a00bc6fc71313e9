"""Files that commit c9a9a12c wrote still work: they continue with the tokens that it would have given.

A script of commit 1924a489 has made them. `answers.json` has the answers of that commit, and
`scripts/store_answers.py` replaces only the rows that it is told to replace.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import answer_runs
import store_answers
from cases import cases
from infer import LLM, InvalidRequestError, SamplingParams
from infer.cli import main
from infer.cli.commands.replay_command import read_permalink
from infer.engine.prefixes import prefix_disk
from infer.engine.session import session_file

OLD = Path(__file__).parents[1] / "data" / "old"
ANSWERS: dict[str, Any] = json.loads((OLD / "answers.json").read_text())
GREEDY, SAMPLED = (SamplingParams(**ANSWERS[name]) for name in ("greedy", "sampled"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model, with the time that its weights had."""
    folder = tmp_path_factory.mktemp("old") / "model"
    shutil.copytree(OLD / "model", folder)
    os.utime(folder / "model.safetensors", ns=(ANSWERS["modified_ns"],) * 2)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


@pytest.fixture
def prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the old prefixes, which models use from now on."""
    folder = tmp_path / "cache" / "prefixes"
    shutil.copytree(OLD / "prefixes", folder)
    for path in (tmp_path / "cache", folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("infer.compute.kvcache.prefix_store.base_folder", lambda: tmp_path / "cache")
    return folder


@pytest.mark.parametrize(("name", "params"), [("greedy", GREEDY), ("sampled", SAMPLED)])
def test_a_session_continues_with_the_same_tokens(name: str, params: SamplingParams, llm: LLM) -> None:
    session = llm.session()
    assert session.load(OLD / "session.safetensors") == {"topic": "old files"}
    assert session.messages == ANSWERS["session"]["messages"]
    num_cached = session.num_cached_tokens
    result = session.send("and now", params)
    assert result.token_ids == ANSWERS["session"][name]
    assert result.reused_tokens == num_cached > 20


def test_a_session_of_another_network_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Its weights are the same, so only the identity of the architecture shows the difference."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 500_000.0}))
    with LLM(other) as llm, pytest.raises(InvalidRequestError) as refused:
        llm.load_session(OLD / "session.safetensors")
    assert re.search(r"\A[^\n]*model: was saved with another architecture: load it with the", str(refused.value))


def test_a_session_of_another_version_is_refused_in_one_line(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "VERSION", "3")
    with pytest.raises(InvalidRequestError) as refused:
        llm.load_session(OLD / "session.safetensors")
    said = "version: expected 3, got '2': it was saved by another version of infer. Load it there and save"
    assert re.search(rf"\A[^\n]*{said}[^\n]*\Z", str(refused.value))


def stored(prefixes: Path) -> set[Path]:
    return set(prefixes.glob("*/*"))


def answer(folder: Path, prefix_disk: str = "1GB") -> int:
    """Answer the prompt of the prefixes. Check the answer, and return the number of tokens that were on disk."""
    with LLM(folder, prefix_disk=prefix_disk) as llm:
        result = llm.generate(ANSWERS["prompt"]["text"], SAMPLED)
    assert result.token_ids == ANSWERS["prompt"]["answer"]
    return result.disk_tokens


def test_prefixes_of_other_kernels_are_not_used(
    folder: Path, prefixes: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stored(prefixes)
    assert (len(old), answer(folder)) == (2, 0)
    assert old < stored(prefixes)
    assert answer(folder) == 128  # the pages of these kernels
    monkeypatch.setattr(prefix_disk, "_code", lambda: "other kernels")
    assert (answer(folder), caplog.records) == (0, [])


def test_prefixes_of_other_kernels_are_removed_first(folder: Path, prefixes: Path) -> None:
    """A file takes 12 KiB of the disk, so the budget has room for two."""
    old = stored(prefixes)
    assert (answer(folder, "36KB"), len(stored(prefixes))) == (0, 2)
    assert not stored(prefixes) & old
    assert answer(folder, "36KB") == 128
    assert len([path for path in prefixes.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_an_unfinished_batch_is_finished(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)  # where the model has the name in the lines
    output = tmp_path / "out.jsonl"
    shutil.copy(OLD / "batch" / "unfinished.jsonl", output)
    assert not output.read_bytes().endswith(b"\n")
    rows, whole = OLD / "batch" / "rows.jsonl", OLD / "batch" / "whole.jsonl"
    assert main(["batch", str(rows), str(output), "--model", "model", "--batch-size", "1"]) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert "2 of 4 rows" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("link", ANSWERS["permalinks"], ids=["completion", "chat"])
def test_a_permalink_is_replayed(link: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_permalink(link["url"]).url == link["url"]
    assert main(["replay", link["url"], "--model", str(folder)]) == 0
    out, told = capsys.readouterr()
    assert out == link["text"]
    assert "the fingerprint is the same\nthe answer is the same" in told


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
