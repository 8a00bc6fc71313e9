"""A forward recorded once as a list of launches on an in-order queue, and run for any step.

Kernels read the step's arrays and counts from fixed slots in memory that host and device share; how many work items
there are is told when a launch is enqueued. What is sampled after is the CPU's sampler, on the same memory.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.backends.base import Forward, Recorded
from infer.backends.opencl.launches import record
from infer.backends.opencl.runtime import Runtime
from infer.operands.step import Step


@final
class RecordedForward(Recorded):
    """Recorded for up to `capacity` tokens at once; longer steps run in pieces."""

    def __init__(self, runtime: Runtime, forward: Forward, capacity: int, max_logits: int) -> None:
        with record(runtime, capacity, max_logits) as self._recording:
            self._logits = forward(self._recording.step)
        self.capacity, self.max_logits = capacity, max_logits

    @property
    def num_launches(self) -> int:
        """Of a step with logits."""
        return len(self._recording.launches)

    def run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        pieces = []
        for piece in step.pieces(self.capacity, self.max_logits):
            self._fill(piece)
            self._recording.execute(len(piece.tokens), len(piece.logit_indices))
            pieces.append(self._logits[: len(piece.logit_indices)])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _fill(self, step: Step) -> None:
        slots = self._recording.step
        for slot, values in (
            (slots.tokens, step.tokens),
            (slots.positions, step.positions),
            (slots.rows, step.rows),
            (slots.logit_indices, step.logit_indices),
        ):
            slot.numpy()[: len(values)] = values.numpy()
