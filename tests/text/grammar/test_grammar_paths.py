"""Random schemas in the real loop: complete answers parse and validate, and cut answers can be completed."""

import json
import random
from dataclasses import replace

import jsonschema
import pytest

from constraint_walks import schema_text, walk
from extent import IS_WHOLE
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams
from path_cases import EOS, VOCAB_SIZE, Case, Outcome, Way, World, constraint_of, run_alone, run_batch

TEMPERATURES = (0.0, 1.0, 2.0)
# A random model seldom closes a bracket or a string.
CLOSING: dict[int, float] = {EOS: 3.0, **{ord(closer): 3.0 for closer in '"}],'}, ord("0"): -1.0}
WAYS = (Way("ngram"), Way("half", 7), Way("none", 1, capture=False), Way("random"))


def case_of(seed: int, temperature: float | None = None) -> Case:
    temperature = TEMPERATURES[seed % 3] if temperature is None else temperature
    limits = {"max_new_tokens": 6 + seed % 42, "min_new_tokens": seed % 5}
    fixed = {"seed": seed, "logit_bias": CLOSING, "frequency_penalty": 0.3}
    params = SamplingParams(json_schema=schema_text(seed, wide=True), temperature=temperature, **limits, **fixed)
    return Case(f"schema {seed}", tuple(b'{"a b": [1, "x"]}'[: 1 + seed % 17]), params)


def check(world: World, case: Case, result: GenerationResult) -> None:
    schema = json.loads(str(case.params.json_schema))
    assert result.error is None
    ids = [token_id for token_id in result.token_ids if token_id not in world.tokenizer.eos_token_ids]
    written = b"".join(world.tokenizer.token_bytes[token_id] for token_id in ids)
    if not result.grammar_complete:
        assert result.finish_reason == "length"
        constraint = constraint_of(world, case.params)
        assert constraint is not None
        assert constraint.accept(result.token_ids) == len(result.token_ids)
        written += walk(constraint, world.tokenizer, VOCAB_SIZE, random.Random(0))
    else:
        assert written.decode() == result.text
    jsonschema.validate(json.loads(written), schema)


def run_all_of(world: World, cases: list[Case]) -> list[GenerationResult]:
    """Run cases without drafts, then with drafts, alone and in a batch. All give the same answers."""
    plain = [run_alone(world, case, Way()) for case in cases]
    said = [result.token_ids for result in plain]
    for index, case in enumerate(cases):
        way = WAYS[index % len(WAYS)]
        assert Outcome.of(run_alone(world, case, way, said[index])) == Outcome.of(plain[index]), f"{case.name}, {way}"
    together = run_batch(world, cases, Way("half"), 4, said)
    assert [Outcome.of(result) for result in together] == [Outcome.of(result) for result in plain]
    for case, result in zip(cases, plain, strict=True):
        check(world, case, result)
    return plain


def test_texts_of_random_schemas_validate_or_can_be_completed(world: World) -> None:
    results = run_all_of(world, [case_of(seed) for seed in range(24)])
    complete = [result.grammar_complete for result in results]
    assert 4 < sum(map(bool, complete)) < len(complete), "some are complete and some are cut"
    assert any(result.stats.tokens_forced for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_of_many_random_schemas_validate_or_can_be_completed(world: World, temperature: float) -> None:
    """There are 60 schemas with one temperature each, or with INFER_TESTS=all 500 with every temperature."""
    seeds = range(1000, 1500) if IS_WHOLE else range(1000 + TEMPERATURES.index(temperature), 1060, len(TEMPERATURES))
    results = run_all_of(world, [case_of(seed, temperature) for seed in seeds])
    assert sum(bool(result.grammar_complete) for result in results) > 0.3 * len(results)


def test_the_check_would_see_a_text_that_breaks_its_schema(world: World) -> None:
    case = next(case for case in map(case_of, range(24)) if run_alone(world, case, Way()).grammar_complete)
    broken = replace(run_alone(world, case, Way()), token_ids=[*b"{]"], text="{]")
    with pytest.raises(ValueError, match="Expecting"):
        check(world, case, broken)
