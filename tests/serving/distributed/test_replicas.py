"""Several processes with the model behind a front: no client notices kills."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.types import Message

from infer.outputs import Piece
from infer.serving.distributed.asked_body import AskedBody, with_seed
from infer.serving.distributed.exchange import Exchange, GoneError, ResponseHead
from infer.serving.distributed.failover import Answering
from infer.serving.distributed.front import Front
from infer.serving.distributed.replica import Replica
from infer.serving.distributed.replicas import Replicas
from infer.serving.distributed.router import RoutedPrompt
from infer.serving.server.app import make_app
from infer.serving.server.call import Call, call_of, put_call
from infer.serving.server.http_errors import ApiError
from infer.serving.server.metrics import Metrics
from infer.serving.server.resumption import SentPart, note_of, unpack
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
from infer.serving.server.sse import failure_events
from shapes import SOURCE
from test_server_process import CHILD, SECONDS
from test_session import make_model
from watched import python_command

sys.path.append(str(SOURCE.parents[1] / "benchmarks"))
from check_failover import check, num_running, replica_processes, until_ready
from failover_cases import cases
from server_process import HOST, ServerProcess, running

FRONT = f"""
import sys
from infer.serving.distributed.front import run_replicas
from infer.serving.server.process import bind
from infer.serving.server.resumption import SentPart, note_of, unpack
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
settings = ServerSettings(port=int(sys.argv[2]))
command = [sys.executable, "-c", {CHILD!r}, sys.argv[1]]
sys.exit(run_replicas(ServerState(settings), bind(settings), [command] * 2))
"""


def test_clients_notice_no_kill(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", context=1500)
    names = ("choices", "log-probabilities", "stop", "response with log-probabilities", "whole sampled")
    asked = {name: case for name, case in cases(30).items() if name in names}
    with running(python_command(FRONT, folder, "PORT", seconds=600), tmp_path / "log") as server:
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
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"works\n"
        child.stdin.close()
        assert child.wait(SECONDS) == 0


def front_of(child: str, **settings: float) -> str:
    own = "".join(f", {name}={value}" for name, value in settings.items())
    return FRONT.replace(repr(CHILD), repr(child)).replace("port=int(sys.argv[2])", f"port=int(sys.argv[2]){own}")


class Story:
    """A long answer, read by a thread."""

    def __init__(self, server: ServerProcess, *, stream: bool = True) -> None:
        self._begun, self._pool = threading.Event(), ThreadPoolExecutor(1)
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1, "stream": stream}
        self._asked = f"http://{HOST}:{server.port}/v1/completions", body
        self._answer = self._pool.submit(self._listen)

    def wait_until_begun(self) -> None:
        assert self._begun.wait(SECONDS)

    def text(self) -> str:
        return self._answer.result(SECONDS)

    def _listen(self) -> str:
        """Return the answer without ids, times and comments.

        Texts of events are joined: an event has the text of each token that was ready when it was written.
        """
        url, body = self._asked
        found, texts = list[str](), list[str]()
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith(":") or not line:
                    continue
                self._begun.set()
                text = re.search(r'"text":"((?:[^"\\]|\\.)*)".*"finish_reason":null', line)
                if text is None:
                    found.append(re.sub(r'"(id|created|\w+_per_second|\w+_seconds)":[^,}]*', "", line))
                else:
                    texts.append(text[1])
        return "\n".join(["".join(texts), *found])


def test_the_streams_of_a_stopped_replica_go_on_elsewhere_and_the_server_stays_ready(tmp_path: Path) -> None:
    """The watchdog kills the replica after its time, and the replica returns."""
    folder = make_model(tmp_path / "model", context=1500)
    command = python_command(front_of(CHILD, watchdog_seconds=6), folder, "PORT", seconds=600)
    with running(command, tmp_path / "log") as server:
        until_ready(server, 2)
        expected = Story(server).text()
        sockets, story = sorted(replica_processes(server)), Story(server)
        story.wait_until_begun()
        busy = max(found := num_running(server), key=found.__getitem__)
        stopped = replica_processes(server)[sockets[busy]]
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert json.loads(server.get("/ready")) == {"status": "ok"}
            assert "smollm2" in server.get("/v1/models")
            assert story.text() == expected
            assert list(num_running(server)) == [1 - busy]
            assert [Story(server).text() for _ in range(2)] == [expected] * 2
            until_ready(server, 2)
            assert stopped not in replica_processes(server).values()
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGKILL)


def test_a_replica_that_hangs_is_killed_when_its_checks_took_the_watchdog_s_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_an_answer_whose_engine_fails_goes_on_in_another_process(tmp_path: Path) -> None:
    """A killed rank of tensor parallelism is such a failure, because the leader lives."""
    folder, fault = make_model(tmp_path / "model", context=1500), tmp_path / "fault"
    step = f"        if os.path.exists({str(fault)!r}):\n            os.remove({str(fault)!r})\n"
    step += '            raise RuntimeError("rank 1 ended by signal 9")\n        time.sleep(0.05)\n'
    child = CHILD.replace("        time.sleep(0.05)\n", step)
    with running(python_command(front_of(child), folder, "PORT", seconds=600), tmp_path / "log") as server:
        until_ready(server, 2)
        for stream in (True, False):
            expected = Story(server, stream=stream).text()
            story = Story(server, stream=stream)
            while not any(num_running(server).values()):
                time.sleep(0.02)
            if stream:
                story.wait_until_begun()
            fault.touch()
            assert story.text() == expected
            assert not fault.exists()


def test_a_request_that_three_replicas_died_of_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    died = list[RoutedPrompt]()

    @asynccontextmanager
    async def dying(prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        died.append(prompt)
        raise GoneError
        yield

    async def until_gone() -> Message:
        return await asyncio.get_running_loop().create_future()

    replicas = Replicas([], [], 1.0, lambda _: None, has_spares=False)
    monkeypatch.setattr(replicas, "exchange", dying)
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/completions", "query_string": b"", "headers": []}
    put_call(scope, Call("req-1", None, "POST"))
    asked = AskedBody(b"{}", RoutedPrompt(0), is_repeatable=True)
    answering = Answering(Request(scope, until_gone), asked, replicas, failure_events)
    with pytest.raises(ApiError) as caught:
        asyncio.run(answering.response())
    assert (caught.value.code, len(died)) == ("engine_died", 3)
    assert not call_of(Request(scope)).is_forwarded


@pytest.mark.parametrize("way", [GoneError, asyncio.CancelledError, None])
def test_work_is_queued_at_a_replica_until_it_ends_however_it_ends(
    way: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready(Replica):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.is_ready = True

        @asynccontextmanager
        async def exchange(self) -> AsyncIterator[Any]:
            yield

    async def send_two() -> None:
        with socket.socket() as own:
            replicas = Replicas([[], []], [own] * 2, 1.0, lambda _: None, has_spares=False)
        monkeypatch.setattr(replicas._router, "choose", choose)
        with suppress(GoneError, asyncio.CancelledError):
            async with replicas.exchange(RoutedPrompt(100, answer=7.0)), replicas.exchange(RoutedPrompt(10)):
                if way is not None:
                    raise way
        async with replicas.exchange(RoutedPrompt(1)):
            pass

    def choose(prompt: RoutedPrompt, queued: Mapping[str, float]) -> str:
        seen.append(dict(queued))
        return "1"

    seen = list[dict[str, float]]()
    monkeypatch.setattr("infer.serving.distributed.replicas.Replica", Ready)
    asyncio.run(send_two())
    assert seen == [{"0": 0, "1": 0}, {"0": 0, "1": 107}, {"0": 0, "1": 0}]


PARTS = [SentPart(0, [token_id]) for token_id in (11, 12, 13)]
NOTES = [note_of(0, [Piece(part.token_ids[0], "x")]) for part in PARTS]
EVENTS = [b"data: %d\n\n" % number for number in range(3)]


@pytest.mark.parametrize("cuts", [(0, 1), (1, 2), (2, 1), (1, 3), (3, 2), (3, 4), (5, 5)])
def test_a_part_is_asked_for_again_once_and_only_if_its_event_was_sent(
    cuts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas die after some notes and events, and a third one sends the other events."""
    lives, asked, expected, body = [*cuts, None], list[list[SentPart]](), list[list[SentPart]](), list[bytes]()

    class Living:
        load_seconds = 0.0

        async def head(self, request: bytes) -> ResponseHead:
            head, _, content = request.partition(b"\r\n\r\n")
            (length,) = re.findall(rb"x-infer-sent: (\d+)", head)
            asked.append(unpack(content[: int(length)]) if int(length) else [])
            expected.append(PARTS[: len(body)])
            return ResponseHead(200, [(b"content-type", b"text/event-stream")])

        async def events(self) -> AsyncGenerator[list[bytes], None]:
            num_given, cut = len(asked[-1]), lives.pop(0)
            new = [each for pair in zip(NOTES[num_given:], EVENTS[num_given:], strict=True) for each in pair]
            for event in [*EVENTS[:num_given], *new][:cut]:
                yield [event]
            if cut is not None:
                raise GoneError

    @asynccontextmanager
    async def living(prompt: RoutedPrompt) -> AsyncIterator[Living]:
        yield Living()

    async def until_gone() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def keep(message: Message) -> None:
        if chunk := message.get("body"):
            body.append(chunk)

    async def answer() -> None:
        response = await answering.response()
        await response(scope, until_gone, keep)

    replicas = Replicas([], [], 1.0, lambda _: None, has_spares=False)
    monkeypatch.setattr(replicas, "exchange", living)
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/completions", "query_string": b"", "headers": []}
    put_call(scope, Call("req-1", None, "POST"))
    repeatable = AskedBody(b"{}", RoutedPrompt(0), is_repeatable=True)
    answering = Answering(Request(scope, until_gone), repeatable, replicas, failure_events)
    asyncio.run(answer())
    assert body == EVENTS
    assert asked == expected
    assert not lives


def test_a_front_without_an_answer_of_any_engine_is_not_ready_and_says_so() -> None:
    """Once, Ray's fronts were never ready, because they have no model."""

    class Answers(NamedTuple):
        found: dict[str, tuple[int, bytes]]
        are_several: bool = True

        async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
            return self.found

        def exchange(self, prompt: RoutedPrompt) -> AbstractAsyncContextManager[Exchange]:
            raise NotImplementedError

    def ask(answers: Answers) -> tuple[int, str]:
        state = ServerState(ServerSettings())
        state.phase = "ready"
        transport = httpx.ASGITransport(make_app(state, Front(answers).table))

        async def get() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.get("/ready")

        answer = asyncio.run(get())
        return answer.status_code, answer.json()["status"]

    assert ask(Answers({})) == (503, "hung")
    assert ask(Answers({"a": (503, b'{"status":"loading"}')})) == (503, "loading")
    assert ask(Answers({"a": (503, b'{"status":"hung"}'), "b": (200, b'{"status":"ok"}')})) == (200, "ok")


def test_a_request_without_a_seed_gets_one_and_any_other_body_stays_as_it_is() -> None:
    for body in (b'{"prompt": "a", "seed": 3}', b"[1]", b"{", b""):
        assert with_seed(body) == body
    for body in (b'{"prompt": "a"}', b'{"prompt": "a", "seed": null}'):
        assert with_seed(body).startswith(b'{"prompt":"a","seed":')


def test_samples_of_several_processes_stand_together() -> None:
    head = "# HELP a_total A.\n# TYPE a_total counter\n"
    texts = [(head + 'a_total 1\na_total{x="y"} 2\n', {"replica": name}) for name in "01"]
    merged = Metrics().merged(texts)
    assert merged.count("# TYPE a_total counter\n") == 1
    family = next(each for each in text_string_to_metric_families(merged) if each.name == "a")
    expected = [({"replica": name, **labels}, value) for name in "01" for labels, value in (({}, 1), ({"x": "y"}, 2))]
    assert [(each.labels, each.value) for each in family.samples] == expected
    assert 'infer_build_info{process="front",' in merged
