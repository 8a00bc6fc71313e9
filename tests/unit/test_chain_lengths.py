"""How many tokens run without a return to Python: what fits a tenth of a second, fewer where they may be in vain."""

from dataclasses import replace

import pytest

from infer.engine.decode import CHAIN, LONGEST_CHAIN, Batch, run_all
from infer.engine.stream import Stream
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from path_cases import Case, Outcome, Way, World, by_definition, make_context, make_running, make_world

CASE = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=140, ignore_eos=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world("llama", tmp_path_factory.mktemp("llama"))


def run(world: World, case: Case, way: Way, chain: int | None = None) -> GenerationResult:
    batch = Batch(make_context(world, way), world.model.device, chain=chain)
    return Stream(make_running(world, case, way), batch).run()


@pytest.mark.parametrize(("seconds", "longest"), [(1e9, LONGEST_CHAIN), (0.0, 1)], ids=["fast", "slow"])
def test_a_chain_lasts_a_tenth_of_a_second(
    world: World, seconds: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.engine.decode.CHAIN_SECONDS", seconds)
    result = run(world, CASE, Way())
    assert Outcome.of(result) == by_definition(world, CASE)
    rest = 140 - 1 - CHAIN
    if longest == 1:
        assert (result.stats.chains, result.stats.single_steps) == (1, 1 + rest)
    else:
        assert (result.stats.chains, result.stats.single_steps) == (1 + -(-rest // longest), 1)


def test_a_chain_is_short_where_a_stop_or_a_draft_may_end_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.decode.CHAIN_SECONDS", 1e9)
    stopped = replace(CASE, params=replace(CASE.params, stop=["never said"]))
    for case, way in ((stopped, Way()), (CASE, Way("ngram"))):
        result = run(world, case, way)
        assert Outcome.of(result) == by_definition(world, case)
        assert result.stats.chain_tokens <= 8 * result.stats.chains


def test_a_chain_that_was_asked_for_is_what_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.decode.CHAIN_SECONDS", 0.0)
    assert run(world, CASE, Way(), chain=20).stats.chains == 7


def test_a_chain_is_as_long_as_the_last_ones_were_fast(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def seconds(batch: Batch) -> float:
        nonlocal now
        now += 0.02
        return now

    monkeypatch.setattr(Batch, "_now", seconds)
    result = run(world, CASE, Way())  # a step of 20 ms, chains of 20 ms: 2.5 ms a token, then less and less
    assert Outcome.of(result) == by_definition(world, CASE)
    assert result.stats.chains == 4


def test_what_a_draft_costs_is_learnt_from_steps_like_it(world: World) -> None:
    """Tokens that were forced have no logits of their own, and rows with other samplers take other times."""
    context = make_context(world, Way())
    batch, running = Batch(context, world.model.device), make_running(world, CASE, Way())
    batch.add(running)
    list(batch.step())
    running.pending = [*running.pending, 98, 99]
    list(batch.step())
    assert not any(context.step_times[1, 0, 1].is_known(count) for count in (1, 3, 7))
    list(batch.step())
    assert context.step_times[1, 0, 1].is_known(1)
    assert list(context.step_times) == [(1, 0, 1)]
    batch.close()


def test_only_rows_that_run_hold_the_index_of_their_prompt(world: World) -> None:
    waiting = [make_running(world, replace(CASE, name=str(index)), Way("adaptive")) for index in range(5)]
    most = 0

    def count(done: int, total: int) -> None:
        nonlocal most
        most = max(most, sum(running._draft is not None for running in waiting))

    run_all(world.model, waiting, 2, count)
    assert most == 2
    assert not any(running._draft for running in waiting)
