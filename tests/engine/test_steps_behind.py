"""Steps that are launched before the tokens of the step before them are known, on a device that runs on its own."""

import time
from dataclasses import replace

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.place import Lease
from infer.engine.step.sequence import Sequence
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Way, World, by_definition, check_ends, make_sequence
from steps_behind import RunsOnItsOwn

LONG = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True))
SHORT = Case("short", tuple(b"cab"), SamplingParams(temperature=0.8, seed=3, max_new_tokens=4, ignore_eos=True))
PROMPT = replace(SHORT, prompt=tuple(b"cab abc" * 12), params=replace(SHORT.params, max_new_tokens=3))
PENALISED = SamplingParams(temperature=0.8, seed=1, max_new_tokens=20, ignore_eos=True, frequency_penalty=0.7)
COUNTED = Case("counted", tuple(b"bca"), PENALISED)


class Place:
    """An engine whose runner's steps run on their own, and whose steps are all single ones."""

    def __init__(self, world: World, num_slots: int = 3) -> None:
        self.world = world
        settings = CacheSettings(page_tokens=16, reuse_prefixes=True)
        self.runner = Runner(world.model, CONTEXT, num_slots=num_slots, settings=settings)
        self.device = RunsOnItsOwn.replace(self.runner)
        self.engine = Engine(self.runner, max_steps=1)

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


@pytest.mark.parametrize("tenants", ["aaaa", "abba"])
def test_answers_beside_prompts_do_not_depend_on_the_sampler_or_the_tenants(place: Place, tenants: str) -> None:
    cases = [LONG, COUNTED, PROMPT, SHORT]
    place.check(*((place.submit(case, tenant=tenant), case) for case, tenant in zip(cases, tenants, strict=True)))
    assert place.device.num_behind > 20


def stopping(world: World) -> tuple[Case, int]:
    """Return a case that ends at a token that is unknown before it is sampled, and its number of tokens."""
    token_ids = by_definition(world, LONG).token_ids
    index = next(index for index in range(4, 20) if token_ids[index] not in token_ids[:index])
    return replace(LONG, params=replace(LONG.params, stop_token_ids=[token_ids[index]])), index + 1


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
    cancelled, other = place.submit(COUNTED), place.submit(LONG)
    for _ in range(4):
        place.engine.step()
    waiting = place.submit(COUNTED)
    place.engine.cancel(cancelled)
    assert cancelled in place.engine.step()
    assert cancelled.has_ended
    assert cancelled not in place.engine.step()
    place.check((other, LONG), (waiting, COUNTED))
    assert cancelled.generated == by_definition(world, COUNTED).token_ids[: len(cancelled.generated)]


def test_a_paused_sequence_gets_the_token_that_is_under_way_and_then_none(place: Place) -> None:
    paused, other = place.submit(LONG), place.submit(COUNTED)
    while len(paused.pieces) < 3:
        place.engine.step()
    place.engine.pause(paused)
    for _ in range(5):
        place.engine.step()
    assert len(paused.pieces) == 4
    place.engine.proceed(paused)
    place.check((paused, LONG), (other, COUNTED))


def test_after_an_exception_of_a_wait_all_is_computed_again(place: Place) -> None:
    asked = [(place.submit(case), case) for case in (LONG, COUNTED, PROMPT)]
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
    asked = [place.submit(LONG), place.submit(PROMPT)]
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
    for case, way in ((constrained, Way(chunk=7)), (LONG, Way("ngram", chunk=7))):
        place = Place(world)
        place.check((place.engine.submit(make_sequence(world, case, way)), case))
        assert not place.device.num_behind
