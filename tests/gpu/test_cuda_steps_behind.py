"""Steps on the backend for GPUs that are launched before the tokens of the step before them are known.

Triton's interpreter runs the kernels, when a device would have come to them (`deferred_graphs`).
"""

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from extent import usual_or_all
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence
from infer.engine.step.steps import LaunchedStep
from path_cases import CASES, CONTEXT, Case, Outcome, Way, World, make_sequence, make_world

pytest.importorskip("triton", reason="Triton is not installed")

from deferred_graphs import DeferredGraphs, defer
from infer.compute.backends.cuda.sampled import Verifier

pytestmark = pytest.mark.usefixtures("quick_interpreter")
NUM_SEEDS = usual_or_all(1, 30)
FREE = [case for case in CASES if case.name.endswith("free")]  # with every sampler
SETTINGS = CacheSettings(page_tokens=16, reuse_prefixes=True)
PAGES = CONTEXT // 16


@pytest.fixture(scope="module")
def device_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    with ops.using("cuda"):
        return replace(make_world("llama", tmp_path_factory.mktemp("device")), settings=SETTINGS)


def make_engine(world: World, num_slots: int = 5) -> Engine:
    runner = Runner(world.model, CONTEXT, num_slots=num_slots, settings=world.settings, pool_pages=PAGES)
    return Engine(runner, max_steps=1)


def drawn_cases(draw: random.Random) -> list[Case]:
    """Return prompts in several chunks, of which some begin alike, with any sampler."""
    shared, cases = tuple(draw.choices(b"abc ", k=17)), list[Case]()
    for number in range(5):
        case = draw.choice(FREE)
        prompt = (*shared[: draw.choice((0, 17))], *draw.choices(b"abc ", k=draw.randint(1, 12)))
        params = replace(case.params, max_new_tokens=draw.randint(max(1, case.params.min_new_tokens), 9))
        cases.append(Case(f"{number}: {case.name}", prompt, params))
    return cases


def answers(world: World, cases: Items[Case], draw: random.Random, *, disturbed_at: int | None) -> list[Sequence]:
    """Submit the answers at random steps. At one step, cancel the last answer, and preempt another one."""
    engine = make_engine(world)
    waiting = [make_sequence(world, case, Way(chunk=7)) for case in cases]
    asked, num_steps = list(waiting), 0
    while waiting or engine.sequences:
        if waiting and draw.random() < 0.5:
            engine.submit(waiting.pop(0))
        engine.step()
        num_steps += 1
        if num_steps == disturbed_at:
            engine.cancel(asked[-1])
            for sequence in [each for each in engine._slots.sequences if each is not asked[-1]][:1]:
                engine._slots.preempt(sequence)
        engine.runner.cache.check_integrity()
    return asked


class Behind:
    """Counts the steps that were launched behind others, and the others of these that had not run yet."""

    def __init__(self, patch: pytest.MonkeyPatch, graphs: DeferredGraphs) -> None:
        self.num_launched = self.num_before_others_ran = 0
        take = Verifier.take_sampled

        def count(verifier: Verifier, behind: Any, tokens: Tensor) -> None:
            self.num_launched += 1
            self.num_before_others_ran += graphs.num_waiting > 1  # one is the copy of the step's own inputs
            take(verifier, behind, tokens)

        patch.setattr(Verifier, "take_sampled", count)


@pytest.mark.slow(rest=0)
def test_tokens_are_those_of_steps_one_after_the_other(device_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    num_ended = num_launched = num_before_others_ran = num_preempted = 0
    for seed in range(NUM_SEEDS):
        cases = drawn_cases(random.Random(seed))
        with monkeypatch.context() as patch:
            patch.setattr(LaunchedStep, "may_be_followed", False)
            undisturbed = answers(device_world, cases, random.Random(seed), disturbed_at=None)
            expected = [Outcome.of(each.result()) for each in undisturbed]
        with monkeypatch.context() as patch:
            behind = Behind(patch, defer(patch))
            found = answers(device_world, cases, random.Random(seed), disturbed_at=5 + seed)
        num_launched += behind.num_launched
        num_before_others_ran += behind.num_before_others_ran
        for sequence, outcome in zip(found, expected, strict=True):
            if sequence.finish_reason == "abort":
                assert sequence.generated == outcome.token_ids[: len(sequence.generated)]
                continue
            num_ended += 1
            num_preempted += sequence.stats.preemptions
            assert Outcome.of(sequence.result()) == outcome
    assert num_ended >= 4 * NUM_SEEDS
    assert num_launched >= 8 * NUM_SEEDS
    assert num_before_others_ran >= 2 * NUM_SEEDS
    assert num_preempted
