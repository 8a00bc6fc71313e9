"""Batches keep every slot busy and their multi-steps long, and a step that raises once changes no answer."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.requests.loop import Backlog, once
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence
from infer.errors import ConstraintError
from infer.sampling_params import SamplingParams
from looping import loop_of, open_stream
from path_cases import CONTEXT, Case, Outcome, Way, World, by_definition, check_ends, make_sequence

LONG = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True))
SHORT = Case("short", tuple(b"cab"), SamplingParams(temperature=0.8, seed=3, max_new_tokens=4, ignore_eos=True))
BOUND = Case("bound", tuple(b"abc ab"), SamplingParams(regex="[ab ]{30}", temperature=0.9, seed=1))
NUM_SLOTS = 3
CALLS = ("adopt", "truncate", "reserve", "launch", "multi_step", "commit", "remember")  # of the runner, in a step


def make_engine(world: World, max_steps: int = 4) -> Engine:
    settings = CacheSettings(page_tokens=16, reuse_prefixes=True)
    runner = Runner(world.model, CONTEXT, num_slots=NUM_SLOTS, settings=settings)
    return Engine(runner, max_steps=max_steps)


# Batches


def test_a_slot_that_is_freed_is_filled_before_the_next_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5 + 7 * (number % 4) for number in range(20)]
    cases = [replace(LONG, params=replace(LONG.params, max_new_tokens=length)) for length in lengths]
    engine, backlogs, taken, counts = make_engine(world), list[Backlog](), list[Sequence](), list[int]()
    step = engine.step

    def make_backlog(most_running: int) -> Backlog:
        backlogs.append(Backlog(most_running))
        return backlogs[-1]

    def step_when_filled() -> list[Sequence]:
        """Run a step. Before it, the caller has taken the ended answers, and added as many new ones."""
        while len(backlogs[0].waiting) < NUM_SLOTS and len(taken) < len(cases):
            time.sleep(0)
        if backlogs[0].waiting:
            counts.append(len(engine.sequences))
        return step()

    def sequences() -> Iterator[tuple[int, Sequence]]:
        for number, case in enumerate(cases):
            taken.append(make_sequence(world, case, Way()))
            yield number, taken[-1]

    monkeypatch.setattr("infer.engine.requests.prompt_batch.Backlog", make_backlog)
    monkeypatch.setattr(engine, "step", step_when_filled)
    for ended in answer_all(loop_of(engine), sequences(), NUM_SLOTS):
        assert Outcome.of(ended.result) == by_definition(world, cases[ended.number])
    assert set(counts[1:]) == {NUM_SLOTS}, "but in the first, which begins before the caller has filled them"
    assert len(counts) > 10


def steps_of_a_batch(world: World, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return the number of steps of each multi-step, for equal answers in batches of `NUM_SLOTS`."""
    engine = make_engine(world, max_steps=16)
    loop, is_filled, steps, multi_step = loop_of(engine), threading.Event(), Counter[int](), engine.runner.multi_step

    def counted(*arguments: Any) -> Any:
        found = multi_step(*arguments)
        steps[len(found[1])] += 1
        return found

    def sequences() -> Iterator[tuple[int, Sequence]]:
        for number in range(count):
            if number == NUM_SLOTS:
                is_filled.set()
            yield number, make_sequence(world, LONG, Way())
        is_filled.set()

    monkeypatch.setattr(engine.runner, "multi_step", counted)
    loop.call(once(is_filled.wait))
    for ended in answer_all(loop, sequences(), NUM_SLOTS):
        assert Outcome.of(ended.result) == by_definition(world, LONG)
    return steps


def test_answers_that_wait_for_their_batch_shorten_no_multi_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of a caller that adds answers while it has its share of the slots do not shorten one either."""
    alone = steps_of_a_batch(world, NUM_SLOTS, monkeypatch)
    together = steps_of_a_batch(world, 4 * NUM_SLOTS, monkeypatch)
    # The length of the last multi-step depends on the steps in which the prompts were read, and so on the machine.
    assert (together[16], together.total()) == (4 * alone[16], 4 * alone.total())
    assert alone[16] >= 2


# Faults of a step


class PlantedError(Exception):
    """An error of the backend."""


def fail_once(
    patch: pytest.MonkeyPatch, runner: Runner, name: str, *, at_call: int, before: bool
) -> list[PlantedError]:
    """Let a method of the runner raise once, before or after its work. Return the list of raised errors."""
    real, raised, num_calls = getattr(runner, name), list[PlantedError](), iter(range(1_000_000))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(num_calls) != at_call:
            return real(*arguments, **options)
        if not before:
            real(*arguments, **options)
        raised.append(PlantedError())
        raise raised[0]

    patch.setattr(runner, name, call)
    return raised


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_raises_once_changes_no_answer(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [LONG, SHORT, BOUND, LONG, SHORT]
    for at_call, before in product((0, 1), (True, False)):
        engine = make_engine(world)
        loop = loop_of(engine)
        with monkeypatch.context() as patch:
            raised = fail_once(patch, engine.runner, name, at_call=at_call, before=before)
            made = [make_sequence(world, case, Way(), tenant=str(place % 2)) for place, case in enumerate(cases)]
            streams = [open_stream(loop, sequence) for sequence in made]
            for stream in streams:
                stream.answer.begin()
            for stream, case in zip(streams, cases, strict=True):
                assert [piece.token_id for piece in stream] == by_definition(world, case).token_ids
                assert Outcome.of(stream.result) == by_definition(world, case)
        assert len(raised) == 1, "the fault was met"
        snapshot, active = loop.run(engine.snapshot), loop.run(partial(dict, engine._queue.tenants._num_active))
        assert (list(snapshot.sequences), active) == ([], {})
        assert all(pool.num_free == pool.num_pages for pool in snapshot.pools)
        loop.close()


@pytest.mark.parametrize("name", ["truncate", "multi_step"])
def test_an_answer_that_ended_before_a_fault_ends_for_its_reader(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(world)
    cancelled, going = (engine.submit(make_sequence(world, LONG, Way())) for _ in range(2))
    engine.step()
    engine.cancel(cancelled)
    fail_once(monkeypatch, engine.runner, name, at_call=0, before=True)
    with pytest.raises(PlantedError):
        engine.step()
    engine.recover()
    assert cancelled in engine.step()
    assert cancelled.has_ended
    assert engine._queue.tenants._num_active == {"": 1}
    check_ends(world, engine, [going], [LONG])


@pytest.mark.parametrize("happening", ["preempted", "recovered"])
def test_a_grammar_that_cannot_be_made_again_fails_only_its_answer(world: World, happening: str) -> None:
    engine = make_engine(world)
    free, bound = (engine.submit(make_sequence(world, case, Way())) for case in (LONG, BOUND))
    engine.step()
    bound.grammar._make = Mock(side_effect=ConstraintError("too complex"))
    engine._slots.preempt(bound) if happening == "preempted" else engine.recover()
    check_ends(world, engine, [free], [LONG])
    assert (bound.has_ended, bound.finish_reason, "too complex" in str(bound.error)) == (True, "error", True)
