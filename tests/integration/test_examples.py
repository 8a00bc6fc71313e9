"""The examples run as a reader would run them, and `infer batch` writes the same lines if it is killed and rerun."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from extent import IS_WHOLE
from infer import LLM, SamplingParams
from programs import Programs
from watched import RUN_SCRIPT

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., str]
NUM_TOKENS = 70  # more than a page of the cache
# The tests below compare the output of these with the library's answers. `test_ray` runs `ray_batch.py`.
COMPARED = ("chat.py", "custom_loop.py", "generate.py", "ray_batch.py", "search.py", "stream.py")

PROMISES = {  # contained in each program's stdout, as regular expressions
    "async_stream.py": r"(The best thing about .+\n){3}",
    "logits.py": r"perplexity \d+\.\d\d over \d+ tokens",
    "tools.py": r'calculate\(\{"operation": "\w+", "a": -?\d+, "b": -?\d+\}\) = -?\d+\n.+',
}

load = cache(LLM)


@pytest.fixture(scope="module")
def run(programs: Programs) -> Run:
    def run_example(name: str, *arguments: object) -> str:
        done = programs.run(RUN_SCRIPT, EXAMPLES / name, *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        return done.stdout

    return run_example


def test_every_example_is_run_and_short() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [program.name for program in programs] == sorted([*PROMISES, *COMPARED])
    for program in programs:
        most = 48 if program.name == "search.py" else 30  # it embeds, ranks and answers
        assert len(program.read_text(encoding="utf-8").splitlines()) < most, program.name


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_the_example_keeps_its_promise(name: str, run: Run, smollm2_path: Path) -> None:
    out = run(name, smollm2_path)
    assert re.search(PROMISES[name], out), out


def test_the_search_answers_with_its_sources(run: Run, smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text("Cats sleep on warm roofs.\n\nThey wake at night.")
    (tmp_path / "bridge.md").write_text("The bridge was built in 1932.")
    out = run("search.py", tmp_path, "Where do cats sleep?", smollm2_path, smollm2_path)
    assert re.search(r"\w[^[]*\n(\[\d\] (cats\.txt|bridge\.md)\n){3}$", out), out


def test_a_loop_of_ones_own_gives_the_tokens_of_generate(run: Run, smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    llm = load(smollm2_path)
    result = llm.generate("Once upon a time", params)
    token_ids = [*llm.tokenizer.encode("Once upon a time"), *result.token_ids]
    assert run("custom_loop.py", smollm2_path, NUM_TOKENS) == llm.tokenizer.decode(token_ids) + "\n"


def test_a_long_text_and_a_long_stream_are_those_of_generate(run: Run, smollm2_path: Path) -> None:
    llm = load(smollm2_path)
    greedy = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
    assert run("generate.py", smollm2_path, NUM_TOKENS) == llm.generate("Once upon a time", greedy).text + "\n"
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=NUM_TOKENS, stop=["\n\n"])
    expected = llm.generate("The best thing about the sea is", sampled).text
    assert run("stream.py", smollm2_path, NUM_TOKENS) == expected + "\n"


def test_a_long_conversation_is_that_of_chat(run: Run, smollm2_path: Path) -> None:
    """Its second answer depends on the first."""
    params = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)
    session = load(smollm2_path).session(system="You answer in one short sentence.")
    expected = ""
    for question in ("What is the capital of France?", "And what is it famous for?"):
        expected += f"> {question}\n{session.send(question, params).text}\n"
    assert run("chat.py", smollm2_path, NUM_TOKENS) == expected
    assert "Paris" in expected


# `infer batch`


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


@pytest.mark.parametrize("workers", [2, 1][: 2 if IS_WHOLE else 1])
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


@pytest.mark.slow(rest=0)
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


@pytest.mark.slow(rest=0)
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
