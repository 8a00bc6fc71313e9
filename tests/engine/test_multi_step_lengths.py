"""Multi-steps and drafts in an engine: their lengths, their costs, and a drafter other than n-grams."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

import path_cases
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.speculation.policy import Drafter, Guess, Priors
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Outcome, Place, Way, World, by_definition, make_sequence

CASE = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=140, ignore_eos=True))


def run(world: World, case: Case, way: Way, chain: int | None = None) -> GenerationResult:
    way = replace(way, chain=chain)
    return Place(world, way).stream(make_sequence(world, case, way)).run()


@pytest.mark.slow
def test_a_chain_is_short_where_a_stop_or_a_draft_may_end_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.step.scheduler.MAX_SECONDS", 1e9)
    stopped = replace(CASE, params=replace(CASE.params, stop=["never said"]))
    for case, way in ((stopped, Way()), (CASE, Way("ngram"))):
        result = run(world, case, way)
        assert Outcome.of(result) == by_definition(world, case)
        assert result.stats.multi_step_tokens <= 8 * result.stats.multi_steps


def test_a_requested_multi_step_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.step.scheduler.MAX_SECONDS", 0.0)
    assert run(world, CASE, Way(), chain=20).stats.multi_steps == 7


def test_the_cost_of_a_draft_is_learnt_from_similar_steps(world: World) -> None:
    """Forced tokens have no logits, and steps of sequences with other samplers take other times."""
    place, sequence = Place(world, Way(chain=1)), make_sequence(world, CASE, Way("adaptive"))
    place.engine.submit(sequence)
    times = place.engine.scheduler.costs.by_kind
    place.engine.step()
    sequence.token_ids += [98, 99]
    place.engine.step()
    assert not any(times[1, 0, 1].is_known(count) for count in (1, 3, 7))
    place.engine.step()
    assert times[1, 0, 1].is_known(1)
    assert list(times) == [(1, 0, 1)]


def test_only_sequences_that_run_hold_the_index_of_their_prompt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [make_sequence(world, replace(CASE, name=str(index)), Way("adaptive")) for index in range(5)]
    begin, drafters, counts = NgramDrafter.begin, set[NgramDrafter](), list[int]()

    def note(drafter: NgramDrafter, slot: int, token_ids: list[int], params: SamplingParams) -> None:
        drafters.add(drafter)
        begin(drafter, slot, token_ids, params)
        counts.append(len(drafter._drafts))

    monkeypatch.setattr(NgramDrafter, "begin", note)
    path_cases.run_all(world, waiting, Way("adaptive"), 2)
    assert max(counts) == 2
    assert not any(drafter._drafts for drafter in drafters)


# A drafter other than n-grams, which proposes for all sequences in one batch


GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


class BatchDrafter(Drafter):
    """Knows the answers. `batches` has the slots of each call of `propose`."""

    priors = Priors((0.2, 0.5), {1: (0.9, 0.9, 0.9), 2: (0.99, 0.99, 0.99)})

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts, self._num_known = texts, dict[int, int]()
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # the whole text, and the ids so far
        self.batches, self.guesses = list[set[int]](), list[Guess]()

    def begin(self, slot: int, token_ids: list[int], params: SamplingParams) -> None:
        (text,) = (text for text in self._texts if text[: len(token_ids)] == token_ids)
        self.rows[slot], self._num_known[slot] = (text, token_ids), len(token_ids)

    def confidence(self, slot: int) -> int:
        return 2

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        self.batches.append(set(counts))
        rows = {slot: self.rows[slot] for slot in counts}
        return {slot: text[len(ids) :][: counts[slot]] for slot, (text, ids) in rows.items()}

    def observe(self, slot: int) -> list[Guess | None]:
        text, ids = self.rows[slot]
        start, self._num_known[slot] = self._num_known[slot], len(ids)
        found = [Guess(2, text[index] == ids[index]) for index in range(start, len(ids))]
        self.guesses += found
        return list(found)

    def release(self, slot: int) -> None:
        del self.rows[slot]


@pytest.mark.parametrize("preempts", [False, True])
def test_a_drafter_proposes_for_all_sequences_in_one_batch_and_changes_no_token(world: World, preempts: bool) -> None:
    prompts = [tuple(b"abc abcab"), tuple(b"xyz"), tuple(b"hello world")]
    cases = [Case(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]
    expected = path_cases.all_by_definition(world, cases)
    drafter = BatchDrafter([[*case.prompt, *outcome.token_ids] for case, outcome in zip(cases, expected, strict=True)])
    engine = Engine(Runner(world.model, CONTEXT, num_slots=3), drafter=drafter)
    waiting = [engine.submit(make_sequence(world, case, Way("adaptive"))) for case in cases]
    num_steps = 0
    while engine.step():
        num_steps += 1
        if preempts and num_steps == 3:
            assert engine._slots.preempt_one()
            assert len(drafter.rows) == 2
    results = [sequence.result() for sequence in waiting]
    assert ([Outcome.of(result) for result in results], max(map(len, drafter.batches))) == (expected, 3)
    assert len(drafter.batches) < num_steps
    assert sum(result.stats.drafts_accepted for result in results) > 30
    assert all(guess.is_right for guess in drafter.guesses)
    assert not drafter.rows


def test_a_sequence_without_drafts_is_never_begun(world: World) -> None:
    drafter = BatchDrafter([])
    engine = Engine(Runner(world.model, CONTEXT, num_slots=2), drafter=drafter)
    case = Case("", tuple(b"abc"), replace(GREEDY, max_new_tokens=4))
    path_cases.check_ends(world, engine, [engine.submit(make_sequence(world, case, Way("none")))], [case])
    assert drafter.batches == []
