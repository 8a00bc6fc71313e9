"""Clients of replicas that die: their answers, and the requests to the replicas. A replica here is a small fake."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message

from cases import cases
from idle import in_event_loop
from infer import LLM
from infer.compute import ops
from infer.serving.distributed.exchange import Exchange, Failover, GoneError, ResponseHead
from infer.serving.distributed.front import Front
from infer.serving.distributed.replica import Replica, Replicas
from infer.serving.distributed.router import ReplicaRouter, RoutedBody, RoutedPrompt, read_routed, text_keys
from infer.serving.protocols.api_errors import ENGINE_FAILED, ApiError
from infer.serving.server.app import make_app
from infer.serving.server.connection import CALL, FAILED, FINGERPRINT_HEADER, Call, SentPart, call_of, unpack
from infer.serving.server.endpoint import ApiRequest, get
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings
from served import SECONDS
from test_session import make_model

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from bench_router import by_routers, replica_names, simulate

EVENTS = [b"data: %d\n\n" % number for number in range(4)]
STREAM, JSON = ({b"content-type": kind} for kind in (b"text/event-stream; charset=utf-8", b"application/json"))


class Life:
    """A replica that answers with this head and body, a list of events or bytes, and then may die.

    `model` is the fingerprint of its model.
    """

    load_seconds = 0.0

    def __init__(self, status: int, body: list[bytes] | bytes, *, dies: bool = False, model: str = "fp_1") -> None:
        self.status, self.content, self.dies, self.model = status, body, dies, model.encode()

    async def head(self, request: bytes) -> ResponseHead:
        headers = STREAM if isinstance(self.content, list) else JSON
        return ResponseHead(self.status, headers | {FINGERPRINT_HEADER.encode(): self.model})

    async def body(self) -> bytes:
        assert isinstance(self.content, bytes)
        if self.dies:
            raise GoneError
        return self.content

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        assert isinstance(self.content, list)
        for event in self.content:
            yield [event]
        if self.dies:
            raise GoneError


class Lives:
    """Consecutive replicas. `asked` has their requests."""

    are_several = True

    def __init__(self, *lives: Life) -> None:
        self.left, self.asked, self.prompts = list(lives), list[bytes](), list[RoutedPrompt]()
        self.answers = dict[str, tuple[int, bytes]]()

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Any]:
        life = self.left.pop(0)
        self.prompts.append(prompt)
        head = life.head

        async def noting(request: bytes) -> ResponseHead:
            self.asked.append(request)
            return await head(request)

        life.head = noting  # type: ignore[method-assign]
        yield life

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        return self.answers


async def until_gone() -> Message:
    return await asyncio.get_running_loop().create_future()


def scope_of(headers: Sequence[tuple[bytes, bytes]] = ()) -> Any:
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/completions", "query_string": b"a=1",
             "headers": list(headers)}  # fmt: skip
    scope[CALL] = Call(None, "POST", "req-1", key_name="ann")
    return scope


def answer(lives: Lives, *, is_repeatable: bool = True, scope: Any = None) -> tuple[int, bytes]:
    """Return the status and the body that the client receives."""
    sent, statuses = list[bytes](), list[int]()
    scope = scope_of() if scope is None else scope

    async def keep(message: Message) -> None:
        if "status" in message:
            statuses.append(message["status"])
        sent.append(message.get("body", b""))

    async def run() -> None:
        asked = RoutedBody(b"{}", RoutedPrompt(0), is_repeatable)
        exchange = partial(lives.exchange, asked.prompt)
        request = ApiRequest(scope, until_gone, ServerState(ServerSettings()))
        response = await Failover(request, get("/", until_gone), asked, exchange).response()
        await response(scope, until_gone, keep)

    asyncio.run(asyncio.wait_for(run(), SECONDS))
    return statuses[0], b"".join(sent)


def has_ended_early(status: int, body: bytes) -> bool:
    """Return True if a stream has two events, then the error that its engine died, and its end."""
    begin, _, error = body.partition(b"".join(EVENTS[:2]))
    return (status, begin, error.count(b"data:"), b"engine_died" in error) == (200, b"", 2, True)


def test_a_stream_that_cannot_be_repeated_ends_with_an_error_and_is_asked_for_once() -> None:
    lives = Lives(Life(200, EVENTS[:2], dies=True), Life(200, EVENTS))
    assert has_ended_early(*answer(lives, is_repeatable=False))
    assert len(lives.asked) == 1


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_request_of_which_the_client_has_nothing_is_asked_again_whatever_it_is(is_repeatable: bool) -> None:
    lives = Lives(Life(200, b"{}", dies=True), Life(200, b'{"whole": 1}'))
    assert (answer(lives, is_repeatable=is_repeatable), len(lives.asked)) == ((200, b'{"whole": 1}'), 2)


def test_a_stream_continues_with_the_events_that_the_client_lacks() -> None:
    """Any number of replicas may die, as long as the client gets new events between the deaths."""
    lives = Lives(*(Life(200, EVENTS[:count], dies=True) for count in range(5)), Life(200, EVENTS))
    assert answer(lives) == (200, b"".join(EVENTS))


def test_a_stream_that_does_not_move_between_two_deaths_is_given_up() -> None:
    lives = Lives(*(Life(200, EVENTS[:count], dies=True) for count in (1, 2, 2)), Life(200, EVENTS))
    assert has_ended_early(*answer(lives))
    assert len(lives.asked) == 3


def test_a_stream_does_not_continue_with_an_error() -> None:
    lives = Lives(Life(200, EVENTS[:2], dies=True), Life(400, b'{"error": {"code": "refused"}}'), Life(200, EVENTS))
    assert has_ended_early(*answer(lives))
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


PARTS = [SentPart(0, [token_id]) for token_id in (11, 12, 13)]
NOTES = [part.note for part in PARTS]


class Noting(Life):
    """A replica that repeats the events of the given parts, sends a note before each other event, and may die."""

    def __init__(self, num_before_death: int | None) -> None:
        super().__init__(200, [], dies=num_before_death is not None)
        self.num_before_death, self.given = num_before_death, list[SentPart]()

    async def head(self, request: bytes) -> ResponseHead:
        head, _, content = request.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"x-infer-sent: (\d+)", head)
        self.given = unpack(content[: int(length)]) if int(length) else []
        count = len(self.given)
        new = [each for pair in zip(NOTES[count:], EVENTS[count:], strict=False) for each in pair]
        self.content = [*EVENTS[:count], *new][: self.num_before_death]
        return await super().head(request)


@pytest.mark.parametrize("cuts", [(0, 2), (1, 2), (2, 3), (1, 3), (3, 3), (3, 4), (5, 5)])
def test_a_part_is_asked_for_again_once_and_only_if_its_event_was_sent(cuts: tuple[int, int]) -> None:
    """Two replicas die after some notes and events, and a third one sends the other events."""
    replicas, counts = [Noting(cut) for cut in (*cuts, None)], [0]
    assert answer(Lives(*replicas)) == (200, b"".join(EVENTS[:3]))
    for cut in cuts:  # a replica repeats as many events as the client has, and then sends pairs of a note and an event
        counts.append(counts[-1] + max(0, cut - counts[-1]) // 2)
    assert [each.given for each in replicas] == [PARTS[:count] for count in counts]


def test_a_request_that_two_replicas_died_of_is_given_up() -> None:
    lives, scope = Lives(*(Life(200, b"{}", dies=True) for _ in range(2)), Life(200, b"{}")), scope_of()
    with pytest.raises(ApiError) as caught:
        answer(lives, scope=scope)
    assert (caught.value.code, len(lives.asked)) == ("engine_died", 2)
    assert not call_of(Request(scope)).is_forwarded


def test_a_request_without_a_seed_gets_one_and_any_other_body_stays_as_it_is() -> None:
    for body in (b'{"prompt": "a", "seed": 3}', b"[1]", b"{", b""):
        assert read_routed(body, "", "", is_repeatable=True).content == body
    for body in (b'{"prompt": "a"}', b'{"prompt": "a", "seed": null}'):
        assert read_routed(body, "", "", is_repeatable=True).content.startswith(b'{"prompt":"a","seed":')


def test_the_note_that_an_engine_has_failed_is_not_for_the_client() -> None:
    lives = Lives(Life(200, [*EVENTS[:2], FAILED, b"data: the engine has failed\n\n"]), Life(200, EVENTS))
    assert (answer(lives), len(lives.asked)) == ((200, b"".join(EVENTS)), 2)


@pytest.mark.parametrize(("status", "code"), [(500, ENGINE_FAILED), (500, "failed"), (503, "failed")])
def test_an_error_of_an_engine_that_has_failed_is_asked_again_of_another(status: int, code: str) -> None:
    error = json.dumps({"error": {"code": code}}).encode()
    assert answer(Lives(Life(status, error), Life(200, b'{"whole": 1}'))) == (200, b'{"whole": 1}')


@cases("status body",
    (499, b'{"error": {"code": "failed"}}'), (500, b'{"error": {"code": "other"}}'), (500, b"no JSON"), (503, b"{}"),
)  # fmt: skip
def test_any_other_error_is_the_client_s(status: int, body: bytes) -> None:
    assert answer(Lives(Life(status, body), Life(200, b'{"whole": 1}'))) == (status, body)


def test_a_replica_gets_the_name_of_the_client_but_not_its_key_or_connection() -> None:
    secret = [(b"authorization", b"Bearer sk-1"), (b"x-api-key", b"sk-2")]
    ours = [(b"x-infer-key-name", b"bob"), (b"x-infer-id", b"7"), (b"x-infer-created", b"7"), (b"x-infer-sent", b"7")]
    connection = [(b"connection", b"keep-alive"), (b"host", b"evil"), (b"expect", b"100-continue"), (b"te", b"x"),
                  (b"content-length", b"99"), (b"transfer-encoding", b"chunked"), (b"x-request-id", b"8")]  # fmt: skip
    lives = Lives(Life(200, b"{}"))
    answer(lives, scope=scope_of([*secret, *ours, *connection, (b"x-session-id", b"s"), (b"accept", b"*/*")]))
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


@pytest.mark.parametrize("name", ["team", "zoë", "日本"])
def test_a_call_keeps_the_name_of_its_key_in_another_process(name: str) -> None:
    call, other = Call(None, "POST", key_name=name), Call(None, "POST")
    other.take_over(Headers(raw=call.handed_on(3, 0.5)))
    assert (other.key_name, other.id, other.num_sent_bytes, other.load_seconds) == (name, call.id, 3, 0.5)


def test_a_head_is_handed_on_without_the_fields_of_its_connection() -> None:
    async def ask() -> tuple[ResponseHead, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(
            b"HTTP/1.1 200 OK\r\nDate: today\r\nConnection: close\r\nKeep-Alive: 5\r\n"
            b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\nX-Request-Id: 1\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n"
        )
        exchange = Exchange(reader, AsyncMock(asyncio.StreamWriter))
        return await exchange.head(b""), await exchange.body()

    head, body = asyncio.run(ask())
    assert head == ResponseHead(200, {b"content-type": b"application/json", b"x-request-id": b"1"})
    assert body == b"{}"


# The replicas of a server


class Kept:
    """A replica whose state the test sets."""

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        self._replica, self.drop = replica, Mock()
        monkeypatch.setattr(replica, "exchange", lambda: nullcontext(replica.name))
        monkeypatch.setattr(replica, "drop_requests", self.drop)

    def become(self, *, is_ready: bool, hangs: bool = False) -> None:
        self._replica.is_ready, self._replica._num_missed = is_ready, 2 * hangs
        self._replica._on_change(self._replica)


class Two(NamedTuple):
    all: Replicas
    state: ServerState
    first: Kept
    second: Kept


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Two]:
    state = ServerState(ServerSettings())
    replicas = Replicas([["a"], ["b"]], tmp_path, state)
    yield Two(replicas, state, *(Kept(each, monkeypatch) for each in replicas._replicas))
    replicas.kill()


def prompt_of(text: bytes, session: str = "") -> RoutedPrompt:
    return RoutedPrompt(len(text) // 4, text_keys(text), session)


async def asked(two: Two, text: bytes) -> Any:
    """Return the name of the replica that answers."""
    async with asyncio.timeout(SECONDS), two.all.exchange(prompt_of(text)) as name:
        return name


@in_event_loop
async def test_the_cache_of_a_replica_that_died_is_not_counted_on(two: Two) -> None:
    first, second = two.first, two.second
    first.become(is_ready=True)
    assert await asked(two, b"x" * 4000) == "0"
    second.become(is_ready=True)
    assert await asked(two, b"x" * 4000) == "0"
    first.become(is_ready=False)
    first.become(is_ready=True)
    assert await asked(two, b"y" * 8000) == "0"  # both are equal, so the first is chosen
    assert await asked(two, b"x" * 4000) == "1", "the first has been sent more, and has nothing of this"


@in_event_loop
async def test_a_request_waits_while_no_replica_is_ready_and_is_answered_by_the_next(two: Two) -> None:
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
    assert (two.state.phase, await waiting) == ("ready", "1")


@in_event_loop
async def test_requests_of_a_replica_that_hangs_are_dropped_while_another_answers(two: Two) -> None:
    first, second = two.first, two.second
    first.become(is_ready=True)
    first.become(is_ready=True, hangs=True)
    assert not first.drop.called, "nobody else could answer"
    assert await asked(two, b"x") == "0"
    second.become(is_ready=True)
    assert (first.drop.call_count, second.drop.call_count) == (1, 0)
    assert await asked(two, b"x") == "1"
    first.become(is_ready=True)
    second.become(is_ready=False)
    assert (await asked(two, b"x"), two.state.phase) == ("0", "ready")


@pytest.mark.parametrize("way", [GoneError, asyncio.CancelledError, None])
def test_work_is_queued_at_a_replica_until_it_ends_however_it_ends(two: Two, way: Any, monkeypatch: Any) -> None:
    seen = list[dict[str, float]]()

    def choose(prompt: RoutedPrompt, queued: dict[str, float]) -> str:
        seen.append(dict(queued))
        return "1"

    async def send_two() -> None:
        for each in (two.first, two.second):
            each.become(is_ready=True)
        with suppress(GoneError, asyncio.CancelledError):
            async with two.all.exchange(RoutedPrompt(100, answer=7.0)), two.all.exchange(RoutedPrompt(10)):
                if way is not None:
                    raise way
        async with two.all.exchange(RoutedPrompt(1)):
            pass

    monkeypatch.setattr(two.all._router, "choose", choose)
    asyncio.run(send_two())
    assert seen == [{"0": 0, "1": 0}, {"0": 0, "1": 107}, {"0": 0, "1": 0}]


def ask_front(replicas: Any, method: str, path: str, phase: Any = "ready", **headers: str) -> httpx.Response:
    """Return the answer of a front in this phase."""
    state = ServerState(ServerSettings())
    state.phase = phase
    transport = httpx.ASGITransport(make_app(state, Front(replicas).table))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "a"} if method == "POST" else None
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(ask())


def test_a_front_that_drains_takes_no_request() -> None:
    lives = Lives(Life(200, b"{}"))
    for phase, status in (("loading", 503), ("draining", 503), ("failed", 503), ("ready", 200)):
        assert ask_front(lives, "POST", "/v1/completions", phase).status_code == status
        assert len(lives.asked) == (phase == "ready")


@pytest.mark.parametrize("name", ["x-session-id", "x-session-affinity"])
def test_requests_of_a_client_s_session_have_one_session_for_the_router(name: str) -> None:
    lives = Lives(*(Life(200, b"{}") for _ in range(3)))
    for session in ("ses_1", "ses_1", "ses_2"):
        assert ask_front(lives, "POST", "/v1/completions", **{name: session}).status_code == 200
    first, second, other = (prompt.session for prompt in lives.prompts)
    assert "" != first == second != other


@cases(
    "answers expected",
    ({}, (503, "hung")),
    ({"a": (503, b'{"status":"loading"}')}, (503, "loading")),
    ({"a": (503, b'{"status":"hung"}'), "b": (200, b'{"status":"ok"}')}, (200, "ok")),
)
def test_a_front_without_an_answer_of_any_engine_is_not_ready_and_says_so(answers: Any, expected: Any) -> None:
    """Once, Ray's fronts were never ready, because they have no model."""
    lives = Lives()
    lives.answers = answers
    found = ask_front(lives, "GET", "/ready")
    assert (found.status_code, found.json()["status"]) == expected


# The router


def test_a_page_that_is_sent_again_is_the_last_to_be_dropped() -> None:
    router, idle = ReplicaRouter(num_pages=2), {"a": 0.0, "b": 0.0}
    one, two, three = (prompt_of(letter * 256) for letter in (b"x", b"y", b"z"))
    for prompt in (one, two, one, three):
        router.sent(prompt, "b")
    for _ in range(20):
        router.sent(RoutedPrompt(100), "a")
    assert (router.choose(three, idle), router._missing(one, "b")) == ("b", 0)
    assert router._missing(two, "b") == two.num_tokens


# In a simulation


NAMES = replica_names(8)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("load", "has_sessions"), [(0.2, False), (0.8, False), (0.8, True)])
def test_a_chat_trace_finds_its_prefixes_and_loads_all_replicas_alike(load: float, has_sessions: bool) -> None:
    found = simulate(by_routers(), num_replicas=8, load=load, num_requests=2500, has_sessions=has_sessions)
    assert found.share_of_ideal >= 0.95
    assert all(0.9 <= found.load_over_mean(name) <= 1.1 for name in NAMES)


def test_without_the_router_most_prefixes_are_lost() -> None:
    names = cycle(NAMES)
    found = simulate(lambda prompt, queued, name: next(names), num_replicas=8, load=0.8, num_requests=1000)
    assert found.share_of_ideal < 0.6


@pytest.mark.slow
def test_routers_that_learn_apart_need_conversations_that_stay_at_one() -> None:
    sticky, apart = (
        simulate(by_routers(4, is_sticky=is_sticky), num_replicas=8, load=0.7, num_requests=1000).share_of_ideal
        for is_sticky in (True, False)
    )
    assert sticky > 0.9 > apart


def test_a_prompt_goes_where_it_began_unless_queued_work_outweighs_its_prefix() -> None:
    router = ReplicaRouter(100)
    router.sent(prompt_of(b"x" * 2000), "b")
    asked = ((b"x" * 2000 + b"and more", 0.0), (b"y" * 2000, 0.0), (b"x" * 2000, 3000.0), (b"x" * 2000, 5000.0))
    found = [router.choose(prompt_of(text), {"a": 0.0, "b": queued}) for text, queued in asked]
    assert found == ["b", "a", "b", "a"]


def test_a_session_stays_where_it_is_though_its_prompts_have_no_page() -> None:
    router, idle = ReplicaRouter(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"hello", "s"), "b")
    router.sent(prompt_of(b"something else"), "a")
    router.sent(prompt_of(b"something else"), "a")
    assert router.choose(prompt_of(b"other text", "s"), idle) == "b"


def test_a_replica_that_was_started_again_has_nothing() -> None:
    router, idle = ReplicaRouter(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 4000, "s"), "b")
    router.forget("b")
    assert router.choose(prompt_of(b"x" * 4000, "s"), idle) == "a"


def test_a_replica_in_the_place_of_dead_ones_gets_no_more_than_its_share() -> None:
    """Ray gives each new replica a new name."""
    router, shares = ReplicaRouter(100), Counter[str]()

    def send(names: set[str], count: int) -> None:
        shares.clear()
        for number in range(count):
            prompt = RoutedPrompt(100, text_keys(b"%d" % number * 600))
            name = router.choose(prompt, dict.fromkeys(names, 0.0))
            router.sent(prompt, name)
            shares[name] += 1

    send({"a", "b"}, 400)
    router.forget("b")
    send({"a"}, 400)
    send({"a", "c"}, 200)
    assert abs(shares["a"] - shares["c"]) <= 20


def test_the_router_knows_the_first_pages_of_a_prompt_longer_than_a_cache() -> None:
    """A later page is of no use without those before it."""
    router, idle = ReplicaRouter(2), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 768), "b")
    assert router.choose(prompt_of(b"x" * 512 + b"y" * 512), idle) == "b"


def test_texts_of_different_salts_share_no_key() -> None:
    text = b"x" * 600
    assert len(text_keys(text)) == 2
    assert not set(text_keys(text, b"ann")) & set(text_keys(text))
