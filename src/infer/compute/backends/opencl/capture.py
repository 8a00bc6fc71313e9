"""A forward recorded once as a list of launches on an in-order queue, and run for any step.

Kernels read the step's arrays and counts from fixed slots, which are copied when a step begins. The number of work
items is set when a launch is enqueued. Rows that are greedy or have only noise are sampled on the device. For all other
rows, the logits are copied to the host and the CPU samples.
"""

import time
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.base import Captured, Forward, Generated, PendingStep, check_multi_step, check_verified
from infer.compute.backends.opencl.launches import record
from infer.compute.backends.opencl.runtime import Runtime
from infer.compute.backends.opencl.sampled import Sampler, is_plain
from infer.compute.operands.step import Chunk, Interrupt, Masks, Step, StepEnd
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError


@final
class CapturedForward(Captured):
    """A forward recorded for up to `capacity` tokens per run; longer steps run in pieces."""

    def __init__(self, runtime: Runtime, forward: Forward, capacity: int, max_logits: int) -> None:
        with record(runtime, capacity, max_logits) as self._recording:
            self._logits = forward(self._recording.step)
        self._forward = list(self._recording.launches)
        self.capacity, self.max_logits = capacity, max_logits
        self._memory = runtime.memory
        self._sampler: Sampler | None = None

    def run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        pieces = []
        for piece in step.pieces(self.capacity, self.max_logits):
            self._fill(piece)
            self._recording.begin(len(piece.tokens), len(piece.logit_indices))
            self._recording.enqueue(self._forward)
            self._memory.to_host(self._logits, 0, len(piece.logit_indices))
            self._memory.finish()
            pieces.append(self._logits[: len(piece.logit_indices)])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def takes(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> bool:
        return self._has_room(chunks) and is_plain(columns) and not any(chunk.num_drafts for chunk in chunks)

    def run_multi_step(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        count: int,
        columns: SamplingColumns,
        history: History | None = None,
        stop_ids: Sequence[int] = (),
        masks: Masks | None = None,
        interrupt: Interrupt | None = None,
    ) -> Generated:
        check_multi_step(chunks, columns)
        self._fill(Step.of_chunks(chunks, starts))
        return self._made_sampler(columns).run_multi_step(count, columns, stop_ids, masks, interrupt)

    def launch(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None = None,
        masks: Masks | None = None,
        behind: PendingStep | None = None,
    ) -> PendingStep:
        check_verified(chunks, columns)
        step = Step.of_chunks(chunks, starts)
        self._fill(step)
        rows = [row for row, chunk in enumerate(chunks) if chunk.has_logits]
        sampled = self._made_sampler(columns).run(columns, rows, len(step.tokens), masks)
        token_ids = dict(zip(rows, sampled, strict=True))
        ended = time.perf_counter()
        found = [[token_ids[row]] if row in token_ids else [] for row in range(len(chunks))]
        return PendingStep.ended(Generated(found, [StepEnd(ended, ended)] if rows else [], [[] for _ in chunks]))

    def profile(self, step: Step) -> list[tuple[str, int]]:
        raise InvalidRequestError("a profile counts the cycles of a CPU's commands: use --device cpu")

    def _made_sampler(self, columns: SamplingColumns) -> Sampler:
        if self._sampler is None:
            self._sampler = Sampler(self._recording, self._logits, columns.vocab_size)
        return self._sampler

    def _fill(self, step: Step) -> None:
        slots = self._recording.step
        for slot, values in (
            (slots.tokens, step.tokens),
            (slots.positions, step.positions),
            (slots.rows, step.rows),
            (slots.logit_indices, step.logit_indices),
        ):
            slot.numpy()[: len(values)] = values.numpy()
