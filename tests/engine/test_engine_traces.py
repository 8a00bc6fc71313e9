"""Random traces of an engine with too few slots and pages: each answer is that of the sequence alone.

Sequences join, leave, pause, fork, are preempted or fail in a step. The cache is consistent after each step.
"""

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest

import path_cases
from extent import usual_or_all
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Lease, Sequence
from infer.sampling_params import SamplingParams
from path_cases import CASES, CONTEXT, Case, Drafts, Way, World, all_by_definition, by_definition, make_sequence
from steps_behind import RunsOnItsOwn
from test_busy_slots import CALLS, PlantedError, owner_of

NUM_TRACES, NUM_EVENTS, NUM_SLOTS = usual_or_all(8, 125), 30, 4
PAGES_EACH = CONTEXT // 16
SLIDING = {"eviction_policy": "sliding", "eviction_window": 48, "protected_prefix": 4}
WORLDS = {
    "all is kept": ("llama", {}),
    "prefixes are shared": ("llama", {"reuse_prefixes": True}),
    "windows": ("windows", {}),
    "the oldest is evicted": ("llama", SLIDING),
}
pytestmark = pytest.mark.slow(cases=1)

SOME = [*CASES[::5], CASES[1], CASES[14], CASES[27]]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, settings = WORLDS[request.param]
    made = path_cases.make_world(name, tmp_path_factory.mktemp(name))
    made = replace(made, settings=CacheSettings(page_tokens=16, **settings))  # type: ignore[arg-type]
    all_by_definition(made, SOME)  # in one batch, which takes less time than one by one
    all_by_definition(made, [turn_after(made, case) for case in SOME])
    return made


def turn_after(world: World, case: Case) -> Case:
    params = SamplingParams(temperature=0.8, seed=9, repetition_penalty=1.3, max_new_tokens=12)
    prompt = (*case.prompt, *by_definition(world, case).token_ids, *b" ab")
    return Case(f"{case.name}, then", prompt if len(prompt) < CONTEXT - 20 else case.prompt, params)


class Trace:
    """One trace. `asked` has sequences with their cases, and `told` has leases with the tokens of their answers."""

    def __init__(self, world: World, seed: int, *, launches_behind: bool = False) -> None:
        """Begin a trace. With `launches_behind`, its steps run on a device, and mostly without drafts."""
        self.world, self.draw = world, random.Random(seed)
        drafts: Items[Drafts] = ("none", "none", "none", "ngram") if launches_behind else ("none", "ngram", "half")
        self.way = Way(self.draw.choice(drafts), self.draw.choice((7, 64, 512)))
        pool_pages = self.draw.choice((PAGES_EACH, PAGES_EACH + 3, 2 * PAGES_EACH))
        is_captured = launches_behind or self.draw.random() < 0.8
        sizes = {"num_slots": NUM_SLOTS, "pool_pages": pool_pages, "capture": is_captured}
        self.runner = Runner(world.model, CONTEXT, settings=world.settings, **sizes)  # type: ignore[arg-type]
        self.device = RunsOnItsOwn.replace(self.runner) if launches_behind else None
        self.engine = Engine(self.runner, max_steps=self.draw.choice((1, 1, 4) if launches_behind else (1, 4, 16)))
        self.asked: list[tuple[Sequence, Case]] = []
        self.told: list[tuple[Lease, Case, Sequence]] = []
        self.delivered = set[Sequence]()
        self.num_preempted = self.num_failed = 0

    def run(self) -> None:
        events = [*[self.ask] * 2, *[self.step] * 3, self.proceed, self.follow_up, self.fork, self.rewind]
        events += [self.cancel, self.pause, self.preempt, self.fail]
        for _ in range(NUM_EVENTS):
            self.draw.choice(events)()
            self.runner.cache.check_integrity()
        self.proceed()
        while self.engine.sequences:
            self.step()
        assert self.delivered == {sequence for sequence, _ in self.asked}, "the reader of each knows of its end"
        for sequence, case in self.asked:
            self.check(sequence, case)

    def check(self, sequence: Sequence, case: Case) -> None:
        found, expected = path_cases.Outcome.of(sequence.result()), by_definition(self.world, case)
        if found.finish_reason == "abort":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)], case.name
        else:
            assert found == expected, case.name

    def submit(self, case: Case, lease: Lease | None = None) -> None:
        made = make_sequence(self.world, case, self.way, by_definition(self.world, case).token_ids)
        sequence = self.engine.submit(made, lease)
        self.asked.append((sequence, case))
        if lease is not None:
            self.told.append((lease, case, sequence))

    def ask(self) -> None:
        self.submit(self.draw.choice(SOME), self.draw.choice((None, Lease())))

    def step(self) -> None:
        before = {sequence: len(sequence.pieces) for sequence in self.engine.sequences}
        try:
            found = self.engine.step()
        except PlantedError:
            self.engine.recover()
        else:
            changed = {each for each, count in before.items() if each.has_ended or len(each.pieces) > count}
            assert changed <= set(found)
            assert len(found) == len(set(found))
            self.delivered.update(each for each in found if each.has_ended)
        self.runner.cache.check_integrity()

    def proceed(self) -> None:
        """Let the readers take all pieces, so that their answers have room again."""
        for sequence in self.engine.sequences:
            self.engine.proceed(sequence)

    def follow_up(self) -> None:
        """Submit the next turn of a conversation, in the slot of the last turn."""
        for index, (lease, case, sequence) in enumerate(self.told):
            if sequence.has_ended and sequence.finish_reason != "abort":
                del self.told[index]
                self.submit(turn_after(self.world, case), lease)
                return

    def fork(self) -> None:
        for lease, case, sequence in self.told:
            if sequence.has_ended and sequence.finish_reason != "abort":
                other = Lease()

                def copy(slot: int, lease: Lease = lease, other: Lease = other) -> None:
                    if lease.slot is not None:
                        self.runner.cache.copy_row(slot, lease.slot)
                        other.token_ids = list(lease.token_ids)

                self.engine.change(other, copy)
                self.submit(turn_after(self.world, case), other)
                return

    def rewind(self) -> None:
        for lease, _, sequence in self.told:
            if sequence.has_ended and lease.token_ids:

                def cut(slot: int, lease: Lease = lease) -> None:
                    held = lease.token_ids[: self.draw.randrange(len(lease.token_ids) + 1)]
                    lease.token_ids = []
                    self.runner.cache.truncate(slot, len(held))
                    lease.token_ids = held[: self.runner.lengths[slot]]

                self.engine.change(lease, cut)
                return

    def cancel(self) -> None:
        if self.asked and self.draw.random() < 0.5:
            self.engine.cancel(self.draw.choice(self.asked)[0])

    def pause(self) -> None:
        """Readers lag behind."""
        for sequence in self.engine.sequences:
            if self.draw.random() < 0.3:
                self.engine.pause(sequence)

    def preempt(self) -> None:
        running = list(self.engine._slots.sequences)
        if running:
            self.engine._slots.preempt(self.draw.choice(running))
            self.num_preempted += 1

    def fail(self) -> None:
        """Let one of the next calls of the runner raise, before or after its work."""
        if self.draw.random() < 0.3:
            name, is_before = self.draw.choice(CALLS), self.draw.random() < 0.5
            owner = owner_of(self.runner, name)
            real = getattr(owner, name)

            def raise_once(*arguments: Any, **options: Any) -> Any:
                delattr(owner, name)
                if not is_before:
                    real(*arguments, **options)
                self.num_failed += 1
                raise PlantedError

            if name not in vars(owner):
                setattr(owner, name, raise_once)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("launches_behind", [False, True], ids=["", "launched before the tokens of others are known"])
def test_every_answer_is_as_alone(world: World, launches_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cases have a grammar if steps are launched early, because none is launched behind a step with a grammar."""
    if launches_behind:
        free = [case for case in CASES if case.name.endswith("free")]
        monkeypatch.setattr("test_engine_traces.SOME", [*free, CASES[1]])
    num_behind = num_preempted = num_failed = 0
    for seed in range(NUM_TRACES):
        trace = Trace(world, seed, launches_behind=launches_behind)
        trace.run()
        num_behind += 0 if trace.device is None else trace.device.num_behind
        num_preempted += trace.num_preempted
        num_failed += trace.num_failed
    assert num_behind > NUM_TRACES or not launches_behind
    assert num_preempted
    assert num_failed


@pytest.mark.slow(rest=1)
def test_a_pool_that_is_too_small_for_two_answers_gives_both(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.step.fairness.EXPECTED_ANSWER", 8)  # so all may enter
    monkeypatch.setattr("infer.engine.step.fairness.LEARNT", 0.0)
    runner = Runner(world.model, CONTEXT, num_slots=3, pool_pages=PAGES_EACH, settings=world.settings)
    engine, long = Engine(runner), SamplingParams(temperature=0.7, seed=5, max_new_tokens=100, ignore_eos=True)
    cases = [Case(str(index), tuple(b"abc ab" * (3 + index)), replace(long, seed=index)) for index in range(3)]
    sequences = [engine.submit(make_sequence(world, case, Way())) for case in cases]
    path_cases.check_ends(world, engine, sequences, cases)
    assert engine.snapshot().num_preemptions or world.settings is None or world.settings.evicts
