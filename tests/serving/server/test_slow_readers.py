"""A reader is slow if it takes nothing for some seconds, however large an event is."""

import time
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

    async def answer(request: Request, state: ServerState) -> Response:
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
