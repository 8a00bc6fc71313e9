"""Pooling: the states of a text's tokens become one vector, independent of how the text was divided into parts."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.outputs import Pooling


@final
class PooledStates:
    """The vectors of texts, in float64. Each is summed token by token, so its bits do not depend on the parts."""

    def __init__(self, pooling: Pooling, num_texts: int, size: int, num_skipped: Sequence[int] = ()) -> None:
        """Begin without states. `num_skipped` is the number of first tokens of each text to skip; () skips none."""
        self._pooling = pooling
        first = -torch.inf if pooling == "max" else 0.0
        self._vectors = torch.full((num_texts, size), first, dtype=torch.float64)
        self._num_skipped = list(num_skipped) or [0] * num_texts
        self._num_tokens = [0] * num_texts

    def add(self, text: int, states: Float[Tensor, "tokens size"]) -> None:
        """Pool the states of the next tokens of a text."""
        first, num_skipped = self._num_tokens[text], self._num_skipped[text]
        self._num_tokens[text] += len(states)
        vector, start = self._vectors[text], max(num_skipped - first, 0)
        if self._pooling == "last":
            start = len(states) - 1
        last = start + 1 if self._pooling in ("cls", "last") else len(states)
        for place, state in enumerate(states[start:last].double(), first + start):
            match self._pooling:
                case "mean" | "mean_sqrt_len":
                    vector += state
                case "weightedmean":
                    vector += state * (place + 1)
                case "max":
                    torch.maximum(vector, state, out=vector)
                case "last":
                    vector[:] = state
                case "cls" if place == num_skipped:
                    vector[:] = state

    def vectors(self) -> Float[Tensor, "texts size"]:
        """Return the vectors of texts whose tokens have all been added."""
        counts = zip(self._num_skipped, self._num_tokens, strict=True)
        match self._pooling:
            case "mean":
                divisors = [float(total - skipped) for skipped, total in counts]
            case "mean_sqrt_len":
                divisors = [float(total - skipped) ** 0.5 for skipped, total in counts]
            case "weightedmean":
                divisors = [float(sum(range(skipped + 1, total + 1))) for skipped, total in counts]
            case _:
                return self._vectors
        return self._vectors / torch.tensor(divisors, dtype=torch.float64).reshape(-1, 1)
