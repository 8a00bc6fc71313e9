"""Many draws in one batch, the distribution that they should follow, and tests with known rates of false alarms.

The exact distribution is computed here a second time, in numpy's float64 and by its definition. It uses neither the
reference nor the batched sampler.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats

from infer.compute import ops
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.sampling_params import SamplingParams

INF = np.inf
CONTEXT, NUM_PROMPT_TOKENS = (0, 1, 6, 2, 7, 7, 6), 3  # logits of both signs, in the tests' rows

EVERYTHING = {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "logit_bias": {2: 1.5, 11: -INF}}
EVERYTHING |= {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1}
# Parameters of a user: each one separately, and all together.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    "window": {"repetition_penalty": 2.0, "repetition_window": 4},
    "bias and mask": {"logit_bias": {3: 2.0, 4: -INF, 20: -1.0}, "allowed_token_ids": range(2, 30)},
    "temperature last": {"temperature": 1.7, "top_p": 0.7, "temperature_last": True},
    "everything": EVERYTHING,
}


def exact_distribution(logits: torch.Tensor, values: Mapping[str, Any]) -> np.ndarray:
    """Return the probabilities of the tokens after CONTEXT."""
    x = logits.double().numpy().copy()
    for token_id in set(range(len(x))) - set(values.get("allowed_token_ids") or range(len(x))):
        x[token_id] = -INF
    for token_id, bias in (values.get("logit_bias") or {}).items():
        x[token_id] += bias
    window = values.get("repetition_window")
    for token_id in set(CONTEXT if window is None else CONTEXT[len(CONTEXT) - window :]):
        penalty = values.get("repetition_penalty", 1.0)
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id, count in Counter(CONTEXT[NUM_PROMPT_TOKENS:]).items():
        x[token_id] -= values.get("frequency_penalty", 0.0) * count + values.get("presence_penalty", 0.0)
    temperature, is_last = values.get("temperature", 1.0), values.get("temperature_last", False)
    x = x if is_last else x / temperature
    order = np.argsort(-x, kind="stable")
    x[order[values.get("top_k") or len(x) :]] = -INF
    reached = np.cumsum(softmax(x)[order]) >= values.get("top_p", 1.0) - 1e-7
    x[order[np.argmax(reached) + 1 :]] = -INF
    probabilities = softmax(x)
    x[probabilities < values.get("min_p", 0.0) * probabilities.max()] = -INF
    return softmax(x / temperature if is_last else x)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())


def draw_tokens(
    logits: torch.Tensor,
    values: Mapping[str, Any],
    num_seeds: int,
    num_positions: int,
    first_seed: int = 0,
) -> np.ndarray:
    """Return tokens[seed, position], with one row per seed and one call per position."""
    prompts = [NUM_PROMPT_TOKENS] * num_seeds
    columns = SamplingColumns.of([SamplingParams(seed=0, **values)] * num_seeds, len(logits), num_prompt_tokens=prompts)
    columns.seed.copy_(torch.arange(first_seed, first_seed + num_seeds))
    history = None
    if columns.has_penalty:
        history = History(num_seeds, len(CONTEXT), len(logits))
        history.begin(0, CONTEXT, NUM_PROMPT_TOKENS)
        for table in (history.tokens, history.last, history.counts):
            table.copy_(table[:1].expand_as(table).clone())
        history.lengths.fill_(len(CONTEXT))
        history.num_prompt_tokens.fill_(NUM_PROMPT_TOKENS)
    batch = logits.expand(num_seeds, -1).contiguous()
    tokens = [
        ops.choose_tokens(batch, columns, history, torch.full((num_seeds,), position)).numpy()
        for position in range(len(CONTEXT), len(CONTEXT) + num_positions)
    ]
    return np.stack(tokens, axis=1)


def goodness_of_fit(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square, 0 if an impossible token was drawn. Rare tokens are one cell."""
    counts = np.bincount(tokens.reshape(-1), minlength=len(probabilities))
    if len(counts) > len(probabilities) or counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * tokens.size
    is_rare = expected < 10
    found = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    found, expected = found[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    return float(stats.chi2.sf(((found - expected) ** 2 / expected).sum(), len(expected) - 1))


def total_variation(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    counts = np.bincount(tokens.reshape(-1), minlength=len(probabilities))
    return float(np.abs(counts / tokens.size - probabilities).sum() / 2)


def total_variation_bound(probabilities: np.ndarray, num_draws: int, false_alarm: float) -> float:
    """Return a bound that is exceeded with at most this probability.

    The mean is at most ½ √(K / N), and McDiarmid's inequality bounds the distance from the mean.
    """
    num_possible = int((probabilities > 0).sum())
    return float(np.sqrt(num_possible / num_draws) / 2 + np.sqrt(np.log(1 / false_alarm) / (2 * num_draws)))


def independence(first: np.ndarray, second: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the p-value of the claim that pairs of tokens are drawn independently, each from the distribution."""
    size = len(probabilities)
    return goodness_of_fit(
        first.reshape(-1) * size + second.reshape(-1), np.outer(probabilities, probabilities).ravel()
    )
