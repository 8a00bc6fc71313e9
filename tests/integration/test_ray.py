"""Ray on this machine without a network: a model served by engines that start, die and end, and a batch file."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infer import LLM
from infer.cli import main
from looping import beside
from watched import python_command, script_command

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from ray_cluster import PATIENCE, RayCluster, environment_of, running_cluster, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT, LENGTH = "Once upon a time", 150
ENGINE, BATCH_ENGINE = "ray::ServeReplica:infer:Engine", "ray::MapWorker(MapBatches(BatchEngine)"
FRONT, PROGRAM = "ray::ServeReplica:infer:Front", "program"
SECONDS = 1800.0  # limit of a program: a cluster ends with the program that started it
MOST_HEADS = 2  # clusters that may fail before the test does

READ_DEPLOYMENT = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from infer.serving.distributed.ray_serve import app
with open(sys.argv[1]) as file:
    (application,) = ServeDeploySchema(**yaml.safe_load(file)).applications
front = app(application.args)._bound_deployment
assert front._deployment_config.graceful_shutdown_timeout_s >= 300
assert app({})._bound_deployment.num_replicas == 2
assert {each.name for each in application.deployments} == {"Engine", "Front"}
"""

REFUSED = """
import sys, ray
def refuse(*arguments, **named): raise ConnectionError
ray.init = refuse
from infer.cli import main
sys.exit(main())
"""


class Client:
    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a path of the server."""
        answer = httpx.get(str(self._client.base_url.join(path)), timeout=PATIENCE)
        return answer.status_code, answer.text

    def pieces(self, length: int = LENGTH) -> Iterator[str]:
        asked: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": length}
        with self._client.completions.create(**asked, stream=True) as stream:
            yield from (chunk.choices[0].text for chunk in stream if chunk.choices)


@contextmanager
def asked_all_the_time(client: Client) -> Iterator[list[str]]:
    """Collect the answers to two clients that repeat their requests as soon as they are answered."""
    answers, is_over = list[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append("".join(client.pieces()))

    with beside([ask] * 2):
        try:
            yield answers
        finally:
            is_over.set()


class ClusterError(Exception):
    """A cluster did not come up, died, or computed nothing in time. The text is the end of its logs."""


def on_a_living_cluster(use: Callable[[], Any]) -> Any:
    """Return what `use` returns. It starts a cluster, and is called again if that fails."""
    for _ in range(MOST_HEADS):
        with suppress(ClusterError, subprocess.CalledProcessError):
            return use()
    return use()


@contextmanager
def deployed(command: list[str]) -> Iterator[tuple[RayCluster, Client]]:
    """Run `infer ray deploy` with its own cluster. Raise ClusterError if that does not come up. No process is left."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster, told = RayCluster(Path(name)), Path(name) / "stderr"
        environment = environment_of(cluster.folder)
        with told.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=environment) as process:
            try:
                with suppress(TimeoutError):
                    wait_until(lambda: process.poll() is not None or "/v1:" in told.read_text())
                found = re.search(r"http://127\.0\.0\.1:\d+/v1", told.read_text())
                if found is None:
                    process.kill()
                    cluster.kill()
                    raise ClusterError(cluster.logs() + told.read_text())
                yield cluster, Client(found[0])
            finally:
                process.terminate()
        assert process.returncode == 0
        wait_until(lambda: not cluster.processes())


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[tuple[RayCluster, Client]]:
    """Serve with one engine of one slot, or two under load. A cluster that does not come up is started again."""
    options = ["--model", smollm2_path, "--served-model-name", "smollm2", "--port", 0, "--threads", 1, "--slots", 1]
    options += ["--max-replicas", 2, "--upscale-seconds", 0.5, "--downscale-seconds", 2]
    code = "import sys; from infer.cli import main; sys.exit(main())"
    command = python_command(code, "ray", "deploy", *options, seconds=SECONDS)
    with ExitStack() as stack:
        yield on_a_living_cluster(lambda: stack.enter_context(deployed(command)))


def test_engines_come_die_and_go_while_clients_stream(served: tuple[RayCluster, Client], smollm2_path: Path) -> None:
    cluster, client = served
    with LLM(smollm2_path) as llm:
        expected = llm.generate(PROMPT, temperature=0, max_new_tokens=LENGTH).text
    assert "".join(client.pieces()) == expected
    assert client.get("/ready") == (200, '{"status":"ok"}')
    assert re.search(r'infer:num_requests_running\{replica="\w+"\} 0', client.get("/metrics")[1])
    assert len(cluster.processes(FRONT)) == 2
    with asked_all_the_time(client) as answers:
        wait_until(lambda: len(cluster.processes(ENGINE)) == 2)
        wait_until(lambda: len(answers) > 4)
        pieces = [client.pieces(), client.pieces()]
        texts = [next(each) for each in pieces]
        os.kill(cluster.processes(ENGINE)[0], signal.SIGKILL)
        assert [text + "".join(each) for text, each in zip(texts, pieces, strict=True)] == [expected] * 2
    assert set(answers) == {expected}
    wait_until(lambda: len(cluster.processes(ENGINE)) == 1)
    assert "".join(client.pieces()) == expected


def run_until_killed(cluster: RayCluster, command: list[str], output: Path, victims: list[str]) -> int:
    """Return the program's exit status. After its first new line the first of `victims` is killed and removed.

    Raise ClusterError if Ray's control service died meanwhile, or if the program needs too long.
    """
    wait_until(lambda: not cluster.processes(BATCH_ENGINE))  # the engines of a killed program end a moment later
    before, told = output.stat().st_size if output.exists() else 0, output.with_suffix(".stderr")
    environment = environment_of(cluster.folder, cluster.address())
    with told.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=environment) as program:

        def has_ended() -> bool:
            return program.poll() is not None or not cluster.has_head()

        try:
            wait_until(lambda: has_ended() or (output.exists() and output.stat().st_size > before))
            if victims and not has_ended():
                victim = victims.pop(0)
                os.kill(program.pid if victim == PROGRAM else cluster.processes(victim)[0], signal.SIGKILL)
            wait_until(has_ended)
        except TimeoutError as error:
            raise ClusterError(f"{error}\n{cluster.logs()}\n{told.read_text()}") from error
        finally:
            program.kill()
    text = told.read_text()
    if not cluster.has_head() or "Failed to connect to GCS" in text:
        raise ClusterError(cluster.logs() + text)
    assert program.returncode in (0, -signal.SIGKILL), text
    return program.returncode


def test_a_file_has_the_lines_of_infer_batch_after_any_kill(smollm2_path: Path, tmp_path: Path) -> None:
    """The program is killed after its first lines, then an engine. If a cluster fails, it goes on with another."""
    rows, expected, output = (tmp_path / name for name in ("in.jsonl", "expected.jsonl", "out.jsonl"))
    prompts = ({"id": f"row {at}", "prompt": f"The number {at} is", "max_new_tokens": 20} for at in range(90))
    rows.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    assert main(["batch", str(rows), str(expected), "-q", "--model", str(smollm2_path)]) == 0
    command = script_command(ROOT / "examples" / "ray_batch.py", rows, output, smollm2_path, 1, seconds=SECONDS)
    victims = [PROGRAM, BATCH_ENGINE]

    def answer() -> None:
        with running_cluster(num_cpus=1) as cluster:
            while run_until_killed(cluster, command, output, victims) != 0:
                pass

    on_a_living_cluster(answer)
    assert not victims
    assert sorted(output.read_text().splitlines()) == sorted(expected.read_text().splitlines())


def test_the_file_for_serve_deploy_is_one_that_ray_and_we_read() -> None:
    """The check is a separate process, because Ray's modules warn when they are imported."""
    subprocess.run(python_command(READ_DEPLOYMENT, ROOT / "deploy" / "ray.yaml"), check=True)


def test_a_cluster_that_is_not_there_is_one_line(smollm2_path: Path) -> None:
    command = python_command(REFUSED, "ray", "deploy", "--model", smollm2_path)
    environment = {**os.environ, "RAY_ADDRESS": "nowhere:6379"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    said = "infer: RAY_ADDRESS='nowhere:6379': no cluster there lets us in: start one (ray start --head)"
    assert said in found.stderr
