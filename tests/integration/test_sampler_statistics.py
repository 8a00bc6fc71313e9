"""The distribution of sampled tokens: 200,000 draws per configuration, pairs, and millions of draws without a fault.

Every check fails by chance with a probability of at most FALSE_ALARM, all of them together of less than 1e-4. Seeds are
fixed, so that a pass is repeatable. No model is needed: these tests are here because they take a minute.
"""

import numpy as np
import pytest
import torch

import sampling_statistics
from extent import IS_SHORT, usual_or_all
from infer.compute import ops
from infer.compute.sampling.columns import SamplingColumns
from infer.sampling_params import SamplingParams
from sampling_cases import make_logits
from sampling_statistics import CONFIGURATIONS, draw_tokens, exact_distribution, goodness_of_fit

pytestmark = pytest.mark.slow(cases=1)

FALSE_ALARM = 1e-6
NUM_SEEDS, NUM_POSITIONS = 4000, 50  # 200,000 draws
RANGES = {"temperature": (0.3, 2), "top_p": (0.3, 1), "min_p": (0, 0.3), "repetition_penalty": (0.7, 1.8)}
RANGES |= {"frequency_penalty": (-1, 1), "presence_penalty": (-1, 1)}


@pytest.mark.slow(cases=1, rest=4)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_200_000_draws_follow_the_exact_distribution(name: str) -> None:
    logits, values = make_logits("normal", 50, 1) / 2, CONFIGURATIONS[name]
    probabilities = exact_distribution(logits, values)
    tokens = draw_tokens(logits, values, NUM_SEEDS, NUM_POSITIONS)
    assert goodness_of_fit(tokens, probabilities) > FALSE_ALARM
    bound = sampling_statistics.total_variation_bound(probabilities, tokens.size, FALSE_ALARM)
    assert sampling_statistics.total_variation(tokens, probabilities) < bound


@pytest.mark.slow(cases=2)
def test_rows_of_different_configurations_in_one_batch_follow_each_its_own() -> None:
    """One batch has 8 configurations without history × 500 seeds × 50 positions, interleaved."""
    history = {"repetition_penalty", "frequency_penalty"}
    free = {name: values for name, values in CONFIGURATIONS.items() if history.isdisjoint(values)}
    free["greedy"] = {"temperature": 0.0}
    logits = {name: make_logits("normal", 50, seed) / 2 for seed, name in enumerate(free)}
    params = [SamplingParams(seed=seed, **values) for seed in range(500) for values in free.values()]
    columns = SamplingColumns.of(params, 50)
    batch = torch.stack([logits[name] for _ in range(500) for name in free])
    found = np.stack(
        [ops.choose_tokens(batch, columns, None, torch.full((len(columns),), p)).numpy() for p in range(50)]
    )
    for index, (name, values) in enumerate(free.items()):
        tokens = found[:, index :: len(free)]
        if name == "greedy":
            assert (tokens == int(logits[name].argmax())).all()
        else:
            assert goodness_of_fit(tokens, exact_distribution(logits[name], values)) > FALSE_ALARM / len(free)


@pytest.mark.slow
def test_random_configurations_follow_their_distributions() -> None:
    """Each has 20,000 draws of the CPU's sampler."""
    random = np.random.default_rng(5)
    for index in range(usual_or_all(40, 200)):
        choices = {name: float(random.uniform(*ends)) for name, ends in RANGES.items()}
        choices |= {"top_k": int(random.integers(2, 31)), "temperature_last": True}
        choices["logit_bias"] = {int(i): float(random.normal()) for i in random.integers(0, 30, 3)}
        values = {name: value for name, value in choices.items() if random.random() < 0.4}
        logits = make_logits("normal", 30, index) / 2
        tokens = draw_tokens(logits, values, 2000, 10, first_seed=index * 7919)
        assert goodness_of_fit(tokens, exact_distribution(logits, values)) > FALSE_ALARM / 200, values


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_neighbouring_positions_rows_and_seeds_are_independent(name: str) -> None:
    logits, values = make_logits("normal", 16, 3) / 4, CONFIGURATIONS[name]
    values = {knob: value for knob, value in values.items() if knob != "logit_bias"}
    probabilities = exact_distribution(logits, values)
    tokens = draw_tokens(logits, values, 4001, 51)
    pairs = {
        "positions": (tokens[:, :-1], tokens[:, 1:]),
        "seeds": (tokens[:-1], tokens[1:]),
        "seed + 1 at position − 1": (tokens[:-1, 1:], tokens[1:, :-1]),
        "seed + 1 at position + 1": (tokens[:-1, :-1], tokens[1:, 1:]),
        "two positions apart": (tokens[:, :-2], tokens[:, 2:]),
        "seed + 2³²": (tokens, draw_tokens(logits, values, 4001, 51, first_seed=2**32)),
    }
    for name, (first, second) in pairs.items():
        assert sampling_statistics.independence(first, second, probabilities) > FALSE_ALARM / len(pairs), name


def test_no_draw_gives_a_forbidden_token() -> None:
    """Ban tokens with most of the probability: the largest logits are banned by bias, the next by the mask, the
    others by top-k and top-p.
    """
    logits = torch.tensor([9.0, 8.0, 7.0, 2.0, 1.9, 1.8, 1.7, 0.0, -1.0, -40.0, 1.75, 1.6])
    values = {"temperature": 2.0, "logit_bias": {0: -np.inf, 1: -np.inf}, "top_k": 6, "top_p": 0.9}
    params = SamplingParams(seed=0, allowed_token_ids=[i for i in range(12) if i != 2], **values)  # type: ignore[arg-type]
    num_rows, num_calls = 4_000 if IS_SHORT else 20_000, usual_or_all(50, 500)
    columns = SamplingColumns.of([params] * num_rows, 12)
    columns.seed.copy_(torch.arange(num_rows))
    batch = logits.expand(num_rows, -1).contiguous()
    counts = torch.zeros(12, dtype=torch.int64)
    for position in range(num_calls):
        tokens = ops.choose_tokens(batch, columns, None, torch.full((num_rows,), position))
        counts += torch.bincount(tokens, minlength=12)
    assert int(counts.sum()) == num_rows * num_calls
    allowed = exact_distribution(logits, values | {"allowed_token_ids": [i for i in range(12) if i != 2]}) > 0
    assert set(counts.nonzero()[:, 0].tolist()) == set(allowed.nonzero()[0].tolist())
