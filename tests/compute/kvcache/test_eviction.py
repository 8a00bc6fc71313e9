"""Answers over caches that evict are the same by every path, and equal to a definition by visible tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

import path_cases
from extent import slow_except
from infer import LLM, Session
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.runner.runner import Runner
from infer.errors import InvalidRequestError
from infer.sampling_params import SamplingParams
from path_cases import CASES, CONTEXT, Outcome, Place, Way, World, varied_ids

STEP = 16  # tokens in one step, so few that windows are much shorter than the text and pages are used again
SLIDING = CacheSettings(page_tokens=16, eviction_policy="sliding", eviction_window=24, protected_prefix=3)
WORLDS = {
    "sliding": ("llama", SLIDING),
    "windows": ("windows", CacheSettings(page_tokens=16)),
    "sliding beside windows": ("windows", SLIDING),
    "sliding beside chunks": ("chunks", SLIDING),
    "q8": ("wide", replace(SLIDING, kv_type="q8")),
    "q4": ("wide", replace(SLIDING, kv_type="q4")),
}
WAYS = [Way("half", 7), Way("random", 16, 1), Way("right", 1, 4), Way("none", 16), Way("half", 7, capture=False)]
SOME = CASES[::6]


@pytest.fixture(scope="module", params=slow_except(["sliding"], WORLDS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, settings = WORLDS[request.param]
    return replace(path_cases.make_world(name, tmp_path_factory.mktemp(name)), settings=settings)


def check_copies(session: Session, llm: LLM, params: SamplingParams, folder: Path) -> None:
    """Check that a session, its fork and its copy on disk answer as the model answers the whole text."""
    before, other = session.token_ids, session.fork()
    session.save(folder / "saved")
    wanted = llm.generate(before, params).token_ids
    for each in (session, other, llm.load_session(folder / "saved")):
        assert each.generate(params).token_ids == wanted


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, Outcome]:
    outcomes = path_cases.all_by_definition(world, SOME)
    return {case.name: outcome for case, outcome in zip(SOME, outcomes, strict=True)}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_cache_that_evicts_gives_the_answer_of_no_cache(world: World, expected: dict[str, Outcome], way: Way) -> None:
    runner = path_cases.make_runner(world, way, step_tokens=STEP)
    assert isinstance(runner, Runner)
    for case in SOME:
        result = path_cases.run_alone(world, case, way, expected[case.name].token_ids, Place(world, way, runner))
        assert Outcome.of(result) == expected[case.name], case.name
        runner.cache.check_integrity()
    tables = [rows.table for rows in runner.cache.groups]
    assert any(table.pages_per_row < CONTEXT // 16 for table in tables)


@pytest.mark.parametrize("way", [Way("half", 64), Way("none", 7, 64)], ids=str)
def test_rows_that_evict_side_by_side_give_the_same_answers(
    world: World, expected: dict[str, Outcome], way: Way
) -> None:
    said = [expected[case.name].token_ids for case in SOME]
    results = path_cases.run_batch(world, SOME, way, 3, said)
    assert [Outcome.of(result) for result in results] == [expected[case.name] for case in SOME]


PLAIN = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


def test_a_window_as_long_as_the_text_changes_nothing(llama: Path) -> None:
    full, sliding = LLM(llama), LLM(llama, eviction_policy="sliding", eviction_window=CONTEXT)
    prompt = varied_ids(CONTEXT - 12)
    assert sliding.logits(prompt).equal(full.logits(prompt))
    assert sliding.generate(prompt, PLAIN).token_ids == full.generate(prompt, PLAIN).token_ids
    shorter = LLM(llama, eviction_policy="sliding", eviction_window=CONTEXT // 2)
    assert not shorter.logits(prompt).equal(full.logits(prompt))


def test_a_text_with_a_sliding_window_continues_beyond_the_context(llama: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"own 160, got 1500: only eviction_policy sliding allows more"):
        LLM(llama, max_seq_len=1500)
    llm = LLM(llama, max_seq_len=1500, eviction_policy="sliding", eviction_window=40)
    result = llm.generate(varied_ids(100), replace(PLAIN, max_new_tokens=None))
    assert len(result.token_ids) == 1400
    assert (result.finish_reason, result.stop_reason) == ("length", "context")
    again = llm.generate(varied_ids(100) + result.token_ids[:900], replace(PLAIN, max_new_tokens=50))
    assert again.token_ids == result.token_ids[900:950]


def test_a_full_context_ends_an_answer_where_nothing_is_forgotten(llama: Path) -> None:
    result = LLM(llama).generate(varied_ids(100), replace(PLAIN, max_new_tokens=None))
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (CONTEXT - 100, "length", "context")


def test_a_session_that_goes_back_beyond_its_cache_answers_as_a_new_model(llama: Path, tmp_path: Path) -> None:
    llm = LLM(llama, max_seq_len=1500, eviction_policy="sliding", eviction_window=40)
    session = llm.session()
    session.append(varied_ids(1200))
    session.generate(PLAIN)
    for count in (3, 30, 500, 2, 600):
        session.rewind(count)
        left = len(session.token_ids)
        assert session.num_cached_tokens in (0, left, left - 1)
        assert session.num_cached_tokens or count >= 500, "what is near was forgotten"
        check_copies(session, llm, PLAIN, tmp_path)
