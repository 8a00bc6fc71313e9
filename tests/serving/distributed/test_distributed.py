"""The common parts of replicas on any machine, without Ray: requests for routers, rows of tables, and cores."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from commands import refused, run
from infer import LLM, BatchEngine, InvalidRequestError
from infer.serving.distributed.asked_body import prompt_of_body
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
from infer.system.cores.core_share import take_cores
from served import serving

LONG = "once " * 200


class Table(NamedTuple):
    """The used part of a `pyarrow.Table`."""

    rows: list[dict[str, Any]]

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows

    @classmethod
    def from_pydict(cls, columns: dict[str, list[Any]]) -> Self:
        return cls([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


@pytest.fixture(autouse=True)
def _cores_as_they_were() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_bodies_that_begin_alike_have_the_same_first_keys() -> None:
    asked = [{"messages": [{"role": "user", "content": LONG + last}], "model": last} for last in "ab"]
    first, second = (prompt_of_body(json.dumps(each).encode(), "", "") for each in asked)
    assert (first.keys, len(first.keys) >= 3, first.num_tokens > 200) == (second.keys, True, True)
    other = prompt_of_body(json.dumps(asked[0]).encode(), "", "another key's name")
    assert not set(first.keys) & set(other.keys)


def test_a_session_is_a_header_or_a_cache_key_of_one_tenant() -> None:
    body = json.dumps({"prompt": "a", "prompt_cache_key": "k"}).encode()
    assert prompt_of_body(body, "", "t") == prompt_of_body(b'{"prompt": "a"}', "k", "t")
    assert prompt_of_body(body, "", "t").session != prompt_of_body(body, "", "u").session
    assert prompt_of_body(b'{"prompt": "a"}', "", "t").session == ""
    for none in (b"", b"[]", b"\xff"):
        assert prompt_of_body(none, "k", "t").num_tokens == 0


def test_the_engine_of_a_data_set_writes_the_lines_of_infer_batch(folder: Path, tmp_path: Path) -> None:
    """Rows are lines of text, or columns with nulls for missing fields."""
    rows = [{"id": f"r{number}", "prompt": [5, 6, 7 + number], "max_new_tokens": 6} for number in range(5)]
    rows += [{"id": "greedy", "prompt": "ab", "temperature": 0.0}, {"id": "wrong", "prompt": "ab", "top_p": 7.0}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(folder), "-q", "--max-new-tokens", "9", "--seed", "3"]
    run("batch", source, output, *options, status=1)
    expected = {json.loads(line)["id"]: line for line in output.read_text().splitlines(keepends=True)}
    engine = BatchEngine(str(folder), seed=3, values={"max_new_tokens": 9}, finished=["r1"])
    del expected["r1"]
    names = {name for row in rows for name in row}
    columns = Table([dict.fromkeys(names) | row for row in rows])
    for table in (Table([{"text": json.dumps(row)} for row in rows]), columns):
        assert {each["id"]: each["line"] for each in engine(table).rows} == expected
    with pytest.raises(InvalidRequestError, match="each row must have its own id"):
        engine(Table([{"prompt": "a"}]))
    with pytest.raises(InvalidRequestError, match='must have batch_format="pyarrow", got batches of dict'):
        engine({"prompt": ["a"]})


def test_each_process_takes_cores_that_no_other_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    allowed, taken = os.sched_getaffinity(0), set[int]()
    assert take_cores(len(allowed) + 1) == []
    for _ in allowed:
        (core,) = take_cores(1)
        assert os.sched_getaffinity(0) == {core}
        assert core not in taken
        taken.add(core)
        os.sched_setaffinity(0, allowed)
    assert taken == allowed
    assert take_cores(1) == []
    assert os.sched_getaffinity(0) == allowed


def test_limits_change_while_requests_are_served(folder: Path) -> None:
    with LLM(folder) as llm, serving(llm, model="tiny", slots=4) as served:
        served.state.change_limits({"slots": 2, "max_queue": 1, "step_ms": 20.5})
        llm._opened.loop.run(bool)  # the engine has its limits before the next message
        assert (llm._opened.engine.max_running, llm._opened.engine.scheduler.gap_seconds) == (2, 0.0205)
        assert (served.state.settings.slots, served.state.door.settings.max_queue) == (2, 1)
    state = ServerState(ServerSettings())
    with pytest.raises(InvalidRequestError, match="port cannot be changed while requests are served: slots, step_ms"):
        state.change_limits({"port": 1})
    for value in (0, 65, 2.5, True, "2"):
        with pytest.raises(InvalidRequestError, match="slots must be a number above 0 and at most 64, got"):
            state.change_limits({"slots": value})


def test_without_ray_its_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = refused("ray", "deploy", "--model", folder)
    assert told == "ray is not installed: run pip install '.[ray]' in the clone of infer"
