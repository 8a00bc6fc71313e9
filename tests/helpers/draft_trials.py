"""Engines with a draft model that always drafts, whatever it costs, and comparisons of their answers.

A draft model may be the model itself, which is often right, or any other with the same tokens, which seldom is. A head
of random weights is right where noise decides.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import path_cases
from head_models import Head, load_with_head, make_headed
from infer.engine.engine import Engine
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.runner.runner import Runner
from infer.engine.runner.token_states import HeadInput, TokenStates
from infer.engine.speculation.policy import Priors, Stake
from infer.engine.step.model_drafter import FIRST_TOKENS, ModelDrafter
from infer.engine.step.sequence import Sequence as Answering
from infer.outputs import GenerationResult
from looping import loop_of
from path_cases import (
    CONFIGS,
    CONTEXT,
    VOCAB_SIZE,
    Always,
    Case,
    Outcome,
    Way,
    World,
    all_by_definition,
    finish_world,
    make_world,
)
from tiny import Tiny


class Lavish(Always):
    """A policy that always drafts: many, none, one and three tokens in turn."""

    def __init__(self, most: int, priors: Priors) -> None:
        super().__init__()
        self.speed = 1e9 * (1 + priors.is_steady)  # a model drafts before n-grams do

    def observe(self, confidence: int, is_right: bool) -> None:
        pass


@contextmanager
def always_drafting() -> Iterator[None]:
    """Let drafts be made in every step, because tiny models are too fast for drafts to pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.engine.step.drafting.DraftPolicy", Lavish)
        patch.setattr(Stake, "allows", lambda stake, seconds: True)
        patch.setattr(ModelDrafter, "reading_seconds", lambda drafter, slot: 0.0)
        yield


@cache
def drafting_world(name: str) -> World:
    with TemporaryDirectory() as folder:
        return make_world(name, Path(folder))


@cache
def headed_world(name: str) -> tuple[World, World, Head]:
    """Return a world with a head, the head as a world, and both as published."""
    with TemporaryDirectory() as folder:
        head = make_headed(Tiny(name, CONFIGS[name]), Path(folder))
        world = finish_world(Path(folder))
        _, model = load_with_head(Path(folder))
        return world, replace(world, model=model), head


def make_engine(world: World, draft: World, num_slots: int, **options: Any) -> tuple[Engine, ModelDrafter]:
    """Return an engine, and its draft model. `options` are the options of the draft model's runner."""
    own, head_input, states = {"num_slots": num_slots} | options, None, None
    if draft.model.state_input is not None:
        own["states"], states = TokenStates(draft.model, 1), TokenStates(world.model, FIRST_TOKENS)
        head_input = HeadInput(draft.model, states, own["states"])
    drafter = ModelDrafter(Runner(draft.model, own.pop("capacity", CONTEXT), **own), VOCAB_SIZE, head_input)
    runner = Runner(world.model, CONTEXT, num_slots=num_slots, settings=world.settings, states=states)
    return Engine(runner, draft_model=drafter, max_steps=4), drafter


def drafted(
    world: World, draft: World, cases: Sequence[Case], num_slots: int, kinds: Sequence[str | None] = ("draft",)
) -> list[GenerationResult]:
    """Return the answers to all cases, whose requests ask for these kinds of drafts in turn.

    The draft model's rows are empty at the end.
    """
    engine, drafter = make_engine(world, draft, num_slots)
    waiting = [plain_sequence(world, case, kinds[index % len(kinds)]) for index, case in enumerate(cases)]
    ended = dict(answer_all(loop_of(engine), enumerate(waiting), num_slots))
    drafter.runner.cache.check_integrity()
    assert not any(drafter.runner.lengths)
    return [ended[number] for number in range(len(cases))]


def plain_sequence(world: World, case: Case, kind: str | None = "draft") -> Answering:
    """Return a sequence with the policy of the engine."""
    return path_cases.make_sequence(world, case, Way("adaptive"), speculation=kind)


def check_equal(world: World, cases: Sequence[Case], results: Sequence[GenerationResult]) -> None:
    """Compare answers with those by definition, which nobody drafted."""
    expected = all_by_definition(world, cases)
    different = [case.name for case, own, out in zip(cases, results, expected, strict=True) if Outcome.of(own) != out]
    assert not different


def step_all(engine: Engine, drafter: ModelDrafter) -> None:
    """Run all steps. After a fifth of them, at random, a sequence loses its slot."""
    draw = random.Random(3)
    while engine.step():
        drafter.runner.cache.check_integrity()
        if draw.random() < 0.2:
            engine._slots.preempt_one(spares_last=True)
