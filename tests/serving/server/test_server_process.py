"""The process of a server: its answers while it loads, its end, and each kind of model, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from cases import cases
from encoder_models import BY_NAME, make_encoder, write_modules
from encoder_tokenizers import make_bert_folder
from fake_hub import COMMIT
from idle import until
from reranker_model import make_logit_score
from shapes import SOURCE
from test_embedding_models import make_folder as make_gemma
from test_session import make_model
from watched import python_command

SECONDS = 300.0
LOAD = """
import asyncio, os, re, socket, sys, threading, time
from infer.serving.server.process import bind, run_server
from infer.serving.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
hangs, pace = "", 0.05
def load(on_progress):
    from infer import LLM, AsyncLLM
    llm = LLM(sys.argv[1])
    engine = llm.host.engine
    step = engine.step
    def slow_step():
        time.sleep(1000 if hangs == "step" else pace)
        return step()
    engine.step = slow_step
    engine.scheduler._max_steps = 1
    return AsyncLLM(llm)
"""
# A server of one slot whose steps are slow. Loading waits for a line on stdin, and after another line steps are quick.
# A step or the event loop may hang.
SERVER = f"""{LOAD}
drain_seconds, hangs = float(sys.argv[2]), sys.argv[3]
settings = ServerSettings(port=0, slots=1, drain_seconds=drain_seconds, watchdog_seconds=5.0 if hangs else 60.0)
listener = bind(settings)
print(listener.getsockname()[1], not {{"torch", "numpy"}}.isdisjoint(sys.modules), flush=True)
def load_later(on_progress):
    on_progress(1, 4)
    sys.stdin.readline()
    threading.Thread(target=hurry, daemon=True).start()
    return load(on_progress)
def hurry():
    global pace
    os.read(0, 1)
    pace = 0
def hang_loop():
    time.sleep(1000)
def hold_lock():
    print("held", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # takes years, and holds Python's lock
def on_ready(state):
    print("ready", flush=True)
    if hangs != "step":
        asyncio.get_running_loop().call_later(0.5, {{"loop": hang_loop, "lock": hold_lock}}.get(hangs, int))
print("ended", run_server(ServerState(settings), listener, load_later, on_ready), flush=True)
"""
# A child with the model, which prints its process id, and the process of its clients.
CHILD = f"""{LOAD}
from infer.serving.distributed.replica import await_turn
await_turn() or sys.exit(0)
on_ready = lambda state: print("ready", os.getpid(), flush=True)
state = ServerState(ServerSettings(is_child=True))
run_server(state, socket.socket(fileno=int(sys.argv[2])), load, on_ready)
"""


def front_of(child: str, num_replicas: int, settings: str) -> str:
    """Return the program of a front, which prints its port."""
    return f"""
import sys
from infer.serving.distributed.front import run_replicas
from infer.serving.server.process import bind
from infer.serving.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
settings = ServerSettings({settings})
listener = bind(settings)
print(listener.getsockname()[1], not {{"torch", "numpy"}}.isdisjoint(sys.modules), flush=True)
commands = [[sys.executable, "-c", {child!r}, sys.argv[1]]] * {num_replicas}
print("ended", run_replicas(ServerState(settings), listener, commands), flush=True)
"""


ENDLESS, LONG, SHORT = 300, 40, 2  # tokens; with slow steps the first take a quarter of a minute
KEY = {"authorization": "Bearer secret"}
ASKED = {"model": "smollm2", "prompt": "hello", "ignore_eos": True, "temperature": 0}


class Process(NamedTuple):
    child: "subprocess.Popen[str]"
    url: str

    def load(self) -> None:
        self.press_enter()
        assert self.child.stdout.readline() == "ready\n"

    def press_enter(self) -> None:
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def ends(self) -> str:
        """Wait for the end of the process and return its other output."""
        out, error = self.child.communicate(timeout=SECONDS)
        return out + error

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SECONDS, headers=headers)

    def ask(self, num_tokens: int, *, stream: bool = False) -> httpx.Response:
        body = ASKED | {"max_tokens": num_tokens, "stream": stream}
        return httpx.post(self.url + "/v1/completions", json=body, headers=KEY, timeout=SECONDS)

    def stream(self, num_tokens: int, begun: threading.Event) -> str:
        """Return the whole stream. `begun` is set when its first part arrives, or when no part can arrive any more."""
        url, body, text = self.url + "/v1/completions", ASKED | {"max_tokens": num_tokens, "stream": True}, ""
        try:
            with httpx.stream("POST", url, json=body, headers=KEY, timeout=SECONDS) as answer:
                for piece in answer.iter_text():
                    text += piece
                    begun.set()
        finally:
            begun.set()
        return text

    def until_ready(self, status: int = 200) -> None:
        until(lambda: self.get("/ready").status_code == status)

    def child_id(self) -> int:
        """Return the process id of the next child that is ready."""
        word, number = self.child.stdout.readline().split()
        assert word == "ready"
        return int(number)


def started(folder: Path, *, drain_seconds: float = 600.0, hangs: str = "", handler: str = "SIG_DFL") -> Any:
    """Run a server with this handler of SIGHUP. The tests themselves may run with SIGHUP ignored."""
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{handler})\n{SERVER}"
    return running(python_command(code, folder, drain_seconds, hangs))


@contextmanager
def running(command: list[str]) -> Iterator[Process]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=SOURCE.parent, **pipes) as child:
        try:
            port, is_heavy = child.stdout.readline().split()
            assert is_heavy == "False"
            yield Process(child, f"http://127.0.0.1:{port}")
        finally:
            child.kill()


def until_running(process: Process, num_waiting: int) -> None:
    """Wait until one answer runs, and `num_waiting` wait."""
    expected = {"infer:num_requests_running 1.0", f"infer:num_requests_waiting {num_waiting:.1f}"}
    until(lambda: expected <= set(process.get("/metrics").text.splitlines()))


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
        running = pool.submit(process.ask, ENDLESS, stream=True)
        until_running(process, 0)
        waiting = [pool.submit(process.ask, ENDLESS) for _ in range(3)]
        streaming = pool.submit(process.ask, ENDLESS, stream=True)
        until_running(process, 4)
        process.child.send_signal(signal.SIGTERM)
        for refused in waiting:
            answer = refused.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert '"code":"shutting_down"' in streaming.result().text
        assert process.get("/ready").status_code == 503
        late = process.ask(SHORT)
        assert (late.status_code, late.headers["connection"]) == (503, "close")
        process.press_enter()
        assert running.result().text.endswith("data: [DONE]\n\n")
        assert '"error"' not in running.result().text
        assert "ended 0" in process.ends()


def test_a_terminal_that_closes_drains_the_server_and_a_second_signal_ends_it(folder: Path) -> None:
    """A second SIGHUP is no second signal."""
    with started(folder) as process, ThreadPoolExecutor(1) as pool:
        process.load()
        begun = threading.Event()
        running = pool.submit(process.stream, 300, begun)
        begun.wait()
        for _ in range(2):
            process.child.send_signal(signal.SIGHUP)
            process.until_ready(503)
        process.child.send_signal(signal.SIGTERM)
        assert "ended 143" in process.ends()
        with pytest.raises(httpx.RemoteProtocolError):
            running.result()


@pytest.mark.slow
def test_answers_that_take_too_long_end_as_errors_and_a_closed_terminal_may_be_ignored(folder: Path) -> None:
    with started(folder, drain_seconds=0.0, handler="SIG_IGN") as process, ThreadPoolExecutor(1) as pool:
        process.child.send_signal(signal.SIGHUP)
        process.load()
        assert process.ask(SHORT).status_code == 200
        running = pool.submit(process.ask, 300, stream=True)
        until_running(process, 0)
        process.child.send_signal(signal.SIGTERM)
        assert '"code":"shutting_down"' in running.result().text
        assert "ended 0" in process.ends()


@pytest.mark.slow(cases=1, rest=1)
@cases("hangs where status", ("loop", "hang_loop", 3), ("step", "slow_step", 3), ("lock", "hold_lock", 1))
def test_code_that_hangs_ends_the_process_with_its_stacks(folder: Path, hangs: str, where: str, status: int) -> None:
    """Code that holds Python's lock does so also after SIGTERM."""
    with started(folder, hangs=hangs) as process, ThreadPoolExecutor(1) as pool:
        process.load()
        asked = pool.submit(process.ask, SHORT) if hangs == "step" else None
        if hangs == "lock":
            assert process.child.stdout.readline() == "held\n"
            process.child.send_signal(signal.SIGTERM)
        assert where in process.ends()
        assert process.child.returncode == status
        assert asked is None or isinstance(asked.exception(), httpx.HTTPError)


def test_a_child_that_dies_is_followed_by_one_that_goes_on_with_its_answers(folder: Path) -> None:
    program = front_of(CHILD, 1, 'port=0, api_keys={"secret": "ann"}')
    with running(python_command(program, folder)) as process, ThreadPoolExecutor(2) as pool:
        first = process.child_id()
        process.until_ready()
        expected = process.ask(LONG).json()["choices"]
        assert process.get("/v1/models").status_code == 401
        begun = threading.Event()
        streamed, whole = pool.submit(process.stream, LONG, begun), pool.submit(process.ask, LONG)
        begun.wait()
        os.kill(first, signal.SIGKILL)
        assert streamed.result().endswith("data: [DONE]\n\n")
        assert text_of(streamed.result()) == expected[0]["text"]
        assert whole.result().json()["choices"] == expected
        metrics = process.get("/metrics", **KEY).text
        assert re.search(r'infer:refusals_total{.*reason="invalid_api_key".*} 1', metrics)
        assert "engine_died" not in metrics
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


def test_the_command_says_what_it_serves_in_six_lines_and_a_log_that_nobody_reads_stops_no_answer(folder: Path) -> None:
    command = python_command(
        "import sys; from infer.__main__ import run; run()", "serve", "--model", folder, "--port", 0,
        "--served-model-name", "tiny",
    )  # fmt: skip
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            lines = [child.stderr.readline() for _ in range(7)]
            found = re.search(r"http://[\d.:]+", lines[0])
            assert " ".join(line.split()[0] for line in lines) == "loading url model slots memory limits ends"
            with httpx.Client(base_url=found[0], timeout=SECONDS) as client:
                (model,) = client.get("/v1/models").json()["data"]
                schema = {"type": "string", "contentEncoding": "of-a-client"}
                asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
                client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **asked}).raise_for_status()
                with client.stream("GET", "/v1/engine/events") as events:
                    first = next(line for line in events.iter_lines() if line.startswith("data:"))
                assert {client.get("/v1/models").status_code for _ in range(500)} == {200}
            child.send_signal(signal.SIGINT)
            assert child.wait(SECONDS) == 0
            out, error = child.communicate(timeout=SECONDS)
        finally:
            child.kill()
    assert (model["id"], "ANTHROPIC" in error) == ("tiny", False)
    assert max(json.loads(first.removeprefix("data:"))["costs"].values()) > 0
    assert "contentEncoding" not in error
    assert json.loads(out.splitlines()[0])["http.route"] == "/v1/models"


# `infer serve` of each kind of model


_COMMAND = "import runpy; runpy.run_module('infer', run_name='__main__')"
EMBED = {"input": ["hello world", "hello"]}
RANK = {"query": "hello", "documents": ["paris", "hello world"]}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def make_bert(folder: Path, *, has_modules: bool = False, **settings: Any) -> None:
    tokenizer = make_bert_folder(folder)
    make_encoder(BY_NAME["bert"], folder, vocab_size=len(tokenizer), **settings)
    if has_modules:
        write_modules(folder, pooling_mode_cls_token=True)


# `make test` tries the fourth.
MAKERS: dict[str, Any] = {
    "gemma": lambda folder: make_gemma(folder, "embedding-gemma"),
    "encoder": make_bert,
    "ranks": lambda folder: make_bert(folder, id2label={0: "LABEL_0"}),
    "sentences": lambda folder: make_bert(folder, has_modules=True),
    "labels": lambda folder: make_bert(folder, id2label={0: "bad", 1: "good"}),
    "reranker": make_logit_score,
}
ANSWERED: dict[str, dict[str, dict[str, Any]]] = {
    "encoder": {"/v1/embeddings": EMBED, "/api/embed": EMBED},
    "sentences": {"/v1/embeddings": EMBED, "/api/embed": EMBED, "/v1/rerank": RANK},
    "labels": {"/v1/classify": {"input": "hello"}},
    "gemma": {"/v1/embeddings": EMBED},
    "ranks": {"/v1/rerank": RANK},
    "reranker": {"/v1/rerank": RANK},
}


@contextmanager
def serve(*arguments: object, **environment: str) -> Iterator[httpx.Client]:
    """Run `infer serve` until the end of `with`. The client's server is ready."""
    command = python_command(_COMMAND, "serve", *arguments, "--port", "0", "--threads", "1")
    own = os.environ | environment
    with subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = list[str]()
        try:
            while not (url := re.search(r"http://[\d.:]+", said[-1] if said else "")):
                said.append(process.stderr.readline())
                assert said[-1], f"the server ended: {said}"
            with httpx.Client(base_url=url[0], timeout=SECONDS, trust_env=False) as client:
                until(lambda: client.get("/ready").status_code == 200)
                yield client
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
    assert process.returncode == 0


@pytest.mark.slow(cases=1, rest=2)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_of_each_kind_is_served_for_what_it_can_do(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / kind)
    with serve(tmp_path / kind) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        for path, body in ANSWERED[kind].items():
            found = client.post(path, json={"model": name, **body})
            assert found.status_code == 200, (path, found.text)
        for path in ("/health", "/metrics", "/props", "/v1/models", "/api/ps", "/api/tags"):
            assert client.get(path).status_code == 200, path
        assert client.post("/api/show", json={"model": name}).status_code == 200
        if kind != "reranker":
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                refused = client.post(path, json={"model": name, **CHAT})
                assert refused.status_code == 400, (path, refused.text)
                assert "is an encoder and generates no text" in refused.text


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_served_together(tmp_path: Path) -> None:
    make_bert(tmp_path / "vectors")
    make_model(tmp_path / "text")
    with serve("-m", tmp_path / "vectors", "-m", tmp_path / "text") as client:
        assert client.post("/v1/embeddings", json={"model": "vectors", **EMBED}).status_code == 200
        found = client.post("/v1/completions", json={"model": "text", "prompt": "hello", "max_tokens": 2})
        assert found.status_code == 200, found.text


@pytest.mark.slow
def test_a_pulled_model_is_served_under_each_spelling_of_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--one" / "snapshots" / COMMIT
    make_model(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with serve("--load-on-demand", "--allow-pull", **environment) as client:
        pulled = client.post("/api/pull", json={"model": "hf.co/org/one", "stream": False})
        assert pulled.json() == {"status": "success"}
        for name in ("hf.co/org/one", "org/one", "org/one:latest", "org/one@main", f"org/one@{COMMIT}"):
            asked = {"model": name, "prompt": "hello", "stream": False, "options": {"num_predict": 2}}
            assert client.post("/api/generate", json=asked).status_code == 200, name
            assert client.post("/api/show", json={"model": name}).status_code == 200, name
            asked = {"model": name, "prompt": "hello", "max_tokens": 2}
            assert client.post("/v1/completions", json=asked).status_code == 200, name
        asked = {"model": "org/other", "prompt": "hello", "max_tokens": 2}
        assert client.post("/v1/completions", json=asked).status_code == 404


@pytest.mark.slow
def test_the_command_asks_no_proxy_for_a_server_of_this_machine(tmp_path: Path) -> None:
    make_model(tmp_path / "text")
    nobody = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    with serve(tmp_path / "text") as client:
        host = str(client.base_url).removeprefix("http://").rstrip("/")
        for url in (f"http://{host}", host, host.replace("127.0.0.1", "localhost")):
            command = python_command(_COMMAND, "ps", "--url", url)
            done = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=SECONDS)
            assert (done.returncode, "text" in done.stdout) == (0, True), done.stderr
    command = python_command(_COMMAND, "ps", "--url", "http://192.0.2.1")
    done = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=SECONDS)
    assert "no server answers at http://192.0.2.1 through the proxy http://127.0.0.1:9" in done.stderr
