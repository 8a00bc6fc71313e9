"""Whole models on the backend for GPUs, in Triton's interpreter with repeats in place of graphs: what is said is what
the definition says, on every path."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from extent import IS_WHOLE
from infer import SamplingParams
from infer.compute import ops
from infer.compute.operands.step import Chunk, Interrupt, Step
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.engine.runner.runner import Runner
from infer.models.transformer import Transformer
from infer.outputs import TokenLogprob
from path_cases import (
    CASES,
    Case,
    Outcome,
    Way,
    World,
    all_by_definition,
    make_runner,
    make_world,
    run_alone,
    run_batch,
)
from steps import load_network
from test_families import expected_logits, load, make_reserved, random_ids, tolerance_of
from tiny import BY_NAME, LONGROPE, TINY, Tiny, make_tiny

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends.cuda import sampled
from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import Repeats

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.slow]
CPU = torch.device("cpu")
LENGTHS = [7, 1, 1, 3]  # a chunk of a prompt, tokens and drafts: past the windows of tiny models
REPLAYED = ("llama", "gemma2", "qwen2_moe", "gemma4_per_layer", "olmo_hybrid", "lfm2")
OTHERS = ("gpt_oss", "qwen3_5_gates", "llama4_chunks", "laguna")
OTHERS += ("gpt2", "cohere2", "gpt_neox_wide", "phi", "hunyuan_v1_dense_alpha", "apertus", "stablelm_norms")
QUANTISED = ("gemma4_per_layer", "qwen2_moe")
WHOLE = [*TINY, LONGROPE]
FAMILIES = WHOLE if IS_WHOLE else [BY_NAME[name] for name in (*REPLAYED, *OTHERS)]
NAMES = ("greedy, free", "filtered, regex", "counted, schema", "ending, free", "stopped, choice", "seeded, free")


@torch.inference_mode()
def logits_of(model: Transformer, ids: list[int], *, is_captured: bool) -> Tensor:
    cache, start, found = make_reserved(model), 0, []
    captured = CapturedForward(lambda step: model.forward(step, cache), 16, 16, CPU, Repeats())
    for length in LENGTHS:
        step = Step.of(ids[start : start + length], start, logit_indices=range(length))
        found.append(captured.run(step).clone() if is_captured else model.forward(step, cache))
        cache.commit(0, length)
        start += length
    return torch.cat(found)


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_every_family_computes_what_transformers_does_and_a_replay_has_its_bits(tiny: Tiny, tmp_path: Path) -> None:
    oracle, ids = make_tiny(tiny, tmp_path), random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load(tmp_path)
    found = logits_of(model, ids, is_captured=False)
    assert (found - expected_logits(oracle, ids)).abs().max() <= tolerance_of(oracle)
    if tiny.name in REPLAYED or IS_WHOLE:
        assert torch.equal(logits_of(model, ids, is_captured=True), found)


@pytest.mark.slow(rest=0)
@pytest.mark.parametrize("tiny", [tiny for tiny in TINY if tiny.name in QUANTISED], ids=lambda tiny: tiny.name)
@torch.inference_mode()
def test_a_quantised_model_has_the_same_bits_in_one_step_and_in_several(tiny: Tiny, tmp_path: Path) -> None:
    make_tiny(tiny, tmp_path)
    ids = random_ids(sum(LENGTHS))
    with ops.using("cuda"):
        model = load_network(tmp_path, keep_floats_as="q8")
    whole = model.forward(Step.of(ids, logit_indices=range(len(ids))), make_reserved(model))
    assert torch.equal(whole, logits_of(model, ids, is_captured=False))


@pytest.fixture(scope="module")
def device_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    with ops.using("cuda"):
        return make_world("llama", tmp_path_factory.mktemp("device"))


WAYS = [Way("none", 512, 8), Way("ngram", 7, 1), Way("right", 64, 8), Way("half", 512, 64), Way("ends", 7, 8)]
WAYS += [Way("random", 64, 1)]


@pytest.fixture(scope="module")
def cases(world: World) -> list[tuple[Case, Outcome]]:
    """Short ones; log-probabilities have other last bits on another device."""
    chosen = [case for case in CASES if IS_WHOLE or case.name in NAMES]
    params = [replace(case.params, max_new_tokens=min(case.params.max_new_tokens, 8)) for case in chosen]
    short = [replace(case, prompt=case.prompt[:9], params=own) for case, own in zip(chosen, params, strict=True)]
    outcomes = all_by_definition(world, short)
    return [(case, replace(outcome, logprobs=None)) for case, outcome in zip(short, outcomes, strict=True)]


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_answers_are_what_the_definition_says(device_world: World, cases: list[tuple[Case, Outcome]], way: Way) -> None:
    index = WAYS.index(way)
    for case, outcome in cases if IS_WHOLE else [cases[index % len(cases)]]:
        result = run_alone(device_world, case, way, outcome.token_ids)
        assert replace(Outcome.of(result), logprobs=None) == outcome, f"{case.name}: {way}"


def test_rows_in_company_say_what_they_say_alone(device_world: World, cases: list[tuple[Case, Outcome]]) -> None:
    chosen, outcomes = zip(*cases[:3], strict=True)
    results = run_batch(device_world, chosen, WAYS[3], 2, [outcome.token_ids for outcome in outcomes])
    assert [replace(Outcome.of(result), logprobs=None) for result in results] == list(outcomes)


@pytest.fixture
def runner(device_world: World, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(sampled, "GROUP", 2)
    return make_runner(device_world, Way(), capacity=64, num_slots=2, step_tokens=16)


def prefilled(runner: Runner, params: SamplingParams, count: int, other: SamplingParams | None = None) -> SampledStep:
    """Return a step of two rows of three tokens and room for `count` more."""
    columns = SamplingColumns.of([params, other or params], 256, num_prompt_tokens=[3, 3])
    for slot in range(2):
        runner.extend(slot, [5 + slot, 6, 7])
        runner.cache.reserve(slot, count)
    return SampledStep([Chunk(slot, [8]) for slot in range(2)], [3, 3], columns)


def test_a_multi_step_ends_when_every_row_has_met_a_stop_id(runner: Runner) -> None:
    step = prefilled(runner, SamplingParams(temperature=0), 6)
    first, second = runner.multi_step(step, 5).token_ids
    assert len(first) == len(second) == 5
    stop_ids = {first[0], second[2]}
    ends = [next(i for i, token_id in enumerate(ids) if token_id in stop_ids) for ids in (first, second)]
    found, times, _ = runner.multi_step(step, 6, stop_ids)
    assert found == [ids[: max(ends) + 1] for ids in (first, second)]
    assert len(times) == max(ends) + 1


def test_a_multi_step_that_is_interrupted_ends_with_the_groups_that_are_under_way(runner: Runner) -> None:
    step = prefilled(runner, SamplingParams(temperature=0), 6)
    found = runner.multi_step(step, 6, interrupt=Interrupt(1)).token_ids
    assert list(map(len, found)) == [4, 4]


def test_a_row_that_fails_ends_a_multi_step_with_its_code(runner: Runner) -> None:
    banned = SamplingParams(temperature=0, allowed_token_ids=[5], logit_bias={5: -float("inf")})
    step = prefilled(runner, banned, 3)
    assert runner.multi_step(step, 3).token_ids == [[-2], [-2]]


def test_log_probabilities_come_with_several_steps_as_one_by_one(device_world: World, runner: Runner) -> None:
    """This is so for raw logits and for processed ones."""
    params = SamplingParams(temperature=0.8, top_k=9, seed=1, logprobs=2, repetition_penalty=1.2)
    found = list[tuple[list[list[int]], list[list[TokenLogprob]]]]()
    for each in (runner, make_runner(device_world, Way(capture=False), capacity=64, num_slots=2, step_tokens=16)):
        step = prefilled(each, params, 3, replace(params, logprobs_mode="processed"))
        history = History(2, 64, 256)
        for slot in range(2):
            history.begin(slot, [5 + slot, 6, 7, 8], 3)
        if each is runner:
            token_ids, _, logprobs = each.multi_step(step._replace(history=history), 3)
            found.append((token_ids, logprobs))
            continue
        found.append(([[], []], [[], []]))
        for index in range(3):
            sampled = each.launch(step._replace(starts=[3 + index] * 2, history=history)).wait()
            for slot in range(2):
                found[-1][0][slot] += sampled.token_ids[slot]
                found[-1][1][slot] += sampled.logprobs[slot]
                each.commit(slot, 1)
            chunks = [Chunk(slot, token_ids[-1:]) for slot, token_ids in enumerate(sampled.token_ids)]
            step = step._replace(chunks=chunks)
    assert found[0] == found[1]
    assert list(map(len, found[0][1])) == [3, 3]


@pytest.mark.slow(rest=0)
def test_a_step_of_many_tokens_and_more_than_64_rows_has_the_bits_of_smaller_steps(device_world: World) -> None:
    """Prompts are computed beside 66 rows of one token, and then some rows are computed alone."""
    assert device_world.model.step_limits == (8192, 512)
    lengths = [78 if IS_WHOLE else 8] * 6 + [1] * 66  # as a whole more than 512 tokens
    whole, alone = (Runner(device_world.model, 80, num_slots=72, capture=False) for _ in range(2))
    chunks = [Chunk(slot, random_ids(length, seed=slot)) for slot, length in enumerate(lengths)]
    for slot, token_ids, *_ in chunks:
        whole.cache.reserve(slot, len(token_ids))
    found = whole.forward(chunks)
    for slot in (5, 71):
        assert torch.equal(found[slot : slot + 1], alone.append(slot, chunks[slot].token_ids, 1)), slot
