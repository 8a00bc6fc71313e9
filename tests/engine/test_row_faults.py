"""An exception of one row's grammar, text or drafts ends only that row. Other rows keep their tokens."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.requests.loop_messages import Reply, once
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence as Answering
from infer.errors import EngineFailedError
from looping import open_stream
from path_cases import (
    Case,
    Outcome,
    Place,
    Way,
    World,
    all_by_definition,
    by_definition,
    make_runner,
    make_sequence,
    make_world,
    run_all,
)

LONG = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
BOUND = SamplingParams(regex="abc abc[ab ]{20}", temperature=0.9, seed=1)
WAYS = [Way("none", chain=16), Way("none", chain=1, capture=False), Way("right"), Way("half", 7, 1)]
PROMPT = tuple(b"abc abcab c" * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return make_world("llama", folder)


class Faulty:
    """A wrapper of an object, one of whose methods raises from its n-th call on."""

    def __init__(self, real: Any, name: str, num_right: int) -> None:
        self._real, self._name, self._left = real, name, num_right

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name != self._name:
            return found
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("planted\nin two lines")
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


def plant(running: Answering, place: str, name: str, num_right: int) -> None:
    part: Any = running
    if place == "constraint":
        part.grammar.constraint = Faulty(part.grammar.constraint, name, num_right)
    elif place == "detokenizer":
        part._text._detokenizer = Faulty(part._text._detokenizer, name, num_right)
    elif place == "draft":
        part.test_draft = Faulty(part.test_draft, name, num_right)
    else:
        part.test_policy = Faulty(part.test_policy, name, num_right)


def check_failed(running: Answering, expected: Sequence[int]) -> bool:
    """Return True if the row failed. If the fault was never reached, the answer must be whole."""
    result = running.result()
    assert running.result().text == result.text, "asking again changes nothing"
    if result.error is None:
        assert result.token_ids == list(expected)
        return False
    assert (result.finish_reason, result.stop_reason) == ("error", "internal")
    assert "ZeroDivisionError: planted" in result.error
    assert "\n" not in result.error
    assert result.token_ids == list(expected[: len(result.token_ids)])
    return True


@pytest.mark.parametrize("num_right", [0, 3])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS[::2], ids=str)
def test_a_fault_in_one_row_costs_no_other_row_a_token(world: World, way: Way, fault: str, num_right: int) -> None:
    place, name = FAULTS[fault]
    cases = [Case(str(i), PROMPT[: 5 + 7 * i], params) for i, params in enumerate([LONG, BOUND, BOUND, LONG, LONG])]
    cases[3] = replace(cases[3], params=replace(LONG, temperature=0.8, seed=3, repetition_penalty=1.2))
    expected = all_by_definition(world, cases)
    waiting = [
        make_sequence(world, case, way, outcome.token_ids) for case, outcome in zip(cases, expected, strict=True)
    ]
    if place in ("draft", "policy") and way.drafts == "none":
        return
    plant(waiting[1], place, name, num_right)
    results = run_all(world, waiting, way, 3, settings=CacheSettings(reuse_prefixes=True, page_tokens=16))
    has_failed = check_failed(waiting[1], expected[1].token_ids)
    is_seldom = name == "accept" and num_right > 0  # in multi-steps, `advance` moves the grammar
    assert (
        has_failed
        or is_seldom
        or name in ("flush", "rollback", "advance", "fill", "forced", "propose", "num_draft_tokens")
    )
    results.pop(1)
    expected.pop(1)
    assert [Outcome.of(result) for result in results] == expected


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS[1::2], ids=str)
def test_after_the_fault_of_an_only_answer_the_context_serves_the_next(world: World, way: Way, fault: str) -> None:
    part, name = FAULTS[fault]
    case = Case("", PROMPT[:9], BOUND)
    expected = by_definition(world, case)
    place = Place(world, way)
    running = make_sequence(world, case, way, expected.token_ids)
    if part in ("draft", "policy") and way.drafts == "none":
        return
    plant(running, part, name, 2)
    place.stream(running).run()
    if check_failed(running, expected.token_ids) and name != "flush":
        assert place.length == 0
    again = make_sequence(world, case, way, expected.token_ids)
    result = place.stream(again).run()
    assert Outcome.of(result) == expected


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
        assert running.has_fault == has_fault
        assert runner.adopt(0, PROMPT) == (0 if has_fault else 32)
        runner.truncate(0, 0)
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
    called, have_begun, accept = list[Reply[int]](), threading.Event(), running.accept

    def stop(*arguments: Any) -> Any:
        for _ in "ab":
            caller = threading.Thread(target=lambda: called.append(place.loop.call(once(len, "abc"))))
            caller.start()
            caller.join()
        if len(called) == 4:
            raise error
        return accept(*arguments)

    running.accept = stop  # type: ignore[method-assign,assignment]
    streams = [open_stream(place.loop, sequence) for sequence in (beside, running)]
    place.loop.call(once(have_begun.wait, 60))
    for stream in streams:
        stream.answer.begin()
    have_begun.set()
    for stream in streams:
        with pytest.raises(EngineFailedError, match=f"the engine has failed: {error.__name__}"):
            stream.run()
    assert [reply.get() for reply in called] == [3] * 4
    place.loop.close()
    assert reported == [error]


def test_an_exception_of_the_user_s_callback_ends_the_call(folder: Path, world: World) -> None:
    llm = LLM(folder)

    def fail(*values: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate("abc", LONG, on_token=fail)
    with pytest.raises(KeyError, match="mine"):
        llm.generate_all(["abc", "ab"], LONG, on_result=fail)
    with pytest.raises(KeyError, match="mine"):
        llm.generate_all(["abc", "ab"], LONG, on_progress=fail)


def test_a_session_whose_answer_had_a_fault_goes_on(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder)
    session, fresh = llm.session(), llm.session()
    for each in (session, fresh):
        each.append("abc ab")
    accept, calls = Answering.accept, list[int]()

    def fail(running: Answering, token_id: int, *logprob: Any) -> Any:
        calls.append(token_id)
        if len(calls) == 5:
            raise ZeroDivisionError
        return accept(running, token_id, *logprob)

    with monkeypatch.context() as patched:
        patched.setattr(Answering, "accept", fail)
        assert session.generate(LONG).stop_reason == "internal"
    assert session.token_ids == fresh.token_ids
    assert session.generate(LONG).token_ids == fresh.generate(LONG).token_ids
