"""The costs of steps are learnt from steps of every kind, on an idle or a busy machine."""

import random
from collections.abc import Iterator
from itertools import product

import pytest

from infer.engine.step.step_costs import StepCosts, StepWork, context_of

TRUE = (2e-3, 3e-4, 4e-4, 1e-5)


def seconds_of(work: StepWork) -> float:
    return sum(cost * feature for cost, feature in zip(TRUE, work.features, strict=True))


def steps(draw: random.Random, count: int) -> Iterator[StepWork]:
    """Yield steps of 1 to 8 sequences after 10 to 4,000 positions, some with a chunk of a prompt."""
    for _ in range(count):
        num = draw.randint(1, 8)
        context = sum(draw.randint(10, 4000) for _ in range(num))
        tokens = draw.choice([0, 0, 0, 16, 64, 200])
        yield StepWork(num + (tokens > 0), num + tokens, context + context_of(tokens, draw.randint(0, 4000)))


def test_the_context_of_a_chunk_is_the_sum_of_its_positions() -> None:
    for count, start in ((1, 0), (1, 7), (5, 0), (16, 100)):
        assert context_of(count, start) == sum(range(start, start + count))


@pytest.mark.parametrize("seed", range(8))
def test_costs_are_found_despite_noise_and_delayed_steps(seed: int) -> None:
    draw, costs = random.Random(seed), StepCosts()
    for work in steps(draw, 300):
        held_up = 10 if draw.random() < 0.05 else 1
        costs.learn(work, seconds_of(work) * draw.lognormvariate(0, 0.05) * held_up)
    errors = [costs.predict(work) / seconds_of(work) for work in steps(draw, 100)]
    assert sorted(errors)[5] > 0.8
    assert sorted(errors)[-5] < 1.25
    assert sorted(costs.ratios)[len(costs.ratios) // 2] == pytest.approx(1, abs=0.1)


def test_a_machine_that_becomes_slower_is_followed_within_some_steps() -> None:
    draw, costs = random.Random(1), StepCosts()
    for work in steps(draw, 100):
        costs.learn(work, seconds_of(work))
    for work in steps(draw, 30):
        costs.learn(work, 2 * seconds_of(work))
    errors = [costs.predict(work) / seconds_of(work) for work in steps(draw, 50)]
    assert 1.5 < sorted(errors)[25] < 2.3


@pytest.mark.parametrize("seed", range(4))
def test_many_equal_steps_do_not_change_the_cost_of_a_sequence(seed: int) -> None:
    """A prompt of 8,000 tokens is read beside four streams. A token in small chunks costs more than in large ones."""
    draw, costs, single = random.Random(seed), StepCosts(), StepWork(4, 4, 2000)
    for work in steps(draw, 100):
        costs.learn(work, seconds_of(work) * draw.lognormvariate(0, 0.05))
    for start in range(0, 8000, 10):
        work = StepWork(5, 5 + 10, 2000 + context_of(11, start))
        costs.learn(work, draw.choice([1.5, 1.8]) * seconds_of(work))
    assert costs.predict(single) == pytest.approx(seconds_of(single), rel=0.2)


def test_one_delayed_step_changes_nothing_and_a_second_one_does() -> None:
    costs, work = StepCosts(), StepWork(1, 1, 100)
    for seconds in (*[0.003] * 20, 5.0):
        costs.learn(work, seconds)
    assert costs.predict(work) == pytest.approx(0.003, rel=0.01)
    costs.learn(work, 5.0)
    assert costs.predict(work) > 0.0032


def test_tokens_in_is_the_inverse_of_predict() -> None:
    draw, costs = random.Random(2), StepCosts()
    assert costs.tokens_in(1.0, 0) == 0
    for work in steps(draw, 300):
        costs.learn(work, seconds_of(work))
    for seconds, start in product((0.01, 0.03, 0.1), (0, 1000, 7000)):
        count = costs.tokens_in(seconds, start)
        spent = costs.predict(StepWork(1, 1 + count, context_of(count, start))) - costs.predict(StepWork(1, 1, 0))
        assert spent == pytest.approx(seconds, rel=0.1)


def test_invalid_times_are_not_learnt() -> None:
    costs = StepCosts()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        costs.learn(StepWork(1, 1, 0), seconds)
    assert (costs.num_steps, costs.predict(StepWork(1, 1, 0))) == (0, 0)
