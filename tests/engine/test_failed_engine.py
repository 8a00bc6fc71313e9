"""Every public way to read an answer raises when the engine fails, and returns no part as if it were the answer."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infer import LLM, AsyncLLM, SamplingParams, Session
from infer.errors import EngineFailedError
from refusals import check_refused

READ_BY = {"GenerationResult", "AsyncStream", "Stream", "Ended"}  # types from which a caller reads an answer
MESSAGES = [{"role": "user", "content": "abc"}]
LENGTH = {"max_new_tokens": 8, "temperature": 0}


async def read_all(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


async def take_all(stream: Any) -> None:
    while await stream.take():
        pass


WAYS: dict[str, Callable[[LLM, Session], object]] = {
    "LLM.generate": lambda llm, session: llm.generate("abc", **LENGTH),
    "LLM.generate, many": lambda llm, session: llm.generate(["abc", "ab"], **LENGTH),
    "LLM.generate_all": lambda llm, session: llm.generate_all(["abc", "ab"], **LENGTH),
    "LLM.generate_iter": lambda llm, session: list(llm.generate_iter(["abc", "ab"], **LENGTH)),
    "LLM.chat": lambda llm, session: llm.chat(MESSAGES, **LENGTH),
    "LLM.stream": lambda llm, session: list(llm.stream("abc", **LENGTH)),
    "LLM.stream, result": lambda llm, session: llm.stream("abc", **LENGTH).result,
    "LLM.stream_chat": lambda llm, session: list(llm.stream_chat(MESSAGES, **LENGTH)),
    "Session.generate": lambda llm, session: session.generate(**LENGTH),
    "Session.answer": lambda llm, session: llm.session().answer(MESSAGES, **LENGTH),
    "Session.send": lambda llm, session: llm.session().send("abc", **LENGTH),
    "Session.stream": lambda llm, session: list(llm.session().stream("abc", **LENGTH)),
}
TASKS: dict[str, Callable[[AsyncLLM], Awaitable[object]]] = {
    "LLM.astream": lambda model: read_all(model.llm.astream("abc", **LENGTH)),
    "AsyncLLM.generate": lambda model: model.generate("abc", **LENGTH),
    "AsyncLLM.generate, many": lambda model: model.generate(["abc", "ab"], **LENGTH),
    "AsyncLLM.generate_all": lambda model: model.generate_all(["abc", "ab"], **LENGTH),
    "AsyncLLM.chat": lambda model: model.chat(MESSAGES, **LENGTH),
    "AsyncLLM.choices": lambda model: read_choices(model),
    "AsyncLLM.stream": lambda model: read_all(model.stream("abc", **LENGTH)),
    "AsyncLLM.stream, pieces at a time": lambda model: take_all(model.stream("abc", **LENGTH)),
    "AsyncLLM.stream, result": lambda model: model.stream("abc", **LENGTH).result(),
    "AsyncLLM.stream_chat": lambda model: read_all(model.stream_chat(MESSAGES, **LENGTH)),
    "AsyncLLM.trace": lambda model: model.trace("abc", **LENGTH),
}


async def read_choices(model: AsyncLLM) -> None:
    await asyncio.gather(*map(read_all, await model.choices("abc", [SamplingParams(max_new_tokens=8)] * 2)))


@pytest.fixture
def failing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Session]:
    """Return a model whose engine fails in each step from now on, and a session that has a text."""
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    llm = LLM(folder, chat_template="{{ messages[-1].content }}")
    session = llm.session()
    session.append("abc")
    llm._opened.loop.run(setattr, llm._opened.engine, "launch", Mock(side_effect=RuntimeError("planted")))
    return llm, session


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_engine_is_reported_to_each_reader(way: str, failing: tuple[LLM, Session]) -> None:
    check_refused(lambda: WAYS[way](*failing), "the engine has failed: RuntimeError: planted", EngineFailedError)


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("way", TASKS)
def test_a_failed_engine_is_reported_to_each_task(way: str, failing: tuple[LLM, Session]) -> None:
    async def read() -> None:
        await TASKS[way](AsyncLLM(failing[0]))

    check_refused(lambda: asyncio.run(read()), "the engine has failed: RuntimeError: planted", EngineFailedError)


def test_no_public_way_to_read_an_answer_is_left_out() -> None:
    ways = {each.partition(",")[0] for each in (*WAYS, *TASKS)}
    for kind in (LLM, AsyncLLM, Session):
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            returned = str(inspect.signature(function).return_annotation)
            is_reading = re.search(rf"\.({'|'.join(READ_BY)})['\]]", returned) and not name.startswith("_")
            assert not is_reading or f"{kind.__name__}.{name}" in ways
