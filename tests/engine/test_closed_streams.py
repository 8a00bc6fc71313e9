"""A stream of an event loop is closed by one task while another reads it."""

import asyncio
import threading
from typing import Any

import pytest

from infer import LLM, AsyncLLM, AsyncStream, SamplingParams

LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
SECONDS = 30.0


@pytest.fixture
def may_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event for which each step waits."""
    engine, may_step = llm._opened.engine, threading.Event()
    step = engine.step

    def waiting_step() -> Any:
        may_step.wait(SECONDS)
        return step()

    monkeypatch.setattr(engine, "step", waiting_step)
    may_step.set()
    return may_step


async def read_on(stream: AsyncStream) -> int:
    return len([piece async for piece in stream])


async def waiting_reader(stream: AsyncStream, may_step: threading.Event) -> asyncio.Task[int]:
    """Return a task that has read all pieces and waits for a step that does not end."""
    await anext(stream)
    may_step.clear()
    reader = asyncio.create_task(read_on(stream))
    await asyncio.sleep(0.3)
    return reader


def test_closing_a_stream_from_another_task_ends_its_reader(llm: LLM, may_step: threading.Event) -> None:
    async def ask() -> None:
        stream = AsyncLLM(llm).stream("hello", LONG)
        reader = await waiting_reader(stream, may_step)
        closing = [asyncio.create_task(stream.close()) for _ in range(2)]
        await asyncio.sleep(0)
        may_step.set()
        await asyncio.wait_for(asyncio.gather(*closing), SECONDS)
        assert await asyncio.wait_for(reader, SECONDS) < 299
        assert stream.sequence.has_ended

    asyncio.run(ask())


def test_cancelling_the_reader_of_a_closed_stream_raises_cancelled_error(llm: LLM, may_step: threading.Event) -> None:
    async def ask() -> None:
        stream = AsyncLLM(llm).stream("hello", LONG)
        reader = await waiting_reader(stream, may_step)
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        may_step.set()
        await asyncio.wait_for(closing, SECONDS)

    asyncio.run(ask())
