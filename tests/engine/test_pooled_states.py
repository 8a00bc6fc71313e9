"""Pooling: each kind by its formula, in any parts, with and without the tokens of a prompt."""

from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from infer.engine.texts.pooled_states import PooledStates
from infer.outputs import Pooling

FORMULAS: dict[Pooling, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda states, skipped: states[skipped:].mean(0),
    "mean_sqrt_len": lambda states, skipped: states[skipped:].sum(0) / (len(states) - skipped) ** 0.5,
    "max": lambda states, skipped: states[skipped:].amax(0),
    "weightedmean": lambda states, skipped: _weighted(states, torch.arange(1, len(states) + 1), skipped),
    "cls": lambda states, skipped: states[skipped],
    "last": lambda states, skipped: states[-1],
}
LENGTHS = (1, 7, 12)


def _weighted(states: Tensor, weights: Tensor, skipped: int) -> Tensor:
    return (states * weights[:, None])[skipped:].sum(0) / weights[skipped:].sum()


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("skipped", [(), (0, 3, 11)])
def test_a_vector_has_its_formula_and_the_same_bits_in_any_parts(pooling: Pooling, skipped: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    texts = [torch.randn(length, 8) for length in LENGTHS]
    whole = PooledStates(pooling, len(texts), 8, skipped)
    for index, states in enumerate(texts):
        whole.add(index, states)
    expected = [FORMULAS[pooling](states.double(), (skipped or (0, 0, 0))[at]) for at, states in enumerate(texts)]
    torch.testing.assert_close(whole.vectors(), torch.stack(expected))
    for length in (1, 2, 5):
        parts = PooledStates(pooling, len(texts), 8, skipped)
        for start, (index, states) in product(range(0, max(LENGTHS), length), enumerate(texts)):
            if start < len(states):
                parts.add(index, states[start : start + length])
        assert torch.equal(parts.vectors(), whole.vectors())
