"""A reader is slow if it takes nothing for some seconds, however large an event is."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from idle import until
from infer import LLM
from infer.serving.server.endpoint import get
from infer.serving.server.server_state import ServerState
from infer.serving.server.sse import EventStream
from raw_http import Connection
from served import Served, serving

EVENT_BYTES = 20_000_000  # more than the kernel keeps for a connection


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

    async def answer(request: Request, state: ServerState) -> Response:
        return EventStream(events(), comment_seconds=60.0)

    with serving(llm, table=[get("/large", answer)], model="tiny", stall_seconds=0.2) as large:
        yield large, counts


def test_a_reader_of_large_events_is_not_slow(llm: LLM) -> None:
    with large_events(llm) as (large, counts):
        text = large.client.get("/large").text
        assert (text.count("z"), "slow_reader" in text, counts) == (2 * EVENT_BYTES, False, [2, -1])


def test_the_answer_of_a_reader_that_stops_is_ended(llm: LLM) -> None:
    with large_events(llm) as (large, counts), Connection(large.port, receive_bytes=1024) as slow:
        slow.send(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: counts == [1, -1])
