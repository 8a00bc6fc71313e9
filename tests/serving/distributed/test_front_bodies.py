"""Bodies that reach the engine through a front get the answers of a single process."""

from collections.abc import Iterator
from typing import Any

import pytest

from infer import LLM
from infer.serving.distributed.front import Front
from raw_http import Answer, Connection, post
from served import Served, serving
from shelves import OneReplica

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(llm: LLM) -> Iterator[list[Served]]:
    """Serve the same model in one process, and behind a front."""
    with (
        serving(llm, model="tiny") as alone,
        serving(llm, model="tiny", is_child=True) as child,
        serving(None, model="tiny", table=Front(OneReplica(child.port)).table) as front,
    ):
        front.state.phase = "ready"
        yield [alone, front]


def answer(served: Served, *sent: Any, path: str = CHAT) -> Answer:
    with Connection(served.port) as connection:
        connection.send(post(path, *sent))
        return connection.answer()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"messages": "\xff"}', b'{"messages":  "\\ud83d"}',
        b'{"messages": [], "seed": \xff}', b'{"messages": 5, "x` - at `$.messages[5]": 1}',
        b'{"messages": [{"role": "x` - at `$.messages[9]"}]}',
        b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": 1e3000000}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": [9999999999]}', b'{"prompt": [-1]}', b'{"prompt": [[]]}', b'{"prompt": [1, "a"]}',
        b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a"} {}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_body_that_cannot_be_meant_is_refused_alike_behind_a_front(servers: list[Served], body: bytes) -> None:
    path = "/v1/completions" if b"prompt" in body else CHAT
    alone, behind = (answer(served, body, path=path) for served in servers)
    assert (alone.status, alone.json()) == (behind.status, behind.json())
    error = alone.json()["error"]
    assert (alone.status, set(error)) == (400, {"message", "type", "param", "code"})
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["x-infer-id", "x-infer-created", "x-infer-sent", "X-Infer-Key-Name"])
@pytest.mark.parametrize("value", ["7", "garbage", ""])
def test_headers_between_the_processes_mean_nothing_to_a_client(servers: list[Served], name: str, value: str) -> None:
    found = [answer(served, ASKED, f"{name}: {value}", f"{name}: {value}") for served in servers]
    assert [each.status for each in found] == [200, 200]
    alone, behind = (each.json()["choices"] for each in found)
    assert alone == behind
