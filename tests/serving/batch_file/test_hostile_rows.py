"""Each row of a batch has one line, whatever the row is, and a run that leaves a row does not end with status 0."""

import json
from pathlib import Path
from typing import Any

import pytest

from infer import LLM
from infer.cli import main
from infer.serving.batch_file.row import ENDPOINTS, read_row
from test_session import make_model

GOOD = '{"id": "good%d", "prompt": "hello", "max_new_tokens": 2}'
DEEP = '{"a":' * 900 + "1" + "}" * 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def in_stack(depth: int, line: str) -> Any:
    """Return the row that is read below `depth` frames."""
    return in_stack(depth - 1, line) if depth else read_row(line, "line 1")


def of_endpoint(endpoint: str, rest: str) -> str:
    return f'{{"custom_id": "bad", "url": "{endpoint}", "body": {{{rest}}}}}'


def run(folder: Path, tmp_path: Path, rows: list[str], *options: str) -> tuple[int, list[dict[str, Any]]]:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows) + "\n")
    status = main(["batch", str(source), str(output), "-m", str(folder), "--threads", "1", *options])
    return status, [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("depth", [62, 100, 950, 970, 980, 990, 10_000])
@pytest.mark.parametrize("endpoint", [None, *ENDPOINTS])
def test_the_depth_of_the_stack_does_not_change_a_row(depth: int, endpoint: str | None) -> None:
    rest = f'"zz": {"[" * depth}{"]" * depth}'
    line = f'{{"id": "bad", "prompt": "a", {rest}}}' if endpoint is None else of_endpoint(endpoint, rest)
    row = read_row(line, "line 1")
    assert in_stack(300, line) == row
    assert ("nested more than 64 deep" in str(row.problem)) == (depth > 62)


@pytest.mark.parametrize("options", [(), ("--retry-errors",)])
def test_every_row_has_a_line_at_each_run(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    text = json.dumps(DEEP)
    bad = [
        '{"id": "bad", "prompt": "a", "zz": %s}' % ("[" * 980 + "]" * 980),
        f'{{"id": "schema", "prompt": "a", "json_schema": {text}}}',
        of_endpoint(ENDPOINTS[0], f'"messages": [], "tools": {DEEP}').replace("bad", "tools"),
        *(of_endpoint(ENDPOINTS[index], f'"{field}": {text}').replace("bad", f"{field}{index}")
          for index in (0, 1) for field in ("guided_json", "prompt", "messages")),
        of_endpoint(ENDPOINTS[1], '"prompt": "a", "guided_json": "\\ud800"').replace("bad", "half"),
    ]  # fmt: skip
    rows = [GOOD % 0, *bad, GOOD % 1]
    for _ in range(2):
        status, lines = run(folder, tmp_path, rows, *options)
        failed = [line.get("id") for line in lines if line.get("error")]
        assert (status, len(lines), len(failed)) == (1, len(rows), len(bad))


def test_a_run_that_leaves_a_row_does_not_end_with_status_0(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input loses a row while the model is loaded."""
    init = LLM.__init__

    def load(self: LLM, *arguments: Any, **options: Any) -> None:
        (tmp_path / "in.jsonl").write_text(GOOD % 0 + "\n")
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", load)
    status, lines = run(folder, tmp_path, [GOOD % 0, GOOD % 1], "--quiet")
    assert (status, len(lines)) == (1, 1)
    assert "1 of 2 rows are answered" in capsys.readouterr().err
