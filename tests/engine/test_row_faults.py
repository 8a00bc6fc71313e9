"""A fault of one row's grammar, text or drafts ends only that row. One of the engine is reported to each reader."""

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infer import LLM, AsyncLLM, SamplingParams, Session
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.requests.answer import EngineCall, once
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence as Answering
from infer.errors import ConstraintError, EngineFailedError
from looping import in_threads, loop_of, open_stream, until_idle
from path_cases import CONTEXT, Case, Outcome, Place, Way, World, all_by_definition, make_runner, make_sequence, run_all
from refusals import check_refused
from steps_behind import RunsOnItsOwn

LONG = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
BOUND = SamplingParams(regex="abc abc[ab ]{20}", temperature=0.9, seed=1)
WAYS = [Way("none", chain=16), Way("none", chain=1, capture=False), Way("right"), Way("half", 7, 1)]
PROMPT = tuple(b"abc abcab c" * 3)


class Faulty:
    """A wrapper of an object, one of whose methods raises from its n-th call on."""

    def __init__(self, real: Any, name: str, num_right: int, error: Exception) -> None:
        self._real, self._name, self._left, self._error = real, name, num_right, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name != self._name:
            return found
        self._left -= 1
        if self._left < 0:
            raise self._error
        return found


FAULTS = {
    "the grammar's next token": ("constraint", "accept"),
    "the grammar's mask": ("constraint", "fill"),
    "the grammar's forced tokens": ("constraint", "forced"),
    "the grammar in a multi-step": ("constraint", "advance"),
    "the grammar taking back": ("constraint", "rollback"),
    "the text": ("detokenizer", "push"),
    "the end of the text": ("detokenizer", "flush"),
    "the drafts": ("draft", "propose"),
    "the drafts that follow": ("draft", "follow"),
    "the policy": ("policy", "num_draft_tokens"),
}


PLANTED, TOO_COMPLEX = ZeroDivisionError("planted\nin two lines"), ConstraintError("too complex")
ERRORS: list[tuple[str, Exception]] = [(fault, PLANTED) for fault in FAULTS]
ERRORS += [(fault, TOO_COMPLEX) for fault, (_, name) in FAULTS.items() if name in ("accept", "fill", "rollback")]


def plant(running: Answering, place: str, name: str, num_right: int, error: Exception = PLANTED) -> None:
    part: Any = {"constraint": running.grammar, "detokenizer": running._text}.get(place, running)
    attribute = {"constraint": place, "detokenizer": "_detokenizer"}.get(place, f"test_{place}")
    setattr(part, attribute, Faulty(getattr(part, attribute), name, num_right, error))


def check_failed(running: Answering, expected: Sequence[int], error: Exception = PLANTED) -> bool:
    """Return True if the row failed. If the fault was never reached, the answer must be whole."""
    result = running.result()
    assert running.result().text == result.text, "asking again changes nothing"
    if result.error is None:
        assert result.token_ids == list(expected)
        return False
    assert (result.finish_reason, result.stop_reason) == ("error", "internal" if error is PLANTED else "grammar")
    assert ("ZeroDivisionError: planted" if error is PLANTED else "too complex") in result.error
    assert "\n" not in result.error
    assert result.token_ids == list(expected[: len(result.token_ids)])
    assert error is PLANTED or result.grammar_complete is False
    return True


@pytest.mark.slow(cases=12)
@pytest.mark.parametrize("num_right", [0, 3])
@pytest.mark.parametrize("way", WAYS[::2], ids=str)
@pytest.mark.parametrize(("fault", "error"), ERRORS)
def test_faults_cost_no_other_row_a_token(world: World, way: Way, fault: str, num_right: int, error: Exception) -> None:
    place, name = FAULTS[fault]
    cases = [Case(str(i), PROMPT[: 5 + 7 * i], params) for i, params in enumerate([LONG, BOUND, BOUND, LONG, LONG])]
    cases[3] = replace(cases[3], params=replace(LONG, temperature=0.8, seed=3, repetition_penalty=1.2))
    expected = all_by_definition(world, cases)
    waiting = [make_sequence(world, case, way, said.token_ids) for case, said in zip(cases, expected, strict=True)]
    if place in ("draft", "policy") and way.drafts == "none":
        return
    plant(waiting[1], place, name, num_right, error)
    results = run_all(world, waiting, way, 3, settings=CacheSettings(reuse_prefixes=True, page_tokens=16))
    has_failed = check_failed(waiting[1], expected[1].token_ids, error)
    seldom = {"flush", "rollback", "advance", "fill", "forced", "propose", "num_draft_tokens"}
    seldom |= {"accept"} if num_right > 0 else set()  # in multi-steps, `advance` moves the grammar
    assert has_failed or name in seldom
    results.pop(1)
    expected.pop(1)
    assert [Outcome.of(result) for result in results] == expected


def test_pages_of_a_failed_row_are_no_prefix(world: World) -> None:
    settings = CacheSettings(reuse_prefixes=True, page_tokens=16)
    runner = Runner(world.model, 100, settings=settings)
    engine = Engine(runner)
    for has_fault in (False, True):
        running = make_sequence(world, Case("", PROMPT, LONG), Way())
        if has_fault:
            plant(running, "detokenizer", "push", 5)
        engine.submit(running)
        while engine.step():
            pass
        assert (running.has_fault, runner.cache.adopt(0, PROMPT)) == (has_fault, 0 if has_fault else 32)
        runner.cache.truncate(0, 0)
    runner.cache.check_integrity()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_fault_that_is_not_a_row_s_ends_the_engine_and_all_waits(
    world: World, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are raised in a step by code that asks the program to end. Signals only reach the main thread."""
    reported = list[type[BaseException] | None]()
    monkeypatch.setattr("threading.excepthook", lambda arguments: reported.append(arguments.exc_type))
    place = Place(world, Way(), make_runner(world, Way(), num_slots=2))
    running, beside = (make_sequence(world, Case("", PROMPT, LONG), Way()) for _ in "ab")
    called, have_begun, accept = list[EngineCall[int]](), threading.Event(), running.accept

    def stop(*arguments: Any) -> Any:
        in_threads([lambda: called.append(place.loop.call(once(len, "abc")))] * 2)
        if len(called) == 4:
            raise error
        return accept(*arguments)

    running.accept = stop  # type: ignore[method-assign,assignment]
    streams = [open_stream(place.loop, sequence) for sequence in (beside, running)]
    place.loop.call(once(have_begun.wait))
    for stream in streams:
        stream.answer.begin()
    have_begun.set()
    for stream in streams:
        with pytest.raises(EngineFailedError, match=f"the engine has failed: {error.__name__}"):
            stream.run()
    assert [reply.get() for reply in called] == [3] * 4
    place.loop.close()
    assert reported == [error]


# Faults of steps


STEP_WAYS = [Way("none", 16, 16), Way("none", 16, 1), Way("none", 16, 1, capture=False), Way("right", 16)]
IsFaulty = Callable[[dict[int, int]], bool]  # takes the number of tokens of each row of a step


def plant_in_steps(runner: Any, is_faulty: Callable[[set[int]], bool]) -> None:
    """Let each step with certain slots raise."""

    def planted(run: Callable[..., Any], step: Any, *arguments: Any) -> Any:
        if is_faulty({chunk.row for chunk in step.chunks}):
            raise PLANTED
        return run(step, *arguments)

    for name in ("launch", "multi_step"):
        setattr(runner, name, partial(planted, getattr(runner, name)))


def run_with_faults(
    world: World, way: Way, is_faulty: IsFaulty, *, is_behind: bool = False
) -> list[tuple[Answering, Outcome]]:
    """Run five answers with three slots while certain steps raise. Return them, with the answers without faults."""
    params = [replace(LONG, temperature=0.8, seed=3, frequency_penalty=0.7), BOUND, LONG, LONG, BOUND]
    cases = [Case(str(i), PROMPT[: 5 + 6 * i], each) for i, each in enumerate(params)]
    expected = all_by_definition(world, cases)
    asked = [make_sequence(world, case, way, said.token_ids) for case, said in zip(cases, expected, strict=True)]
    settings = CacheSettings(reuse_prefixes=True, page_tokens=16)
    runner = Runner(world.model, CONTEXT, num_slots=3, capture=way.capture, settings=settings)
    if is_behind:
        RunsOnItsOwn.replace(runner)
    plant_in_steps(runner, lambda slots: is_faulty({i: len(s.pieces) for i, s in enumerate(asked) if s.slot in slots}))
    loop, have_come = loop_of(Engine(runner, max_steps=way.chain)), threading.Event()
    loop.call(once(have_come.wait, 60))
    streams = [open_stream(loop, sequence) for sequence in asked]
    for stream in streams:
        stream.answer.begin()
    have_come.set()
    for stream in streams:
        stream.run()
    assert Outcome.of(open_stream(loop, make_sequence(world, cases[2], Way())).run()) == expected[2], "it still works"
    loop.run(runner.cache.check_integrity)
    loop.close()
    return list(zip(asked, expected, strict=True))


@pytest.mark.slow(cases=4, rest=10)
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("guilty", [{1}, {0, 4}, {0, 1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize(("way", "is_behind"), [*((way, False) for way in STEP_WAYS), (STEP_WAYS[1], True)], ids=str)
def test_a_row_whose_steps_fail_ends_and_the_others_continue(
    world: World, way: Way, is_behind: bool, guilty: set[int], num_tokens: int
) -> None:
    def is_faulty(rows: dict[int, int]) -> bool:
        return any(rows[index] >= num_tokens for index in rows.keys() & guilty)

    for index, (sequence, said) in enumerate(run_with_faults(world, way, is_faulty, is_behind=is_behind)):
        assert check_failed(sequence, said.token_ids) == (index in guilty)
        assert index in guilty or Outcome.of(sequence.result()) == said


@pytest.mark.parametrize("way", STEP_WAYS[::3], ids=str)
def test_rows_whose_steps_fail_only_together_are_all_answered(world: World, way: Way) -> None:
    for sequence, said in run_with_faults(world, way, lambda rows: len(rows) > 1 and max(rows.values()) > 2):
        assert Outcome.of(sequence.result()) == said


@pytest.mark.parametrize("cancelled", ["ab", "b"])
def test_rows_that_are_cancelled_while_others_run_alone_end(world: World, cancelled: str) -> None:
    """The first is found guilty, and the second leaves before its turn: only a row of the engine's own is left."""
    runner = make_runner(world, Way(), num_slots=2)
    engine = Engine(runner)
    guilty, other = (make_sequence(world, Case(name, PROMPT, LONG), Way()) for name in "ab")

    def cancel_when_alone(slots: set[int]) -> bool:
        if guilty.slot in slots and engine._faults.alone is guilty and engine._faults._num_in_a_row:
            for name in cancelled:
                engine.cancel({"a": guilty, "b": other}[name])
        return guilty.slot in slots

    plant_in_steps(runner, cancel_when_alone)
    loop, have_come = loop_of(engine), threading.Event()
    loop.call(once(have_come.wait, 60))
    streams = [open_stream(loop, sequence) for sequence in (guilty, other)]
    for stream in streams:
        stream.answer.begin()
    have_come.set()
    until_idle(loop)
    for stream in streams:
        stream.close()
    assert (guilty.finish_reason, other.finish_reason) == ("abort" if "a" in cancelled else "error", "abort")
    loop.close()


def test_a_row_with_a_fault_has_ended_also_if_its_step_fails(world: World) -> None:
    engine = Engine(make_runner(world, Way(), num_slots=1))
    sequence = engine.submit(make_sequence(world, Case("", PROMPT, LONG), Way()))
    engine.step()
    engine.step()
    sequence._text._detokenizer = Mock(push=Mock(side_effect=ZeroDivisionError))
    num_pieces = len(sequence.pieces)
    engine.step()
    sequence.restart()
    assert (sequence.finish_reason, len(sequence.pieces)) == ("error", num_pieces)


def test_one_accident_of_the_engine_s_own_row_does_not_end_it(world: World) -> None:
    accidents = chain([True], repeat(False))
    found = run_with_faults(world, Way("none", 16, 1), lambda rows: bool(rows) or next(accidents))
    assert {sequence.finish_reason for sequence, _ in found} == {"error"}


def test_one_accident_does_not_end_an_engine_whose_only_row_has_left(world: World) -> None:
    runner = make_runner(world, Way(), num_slots=1)
    device, engine = RunsOnItsOwn.replace(runner), Engine(runner, max_steps=1)
    sequence = engine.submit(make_sequence(world, Case("", PROMPT, LONG), Way()))
    while engine._pending is None:
        engine.step()
    engine.cancel(sequence)
    device.error = PLANTED
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.recover_from(PLANTED)


def test_the_engine_fails_if_the_steps_of_each_row_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    with pytest.raises(EngineFailedError, match="the engine has failed: ZeroDivisionError: planted"):
        run_with_faults(world, Way(), lambda rows: True)


# Faults of the engine


READ_BY = {"GenerationResult", "AsyncStream", "Stream", "Ended"}  # types from which a caller reads an answer
MESSAGES = [{"role": "user", "content": "abc"}]
LENGTH = {"max_new_tokens": 8, "temperature": 0}


async def read_all(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


async def take_all(stream: Any) -> None:
    while await stream.take():
        pass


CALLS: dict[str, Callable[[LLM, Session], object]] = {
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
    llm.host.loop.run(setattr, llm.host.engine, "launch", Mock(side_effect=RuntimeError("planted")))
    return llm, session


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("way", CALLS)
def test_a_failed_engine_is_reported_to_each_reader(way: str, failing: tuple[LLM, Session]) -> None:
    check_refused(lambda: CALLS[way](*failing), "the engine has failed: RuntimeError: planted", EngineFailedError)


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("way", TASKS)
def test_a_failed_engine_is_reported_to_each_task(way: str, failing: tuple[LLM, Session]) -> None:
    async def read() -> None:
        await TASKS[way](AsyncLLM(failing[0]))

    check_refused(lambda: asyncio.run(read()), "the engine has failed: RuntimeError: planted", EngineFailedError)


def test_no_public_way_to_read_an_answer_is_left_out() -> None:
    ways = {each.partition(",")[0] for each in (*CALLS, *TASKS)}
    for kind in (LLM, AsyncLLM, Session):
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            returned = str(inspect.signature(function).return_annotation)
            is_reading = re.search(rf"\.({'|'.join(READ_BY)})['\]]", returned) and not name.startswith("_")
            assert not is_reading or f"{kind.__name__}.{name}" in ways
