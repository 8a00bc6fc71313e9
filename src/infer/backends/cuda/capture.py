"""A forward recorded for steps of 1, 2, 4, 8 … tokens and logits. Each size is recorded when it first occurs.

A recording reads its step from `StepInputs`. If the step is shorter than the recording, the rest are padding tokens
with id and row −1. They have no effect. They are embedded as NaN, which their products pass on without reading a
weight. Every kernel computes a token in the same order, whatever its neighbours. So a replay's results equal those of
the same ops run one by one, to the bit.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from infer.backends.base import Captured, Forward, Generated, PendingStep, check_multi_step, check_verified
from infer.backends.cuda.graphs import Graphs, Recording
from infer.backends.cuda.multi_step import MultiStep
from infer.backends.cuda.step_inputs import StepInputs
from infer.backends.cuda.verifier import Verifier
from infer.errors import InvalidRequestError
from infer.operands.step import Chunk, Interrupt, Masks, Step
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History


@final
class CapturedForward(Captured):
    """A forward recorded in several sizes. Steps of more than `capacity` tokens run in pieces."""

    def __init__(self, forward: Forward, capacity: int, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        self.capacity, self.max_logits = capacity, max_logits
        self._forward, self._graphs, self._device = forward, graphs, device
        self._inputs = StepInputs(capacity, max_logits, device, graphs)
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._multi_step = MultiStep(max_logits, device, graphs)
        self._verifier = Verifier(max_logits, device, graphs)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        with self._graphs.on_device():
            pieces = list(step.pieces(self.capacity, self.max_logits))
            if len(pieces) == 1:
                return self._run_piece(step)
            return torch.cat([self._run_piece(piece).clone() for piece in pieces])

    def takes(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> bool:
        return self._has_room(chunks)

    @torch.inference_mode()
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
        size = _size_of(len(chunks), self.capacity), _size_of(len(chunks), self.max_logits)
        with self._graphs.on_device():
            forward = self._recording(*size)
            self._inputs.fill(Step.of_chunks(chunks, starts), *size)
            step = self._inputs.step(*size)
            return self._multi_step.run(forward, step, count, columns, history, stop_ids, masks, interrupt)

    def run_verified(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None = None,
        masks: Masks | None = None,
    ) -> Generated:
        return self.launch(chunks, starts, columns, history, masks).wait()

    @torch.inference_mode()
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
        num_logits = len(step.logit_indices)
        size = _size_of(len(step.tokens), self.capacity), _size_of(num_logits, self.max_logits)
        with self._graphs.on_device():
            forward = self._recording(*size)
            self._inputs.fill(step, *size)
            if behind is not None:
                self._verifier.take_sampled(behind, self._inputs.tokens)
            if not num_logits:
                return self._verifier.launch_without_logits(forward.replay, len(chunks))
            return self._verifier.launch(forward, chunks, starts, columns, history, masks)

    def profile(self, step: Step) -> list[tuple[str, int]]:
        raise InvalidRequestError("a profile counts the cycles of a CPU's commands: on a GPU use Nsight Systems")

    def _run_piece(self, step: Step) -> Tensor:
        num_logits = len(step.logit_indices)
        size = _size_of(len(step.tokens), self.capacity), _size_of(num_logits, self.max_logits)
        recording = self._recording(*size)
        self._inputs.fill(step, *size)
        recording.replay()
        return recording.result[:num_logits]

    def _recording(self, num_tokens: int, num_logits: int) -> Recording:
        """Return the recording of this size. A new one is recorded with padding tokens only."""
        size = num_tokens, num_logits
        if size not in self._recordings:
            step = self._inputs.step(*size)
            self._inputs.clear(*size)
            self._recordings[size] = self._graphs.record(lambda: self._forward(step))
        return self._recordings[size]


def _size_of(count: int, most: int) -> int:
    """Return the next power of 2, but at most `most`. Nothing stays 0: without logits the head reads no weight."""
    return min(most, 1 << (count - 1).bit_length()) if count else 0
