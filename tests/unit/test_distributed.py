"""What replicas on any machine share, without Ray: rows as tables bring them, cores."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from infer import InvalidRequestError
from infer.cli import main
from infer.distributed import BatchEngine
from infer.system.core_share import take_cores
from test_session import make_model


class Table(NamedTuple):
    """As much of a `pyarrow.Table` as is asked of one."""

    rows: list[dict[str, Any]]

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows

    @classmethod
    def from_pydict(cls, columns: dict[str, list[Any]]) -> Self:
        return cls([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _cores_as_they_were() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_the_engine_of_a_data_set_writes_the_lines_of_infer_batch(model: Path, tmp_path: Path) -> None:
    """From lines as they are, and from columns with nulls where a row has no such field."""
    rows = [{"id": f"r{number}", "prompt": [5, 6, 7 + number], "max_new_tokens": 6} for number in range(5)]
    rows += [{"id": "greedy", "prompt": "ab", "temperature": 0.0}, {"id": "wrong", "prompt": "ab", "top_p": 7.0}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(model), "-q", "--max-new-tokens", "9", "--seed", "3"]
    assert main(["batch", str(source), str(output), *options]) == 1
    expected = {json.loads(line)["id"]: line for line in output.read_text().splitlines(keepends=True)}
    engine = BatchEngine(str(model), seed=3, values={"max_new_tokens": 9}, finished=["r1"])
    del expected["r1"]
    names = {name for row in rows for name in row}
    columns = Table([dict.fromkeys(names) | row for row in rows])
    for table in (Table([{"text": json.dumps(row)} for row in rows]), columns):
        assert {each["id"]: each["line"] for each in engine(table).rows} == expected
    with pytest.raises(InvalidRequestError, match="each row needs an id of its own"):
        engine(Table([{"prompt": "a"}]))
    with pytest.raises(InvalidRequestError, match='needs batch_format="pyarrow", got batches as dict'):
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
