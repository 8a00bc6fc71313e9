"""The process of a server: its answers while it loads, and its end."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from idle import until
from shapes import SOURCE
from watched import python_command

SECONDS = 100.0
# A server of one slot whose steps are slow; loading waits for a line on stdin. A step or the event loop may hang.
SERVER = """
import asyncio, os, re, socket, sys, threading, time
from infer.serving.server.process import bind, run_server
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
folder, drain_seconds, hangs = sys.argv[1], float(sys.argv[2]), sys.argv[3]
settings = ServerSettings(port=0, slots=1, drain_seconds=drain_seconds, watchdog_seconds=1.0 if hangs else 60.0)
listener = bind(settings)
print(listener.getsockname()[1], not {"torch", "numpy"}.isdisjoint(sys.modules), flush=True)
def load(on_progress):
    on_progress(1, 4)
    sys.stdin.readline()
    from infer import LLM, AsyncLLM
    llm = LLM(folder)
    engine = llm._opened.engine
    step = engine.step
    def slow_step():
        time.sleep(1000 if hangs == "step" else 0.05)
        return step()
    engine.step = slow_step
    engine.scheduler._max_steps = 1
    return AsyncLLM(llm)
def hang_loop():
    time.sleep(1000)
def hold_lock():
    print("held", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # takes years, and holds Python's lock
def on_ready(state):
    print("ready", flush=True)
    if hangs != "step":
        asyncio.get_running_loop().call_later(0.5, {"loop": hang_loop, "lock": hold_lock}.get(hangs, int))
print("ended", run_server(ServerState(settings), listener, load, on_ready), flush=True)
"""
# The process of its clients, and the child with the model, which prints its process id.
CHILD = """
import os, socket, sys, time
from infer.serving.distributed.replica import await_turn
from infer.serving.server.process import run_server
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
settings = ServerSettings(is_child=True)
await_turn() or sys.exit(0)
def load(on_progress):
    from infer import LLM, AsyncLLM
    llm = LLM(sys.argv[1])
    engine = llm._opened.engine
    step = engine.step
    def slow_step():
        time.sleep(0.05)
        return step()
    engine.step = slow_step
    engine.scheduler._max_steps = 1
    return AsyncLLM(llm)
on_ready = lambda state: print("ready", os.getpid(), flush=True)
run_server(ServerState(settings), socket.socket(fileno=int(sys.argv[2])), load, on_ready)
"""
ISOLATED = f"""
import sys
from infer.serving.distributed.front import run_replicas
from infer.serving.server.process import bind
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
settings = ServerSettings(port=0, api_keys={{"secret": "ann"}})
listener = bind(settings)
print(listener.getsockname()[1], not {{"torch", "numpy"}}.isdisjoint(sys.modules), flush=True)
command = [sys.executable, "-c", {CHILD!r}, sys.argv[1]]
print("ended", run_replicas(ServerState(settings), listener, [command]), flush=True)
"""
LONG, SHORT = 40, 2  # tokens
KEY = {"authorization": "Bearer secret"}


class Process(NamedTuple):
    child: "subprocess.Popen[str]"
    url: str

    def load(self) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline() == "ready\n"

    def ends(self) -> str:
        """Wait for the end of the process and return its other output."""
        out, error = self.child.communicate(timeout=SECONDS)
        return out + error

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SECONDS, headers=headers)

    def ask(self, num_tokens: int, *, stream: bool = False) -> httpx.Response:
        body = {"model": "smollm2", "prompt": "hello", "max_tokens": num_tokens, "stream": stream, "ignore_eos": True,
                "temperature": 0}  # fmt: skip
        return httpx.post(self.url + "/v1/completions", json=body, headers=KEY, timeout=SECONDS)

    def stream(self, num_tokens: int, begun: threading.Event) -> str:
        """Return the whole stream. `begun` is set when its first part arrives, or when no part can arrive any more."""
        body = {"model": "smollm2", "prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True,
                "temperature": 0}  # fmt: skip
        text = ""
        try:
            url = self.url + "/v1/completions"
            with httpx.stream("POST", url, json=body, headers=KEY, timeout=SECONDS) as answer:
                for piece in answer.iter_text():
                    text += piece
                    begun.set()
        finally:
            begun.set()
        return text

    def child_id(self) -> int:
        """Return the process id of the next child that is ready."""
        assert self.child.stdout is not None
        word, number = self.child.stdout.readline().split()
        assert word == "ready"
        return int(number)


def started(folder: Path, *, drain_seconds: float = 60.0, hangs: str = "") -> AbstractContextManager[Process]:
    return running(python_command(SERVER, folder, drain_seconds, hangs))


@contextmanager
def running(command: list[str]) -> Iterator[Process]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=SOURCE.parent, **pipes) as child:
        try:
            assert child.stdout is not None
            port, is_heavy = child.stdout.readline().split()
            assert is_heavy == "False"
            yield Process(child, f"http://127.0.0.1:{port}")
        finally:
            child.kill()


def until_running(process: Process, num_waiting: int) -> None:
    """Wait until one answer runs, and `num_waiting` wait."""
    while True:
        lines = process.get("/metrics").text.splitlines()
        if {"infer:num_requests_running 1.0", f"infer:num_requests_waiting {num_waiting:.1f}"} <= set(lines):
            return
        time.sleep(0.02)


def test_it_answers_while_it_loads_and_a_signal_ends_it(folder: Path) -> None:
    with started(folder) as process:
        assert process.get("/health").status_code == 503
        assert process.get("/v1/models").status_code in (200, 503)
        refused = process.ask(SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        process.child.send_signal(signal.SIGTERM)
        assert "ended 0" in process.ends()


def test_a_draining_server_finishes_running_answers_and_refuses_waiting_ones(folder: Path) -> None:
    with started(folder) as process, ThreadPoolExecutor(8) as pool:
        process.load()
        running = pool.submit(process.ask, LONG, stream=True)
        until_running(process, 0)
        waiting = [pool.submit(process.ask, LONG) for _ in range(3)]
        streaming = pool.submit(process.ask, LONG, stream=True)
        until_running(process, 4)
        process.child.send_signal(signal.SIGTERM)
        for refused in waiting:
            answer = refused.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert '"code":"shutting_down"' in streaming.result().text
        assert process.get("/ready").status_code == 503
        late = process.ask(SHORT)
        assert (late.status_code, late.headers["connection"]) == (503, "close")
        assert running.result().text.endswith("data: [DONE]\n\n")
        assert '"error"' not in running.result().text
        assert "ended 0" in process.ends()


def with_sighup(handler: str, folder: Path) -> AbstractContextManager[Process]:
    """Run a server with this handler of SIGHUP. The tests themselves may run with SIGHUP ignored."""
    return running(
        python_command(f"import signal; signal.signal(signal.SIGHUP, signal.{handler})\n{SERVER}", folder, 60.0, "")
    )


def test_a_terminal_that_closes_drains_the_server(folder: Path) -> None:
    with with_sighup("SIG_DFL", folder) as process, ThreadPoolExecutor(1) as pool:
        process.load()
        running = pool.submit(process.ask, LONG, stream=True)
        until_running(process, 0)
        for _ in range(2):
            process.child.send_signal(signal.SIGHUP)
            until(lambda: process.get("/ready").status_code == 503)
        assert running.result().text.endswith("data: [DONE]\n\n")
        assert "ended 0" in process.ends()


def test_a_server_that_was_told_to_ignore_a_closed_terminal_goes_on(folder: Path) -> None:
    with with_sighup("SIG_IGN", folder) as process:
        process.child.send_signal(signal.SIGHUP)
        process.load()
        assert process.ask(SHORT).status_code == 200


@pytest.mark.parametrize("drain_seconds", [0.0, 60.0])
def test_answers_that_take_too_long_end_as_errors_and_a_second_signal_ends_all(
    folder: Path, drain_seconds: float
) -> None:
    with started(folder, drain_seconds=drain_seconds) as process, ThreadPoolExecutor(1) as pool:
        process.load()
        running: Future[httpx.Response] = pool.submit(process.ask, 300, stream=True)
        until_running(process, 0)
        process.child.send_signal(signal.SIGTERM)
        if drain_seconds:
            until(lambda: process.get("/ready").status_code == 503)
            process.child.send_signal(signal.SIGTERM)
            assert "ended 143" in process.ends()
            with pytest.raises(httpx.RemoteProtocolError):
                running.result()
        else:
            assert '"code":"shutting_down"' in running.result().text
            assert "ended 0" in process.ends()


def test_a_step_that_hangs_ends_the_process_with_its_stacks(folder: Path) -> None:
    with started(folder, hangs="step") as process, ThreadPoolExecutor(1) as pool:
        process.load()
        asked = pool.submit(process.ask, SHORT)
        assert "slow_step" in process.ends()
        assert process.child.returncode == 3
        assert isinstance(asked.exception(), httpx.HTTPError)


def test_an_event_loop_that_hangs_ends_the_process_with_its_stacks(folder: Path) -> None:
    with started(folder, hangs="loop") as process:
        process.load()
        assert "hang_loop" in process.ends()
        assert process.child.returncode == 3


def test_code_that_holds_python_s_lock_ends_the_process_with_its_stacks_also_after_sigterm(folder: Path) -> None:
    with started(folder, hangs="lock") as process:
        process.load()
        assert process.child.stdout is not None
        assert process.child.stdout.readline() == "held\n"
        process.child.send_signal(signal.SIGTERM)
        assert "hold_lock" in process.ends()
        assert process.child.returncode == 1


def test_a_child_that_dies_is_followed_by_one_that_goes_on_with_its_answers(folder: Path) -> None:
    with running(python_command(ISOLATED, folder)) as process, ThreadPoolExecutor(2) as pool:
        first = process.child_id()
        until(lambda: process.get("/ready").status_code == 200)
        expected = process.ask(LONG).json()["choices"]
        assert process.get("/v1/models").status_code == 401
        begun = threading.Event()
        streamed, whole = pool.submit(process.stream, LONG, begun), pool.submit(process.ask, LONG)
        begun.wait()
        os.kill(first, signal.SIGKILL)
        assert streamed.result().endswith("data: [DONE]\n\n")
        assert text_of(streamed.result()) == expected[0]["text"]
        assert whole.result().json()["choices"] == expected
        own = text_string_to_metric_families(process.get("/metrics", **KEY).text)
        refused = {s.labels["reason"]: s.value for f in own for s in f.samples if s.name == "infer:refusals_total"}
        assert refused["invalid_api_key"] == 1
        assert "engine_died" not in refused
        assert process.child_id() != first
        begun = threading.Event()
        running_on = pool.submit(process.stream, LONG, begun)
        begun.wait()
        process.child.send_signal(signal.SIGTERM)
        assert text_of(running_on.result()) == expected[0]["text"]
        assert "ended 0" in process.ends()


def text_of(streamed: str) -> str:
    lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@contextmanager
def command_of(folder: Path) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """Run `infer serve`, and yield its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", "--model", str(folder), "--port", str(port), "--served-model-name", "tiny"]
    command = [*python_command("import sys; from infer.__main__ import run; run()"), *arguments]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            yield child, port
        finally:
            child.kill()


def test_a_log_that_nobody_reads_stops_no_answer_and_no_end(folder: Path) -> None:
    with command_of(folder) as (child, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        assert child.stderr is not None
        while not child.stderr.readline().startswith("ends"):
            pass
        assert {client.get("/v1/models").status_code for _ in range(500)} == {200}
        child.send_signal(signal.SIGINT)
        assert child.wait(SECONDS) == 0
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["http.route"] == "/v1/models"


def test_the_command_says_what_it_serves_in_six_lines(folder: Path, tmp_path: Path) -> None:
    with command_of(folder) as (child, port):
        assert child.stderr is not None
        lines = [child.stderr.readline() for _ in range(7)]
        assert [line.split()[0] for line in lines] == ["loading", "url", "model", "slots", "memory", "limits", "ends"]
        url = f"http://127.0.0.1:{port}"
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        schema = {"type": "string", "contentEncoding": "of-a-client"}
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 2, **asked}).raise_for_status()
        with httpx.stream("GET", f"{url}/v1/engine/events") as events:
            first = next(line for line in events.iter_lines() if line.startswith("data:"))
        child.send_signal(signal.SIGINT)
        out, error = child.communicate(timeout=SECONDS)
    assert (model["id"], child.returncode) == ("tiny", 0)
    assert max(json.loads(first.removeprefix("data:"))["costs"].values()) > 0
    assert "contentEncoding" not in error
    assert json.loads(out.splitlines()[0])["http.route"] == "/v1/models"
