"""Drafts of a model's own head: tokens that are those without drafts, however its states are kept and lost."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_trials import always_drafting, check_equal, drafted, headed_world, make_engine, plain_sequence, step_all
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Chunk
from infer.engine.runner.token_states import TokenStates
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.step.model_drafter import FIRST_TOKENS, ModelDrafter
from infer.sampling_params import SamplingParams
from path_cases import CASES, VOCAB_SIZE, Case, varied_ids

NAMES = ("states", "sigmoids")
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def _without_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "confidence", lambda drafter, slot: 0)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_without_drafts(name: str, num_slots: int) -> None:
    """Every sampler with every grammar: stops, penalties, log-probabilities. With one slot and with three."""
    world, head, _ = headed_world(name)
    some = CASES[::2] if num_slots > 1 else CASES[::3]
    with always_drafting():
        results = drafted(world, head, some, num_slots)
    check_equal(world, some, results)
    assert sum(result.stats.drafts_proposed for result in results) > 20
    assert sum(result.stats.drafts_accepted for result in results) > 0


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_published_equations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place of a text, with steps between that accept drafts. A guess has nearly the largest logit."""
    world, head, published = headed_world(name)
    made, draft = list[tuple[list[int], int, list[int]]](), ModelDrafter._draft

    def note(drafter: ModelDrafter, pending: Mapping[int, Sequence[int]], count: int) -> None:
        draft(drafter, pending, count)
        made.extend(
            (list(row.token_ids), row.start or 0, row.guesses) for row in (drafter._rows[slot] for slot in pending)
        )

    monkeypatch.setattr(ModelDrafter, "_draft", note)
    some = [Case(str(length), tuple(varied_ids(length)), GREEDY) for length in (2, 30, FIRST_TOKENS + 20)]
    with always_drafting():
        check_equal(world, some, drafted(world, head, some, 3))
    assert len(made) > 40
    assert max(len(guesses) for _, _, guesses in made) > 2
    for token_ids, start, guesses in made:
        _check_guesses(published, token_ids, start, guesses)


@torch.inference_mode()
def _check_guesses(published: Any, token_ids: list[int], start: int, guesses: list[int]) -> None:
    read, states = token_ids[start:], published.states(token_ids)[start - 1 : -1]
    for guess in guesses:
        logits, own = published(read, states)
        last = logits[-1, :VOCAB_SIZE]
        assert last[guess] > last.max() - 0.02 * last.abs().max()
        read, states = [*read, guess], torch.cat([states, own[-1:]])


@pytest.mark.parametrize("settings", [None, CacheSettings(reuse_prefixes=True)])
def test_preempted_sequences_and_chunks_of_prompts_keep_the_right_states(settings: CacheSettings | None) -> None:
    """With shared prefixes, a sequence begins after tokens whose states nobody has."""
    world, head, _ = headed_world("states")
    world = replace(world, settings=settings)
    some = [Case(str(length), tuple(varied_ids(length)), GREEDY) for length in (5, 40, 110)]
    with always_drafting():
        engine, drafter = make_engine(world, head, 3)
        waiting = [plain_sequence(world, case) for case in some]
        for sequence in waiting:
            options = replace(sequence.request.options, prefill_chunk=16)
            sequence.request = replace(sequence.request, options=options)
            engine.submit(sequence)
        step_all(engine, drafter)
    check_equal(world, some, [sequence.result() for sequence in waiting])
    assert sum(sequence.stats.preemptions for sequence in waiting) > 2
    assert not any(drafter.runner.lengths)


def test_states_are_kept_by_position_and_lost_before_a_gap() -> None:
    """A state is its position here. Steps also have tokens of another slot, and drafts that are not committed."""
    model: Any = SimpleNamespace(final_norm=lambda states: states)
    states, draw, end = TokenStates(model, 5), random.Random(1), 0
    states.begin(3)
    for _ in range(200):
        if draw.random() < 0.1:
            end += 2  # tokens of a multi-step, or of a prefix that another slot computed
        count = draw.randint(1, 9)
        rows = [-1, -1, *range(end, end + count)]
        states.expect([Chunk(0, [1, 1]), Chunk(3, [1] * count)])
        states._residual = torch.tensor(rows, dtype=torch.float32)[:, None]
        num_right = draw.randint(1, count)
        states.keep(3, end, num_right)
        end += num_right
        assert states.end(3) == end
        assert end - min(5, num_right) >= states.first(3) >= end - 13
        for start in range(states.first(3), end):
            assert states.of(3, start, end)[:, 0].tolist() == list(range(start, end))
