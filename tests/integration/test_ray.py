"""Ray on this machine without a network: a model served by engines that come, die and go, and a file answered."""

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from infer import LLM
from infer.cli import main
from watched import python_command, script_command

ROOT = Path(__file__).parents[2]
PROMPT, LENGTH = "Once upon a time", 150
PATIENCE = 120.0  # on a busy machine
ENGINE, BATCH_ENGINE = "ray::ServeReplica:infer:Engine", "ray::MapWorker(MapBatches(BatchEngine)"

READ_DEPLOYMENT = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from infer.distributed.serve import app
with open(sys.argv[1]) as file:
    (application,) = ServeDeploySchema(**yaml.safe_load(file)).applications
app(application.args)
assert {each.name for each in application.deployments} == {"Engine", "Front"}
"""


class Cluster(NamedTuple):
    """All processes of it log into files of its folder."""

    folder: Path

    def processes(self, name: str = "") -> list[int]:
        """Whose command line begins so."""
        return [each for each in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._has(each, name)]

    def _has(self, process: int, name: str) -> bool:
        found = Path("/proc") / str(process)
        with suppress(OSError):
            opened = [os.readlink(link) for link in (found / "fd").iterdir()]
            return (found / "cmdline").read_text().startswith(name) and any(
                path.startswith(f"{self.folder}/") for path in opened
            )
        return False

    @property
    def environment(self) -> dict[str, str]:
        pushes = {f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5" for who in ("REPLICA", "HANDLE")}
        return {**os.environ, **pushes, "RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Nothing of it runs afterwards. The folder's name is short: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        found = Cluster(Path(folder))
        yield found
        wait_until(lambda: not found.processes())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE:g} s")
        time.sleep(0.1)


class Client:
    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)

    def pieces(self, length: int = LENGTH) -> Iterator[str]:
        asked: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": length}
        with self._client.completions.create(**asked, stream=True) as stream:
            yield from (chunk.choices[0].text for chunk in stream if chunk.choices)


@contextmanager
def asked_all_the_time(client: Client) -> Iterator[list[str]]:
    """Answers to two who ask again as soon as they are answered."""
    answers, is_over = list[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append("".join(client.pieces()))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_engines_come_die_and_go_while_clients_stream(cluster: Cluster, smollm2_path: Path) -> None:
    """One with a slot; two while more is asked."""
    with LLM(smollm2_path) as llm:
        expected = llm.generate(PROMPT, temperature=0, max_new_tokens=LENGTH).text
    options = ["--model", smollm2_path, "--served-model-name", "smollm2", "--port", 0, "--threads", 1, "--slots", 1]
    options += ["--max-replicas", 2, "--upscale-seconds", 0.5, "--downscale-seconds", 2]
    command = python_command("import sys; from infer.cli import main; sys.exit(main())", "ray", "deploy", *options)
    told = cluster.folder / "stderr"
    with told.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=cluster.environment) as process:
        try:
            wait_until(lambda: process.poll() is not None or "/v1:" in told.read_text())
            found = re.search(r"http://127\.0\.0\.1:\d+/v1", told.read_text())
            assert found, told.read_text()
            client = Client(found[0])
            assert "".join(client.pieces()) == expected
            with asked_all_the_time(client) as answers:
                wait_until(lambda: len(cluster.processes(ENGINE)) == 2)
                wait_until(lambda: len(answers) > 4)
                pieces = [client.pieces(), client.pieces()]
                texts = [next(each) for each in pieces]
                os.kill(cluster.processes(ENGINE)[0], signal.SIGKILL)
                assert [text + "".join(each) for text, each in zip(texts, pieces, strict=True)] == [expected] * 2
                wait_until(lambda: len(cluster.processes(ENGINE)) == 2)
            assert set(answers) == {expected}
            wait_until(lambda: len(cluster.processes(ENGINE)) == 1)
            assert "".join(client.pieces()) == expected
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_file_has_the_lines_of_infer_batch_whoever_is_killed(cluster: Cluster, smollm2_path: Path) -> None:
    """All at once after the first lines, then an engine."""
    rows, expected, output = (cluster.folder / name for name in ("in.jsonl", "expected.jsonl", "out.jsonl"))
    prompts = [
        {"id": f"row {number}", "prompt": f"The number {number} is", "max_new_tokens": 20} for number in range(90)
    ]
    rows.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    assert main(["batch", str(rows), str(expected), "-q", "--model", str(smollm2_path)]) == 0
    command = script_command(ROOT / "examples" / "ray_batch.py", rows, output, smollm2_path)
    for name in ("", BATCH_ENGINE):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=cluster.environment) as process:
            before = output.stat().st_size if output.exists() else 0
            wait_until(lambda before=before: output.exists() and output.stat().st_size > before)
            for each in cluster.processes(name)[:1] if name else [process.pid, *cluster.processes()]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            told = process.communicate()[1]
    assert process.returncode == 0, told
    assert sorted(output.read_text().splitlines()) == sorted(expected.read_text().splitlines())


def test_the_file_for_serve_deploy_is_one_that_ray_and_we_read() -> None:
    """In a process of its own: Ray's modules warn when they are imported."""
    subprocess.run(python_command(READ_DEPLOYMENT, ROOT / "deploy" / "ray.yaml"), check=True)
