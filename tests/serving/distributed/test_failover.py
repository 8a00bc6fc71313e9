"""Clients of replicas that die: their answers, and the requests to the replicas. A replica here is a small fake."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from infer import LLM
from infer.compute import ops
from infer.serving.distributed.asked_body import AskedBody
from infer.serving.distributed.exchange import Exchange, GoneError, ResponseHead
from infer.serving.distributed.failover import Answering
from infer.serving.distributed.front import Front, follow
from infer.serving.distributed.replica import Replica
from infer.serving.distributed.replicas import Replicas
from infer.serving.distributed.router import ReplicaRouter, RoutedPrompt, text_keys
from infer.serving.server.app import make_app
from infer.serving.server.call import FINGERPRINT_HEADER, Call, put_call
from infer.serving.server.http_errors import ENGINE_FAILED
from infer.serving.server.resumption import FAILED
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.server_state import ServerState
from infer.serving.server.sse import failure_events
from test_session import make_model

EVENTS = [b"data: %d\n\n" % number for number in range(4)]
STREAM, JSON = ([(b"content-type", kind)] for kind in (b"text/event-stream; charset=utf-8", b"application/json"))


class Life:
    """A replica that answers with this head and body, a list of events or bytes, and then may die.

    `model` is the fingerprint of its model.
    """

    load_seconds = 0.0

    def __init__(self, status: int, body: list[bytes] | bytes, *, dies: bool = False, model: str = "fp_1") -> None:
        self.status, self.content, self.dies, self.model = status, body, dies, model.encode()

    async def head(self, request: bytes) -> ResponseHead:
        headers = STREAM if isinstance(self.content, list) else JSON
        return ResponseHead(self.status, [*headers, (FINGERPRINT_HEADER, self.model)])

    async def body(self) -> bytes:
        assert isinstance(self.content, bytes)
        if self.dies:
            raise GoneError
        return self.content

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        assert isinstance(self.content, list)
        yield self.content
        if self.dies:
            raise GoneError


class Lives:
    """Consecutive replicas. `asked` has their requests."""

    are_several = True

    def __init__(self, *lives: Life) -> None:
        self.left, self.asked = list(lives), list[bytes]()

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Any]:
        life = self.left.pop(0)
        head = life.head

        async def noting(request: bytes) -> ResponseHead:
            self.asked.append(request)
            return await head(request)

        life.head = noting  # type: ignore[method-assign]
        yield life

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        return {}


def answer(
    lives: Lives, *, is_repeatable: bool = True, headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """Return the status and the body that the client receives."""
    sent, statuses = list[bytes](), list[int]()

    async def until_gone() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def keep(message: Message) -> None:
        if "status" in message:
            statuses.append(message["status"])
        sent.append(message.get("body", b""))

    async def run() -> None:
        asked = AskedBody(b"{}", RoutedPrompt(0), is_repeatable)
        response = await Answering(Request(scope, until_gone), asked, lives, failure_events).response()
        await response(scope, until_gone, keep)

    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/completions", "query_string": b"a=1",
             "headers": list(headers)}  # fmt: skip
    put_call(scope, Call("req-1", None, "POST", key_name="ann"))
    asyncio.run(asyncio.wait_for(run(), 60))
    return statuses[0], b"".join(sent)


def test_a_stream_that_cannot_be_repeated_ends_with_an_error_and_is_asked_for_once() -> None:
    lives = Lives(Life(200, EVENTS[:2], dies=True), Life(200, EVENTS))
    status, body = answer(lives, is_repeatable=False)
    assert (status, len(lives.asked)) == (200, 1)
    assert body.startswith(b"".join(EVENTS[:2]))
    assert b'"code":"engine_died"' in body.replace(b" ", b"")
    assert EVENTS[2] not in body


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_request_of_which_the_client_has_nothing_is_asked_again_whatever_it_is(is_repeatable: bool) -> None:
    lives = Lives(Life(200, b"{}", dies=True), Life(200, b'{"whole": 1}'))
    assert answer(lives, is_repeatable=is_repeatable) == (200, b'{"whole": 1}')
    assert len(lives.asked) == 2


def test_a_stream_continues_with_the_events_that_the_client_lacks() -> None:
    lives = Lives(Life(200, EVENTS[:2], dies=True), Life(200, EVENTS[:3], dies=True), Life(200, EVENTS))
    assert answer(lives) == (200, b"".join(EVENTS))


def test_a_stream_does_not_continue_with_an_error() -> None:
    lives = Lives(Life(200, EVENTS[:2], dies=True), Life(400, b'{"error": {"code": "refused"}}'), Life(200, EVENTS))
    status, body = answer(lives)
    assert status == 200
    assert body.startswith(b"".join(EVENTS[:2]))
    assert b"refused" not in body
    assert b"engine_died" in body
    assert len(lives.asked) == 2


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_stream_continues_only_on_kernels_of_the_same_kind(kernels: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    here = LLM(folder).system_fingerprint
    with ops.using(kernels):
        there = LLM(folder).system_fingerprint
    _, body = answer(Lives(Life(200, EVENTS[:2], dies=True, model=here), Life(200, EVENTS, model=there)))
    assert (body == b"".join(EVENTS)) == (here == there) == (kernels == "cpu")
    assert body.startswith(b"".join(EVENTS[:2]))


def test_the_note_that_an_engine_has_failed_is_not_for_the_client() -> None:
    lives = Lives(Life(200, [*EVENTS[:2], FAILED, b"data: the engine has failed\n\n"]), Life(200, EVENTS))
    assert answer(lives) == (200, b"".join(EVENTS))
    assert len(lives.asked) == 2


@pytest.mark.parametrize(("status", "code"), [(500, ENGINE_FAILED), (500, "failed"), (503, "failed")])
def test_an_error_of_an_engine_that_has_failed_is_asked_again_of_another(status: int, code: str) -> None:
    error = json.dumps({"error": {"code": code}}).encode()
    lives = Lives(Life(status, error), Life(200, b'{"whole": 1}'))
    assert answer(lives) == (200, b'{"whole": 1}')


@pytest.mark.parametrize(
    ("status", "body"),
    [(499, b'{"error": {"code": "failed"}}'), (500, b'{"error": {"code": "other"}}'), (500, b"no JSON"), (503, b"{}")],
)
def test_any_other_error_is_the_client_s(status: int, body: bytes) -> None:
    assert answer(Lives(Life(status, body), Life(200, b'{"whole": 1}'))) == (status, body)


def test_a_replica_gets_the_name_of_the_client_but_not_its_key_or_connection() -> None:
    secret = [(b"authorization", b"Bearer sk-1"), (b"x-api-key", b"sk-2")]
    ours = [(b"x-infer-key-name", b"bob"), (b"x-infer-id", b"7"), (b"x-infer-created", b"7"), (b"x-infer-sent", b"7")]
    connection = [(b"connection", b"keep-alive"), (b"host", b"evil"), (b"expect", b"100-continue"), (b"te", b"x"),
                  (b"content-length", b"99"), (b"transfer-encoding", b"chunked"), (b"x-request-id", b"8")]  # fmt: skip
    lives = Lives(Life(200, b"{}"))
    answer(lives, headers=[*secret, *ours, *connection, (b"x-session-id", b"s"), (b"accept", b"*/*")])
    head, _, content = lives.asked[0].partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    found = {name: value for name, _, value in (field.partition(b": ") for field in fields)}
    assert (first, content) == (b"POST /v1/completions?a=1 HTTP/1.1", b"{}")
    assert len(found) == len(fields)
    assert found.pop(b"x-infer-created").isdigit()
    assert found == {
        b"x-session-id": b"s", b"accept": b"*/*", b"host": b"engine", b"connection": b"close", b"content-length": b"2",
        b"x-request-id": b"req-1", b"x-infer-id": b"req-1", b"x-infer-key-name": b"ann", b"x-infer-sent": b"0",
        b"x-infer-load-seconds": b"0.000000",
    }  # fmt: skip


def test_a_head_is_handed_on_without_the_fields_of_its_connection() -> None:
    class Reader:
        async def read(self, num_bytes: int, /) -> bytes:
            return (
                b"HTTP/1.1 200 OK\r\nDate: today\r\nConnection: close\r\nKeep-Alive: 5\r\n"
                b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\nX-Request-Id: 1\r\n\r\n"
                b"2\r\n{}\r\n0\r\n\r\n"
            )

    class Writer:
        def write(self, found: bytes, /) -> None:
            pass

        async def drain(self) -> None:
            pass

        def close(self) -> None:
            pass

    async def ask() -> tuple[ResponseHead, bytes]:
        exchange = Exchange(Reader(), Writer())
        return await exchange.head(b""), await exchange.body()

    head, body = asyncio.run(ask())
    assert head == ResponseHead(200, [(b"content-type", b"application/json"), (b"x-request-id", b"1")])
    assert body == b"{}"


# The replicas of a server


class Kept:
    """A replica whose state the test sets."""

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        self._replica, self.num_dropped = replica, 0

        @asynccontextmanager
        async def exchange() -> AsyncIterator[str]:
            yield replica.name

        monkeypatch.setattr(replica, "exchange", exchange)
        monkeypatch.setattr(replica, "drop_requests", self._drop)

    def become(self, *, is_ready: bool, hangs: bool = False) -> None:
        self._replica.is_ready, self._replica._num_missed = is_ready, 2 * hangs
        self._replica._on_change(self._replica)

    def _drop(self) -> None:
        self.num_dropped += 1


class Two(NamedTuple):
    all: Replicas
    state: ServerState
    first: Kept
    second: Kept


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    state = ServerState(ServerSettings())
    with socket.socket() as one, socket.socket() as other:
        replicas = Replicas([["a"], ["b"]], [one, other], 120.0, partial(follow, state), has_spares=False)
        yield Two(replicas, state, *(Kept(each, monkeypatch) for each in replicas._replicas))


def prompt_of(text: bytes) -> RoutedPrompt:
    return RoutedPrompt(len(text) // 4, text_keys(text))


async def asked(two: Two, text: bytes) -> Any:
    """Return the name of the replica that answers."""
    async with asyncio.timeout(60), two.all.exchange(prompt_of(text)) as name:
        return name


def test_the_cache_of_a_replica_that_died_is_not_counted_on(two: Two) -> None:
    async def run() -> None:
        first, second = two.first, two.second
        first.become(is_ready=True)
        assert await asked(two, b"x" * 4000) == "0"
        second.become(is_ready=True)
        assert await asked(two, b"x" * 4000) == "0"
        first.become(is_ready=False)
        first.become(is_ready=True)
        assert await asked(two, b"y" * 8000) == "0"  # both are equal, so the first is chosen
        assert await asked(two, b"x" * 4000) == "1", "the first has been sent more, and has nothing of this"

    asyncio.run(run())


def test_a_request_waits_while_no_replica_is_ready_and_is_answered_by_the_next(two: Two) -> None:
    async def run() -> None:
        first, second = two.first, two.second
        phases = list[str]()
        for one, is_ready in ((first, True), (second, True), (first, False), (second, False)):
            one.become(is_ready=is_ready)
            phases.append(two.state.phase)
        assert phases == ["ready", "ready", "ready", "loading"]
        waiting = asyncio.create_task(asked(two, b"x"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        second.become(is_ready=True)
        assert two.state.phase == "ready"
        assert await waiting == "1"

    asyncio.run(run())


def test_requests_of_a_replica_that_hangs_are_dropped_while_another_answers(two: Two) -> None:
    async def run() -> None:
        first, second = two.first, two.second
        first.become(is_ready=True)
        first.become(is_ready=True, hangs=True)
        assert first.num_dropped == 0, "nobody else could answer"
        assert await asked(two, b"x") == "0"
        second.become(is_ready=True)
        assert (first.num_dropped, second.num_dropped) == (1, 0)
        assert await asked(two, b"x") == "1"
        first.become(is_ready=True)
        second.become(is_ready=False)
        assert await asked(two, b"x") == "0"
        assert two.state.phase == "ready"

    asyncio.run(run())


def test_a_front_that_drains_takes_no_request() -> None:
    lives, state = Lives(Life(200, b"{}")), ServerState(ServerSettings())
    transport = httpx.ASGITransport(make_app(state, Front(lives).table))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json={"prompt": "a"})

    for phase, status in (("loading", 503), ("draining", 503), ("failed", 503), ("ready", 200)):
        state.phase = phase  # type: ignore[assignment]
        assert asyncio.run(post()).status_code == status
        assert len(lives.asked) == (phase == "ready")


# The router


def test_a_page_that_is_sent_again_is_the_last_to_be_dropped() -> None:
    router, idle = ReplicaRouter(num_pages=2), {"a": 0.0, "b": 0.0}
    one, two, three = (prompt_of(letter * 256) for letter in (b"x", b"y", b"z"))
    for prompt in (one, two, one, three):
        router.sent(prompt, "b")
    for _ in range(20):
        router.sent(RoutedPrompt(100), "a")
    assert router.choose(three, idle) == "b"
    assert router._missing(one, "b") == 0
    assert router._missing(two, "b") == two.num_tokens
