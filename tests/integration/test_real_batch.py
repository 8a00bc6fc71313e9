"""`infer batch` over SmolLM2 writes the same lines if it is killed and run again, with one worker or several."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("INFER_KILLS", "1"))  # a hundred take a quarter of an hour
NUM_ROWS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[dict[str, object]] = [
        {"id": f"row {index}", "prompt": f"The number {index} is", "max_new_tokens": 4 + index % 9}
        for index in range(NUM_ROWS)
    ]
    rows[1]["logprobs"], rows[2]["regex"], rows[3]["temperature"] = 1, "[a-z ]+", 0
    rows[4]["repetition_penalty"], rows[5]["no_such"] = 1.2, 1
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
    rows[6] = {"custom_id": "row 6", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def undisturbed(source: Path, smollm2_path: Path) -> list[str]:
    """Return the lines of a run that is not killed."""
    output = source.with_name("whole.jsonl")
    with start(source, smollm2_path, str(output)) as process:
        _, errors = process.communicate()
        assert process.returncode == 1, errors
    assert "24 rows answered" in errors
    assert "1 of all failed" in errors
    lines = lines_of(output)
    assert len({json.loads(line)["id"] for line in lines}) == NUM_ROWS
    return lines


def start(source: Path, model: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "infer", "batch", str(source), *options, "-m", str(model), "--batch-size", "3"]
    return subprocess.Popen([*command, "--max-seq-len", "256"], stderr=subprocess.PIPE, text=True)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lines_of(path: Path) -> list[str]:
    return sorted(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("workers", [1, 2])
def test_kills_and_workers_change_no_byte(
    source: Path, undisturbed: list[str], smollm2_path: Path, tmp_path: Path, workers: int
) -> None:
    killed, rng = tmp_path / "killed.jsonl", random.Random(workers)
    for _ in range(KILLS):
        wanted = num_lines(killed) + rng.randrange(4)
        with start(source, smollm2_path, str(killed), "--workers", str(workers)) as process:
            while process.poll() is None and num_lines(killed) < wanted:
                time.sleep(0.01)
            time.sleep(rng.random() / 20)
            process.send_signal(signal.SIGKILL)
    with start(source, smollm2_path, str(killed), "--workers", str(workers)) as process:
        assert process.wait() == 1
    assert lines_of(killed) == undisturbed


def test_rows_and_lines_that_fill_the_pipes_pass_each_other(tmp_path: Path, smollm2_path: Path) -> None:
    """The rows are refused and have ids of 64 kB. Two chunks of them are sent while their lines return."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": f"{index:08}" * 8000, "prompt": "a", "no_such": 1} for index in range(400)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start(source, smollm2_path, str(output), "--workers", "2") as process:
        try:
            assert process.wait(600) == 1
        finally:
            process.kill()
    assert num_lines(output) == len(rows)


def test_a_worker_that_dies_loses_nothing(source: Path, smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with start(source, smollm2_path, str(output), "--workers", "2") as process:
        while not num_lines(output):
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
                break
        else:
            pytest.fail("no worker was found")
        assert process.wait() == 1
    assert len({json.loads(line)["id"] for line in lines_of(output)}) == len(lines_of(output)) == NUM_ROWS
