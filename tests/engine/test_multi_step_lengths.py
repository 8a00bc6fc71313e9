"""The length of multi-steps: as many tokens as fit a tenth of a second, but fewer if they may be dropped."""

from dataclasses import replace

import pytest

from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.step.scheduler import FIRST_STEPS, MAX_STEPS
from infer.engine.step.step_costs import StepKind
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from path_cases import Case, Outcome, Place, Way, World, by_definition, make_sequence, run_all

CASE = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=140, ignore_eos=True))


def run(world: World, case: Case, way: Way, chain: int | None = None) -> GenerationResult:
    way = replace(way, chain=chain)
    return Place(world, way).stream(make_sequence(world, case, way)).run()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "longest"), [(1e9, MAX_STEPS), (0.0, 1)], ids=["fast", "slow"])
def test_a_chain_lasts_a_tenth_of_a_second(
    world: World, seconds: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.engine.step.scheduler.MAX_SECONDS", seconds)
    result = run(world, CASE, Way())
    assert Outcome.of(result) == by_definition(world, CASE)
    rest = 140 - 1 - FIRST_STEPS
    expected = (1, 1 + rest) if longest == 1 else (1 + -(-rest // longest), 1)
    assert (result.stats.multi_steps, result.stats.single_steps) == expected


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
    assert not any(times[StepKind(1, 0, 1)].is_known(count) for count in (1, 3, 7))
    place.engine.step()
    assert times[StepKind(1, 0, 1)].is_known(1)
    assert list(times) == [StepKind(1, 0, 1)]


def test_only_sequences_that_run_hold_the_index_of_their_prompt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [make_sequence(world, replace(CASE, name=str(index)), Way("adaptive")) for index in range(5)]
    begin, drafters, counts = NgramDrafter.begin, set[NgramDrafter](), list[int]()

    def note(drafter: NgramDrafter, slot: int, token_ids: list[int]) -> None:
        drafters.add(drafter)
        begin(drafter, slot, token_ids)
        counts.append(len(drafter._drafts))

    monkeypatch.setattr(NgramDrafter, "begin", note)
    run_all(world, waiting, Way("adaptive"), 2)
    assert max(counts) == 2
    assert not any(drafter._drafts for drafter in drafters)
