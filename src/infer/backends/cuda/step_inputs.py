"""A step's numbers on the device, where recordings read them, and their mirror on the host: one copy a step."""

from itertools import pairwise
from typing import final

import torch

from infer.backends.cuda.graphs import Graphs
from infer.operands.step import Step

NONE = -1  # the row of a token that is none


@final
class StepInputs:
    """Tokens, positions, rows and logit indices, one after the other as the bucket of a step has them."""

    def __init__(self, capacity: int, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        size = 3 * capacity + max_logits
        self._mirror, self._copied = graphs.mirror(size), graphs.event()
        self._words, self._device = self._mirror.numpy(), torch.zeros(size, dtype=torch.int64, device=device)

    def step(self, num_tokens: int, num_logits: int) -> Step:
        """What a recording reads: `fill` changes it."""
        return Step(*(self._device[part] for part in _parts(num_tokens, num_logits)), is_recorded=True)

    def fill(self, step: Step, num_tokens: int, num_logits: int) -> None:
        """A step of no more tokens and logits; the others are none."""
        self._copied.synchronize()  # what was copied last: the mirror is free
        values = (step.tokens, step.positions, step.rows, step.logit_indices)
        for part, mine, rest in zip(_parts(num_tokens, num_logits), values, (0, 0, NONE, 0), strict=True):
            words = self._words[part]
            words[: len(mine)], words[len(mine) :] = mine.numpy(), rest
        size = 3 * num_tokens + num_logits
        self._device[:size].copy_(self._mirror[:size], non_blocking=True)
        self._copied.record()

    def clear(self, num_tokens: int, num_logits: int) -> None:
        """No token at all: a step that changes nothing."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self.fill(Step(nothing, nothing, nothing, nothing), num_tokens, num_logits)


def _parts(num_tokens: int, num_logits: int) -> list[slice]:
    ends = [num_tokens, 2 * num_tokens, 3 * num_tokens, 3 * num_tokens + num_logits]
    return [slice(start, end) for start, end in pairwise([0, *ends])]
