"""Slots and steps of an engine: slots stay busy, steps are launched early, and a step that raises changes no answer."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product, repeat
from typing import Any
from unittest.mock import Mock

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.engine.engine import Engine
from infer.engine.requests.answer import Backlog, once
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Lease, Sequence
from infer.errors import ConstraintError
from infer.sampling_params import SamplingParams
from looping import loop_of, open_stream
from path_cases import CONTEXT, Case, Outcome, Way, World, by_definition, check_ends, make_sequence
from steps_behind import RunsOnItsOwn

LONG = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True))
SHORT = Case("short", tuple(b"cab"), SamplingParams(temperature=0.8, seed=3, max_new_tokens=4, ignore_eos=True))
BOUND = Case("bound", tuple(b"abc ab"), SamplingParams(regex="[ab ]{30}", temperature=0.9, seed=1))
NUM_SLOTS = 3
CALLS = ("adopt", "truncate", "try_reserve", "launch", "multi_step", "commit", "remember")  # in a step


def make_engine(world: World, max_steps: int = 4) -> Engine:
    settings = CacheSettings(page_tokens=16, reuse_prefixes=True)
    return Engine(Runner(world.model, CONTEXT, num_slots=NUM_SLOTS, settings=settings), max_steps=max_steps)


# Batches


def test_a_slot_that_is_freed_is_filled_before_the_next_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5 + 7 * (number % 4) for number in range(20)]
    cases = [replace(LONG, params=replace(LONG.params, max_new_tokens=length)) for length in lengths]
    engine, backlogs, taken, counts = make_engine(world), list[Backlog](), list[Sequence](), list[int]()
    loop, step = loop_of(engine), engine.step

    def make_backlog(most_running: int) -> Backlog:
        backlogs.append(Backlog(most_running))
        return backlogs[-1]

    def step_when_filled() -> list[Sequence]:
        """Run a step. Before it, the caller has taken the ended answers, and added as many new ones."""
        while len(backlogs[0].waiting) < NUM_SLOTS and len(taken) < len(cases):
            loop.thread.inbox.get()()
        if backlogs[0].waiting:
            counts.append(len(engine.sequences))
        return step()

    def sequences() -> Iterator[tuple[int, Sequence]]:
        for number, case in enumerate(cases):
            taken.append(make_sequence(world, case, Way()))
            yield number, taken[-1]

    monkeypatch.setattr("infer.engine.requests.prompt_batch.Backlog", make_backlog)
    monkeypatch.setattr(engine, "step", step_when_filled)
    for ended in answer_all(loop, sequences(), NUM_SLOTS):
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


@pytest.mark.slow
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


def owner_of(runner: Runner, name: str) -> Runner | PagedCache:
    """Return the object that has a method of `CALLS`: the runner or its cache."""
    return runner if name in vars(Runner) else runner.cache


def plant(patch: pytest.MonkeyPatch, runner: Runner, name: str, *, at_call: int, before: bool) -> list[PlantedError]:
    """Let a method of `CALLS` raise once, before or after its work. Return the list of raised errors."""
    owner, raised, num_calls = owner_of(runner, name), list[PlantedError](), iter(range(1_000_000))
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(num_calls) != at_call:
            return real(*arguments, **options)
        if not before:
            real(*arguments, **options)
        raised.append(PlantedError())
        raise raised[0]

    patch.setattr(owner, name, call)
    return raised


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_raises_once_changes_no_answer(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [LONG, SHORT, BOUND, LONG, SHORT]
    for at_call, before in product((0, 1), (True, False)):
        engine = make_engine(world)
        loop = loop_of(engine)
        with monkeypatch.context() as patch:
            raised = plant(patch, engine.runner, name, at_call=at_call, before=before)
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
def test_an_end_before_a_fault_reaches_its_reader(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(world)
    cancelled, going = (engine.submit(make_sequence(world, LONG, Way())) for _ in range(2))
    engine.step()
    engine.cancel(cancelled)
    plant(monkeypatch, engine.runner, name, at_call=0, before=True)
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


# Leases, and answers that pause


PARAMS = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
TURN = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


def make_small_engine(world: World, num_slots: int, pool_pages: int | None = None) -> Engine:
    sizes = {"num_slots": num_slots, "pool_pages": pool_pages, "settings": CacheSettings(page_tokens=16)}
    return Engine(Runner(world.model, CONTEXT, **sizes), max_steps=4)  # type: ignore[arg-type]


def test_a_paused_answer_gives_its_pages_before_one_that_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of 67 tokens fill the ten pages."""
    monkeypatch.setattr("infer.engine.step.fairness.EXPECTED_ANSWER", 1)
    engine = make_small_engine(world, 3, pool_pages=CONTEXT // 16)
    cases = [Case("", tuple(text), PARAMS) for text in (b"abc", b"abc cab", b"cab abc")]
    paused, *running = asked = [engine.submit(make_sequence(world, case, Way())) for case in cases]
    while not paused.pieces:
        engine.step()
    engine.pause(paused)
    while not all(sequence.has_ended for sequence in running):
        engine.step()
        engine.runner.cache.check_integrity()  # type: ignore[attr-defined]
    assert [sequence.stats.preemptions for sequence in asked] == [1, 0, 0]
    engine.proceed(paused)
    check_ends(world, engine, asked, cases)
    engine.close()


class Talk:
    """Consecutive answers with one lease."""

    def __init__(self, world: World, engine: Engine, text: bytes) -> None:
        self.world, self.engine, self.lease, self.token_ids = world, engine, Lease(), list(text)

    def turn(self) -> Sequence:
        case = Case("", tuple(self.token_ids), TURN)
        sequence = self.engine.submit(make_sequence(self.world, case, Way()), self.lease)
        check_ends(self.world, self.engine, [sequence], [case])
        self.token_ids += [*sequence.generated, *b"ab"]
        return sequence


@pytest.mark.parametrize("is_reset", [False, True])
def test_leases_that_fit_are_kept_also_after_a_reset(world: World, is_reset: bool) -> None:
    engine = make_small_engine(world, 2)
    first, second = (Talk(world, engine, text) for text in (b"abc", b"cab "))
    assert first.turn().num_reused == 0
    if is_reset:
        engine.recover()  # as after a step that raised
    found = [talk.turn().num_reused > 0 for talk in (first, second, first, second)]
    assert found == [not is_reset, False, True, True]
    engine.close()


def test_the_lease_used_longest_ago_is_lost_when_another_needs_its_slot(world: World) -> None:
    engine = make_small_engine(world, 2)
    first, second, third = (Talk(world, engine, text) for text in (b"abc", b"cab ", b"bca"))
    for talk in (first, second, first, third):
        talk.turn()
    assert [talk.lease.slot is None for talk in (first, second, third)] == [False, True, False]
    assert first.turn().num_reused > 0
    assert second.turn().num_reused == 0
    assert [talk.lease.slot is None for talk in (first, second, third)] == [False, False, True]
    engine.close()


# Steps that are launched before the tokens of the step before them are known


MEDIUM = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True))
PROMPT = replace(SHORT, prompt=tuple(b"cab abc" * 12), params=replace(SHORT.params, max_new_tokens=3))
PENALISED = SamplingParams(temperature=0.8, seed=1, max_new_tokens=20, ignore_eos=True, frequency_penalty=0.7)
COUNTED = Case("counted", tuple(b"bca"), PENALISED)


class Place:
    """An engine whose runner's steps run on their own."""

    def __init__(self, world: World, num_slots: int = 3, max_steps: int | None = 1) -> None:
        self.world = world
        settings = CacheSettings(page_tokens=16, reuse_prefixes=True)
        self.runner = Runner(world.model, CONTEXT, num_slots=num_slots, settings=settings)
        self.device = RunsOnItsOwn.replace(self.runner)
        self.engine = Engine(self.runner, max_steps=max_steps)

    def submit(self, case: Case, lease: Lease | None = None, **options: object) -> Sequence:
        return self.engine.submit(make_sequence(self.world, case, Way(chunk=7), **options), lease)

    def check(self, *asked: tuple[Sequence, Case]) -> None:
        """Run to the end, and check the answers."""
        check_ends(self.world, self.engine, [sequence for sequence, _ in asked], [case for _, case in asked])


@pytest.fixture
def place(world: World) -> Place:
    return Place(world)


def test_each_step_is_launched_before_the_one_before_it_is_waited_for(place: Place) -> None:
    place.check((place.submit(PROMPT), PROMPT))
    num_steps = place.device.num_launched
    assert num_steps == len(PROMPT.prompt) // 7 + 2  # three tokens; the prompt's last chunk gives the first
    expected = [("launch", 0)]
    for number in range(1, num_steps):
        expected += [("launch", number), ("wait", number - 1)]
    assert place.device.calls == [*expected, ("wait", num_steps - 1)]


def test_single_steps_follow_each_other_if_a_step_takes_longer_than_the_host_s_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise multi-steps run, and a single step is tried again when the host may have less work."""
    for seconds in (1.0, 1e-9):
        place = Place(world, max_steps=None)
        monkeypatch.setattr(place.engine.scheduler.costs, "predict", lambda work, seconds=seconds: seconds)
        asked = [(place.submit(case), case) for case in (LONG, COUNTED)]
        place.check(*asked)
        num_multi_steps = sum(each.stats.multi_steps for each, _ in asked)
        assert (num_multi_steps == 0) == (place.device.num_behind >= 50) == (seconds == 1.0)


def test_an_idle_engine_records_steps_until_none_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Mock(side_effect=chain([True] * 3, repeat(False)))
    monkeypatch.setattr(place.device, "record_next", record)
    loop = loop_of(place.engine)
    loop.run(bool)
    while record.call_count < 4:
        time.sleep(0.001)
    assert Outcome.of(open_stream(loop, make_sequence(place.world, SHORT, Way())).run()) == by_definition(
        place.world, SHORT
    )
    loop.close()


@pytest.mark.parametrize("grammar", [BOUND])
def test_a_grammar_beside_answers_runs_in_multi_steps(world: World, grammar: Case) -> None:
    place = Place(world, max_steps=None)
    asked = [(place.submit(case), case) for case in (MEDIUM, grammar)]
    place.check(*asked)
    assert all(each.stats.multi_steps for each, _ in asked)


@pytest.mark.parametrize("tenants", ["aaaa", "abba"])
def test_answers_beside_prompts_do_not_depend_on_the_sampler_or_the_tenants(place: Place, tenants: str) -> None:
    cases = [MEDIUM, COUNTED, PROMPT, SHORT]
    place.check(*((place.submit(case, tenant=tenant), case) for case, tenant in zip(cases, tenants, strict=True)))
    assert place.device.num_behind > 20


def stopping(world: World) -> tuple[Case, int]:
    """Return a case that ends at a token that is unknown before it is sampled, and its number of tokens."""
    token_ids = by_definition(world, MEDIUM).token_ids
    index = next(index for index in range(4, 20) if token_ids[index] not in token_ids[:index])
    return replace(MEDIUM, params=replace(MEDIUM.params, stop_token_ids=[token_ids[index]])), index + 1


def test_a_step_behind_the_last_token_is_dropped_and_the_lease_is_unchanged(world: World) -> None:
    (case, count), held = stopping(world), list[list[int]]()
    for is_behind in (True, False):
        place, lease = Place(world), Lease()
        place.device.is_alone = is_behind
        sequence = place.submit(case, lease)
        place.check((sequence, case))
        assert place.runner.lengths[lease.slot] == len(lease.token_ids)
        held.append(list(lease.token_ids))
        assert place.device.num_launched == count + is_behind
        turn = replace(SHORT, prompt=(*case.prompt, *sequence.generated, *b" b"))
        then = place.submit(turn, lease)
        place.check((then, turn))
        assert then.num_reused == len(held[-1])
    assert held[0] == held[1] == [*case.prompt, *sequence.generated[:-1]]


def test_a_cancelled_sequence_ends_beside_others_and_its_slot_serves_another(world: World) -> None:
    place = Place(world, num_slots=2)
    cancelled, other = place.submit(COUNTED), place.submit(MEDIUM)
    for _ in range(4):
        place.engine.step()
    waiting = place.submit(COUNTED)
    place.engine.cancel(cancelled)
    assert cancelled in place.engine.step()
    assert cancelled.has_ended
    assert cancelled not in place.engine.step()
    place.check((other, MEDIUM), (waiting, COUNTED))
    assert cancelled.generated == by_definition(world, COUNTED).token_ids[: len(cancelled.generated)]


def test_a_paused_sequence_gets_the_token_that_is_under_way_and_then_none(place: Place) -> None:
    paused, other = place.submit(MEDIUM), place.submit(COUNTED)
    while len(paused.pieces) < 3:
        place.engine.step()
    place.engine.pause(paused)
    for _ in range(5):
        place.engine.step()
    assert len(paused.pieces) == 4
    place.engine.proceed(paused)
    place.check((paused, MEDIUM), (other, COUNTED))


def test_after_an_exception_of_a_wait_all_is_computed_again(place: Place) -> None:
    asked = [(place.submit(case), case) for case in (MEDIUM, COUNTED, PROMPT)]
    for _ in range(3):
        place.engine.step()
    place.device.error = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        place.engine.step()
    place.engine.recover()
    place.check(*asked)


def test_times_of_steps_do_not_overlap(place: Place) -> None:
    """These steps wait for the host, so the sum of their times is at most the whole time."""
    started = time.perf_counter()
    asked = [place.submit(MEDIUM), place.submit(PROMPT)]
    place.check()
    whole = time.perf_counter() - started
    taken = [step.seconds for step in place.engine.scheduler.taken]
    assert len(taken) == place.device.num_launched
    assert all(seconds > 0 for seconds in taken)
    assert sum(taken) <= whole
    for sequence in asked:
        timing = sequence.result().timing
        assert timing.prefill_time_s + sum(timing.decode_times_s) + sum(timing.sampling_times_s) <= whole


def test_a_step_with_a_grammar_or_drafts_has_none_behind_it(world: World) -> None:
    constrained = Case("regex", tuple(b"ab"), SamplingParams(temperature=0, max_new_tokens=8, regex="[a-c]{6}"))
    for case, way in ((constrained, Way(chunk=7)), (MEDIUM, Way("ngram", chunk=7))):
        place = Place(world)
        place.check((place.engine.submit(make_sequence(world, case, way)), case))
        assert not place.device.num_behind
