"""Drafts of a draft model: tokens that are those without drafts, rows that are freed, and time that is not lost."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cases import cases
from draft_trials import always_drafting, check_equal, drafted, drafting_world, make_engine, plain_sequence, step_all
from infer.compute.operands.limits import HOST_STEP
from infer.compute.operands.step import Chunk
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.speculation.policy import StepTimes
from infer.engine.step.drafting import Drafting
from infer.engine.step.model_drafter import ModelDrafter
from infer.sampling_params import SamplingParams
from path_cases import CASES, CONTEXT, Case, World, varied_ids

DRAFTS = ("llama", "wide", "states", "windows", "convolutions")
GREEDY = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
FREE = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, seed=3),
    "filtered": replace(GREEDY, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4),
    "temperature last": replace(GREEDY, temperature=0.8, top_p=0.9, temperature_last=True, seed=5),
    "biased": replace(GREEDY, temperature=0.5, logit_bias={97: 2.0}, seed=6),
    "few letters": replace(GREEDY, temperature=0.7, allowed_token_ids=[97, 98, 99, 32], seed=2**64 - 1),
}


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_answers_are_those_without_drafts(world: World, name: str, num_slots: int) -> None:
    """Every sampler with every grammar: stops, penalties, log-probabilities. With one slot and with three."""
    some = CASES if name != "states" else CASES[::2]
    with always_drafting():
        results = drafted(world, drafting_world(name), some, num_slots)
    check_equal(world, some, results)
    assert sum(result.stats.drafts_proposed for result in results) > 150


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["states", "convolutions", "windows"])
def test_layers_with_states_and_windows_forget_wrong_drafts(name: str) -> None:
    world, some = drafting_world(name), CASES[::3]
    with always_drafting():
        check_equal(world, some, drafted(world, drafting_world("llama"), some, 2))
        check_equal(world, some, drafted(world, world, some, 2))


def test_a_batch_may_mix_requests_with_and_without_drafts(world: World) -> None:
    some = [case for case in CASES if case.name.endswith("free")]
    with always_drafting():
        results = drafted(world, drafting_world("wide"), some, 4, ("draft", None, "ngram", "off"))
    check_equal(world, some, results)
    by_kind = [sum(result.stats.drafts_proposed for result in results[kind::4]) for kind in range(4)]
    assert min(by_kind[:2]) > 20
    assert by_kind[3] == 0


@pytest.mark.slow(cases=2)
@cases("name", *FREE)
def test_a_draft_model_that_is_the_model_is_always_right(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a temperature, too: the noise is that of the engine's positions."""
    monkeypatch.setattr(NgramDrafter, "confidence", lambda drafter, slot: 0)
    case = Case(name, tuple(varied_ids(12)), FREE[name])
    with always_drafting():
        (result,) = drafted(world, world, [case], 1)
    check_equal(world, [case], [result])
    assert result.stats.drafts_accepted == result.stats.drafts_proposed > 30


def test_the_end_of_a_long_text_has_the_noise_of_its_own_positions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise decides among the three allowed letters, because the temperature is high."""
    monkeypatch.setattr(NgramDrafter, "confidence", lambda drafter, slot: 0)
    params = SamplingParams(temperature=2.0, allowed_token_ids=[97, 98, 99], seed=11, max_new_tokens=90)
    case = Case("noise", tuple(varied_ids(40)), params)
    with always_drafting():
        (result,) = drafted(world, world, [case], 1)
    assert result.stats.drafts_accepted > 40


@pytest.mark.parametrize("capacity", [CONTEXT, 80])
def test_preempted_sequences_and_full_rows_begin_again(world: World, capacity: int) -> None:
    some = [Case(str(length), tuple(varied_ids(length)), GREEDY) for length in (5, 40, 70)]
    with always_drafting():
        engine, drafter = make_engine(world, world, 3, capacity=capacity)
        waiting = [engine.submit(plain_sequence(world, case)) for case in some]
        step_all(engine, drafter)
    check_equal(world, some, [sequence.result() for sequence in waiting])
    assert sum(sequence.stats.preemptions for sequence in waiting) > 2
    assert not any(drafter.runner.lengths)


def test_without_pages_for_its_row_a_sequence_is_not_drafted_for(world: World) -> None:
    some = [Case(str(length), tuple(varied_ids(length)), GREEDY) for length in (60, 65, 70)]
    with always_drafting():
        engine, drafter = make_engine(world, world, 3, pool_pages=3)
        waiting = [engine.submit(plain_sequence(world, case)) for case in some]
        fewest = 3
        while engine.step():
            fewest = min(fewest, *drafter.runner.cache.free_pages)
    check_equal(world, some, [sequence.result() for sequence in waiting])
    assert fewest == 0
    assert drafter.runner.cache.free_pages == [3]


def test_a_fault_of_the_draft_model_ends_only_its_sequence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = ModelDrafter._draft, {"slot": -1}

    def draft(drafter: ModelDrafter, pending: Any, count: int) -> None:
        if broken["slot"] in pending:
            raise RuntimeError("the draft model broke")
        read(drafter, pending, count)

    monkeypatch.setattr(ModelDrafter, "_draft", draft)
    some = [Case(str(length), tuple(varied_ids(length)), GREEDY) for length in (5, 9)]
    with always_drafting():
        engine, _ = make_engine(world, world, 2)
        waiting = [engine.submit(plain_sequence(world, case)) for case in some]
        engine.step()
        broken["slot"] = waiting[0].slot
        while engine.step():
            pass
    assert waiting[0].result().finish_reason == "error"
    check_equal(world, some[1:], [waiting[1].result()])


def test_a_token_that_only_the_model_has_begins_the_row_again(world: World) -> None:
    drafter = ModelDrafter(make_engine(world, world, 1)[1].runner, 200)
    ids = [*varied_ids(20), 210, 1, 2, 3]
    drafter.begin(0, ids, GREEDY)
    assert drafter.confidence(0) == 2
    assert len(drafter.propose({0: 3})[0]) == 3
    assert drafter.runner.lengths[0] == 3
    assert drafter._rows[0].start == 21
    ids += [4, 201]
    assert drafter.observe(0)[1:] == [None]
    assert drafter.confidence(0) == 0


# Time: the draft model's steps and the engine's take simulated seconds


class Simulated:
    """A runner and its cache, whose steps advance a clock. A draft is right with probability `acceptance`."""

    def __init__(self, acceptance: float, seconds_per_pass: float, read_seconds: float) -> None:
        self.clock, self.lengths = 0.0, [0]
        self.model = SimpleNamespace(architecture=SimpleNamespace(vocab_size=10), device="cpu", step_limits=HOST_STEP)
        self.num_slots, self.capacity, self.cache, self._draw = 1, 4096, self, random.Random(5)
        self.acceptance, self._pass, self._read = acceptance, seconds_per_pass, read_seconds

    def try_reserve(self, slot: int, num_tokens: int) -> str:
        return ""

    def reset(self) -> None:
        self.lengths = [0]

    def truncate(self, slot: int, length: int) -> None:
        self.lengths[slot] = length

    def commit(self, slot: int, count: int) -> None:
        self.lengths[slot] += count

    def extend(self, slot: int, token_ids: list[int]) -> None:
        self.clock += self._read * len(token_ids)
        self.lengths[slot] += len(token_ids)

    def starts(self, chunks: Any) -> list[int]:
        return self.lengths

    def launch(self, step: Any) -> Any:
        self.clock += self._pass
        return SimpleNamespace(wait=lambda: SimpleNamespace(token_ids=[[self._token()]]))

    def multi_step(self, step: Any, count: int) -> Any:
        self.clock += self._pass * count
        return SimpleNamespace(token_ids=[[self._token() for _ in range(count)]])

    def _token(self) -> int:
        """Return the token that the model samples, 1, or another one."""
        return 1 if self._draw.random() < self.acceptance else 2


class Answering(SimpleNamespace):
    """The attributes of a sequence that drafting reads."""

    __hash__ = object.__hash__


class Simulation:
    """An engine with one sequence, of which only the drafting is real. A step of n tokens takes `1 + per_token (n - 1)`
    seconds.
    """

    def __init__(self, runner: Simulated, per_token: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner, self._per_token, self._times = runner, per_token, StepTimes()
        self.drafter = ModelDrafter(runner, 10)  # type: ignore[arg-type]
        monkeypatch.setattr(NgramDrafter, "confidence", lambda drafter, slot: 0)
        for module in ("model_drafter", "drafting"):
            monkeypatch.setattr(f"infer.engine.step.{module}.time.perf_counter", lambda: runner.clock)

    def answer(self, num_prompt: int, num_tokens: int) -> float:
        """Return the seconds of an answer."""
        drafting, started = Drafting(model=self.drafter), self.runner.clock
        ids, drafts = [3 + index % 7 for index in range(num_prompt)], list[int]()
        request = SimpleNamespace(options=SimpleNamespace(speculation="draft", num_draft_tokens=15))
        sequence: Any = Answering(slot=0, request=request, token_ids=ids, params=SamplingParams(temperature=0))
        vars(sequence).update(pieces=[], must_end_prompt=False, room=num_tokens, num_pending=1, is_finished=False)
        sequence.attempt = lambda call, otherwise: call()
        sequence.take_drafts = lambda token_ids: drafts.__setitem__(slice(None), token_ids)
        drafting.enter(sequence)
        while sequence.room > 0:
            drafting.propose([sequence], 15, self._times)
            spent = drafting.take_seconds()
            num_right = next((i for i, token_id in enumerate(drafts) if token_id != 1), len(drafts))
            new = min(num_right + 1, sequence.room)
            seconds = 1 + self._per_token * len(drafts)
            self.runner.clock += seconds
            ids += [1] * new
            sequence.pieces += [SimpleNamespace(origin="sampled")] * new
            sequence.room -= new
            self._times.learn(1 + len(drafts), seconds)
            own = [(Chunk(0, drafts, len(drafts)), new - 1)] if drafts else []
            drafting.account(own, 1, seconds, spent, self._times)
            drafting.observe([sequence])
            drafts.clear()
        drafting.release(0)
        return self.runner.clock - started


@cases(
    "acceptance per_token pass_seconds",
    (0.0, 0.05, 0.2),
    (0.3, 0.1, 0.3),
    (0.6, 1.0, 0.4),  # verifying costs as much as a plain step
    (0.9, 0.05, 1.5),  # the draft model is slower than the model
)
def test_drafts_that_do_not_pay_cost_less_than_two_percent(
    acceptance: float, per_token: float, pass_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Simulated(acceptance, pass_seconds, 0.1)
    simulation = Simulation(runner, per_token, monkeypatch)
    simulation.answer(50, 1000)  # the first answers of an engine may lose a few steps
    seconds = sum(simulation.answer(200, 150) for _ in range(20))
    assert seconds < 3000 / 0.98


@cases("acceptance per_token pass_seconds least", (0.8, 0.05, 0.2, 1.4), (0.95, 0.1, 0.2, 1.7), (0.7, 0.02, 0.1, 1.5))
def test_drafts_that_pay_are_made(
    acceptance: float, per_token: float, pass_seconds: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(Simulated(acceptance, pass_seconds, 0.05), per_token, monkeypatch)
    assert 300 / simulation.answer(200, 300) > 0.85 * least  # the engine's first answer
    assert 3000 / sum(simulation.answer(400, 150) for _ in range(20)) > least


def test_a_text_in_which_no_draft_is_right_loses_little_after_one_that_drafts_suit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The times are those of Qwen2.5-Coder 1.5B and 0.5B. Each wrong trial doubles the wait for the next one."""
    runner = Simulated(0.9, 0.4, 0.04)
    simulation, seconds = Simulation(runner, 0.05, monkeypatch), 0.0
    for _ in range(12):
        runner.acceptance = 0.9
        simulation.answer(50, 96)
        runner.acceptance = 0.0
        seconds += simulation.answer(50, 96)
    assert 12 * 96 / seconds > 0.973


def test_n_grams_that_help_little_do_not_keep_a_draft_model_from_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """An n-gram proposes a token in every fourth step, and is wrong."""
    runner = Simulated(0.95, 0.3, 0.05)
    simulation, asked = Simulation(runner, 0.05, monkeypatch), {"steps": 0}

    def confidence(drafter: NgramDrafter, slot: int) -> int:
        asked["steps"] += 1
        return 20 * (asked["steps"] % 4 == 0)

    monkeypatch.setattr(NgramDrafter, "confidence", confidence)
    monkeypatch.setattr(NgramDrafter, "propose", lambda drafter, counts: {slot: [2] for slot in counts})
    simulation.answer(50, 200)
    assert 96 / simulation.answer(50, 96) > 1.6


@cases("right per_token pass_seconds least", (0.95, 0.11, 0.43, 1.05), (0.9, 0.05, 0.2, 1.5), (0.95, 0.05, 0.2, 1.9))
def test_answers_in_turn_that_drafts_suit_and_do_not_suit_lose_little(
    right: float, per_token: float, pass_seconds: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds that one answer's drafts saved are not for the next answer to lose."""
    runner = Simulated(right, pass_seconds, 0.05)
    simulation, seconds = Simulation(runner, per_token, monkeypatch), {right: 0.0, 0.1: 0.0}
    simulation.answer(200, 300)
    for _ in range(12):
        for acceptance in seconds:
            runner.acceptance = acceptance
            seconds[acceptance] += simulation.answer(200, 300)
    assert 12 * 300 / seconds[right] > least
    assert 12 * 300 / seconds[0.1] > 0.97


def test_a_draft_model_is_tried_again_when_its_guesses_have_become_right(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Simulated(0.0, 0.2, 0.05)
    simulation = Simulation(runner, 0.05, monkeypatch)
    simulation.answer(100, 3000)
    runner.acceptance = 0.9
    simulation.answer(100, 3000)
    assert 1000 / simulation.answer(100, 1000) > 1.5
