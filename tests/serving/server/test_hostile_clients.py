"""Slow, broken or malicious clients get a true refusal or are disconnected, at exact limits. Others are served."""

import json
import logging
import socket
import struct
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from starlette.responses import Response

from cases import cases
from extent import usual_or_all
from idle import until, until_idle
from infer import LLM
from infer.serving.server.endpoint import ApiRequest, EventStream, get
from openai_shapes import check
from raw_http import Answer, Connection, post
from served import Served, serving

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = ASKED | {"max_tokens": 300}
SERVED = {"slots": 2}


@pytest.fixture
def hasty(served: Served) -> Iterator[Connection]:
    """Return a connection to a server that waits for half a second."""
    limits = {"header_seconds": 0.5, "body_seconds": 0.5, "keep_alive_seconds": 1}
    with serving(served.state.llm().llm, model="tiny", **limits) as hasty, Connection(hasty.port) as connection:
        yield connection


@pytest.fixture
def connection(served: Served) -> Iterator[Connection]:
    with Connection(served.port) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _others_are_served_afterwards(served: Served) -> Iterator[None]:
    expected = answered(served)
    yield
    until_idle(served)
    assert answered(served) == expected


def answered(served: Served) -> str:
    return str(served.ask(COMPLETIONS, **ASKED)["choices"][0]["text"])


def refusal(answer: Answer) -> tuple[int, dict[str, Any]]:
    check("ErrorResponse", answer.json())
    return answer.status, answer.json()["error"]


def is_refused(connection: Connection, status: int) -> bool:
    """Return True if the answer has this status, and the connection is closed after it."""
    return refusal(connection.answer())[0] == status and connection.is_closed()


# Bytes that arrive


def test_a_request_may_come_byte_by_byte_and_its_length_may_have_leading_zeros(connection: Connection) -> None:
    for byte in post(COMPLETIONS, ASKED).replace(b"Content-Length: ", b"Content-Length: " + b"0" * 4300):
        connection.send(bytes([byte]))
    assert connection.answer().status == 200


def test_requests_that_come_at_once_are_answered_in_their_order(connection: Connection) -> None:
    limits = (3, 1, 2)
    connection.send(b"".join(post(COMPLETIONS, ASKED | {"max_tokens": limit}) for limit in limits))
    assert [connection.answer().json()["usage"]["completion_tokens"] for _ in limits] == list(limits)


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(connection: Connection) -> None:
    head, body = post(COMPLETIONS, ASKED, "Expect: 100-continue").split(b"\r\n\r\n")
    connection.send(head + b"\r\n\r\n")
    assert connection.line().startswith(b"HTTP/1.1 100")
    assert connection.line() == b"\r\n"
    connection.send(body)
    assert connection.answer().status == 200


def test_http_1_0_is_answered_and_closed(connection: Connection) -> None:
    connection.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert connection.answer().status == 200
    assert connection.is_closed()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions", "/nowhere"])
def test_head_has_no_body(connection: Connection, path: str) -> None:
    head = "HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.send(f"HEAD {path} {head}GET /health {head}".encode())
    assert connection.answer(has_body=False).status in (200, 404, 405)
    assert connection.answer().json() == {"status": "ok"}


@cases(
    "sent",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 100,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",  # neither of two is answered
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
)
def test_bytes_that_are_not_a_request_are_refused_and_the_connection_closes(connection: Connection, sent: Any) -> None:
    connection.send(sent)
    assert is_refused(connection, 400)


@pytest.mark.parametrize("field", ["Content-Type: application/json", "Authorization: Bearer a", "Origin: http://a"])
def test_a_field_that_must_be_single_is_not_sent_twice(connection: Connection, field: str) -> None:
    connection.send(post(COMPLETIONS, ASKED, field, field))
    assert is_refused(connection, 400)


@cases(
    "coding status",
    ("Transfer-Encoding: gzip, chunked", 501),
    ("Transfer-Encoding: xchunked", 501),
    ("Content-Encoding: gzip", 415),
    ("Content-Encoding: identity", 200),
)
def test_a_body_is_read_only_in_the_coding_that_it_has(connection: Connection, coding: str, status: int) -> None:
    request = chunked(ASKED).replace(b"Transfer-Encoding: chunked", coding.encode())
    connection.send(request if "Transfer" in coding else post(COMPLETIONS, ASKED, coding))
    assert connection.answer().status == status


@pytest.mark.parametrize("target", ["//", "/%00", "/v1/../health", "/%ff%fe", "/" + "a" * 4000, "http://b/health2"])
def test_odd_targets_are_unknown_urls(connection: Connection, target: str) -> None:
    connection.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert refusal(connection.answer())[0] == 404


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
OPEN, SHORT = HEALTH[:-2], post(COMPLETIONS, ASKED)[:-1]  # without the empty line, and without a byte of the body


@cases("rest is_one_write", (b"GET /hea", False), (b"GET /hea", True), (OPEN, False), (b"\r\n", False), (SHORT, False))
def test_every_head_and_body_of_a_connection_is_timed(hasty: Connection, rest: bytes, is_one_write: bool) -> None:
    hasty.send(HEALTH + rest if is_one_write else HEALTH)
    assert hasty.answer().status == 200
    if not is_one_write:
        hasty.send(rest)
    assert is_refused(hasty, 408)


@pytest.mark.parametrize("rest", [b"", b"a", b"a" * 100])
def test_an_unread_body_keeps_no_connection_open(hasty: Connection, rest: bytes) -> None:
    hasty.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
    assert refusal(hasty.answer())[0] == 404
    hasty.send(rest)
    assert hasty.is_closed() or refusal(hasty.answer())[0] == 408


def test_a_half_head_behind_a_request_does_not_end_its_answer(served: Served) -> None:
    with serving(served.state.llm().llm, model="tiny", header_seconds=0.05) as quick, Connection(quick.port) as other:
        other.send(post(COMPLETIONS, LONG | {"stream": True}) + b"GET /hea")
        assert other.answer().body.endswith(b"data: [DONE]\n\n")
        assert refusal(other.answer())[0] == 408


# Trailers


def chunked(body: Any, *headers: str) -> bytes:
    """Return a request up to its trailer."""
    content = json.dumps(body).encode()
    head = post(COMPLETIONS, b"", "Transfer-Encoding: chunked", *headers).replace(b"Content-Length: 0\r\n", b"")
    return head + b"%x\r\n" % len(content) + content + b"\r\n0\r\n"


@pytest.mark.parametrize("is_one_write", [True, False])
def test_a_key_in_a_trailer_never_counts(served: Served, is_one_write: bool) -> None:
    trailer = b"Authorization: Bearer secret\r\n\r\n"
    with serving(served.state.llm().llm, model="tiny", api_keys={"secret": "ann"}) as guarded:
        for parts in ([chunked(ASKED) + trailer], [chunked(ASKED), trailer]):
            with Connection(guarded.port) as connection:
                for part in [b"".join(parts)] if is_one_write else parts:
                    connection.send(part)
                assert refusal(connection.answer())[0] == 401
        with Connection(guarded.port) as connection:
            connection.send(chunked(ASKED, "Authorization: Bearer secret") + b"a: b\r\n\r\n" + HEALTH)
            assert [connection.answer().status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("before", [b"", HEALTH])
@pytest.mark.parametrize("trailer", [b"a: b\r\n" * 200, b"a: " + b"b" * 600_000 + b"\r\n", b"a: " + b"b" * 600_000])
def test_a_trailer_has_the_limits_of_a_head(connection: Connection, before: bytes, trailer: bytes) -> None:
    connection.send(before + chunked(ASKED))
    if before:
        assert connection.answer().status == 200
    connection.send(trailer)
    assert is_refused(connection, 431)


# Contents of bodies


@cases(
    "body told",
    (rb'{"prompt": "a \ud83d"}', r"\ud83d at byte 14 is half of a surrogate pair"),
    (rb'{"prompt": "\\ud83d \ud83d\ude00 \ude00"}', r"\ude00 at byte 33 is half of a surrogate pair"),
    (b'{"prompt": "aa\xff"}', "byte 14 (0xff) is not UTF-8"),
)
def test_the_byte_that_is_no_text_is_named(connection: Connection, body: bytes, told: str) -> None:
    connection.send(post(COMPLETIONS, body))
    status, error = refusal(connection.answer())
    assert (status, error["code"]) == (400, "invalid_json")
    assert told in error["message"]


MINIMAL = {  # without a limit
    COMPLETIONS: '"prompt": "a"', "/v1/trace": '"prompt": "a"', "/v1/responses": '"input": "a"',
    "/v1/branch": '"prompt": "a", "answer_token_ids": [5], "position": 0',
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages"), '"messages": [{"role": "user", "content": "a"}]'),
}  # fmt: skip


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize("number", ["9" * 400, "4294967296"])
def test_limits_beyond_a_context_are_counted_not_summed(served: Served, caplog: Any, path: str, number: str) -> None:
    def limits() -> list[str]:
        return [line for line in served.client.get("/metrics").text.splitlines() if "params_max_tokens" in line]

    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    counted = f'infer:http_requests_total{{path="{path}",status="400"}} '
    before, limits_before = count_of(served, counted), limits()
    with caplog.at_level(logging.INFO, "infer.access"), Connection(served.port) as connection:
        connection.send(post(path, f'{{{MINIMAL[path]}, "{name}": {number}}}'.encode()))
        answer = connection.answer()
        assert answer.status == 400
        assert number[:4] in answer.json()["error"]["message"]
        until(lambda: count_of(served, counted) == before + 1)
        assert limits() == limits_before
    logged = [json.loads(record.getMessage()) for record in caplog.records if record.name == "infer.access"]
    assert [each["http.response.status_code"] for each in logged if each["http.route"] == path] == [400]


def test_a_call_that_cannot_be_counted_is_logged(served: Served, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: object) -> None:
        raise OverflowError

    monkeypatch.setattr(served.state.metrics, "count_call", fail)
    with caplog.at_level(logging.INFO, "infer.access"):
        answered(served)
        until(lambda: "cannot be counted" in caplog.text)
    assert f'"http.route":"{COMPLETIONS}"' in caplog.text


def count_of(served: Served, sample: str) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(sample)) for line in lines if line.startswith(sample))


def test_an_idle_server_tells_nobody_to_come_back(served: Served) -> None:
    with serving(served.state.llm().llm, model="tiny", max_ttft=1e-9) as strict:
        strict.ask(COMPLETIONS, **ASKED)


def test_requests_of_the_same_id_are_answered_apart(served: Served) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(served.port)) for _ in range(4)]
        for count, connection in enumerate(connections):
            connection.send(post(COMPLETIONS, ASKED | {"max_tokens": count + 1}, "x-request-id: twice"))
        found = [connection.answer() for connection in connections]
    assert [answer.json()["usage"]["completion_tokens"] for answer in found] == [1, 2, 3, 4]
    assert {answer.headers["x-request-id"] for answer in found} == {"twice"}


# Clients that disconnect, or do not read


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("way", ["closed", "half closed", "reset"])
def test_a_client_that_goes_away_frees_its_slot(served: Served, is_stream: bool, way: str) -> None:
    for _ in range(usual_or_all(3, 100)):
        with Connection(served.port) as connection:
            connection.send(post(COMPLETIONS, LONG | {"stream": is_stream}))
            if is_stream:
                connection.line()
            leave(connection, way)
            if way == "half closed":
                connection.socket.recv(1)
    until_idle(served)


def test_clients_that_go_away_while_they_wait_are_forgotten(served: Served) -> None:
    """More than two clients share two slots. Some leave in the queue, some in their prompt, some before their body."""
    with ExitStack() as stack:
        for count in range(usual_or_all(12, 1000)):
            connection = stack.enter_context(Connection(served.port))
            request = post(COMPLETIONS, LONG | {"stream": count % 2 == 0, "prompt": [5] * 100})
            connection.send(request if count % 5 else request[:-10])
            if count % 3 == 0:
                leave(connection, "reset")
    until_idle(served)


@pytest.mark.parametrize("is_silent", [False, True])
def test_clients_that_read_nothing_or_are_silent_delay_no_other_client(served: Served, is_silent: bool) -> None:
    with ExitStack() as stack:
        for _ in range(usual_or_all(50, 900) if is_silent else usual_or_all(8, 50)):
            other = stack.enter_context(Connection(served.port, receive_bytes=1024))
            other.send(b"" if is_silent else post(COMPLETIONS, LONG | {"stream": True, "logprobs": 5}))
        assert answered(served)


def leave(connection: Connection, way: str) -> None:
    match way:
        case "half closed":
            connection.socket.shutdown(socket.SHUT_WR)
        case "reset":
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        case _:
            connection.close()


# The largest allowed numbers, and the next ones


FIELDS, BYTES, BODY = 12, 400, 1000


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    with serving(None, max_headers=FIELDS, max_header_bytes=BYTES, max_body_bytes=BODY) as limited:
        limited.state.phase = "ready"
        yield limited


def status(limited: Served, *fields: str, path: str = "/nowhere") -> int:
    with Connection(limited.port) as connection:
        connection.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode())
        return connection.answer().status


def test_a_request_may_have_as_many_fields_as_are_allowed(limited: Served) -> None:
    others = [f"x-{number}: 1" for number in range(FIELDS)]
    assert (status(limited, *others[: FIELDS - 1]), status(limited, *others)) == (404, 431)


def test_a_head_may_have_as_many_bytes_as_are_allowed(limited: Served) -> None:
    """The path counts, and each field with the four bytes that end it."""
    left = BYTES - len("/nowhere") - len("Hostlocalhost") - 4 - len("x-a") - 4
    assert (status(limited, f"x-a: {'b' * left}"), status(limited, f"x-a: {'b' * (left + 1)}")) == (404, 431)
    assert status(limited, f"x-a: {'b' * left}", path="/nowhere1") == 431


def test_the_head_of_each_request_of_a_connection_is_counted_alone(limited: Served) -> None:
    request = f"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nx-a: {'b' * (BYTES - 100)}\r\n\r\n".encode()
    with Connection(limited.port) as connection:
        for _ in range(3):
            connection.send(request)
            assert connection.answer().status == 404


@cases("num_bytes expected", (BODY, 100), (BODY + 1, 413), (8 * BODY, 413), (8 * BODY + 1, 413))
def test_a_client_that_asks_first_is_asked_for_what_may_come(limited: Served, num_bytes: int, expected: int) -> None:
    head = ["POST /tokenize HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Expect: 100-continue"]
    with Connection(limited.port) as connection:
        connection.send("\r\n".join([*head, f"Content-Length: {num_bytes}", "", ""]).encode())
        assert connection.line().split()[1] == str(expected).encode()


def test_as_many_connections_as_are_allowed_are_served_and_the_next_when_one_has_ended() -> None:
    def ask(connection: Connection) -> int:
        connection.send(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.answer().status

    with ExitStack() as stack:
        limited = stack.enter_context(serving(None, max_connections=3))
        allowed = [stack.enter_context(Connection(limited.port)) for _ in range(3)]
        assert ([ask(each) for each in allowed], status(limited)) == ([404] * 3, 503)
        allowed[0].close()
        until(lambda: status(limited) == 404)  # it has ended as soon as the server sees it


# Slow readers


EVENT_BYTES = 20_000_000  # more than the kernel keeps for a connection
STALL_SECONDS = 2.0


@contextmanager
def large_events(llm: LLM) -> Iterator[tuple[Served, list[int]]]:
    """Serve a stream of two large events. Yield also the number of events that were made, then -1 at the end."""
    counts = list[int]()

    async def events() -> AsyncGenerator[bytes, None]:
        counts.append(0)
        try:
            for _ in range(2):
                counts[0] += 1
                yield b"data: " + b"z" * EVENT_BYTES + b"\n\n"
        finally:
            counts.append(-1)

    async def answer(request: ApiRequest) -> Response:
        return EventStream(events(), comment_seconds=60.0)

    with serving(llm, table=[get("/large", answer)], model="tiny", stall_seconds=STALL_SECONDS) as large:
        yield large, counts


def test_a_reader_of_large_events_is_not_slow(llm: LLM) -> None:
    """Each part is read in much less time than a stall, and all parts in more."""
    pause = STALL_SECONDS / 16
    with large_events(llm) as (large, counts), large.client.stream("GET", "/large") as answer:
        num_bytes, num_parts, end = 0, 0, b""
        for part in answer.iter_bytes(EVENT_BYTES // 10):
            num_bytes, num_parts, end = num_bytes + part.count(b"z"), num_parts + 1, part
            time.sleep(pause)
    assert num_parts * pause > STALL_SECONDS
    assert (num_bytes, b"slow_reader" in end, counts) == (2 * EVENT_BYTES, False, [2, -1])


def test_the_answer_of_a_reader_that_stops_is_ended(llm: LLM) -> None:
    with large_events(llm) as (large, counts), Connection(large.port, receive_bytes=1024) as slow:
        slow.send(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: counts == [1, -1])
