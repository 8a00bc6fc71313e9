"""A step's numbers on the device, where recordings read them, and their mirror on the host: one copy per step."""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from infer.compute.backends.cuda.graphs import Graphs
from infer.compute.operands.step import Step

NONE = -1  # the id and the row of a token that is none, and the index of its logits


@final
class StepInputs:
    """Tokens, positions, rows and logit indices, one after the other, each as long as the step's bucket."""

    def __init__(self, capacity: int, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        size = _parts(capacity, max_logits)[-1].stop
        self._graphs, self._mirror, self._copied = graphs, graphs.mirror(size), graphs.event()
        self._capacity = capacity
        self._words, self._device = self._mirror.numpy(), torch.zeros(size, dtype=torch.int64, device=device)

    @property
    def tokens(self) -> Tensor:
        """Memory that every step's tokens begin in. The numbers after the tokens are −1 or more."""
        return self._device[: self._capacity]

    def step(self, num_tokens: int, num_logits: int) -> Step:
        """Return the step that a recording reads. `fill` changes its contents."""
        return Step(*(self._device[part] for part in _parts(num_tokens, num_logits)), is_recorded=True)

    def fill(self, step: Step, num_tokens: int, num_logits: int) -> None:
        """Copy a step of at most this many tokens and logits to the device. The rest is padding."""
        self._copied.synchronize()  # what was copied last: the mirror is free
        values = (step.tokens, step.positions, step.rows, step.logit_indices)
        for part, mine, rest in zip(_parts(num_tokens, num_logits), values, (NONE, 0, NONE, NONE), strict=True):
            words = self._words[part]
            words[: len(mine)], words[len(mine) :] = mine.numpy(), rest
        size = _parts(num_tokens, num_logits)[-1].stop
        self._graphs.copy(self._device[:size], self._mirror[:size])
        self._copied.record()

    def clear(self, num_tokens: int, num_logits: int) -> None:
        """Fill the step with padding tokens only, so that it has no effect."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self.fill(Step(nothing, nothing, nothing, nothing), num_tokens, num_logits)


def _parts(num_tokens: int, num_logits: int) -> list[slice]:
    return aligned_parts([num_tokens] * 3 + [num_logits])


def aligned_parts(sizes: Sequence[int]) -> list[slice]:
    """Return slices of an int64 tensor. Each begins at a multiple of 16 bytes, else Triton compiles a kernel again."""
    starts = accumulate((size + size % 2 for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
