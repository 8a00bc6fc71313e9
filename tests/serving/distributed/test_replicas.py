"""Several processes with the model behind a front: no client notices kills. Their parts are tested without Ray."""

import asyncio
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self
from unittest.mock import Mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import infer
from commands import refused, run
from idle import until
from infer import LLM, BatchEngine, InvalidRequestError
from infer.serving.distributed.replica import Replica
from infer.serving.distributed.router import read_routed
from infer.serving.server.metrics import Metrics
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings
from infer.system.cores import take_cores
from served import serving
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
        try:
            assert child.wait(SECONDS) == 0
        finally:
            child.kill()


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
            assert (story.result(), list(num_running(server))) == (expected, [1 - busy])
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
    slow = '        time.sleep(1000 if hangs == "step" else pace)\n'
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
    named = Metrics("m").merged([(Metrics("m").text(), {"replica": "0"})])
    assert (named.count("# TYPE vllm:request_success_total"), "infer:" in named) == (1, False)


# Parts of replicas, without processes


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


read = partial(read_routed, is_repeatable=True)


def test_bodies_that_begin_alike_have_the_same_first_keys() -> None:
    asked = [{"messages": [{"role": "user", "content": LONG + last}], "model": last} for last in "ab"]
    first, second = (read(json.dumps(each).encode(), "", "").prompt for each in asked)
    assert (first.keys, len(first.keys) >= 3, first.num_tokens > 200) == (second.keys, True, True)
    other = read(json.dumps(asked[0]).encode(), "", "another key's name").prompt
    assert not set(first.keys) & set(other.keys)


def test_a_session_is_a_header_or_a_cache_key_of_one_tenant() -> None:
    body = json.dumps({"prompt": "a", "prompt_cache_key": "k"}).encode()
    assert read(body, "", "t").prompt == read(b'{"prompt": "a"}', "k", "t").prompt
    assert read(body, "", "t").prompt.session != read(body, "", "u").prompt.session
    assert read(b'{"prompt": "a"}', "", "t").prompt.session == ""
    for none in (b"", b"[]", b"\xff"):
        assert read(none, "k", "t").prompt.num_tokens == 0


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
    assert (taken, take_cores(1)) == (allowed, [])
    assert os.sched_getaffinity(0) == allowed


def test_limits_change_while_requests_are_served(folder: Path) -> None:
    with LLM(folder) as llm, serving(llm, model="tiny", slots=4) as served:
        for step_ms in (20, 20.5):
            served.state.change_limits({"slots": 2, "max_queue": 1, "step_ms": step_ms})
        llm.host.loop.run(bool)  # the engine has its limits before the next message
        assert (llm.host.engine.max_running, llm.host.engine.scheduler.gap_seconds) == (2, 0.0205)
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


# Old names


def test_the_old_place_of_the_batch_engine_warns() -> None:
    old = importlib.import_module("infer.distributed")
    with pytest.warns(DeprecationWarning, match=r"infer\.distributed\.BatchEngine is now infer\.BatchEngine"):
        assert old.BatchEngine is infer.BatchEngine
    with pytest.raises(AttributeError, match="no attribute 'Batch'"):
        _ = old.Batch


def test_the_import_path_of_older_configs_leads_to_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray imports `infer.distributed.ray_serve:app`. A stub stands for the module here, because it needs Ray."""
    stub, place = ModuleType("stub"), "infer.serving.distributed.ray_serve"
    stub.app = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, place, stub)
    monkeypatch.delitem(sys.modules, "infer.distributed.ray_serve", raising=False)
    with pytest.warns(FutureWarning, match=rf"ray_serve:app is now {place}:app: change `import_path`"):
        assert importlib.import_module("infer.distributed.ray_serve").app is stub.app
    monkeypatch.delitem(sys.modules, "infer.distributed.ray_serve")
