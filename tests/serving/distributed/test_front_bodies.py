"""Bodies that reach the engine through a front get the answers of a single process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infer import LLM
from infer.serving.distributed.exchange import Exchange
from infer.serving.distributed.front import Front
from infer.serving.distributed.router import RoutedPrompt
from raw_http import Answer, Connection, post
from served import Served, serving
from test_session import make_model

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


class OneReplica:
    """A child server at a port of this machine."""

    are_several = False

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        exchange = Exchange(*await asyncio.open_connection("127.0.0.1", self._port))
        try:
            yield exchange
        finally:
            exchange.close()

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        return {}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """Serve the same model in one process, and behind a front."""
    with (
        LLM(make_model(tmp_path_factory.mktemp("model"))) as llm,
        serving(llm, model="tiny") as alone,
        serving(llm, model="tiny", is_child=True) as child,
        serving(None, model="tiny", table=Front(OneReplica(child.port)).table) as front,
    ):
        front.state.phase = "ready"
        yield [alone, front]


def answer(served: Served, *sent: Any) -> Answer:
    with Connection(served.port) as connection:
        connection.send(post(CHAT, *sent))
        return connection.answer()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"messages": "\xff"}', b"\xff\xfe",
        b'{"messages":  "\\ud83d"}', b"{", b"", b"[]", b'{"messages": [], "seed": \xff}',
        b'{"messages": 5, "x` - at `$.messages[5]": 1}', b'{"messages": [{"role": "x` - at `$.messages[9]"}]}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_bad_body_is_refused_alike_behind_a_front(servers: list[Served], body: bytes) -> None:
    alone, behind = (answer(served, body) for served in servers)
    assert (alone.status, alone.json()) == (behind.status, behind.json())
    assert (alone.status, set(alone.json()["error"])) == (400, {"message", "type", "param", "code"})


@pytest.mark.parametrize("name", ["x-infer-id", "x-infer-created", "x-infer-sent", "X-Infer-Key-Name"])
@pytest.mark.parametrize("value", ["7", "garbage", ""])
def test_headers_between_the_processes_mean_nothing_to_a_client(servers: list[Served], name: str, value: str) -> None:
    found = [answer(served, ASKED, f"{name}: {value}", f"{name}: {value}") for served in servers]
    assert [each.status for each in found] == [200, 200]
    alone, behind = (each.json()["choices"] for each in found)
    assert alone == behind
