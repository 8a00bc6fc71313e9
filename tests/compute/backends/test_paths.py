"""One equality: an answer does not depend on drafts, multi-steps, chunks, capture, cache or neighbours.

Every way to run a generation is compared with `by_definition`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import path_cases
from extent import IS_WHOLE, slow_except
from infer import LLM, SamplingParams
from infer.compute.backends.cpu.backend import CpuBackend
from path_cases import CASES, Case, Outcome, Place, Way, World

CHUNKS = (1, 7, 64, 512)
CHAINS = (1, 8, 64)
NUM_ROWS = 5

PRODUCT = [Way(*values) for values in product(path_cases.DRAFTS, CHUNKS, CHAINS)]
# Every draft with every chunk. The lengths of multi-steps take turns.
PAIRWISE = [Way(drafts, CHUNKS[j], CHAINS[(i + j) % 3]) for i, drafts in enumerate(path_cases.DRAFTS) for j in range(4)]
WAYS = PRODUCT if IS_WHOLE else PAIRWISE
# Ways without a capture, or without a cache.
SLOWER = [Way(drafts, chunk, capture=False) for drafts, chunk in zip(path_cases.DRAFTS, CHUNKS * 2, strict=False)]
SLOWER += [Way(drafts, chunk, capture=False, cached=False) for drafts, chunk in (("none", 512), ("half", 7))]


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """Return the worlds, each made once. Pytest would make a fixture with parameters again after another parameter."""
    return {}


WORLDS = ["llama", "windows", "chunks", "shared keys", "convolutions", "states"]


@pytest.fixture(scope="module", params=slow_except(["llama"], WORLDS))
def world(request: pytest.FixtureRequest, worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory) -> World:
    name = request.param
    if name not in worlds:
        worlds[name] = path_cases.make_world(name, tmp_path_factory.mktemp(name))
    return worlds[name]


def in_turns(ways: Sequence[Way], step: int, num_quick: int) -> pytest.MarkDecorator:
    """Parametrise a test with every way in every `step`-th world, in turns. `make test` runs some ways of one world."""
    each = 1 if IS_WHOLE else step
    pairs = [(name, way) for at, name in enumerate(WORLDS) for way in ways[at % each :: each]]
    of_one = [pair for pair in pairs if pair[0] == "llama"]
    quick = of_one[:: -(-len(of_one) // num_quick)]
    return pytest.mark.parametrize(("world", "way"), slow_except(quick, pairs), indirect=["world"], ids=str)


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, Outcome]:
    outcomes = path_cases.all_by_definition(world, CASES)
    return {case.name: outcome for case, outcome in zip(CASES, outcomes, strict=True)}


def alone(world: World, cases: Sequence[Case], way: Way, expected: dict[str, Outcome]) -> dict[str, Outcome]:
    return {
        case.name: Outcome.of(path_cases.run_alone(world, case, way, expected[case.name].token_ids)) for case in cases
    }


def together(world: World, cases: Sequence[Case], way: Way, expected: dict[str, Outcome]) -> dict[str, Outcome]:
    said = [expected[case.name].token_ids for case in cases]
    results = path_cases.run_batch(world, cases, way, NUM_ROWS, said)
    return {case.name: Outcome.of(result) for case, result in zip(cases, results, strict=True)}


def check(outcomes: dict[str, Outcome], expected: dict[str, Outcome], way: Way) -> None:
    for name, outcome in outcomes.items():
        assert outcome == expected[name], f"{name}: {way}"


@pytest.mark.slow
def test_the_cases_end_in_every_way_and_fill_the_window(expected: dict[str, Outcome]) -> None:
    outcomes = expected.values()
    assert {outcome.finish_reason for outcome in outcomes} == {"eos", "stop", "length"}
    assert {" ab", "grammar", "max_new_tokens"} <= {outcome.stop_reason for outcome in outcomes}
    assert max(len(outcome.token_ids) for outcome in outcomes) > 3 * path_cases.WINDOW
    assert sum(outcome.logprobs is not None for outcome in outcomes) == 8


@in_turns(WAYS, 4, 5)
def test_an_answer_does_not_depend_on_the_way(world: World, expected: dict[str, Outcome], way: Way) -> None:
    start = WAYS.index(way)
    check(alone(world, CASES[start % 10 :: 10], way, expected), expected, way)
    check(together(world, CASES[start % 4 :: 4], way, expected), expected, way)


@in_turns(SLOWER, 3, 3)
def test_an_answer_does_not_depend_on_capture_or_cache(world: World, expected: dict[str, Outcome], way: Way) -> None:
    start = SLOWER.index(way)
    check(alone(world, CASES[start::20], way, expected), expected, way)
    if way.cached:
        check(together(world, CASES[start::12], way, expected), expected, way)


# An answer after another one, in the same context

FIRST = [case for case in CASES if case.name in ("stopped, free", "ending, free", "seeded, regex", "greedy, free")]


@pytest.fixture(scope="module")
def turns(world: World, expected: dict[str, Outcome]) -> list[tuple[Case, Case, Outcome]]:
    """Return a case, a case that continues after it, and the second one's outcome."""
    params = SamplingParams(temperature=0.8, seed=9, repetition_penalty=1.3, max_new_tokens=16)
    prompts = [(*case.prompt, *expected[case.name].token_ids, *b" ab") for case in FIRST]
    then = [Case(f"{case.name}, then", prompt, params) for case, prompt in zip(FIRST, prompts, strict=True)]
    return list(zip(FIRST, then, path_cases.all_by_definition(world, then), strict=True))


def gone_on(world: World, turns: Sequence[tuple[Case, Case, Outcome]], way: Way) -> Iterator[tuple[Outcome, Outcome]]:
    for first, second, outcome in turns:
        place = Place(world, way)
        said = second.prompt[len(first.prompt) :]
        path_cases.run_alone(world, first, way, said, place)
        yield Outcome.of(path_cases.run_alone(world, second, way, outcome.token_ids, place)), outcome


@in_turns([Way("none", chain=64), Way("right"), Way("half", 7), Way("ends")], 1, 2)
def test_tokens_after_a_stop_leave_no_trace_in_the_context(
    world: World, turns: list[tuple[Case, Case, Outcome]], way: Way
) -> None:
    for outcome, wanted in gone_on(world, turns, way):
        assert outcome == wanted


# Steps that are larger than the recording


@in_turns([Way("half"), Way("right", 7), Way("none", 64)], 3, 1)
def test_steps_larger_than_the_recording_run_in_pieces_with_the_same_answer(
    world: World, expected: dict[str, Outcome], way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = CpuBackend.capture
    monkeypatch.setattr(CpuBackend, "capture", lambda backend, forward, *_: capture(backend, forward, 6, 4))
    check(together(world, CASES[::4], way, expected), expected, way)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["windows"], indirect=True)
@pytest.mark.parametrize(("weights", "precision"), [("q8", "exact"), ("q4", "fast"), ("bf16", "exact")])
def test_quantised_weights_give_the_same_answer_with_drafts_and_neighbours(
    world: World, weights: str, precision: str, tmp_path: Path
) -> None:
    llm = LLM(path_cases.make_folder("windows", tmp_path), weights=weights, precision=precision)
    cases = [case for case in CASES[::3] if case.params.logprobs is None]
    other = replace(world, model=llm.model)
    plain = [Outcome.of(path_cases.run_alone(other, case, Way(chain=1))) for case in cases]
    said = [outcome.token_ids for outcome in plain]
    for way in (Way("half"), Way("none", 7, 64)):
        results = path_cases.run_batch(other, cases, way, NUM_ROWS, said)
        assert [Outcome.of(result) for result in results] == plain
