"""Limits of requests and connections, tried with the largest allowed number and with the next one."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from idle import until
from raw_http import Connection
from served import Served, serving

FIELDS, BYTES, BODY = 12, 400, 1000


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(None, max_headers=FIELDS, max_header_bytes=BYTES, max_body_bytes=BODY) as served:
        served.state.phase = "ready"
        yield served


def status(served: Served, *fields: str, path: str = "/nowhere") -> int:
    with Connection(served.port) as connection:
        connection.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode())
        return connection.answer().status


def test_a_request_may_have_as_many_fields_as_are_allowed(served: Served) -> None:
    others = [f"x-{number}: 1" for number in range(FIELDS)]
    assert status(served, *others[: FIELDS - 1]) == 404
    assert status(served, *others) == 431


def test_a_head_may_have_as_many_bytes_as_are_allowed(served: Served) -> None:
    """The path counts, and each field with the four bytes that end it."""
    left = BYTES - len("/nowhere") - len("Hostlocalhost") - 4 - len("x-a") - 4
    assert status(served, f"x-a: {'b' * left}") == 404
    assert status(served, f"x-a: {'b' * (left + 1)}") == 431
    assert status(served, f"x-a: {'b' * left}", path="/nowhere1") == 431


def test_the_head_of_each_request_of_a_connection_is_counted_alone(served: Served) -> None:
    request = f"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nx-a: {'b' * (BYTES - 100)}\r\n\r\n".encode()
    with Connection(served.port) as connection:
        for _ in range(3):
            connection.send(request)
            assert connection.answer().status == 404


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(BODY, 100), (BODY + 1, 413), (8 * BODY, 413), (8 * BODY + 1, 413)]
)
def test_a_client_that_asks_first_is_asked_for_what_may_come(served: Served, num_bytes: int, expected: int) -> None:
    head = ["POST /tokenize HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Expect: 100-continue"]
    with Connection(served.port) as connection:
        connection.send("\r\n".join([*head, f"Content-Length: {num_bytes}", "", ""]).encode())
        assert connection.line().split()[1] == str(expected).encode()


def test_as_many_connections_as_are_allowed_are_served_and_the_next_when_one_has_ended() -> None:
    def ask(connection: Connection) -> int:
        connection.send(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.answer().status

    with ExitStack() as stack:
        served = stack.enter_context(serving(None, max_connections=3))
        allowed = [stack.enter_context(Connection(served.port)) for _ in range(3)]
        assert [ask(each) for each in allowed] == [404] * 3
        assert status(served) == 503
        allowed[0].close()
        until(lambda: status(served) == 404)  # it has ended as soon as the server sees it
