"""Each row of a batch has one line, whatever the row is, and a run that leaves a row does not end with status 0."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import run
from infer import LLM
from infer.serving.batch_file.row import ENDPOINTS, read_row

GOOD = '{"id": "good%d", "prompt": "hello", "max_new_tokens": 2}'
DEEP = '{"a":' * 900 + "1" + "}" * 900


def in_stack(depth: int, line: str) -> Any:
    """Return the row that is read below `depth` frames."""
    return in_stack(depth - 1, line) if depth else read_row(line, "line 1")


def of_endpoint(endpoint: str, rest: str) -> str:
    return f'{{"custom_id": "bad", "url": "{endpoint}", "body": {{{rest}}}}}'


def lines_of(folder: Path, tmp_path: Path, rows: list[str], *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the lines and the notes of a run that ends with status 1."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows) + "\n")
    told = run("batch", source, output, "-m", folder, "--threads", "1", *options, status=1).err
    return [json.loads(line) for line in output.read_text().splitlines()], told


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
        lines, _ = lines_of(folder, tmp_path, rows, *options)
        assert (len(lines), sum(bool(line.get("error")) for line in lines)) == (len(rows), len(bad))


def test_a_run_that_leaves_a_row_does_not_end_with_status_0(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The input loses a row while the model is loaded."""
    init = LLM.__init__

    def load(self: LLM, *arguments: Any, **options: Any) -> None:
        (tmp_path / "in.jsonl").write_text(GOOD % 0 + "\n")
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", load)
    lines, told = lines_of(folder, tmp_path, [GOOD % 0, GOOD % 1], "--quiet")
    assert (len(lines), "1 of 2 rows are answered" in told) == (1, True)


def test_the_rows_that_are_answered_together_change_no_byte(folder: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"id": str(index), "prompt": "abc" * index, "max_new_tokens": index}) for index in range(1, 8)]
    (source := tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    written = set[tuple[str, ...]]()
    for size in ("1", "3"):
        output = tmp_path / f"{size}.jsonl"
        run("batch", source, output, "-m", folder, "--threads", "1", "--batch-size", size)
        written.add(tuple(sorted(output.read_text().splitlines())))
    assert [len(lines) for lines in written] == [7]
