"""Several processes with the model behind a front: no client notices kills."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from idle import until
from infer.serving.distributed.replica import Replica
from infer.serving.server.metrics import Metrics
from shapes import SOURCE
from test_server_process import CHILD, SECONDS, front_of
from test_session import make_model
from watched import python_command

sys.path.append(str(SOURCE.parents[1] / "benchmarks"))
from check_failover import check, listen, num_running, replica_processes, until_ready
from failover_cases import cases
from server_process import HOST, ServerProcess, running


def front_command(folder: Path, child: str = CHILD, settings: str = "") -> list[str]:
    """Return the command of a front of two replicas."""
    program = front_of(child, 2, f"port=int(sys.argv[2]){settings}")
    return python_command(program, folder, "PORT", seconds=600)


@pytest.mark.slow
def test_clients_notice_no_kill(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", context=1500)
    names = ("choices", "log-probabilities", "stop", "response with log-probabilities", "whole sampled")
    asked = {name: case for name, case in cases(30).items() if name in names}
    with running(front_command(folder), tmp_path / "log") as server:
        found = check(server, asked, num_kills=3, num_replicas=2, seed=1)
    assert (found["kills"], found["different"]) == (3, 0), found["tries"]


def test_a_child_ends_with_its_parent_whatever_it_does() -> None:
    code = """
import time
from infer.serving.distributed import replica
replica.import_module = lambda name: None
replica.await_turn() and print("works", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(python_command(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"works\n"
        child.stdin.close()
        assert child.wait(SECONDS) == 0


def begin_story(pool: ThreadPoolExecutor, server: ServerProcess, *, stream: bool = True) -> tuple[Any, Any]:
    """Return an event that is set when a long answer has begun, and the future answer without ids and times."""
    begun, url = threading.Event(), f"http://{HOST}:{server.port}"
    body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1} | ({"stream": True} if stream else {})

    def read() -> Any:
        with httpx.Client(base_url=url, timeout=SECONDS) as client:
            return listen(client, "/v1/completions", body, begun).adds_up_to

    return begun, pool.submit(read)


@pytest.mark.slow
def test_the_streams_of_a_stopped_replica_go_on_elsewhere_and_the_server_stays_ready(tmp_path: Path) -> None:
    """The watchdog kills the replica after its time, and the replica returns."""
    folder = make_model(tmp_path / "model", context=1500)
    with (
        running(front_command(folder, settings=", watchdog_seconds=10"), tmp_path / "log") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        until_ready(server, 2)
        expected = begin_story(pool, server)[1].result()
        sockets, (begun, story) = sorted(replica_processes(server)), begin_story(pool, server)
        assert begun.wait(SECONDS)
        busy = max(found := num_running(server), key=found.__getitem__)
        stopped = replica_processes(server)[sockets[busy]]
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert json.loads(server.get("/ready")) == {"status": "ok"}
            assert "smollm2" in server.get("/v1/models")
            assert story.result() == expected
            assert list(num_running(server)) == [1 - busy]
            assert [begin_story(pool, server)[1].result() for _ in range(2)] == [expected] * 2
            until_ready(server, 2)
            assert stopped not in replica_processes(server).values()
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGKILL)


def test_a_replica_that_hangs_is_killed_when_its_checks_took_the_watchdog_s_seconds(monkeypatch: Any) -> None:
    """A missed check takes a second before it, and a second without an answer."""
    num_checks, killed_after = 0, list[int]()

    async def silent(target: bytes) -> None:
        nonlocal num_checks
        num_checks += 1
        await asyncio.sleep(0.02)

    async def watch() -> None:
        watching = asyncio.create_task(replica._watch(Mock()))
        while not killed_after:
            await asyncio.sleep(0.001)
        watching.cancel()

    monkeypatch.setattr("infer.serving.distributed.replica._CHECK_SECONDS", 0.01)
    monkeypatch.setattr("infer.serving.distributed.replica._ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("infer.serving.distributed.replica._signal", lambda *_: killed_after.append(num_checks))
    with socket.socket(socket.AF_UNIX) as own:
        replica = Replica("0", own, ["none"], lambda _: None, watchdog_seconds=0.05)
        monkeypatch.setattr(replica, "try_get", silent)
        replica.is_ready, replica._num_missed = True, 1
        asyncio.run(watch())
    assert killed_after[0] == 3


@pytest.mark.slow
def test_an_answer_whose_engine_fails_goes_on_in_another_process(tmp_path: Path) -> None:
    """A killed rank of tensor parallelism is such a failure, because the leader lives."""
    folder, fault = make_model(tmp_path / "model", context=1500), tmp_path / "fault"
    slow = '        time.sleep(1000 if hangs == "step" else 0.05)\n'
    step = f"        if os.path.exists({str(fault)!r}):\n            os.remove({str(fault)!r})\n"
    step += '            raise RuntimeError("rank 1 ended by signal 9")\n'
    assert slow in CHILD
    command = front_command(folder, CHILD.replace(slow, step + slow))
    with running(command, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        until_ready(server, 2)
        for stream in (True, False):
            expected = begin_story(pool, server, stream=stream)[1].result()
            begun, story = begin_story(pool, server, stream=stream)
            until(lambda: any(num_running(server).values()))
            assert begun.wait(SECONDS)
            fault.touch()
            assert story.result() == expected
            assert not fault.exists()


def test_samples_of_several_processes_stand_together() -> None:
    head = "# HELP a_total A.\n# TYPE a_total counter\n"
    texts = [(head + 'a_total 1\na_total{x="y"} 2\n', {"replica": name}) for name in "01"]
    merged = Metrics().merged(texts)
    assert merged.count("# TYPE a_total counter\n") == 1
    family = next(each for each in text_string_to_metric_families(merged) if each.name == "a")
    expected = [({"replica": name, **labels}, value) for name in "01" for labels, value in (({}, 1), ({"x": "y"}, 2))]
    assert [(each.labels, each.value) for each in family.samples] == expected
    assert 'infer_build_info{process="front",' in merged
