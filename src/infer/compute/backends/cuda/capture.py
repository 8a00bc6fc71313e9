"""A forward recorded in a few sizes: some of them before the first request, the others between requests.

The number of tokens is a power of 2. A step of decoding has as many lines of logits as tokens. A step with prompts has
fewer lines, in a few sizes only. Padding costs little: it is embedded as NaN, for which products read no weight.

A recording reads its step from `StepInputs`. If the step is shorter than the recording, the rest are padding tokens
with id and row −1. They have no effect. They are embedded as NaN, which their products pass on without reading a
weight. Every kernel computes a token in the same order, whatever its neighbours. So a replay's results equal those of
the same ops run one by one, to the bit.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from infer.compute.backends.base import Captured, Forward, Generated, PendingStep, SampledStep
from infer.compute.backends.cuda.graphs import Graphs, Recording, StepInputs
from infer.compute.backends.cuda.sampled import MultiStep, Verifier
from infer.compute.backends.gpu_memory import FEW_LINES
from infer.compute.operands.limits import StepLimits
from infer.compute.operands.step import Interrupt, Step
from infer.compute.sampling.columns import SamplingColumns
from infer.errors import InvalidRequestError

_LINES = 8, 64  # of a step with prompts; or the most lines
_TOKENS_AHEAD = 1, 8, 16, 64  # of steps of decoding: other sizes are compiled alike
_PROMPT_AHEAD = 512


class StepSize(NamedTuple):
    """Numbers of tokens and of lines of logits that a recording has room for."""

    tokens: int
    logits: int


def size_for(num_tokens: int, num_logits: int, limits: StepLimits) -> StepSize:
    """Return the size of the recording for a step within the limits. Without logits the head reads no weight."""
    tokens = _power_of_2(num_tokens, limits.tokens)
    if not num_logits:
        return StepSize(tokens, 0)
    sizes = sorted(min(each, limits.logits) for each in (*_LINES, tokens, limits.logits))
    return StepSize(tokens, next(each for each in sizes if each >= num_logits))


def sizes_ahead(limits: StepLimits) -> Iterator[StepSize]:
    """Yield sizes whose recordings compile every kernel that other sizes need."""
    for count in _TOKENS_AHEAD:
        if count <= min(limits):
            yield StepSize(count, count)
    for num_tokens in sorted({min(_PROMPT_AHEAD, limits.tokens), limits.tokens}):
        yield size_for(num_tokens, 1, limits)


def later_sizes(limits: StepLimits) -> Iterator[StepSize]:
    """Yield the sizes of usual steps: of decoding, and of prompts. More than FEW_LINES lines would need more memory."""
    for exponent in range(limits.tokens.bit_length() + 1):
        num_tokens = min(1 << exponent, limits.tokens)
        for num_logits in (min(num_tokens, limits.logits, FEW_LINES), 1, 0):
            yield size_for(num_tokens, num_logits, limits)


def _power_of_2(count: int, most: int) -> int:
    """Return the next power of 2, but at most `most`. Nothing stays 0."""
    return min(most, 1 << (count - 1).bit_length()) if count else 0


@final
class CapturedForward(Captured):
    """A forward recorded in several sizes. Steps of more than `capacity` tokens run in pieces."""

    def __init__(self, forward: Forward, capacity: int, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        self.capacity, self.max_logits = capacity, max_logits
        self._forward, self._graphs, self._device = forward, graphs, device
        self._inputs = StepInputs(capacity, max_logits, device, graphs)
        self._limits = StepLimits(capacity, max_logits)
        self._recordings: dict[StepSize, Recording] = {}
        self._results: dict[int, Tensor] = {}  # by their number of lines
        self._later: Iterator[StepSize] = iter(())
        self._multi_step = MultiStep(max_logits, device, graphs)
        self._verifier = Verifier(max_logits, device, graphs)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        with self._graphs.on_device():
            pieces = list(step.pieces(self.capacity, self.max_logits))
            if len(pieces) == 1:
                return self._run_piece(step)
            return torch.cat([self._run_piece(piece).clone() for piece in pieces])

    @torch.inference_mode()
    def record_ahead(self, selections: Sequence[SamplingColumns]) -> int:
        if not self._graphs.records_ahead:
            return 0
        num_before = len(self._recordings)
        with self._graphs.on_device():
            self._verifier.record_taking(self._inputs.tokens)
            for size in reversed(list(sizes_ahead(self._limits))):  # the others find room in the memory of the largest
                forward = self._recording(*size)
                if size.tokens == size.logits:
                    step = self._inputs.step(*size)
                    for columns in selections:
                        self._multi_step.record(forward.result, step, columns, None, None)
                        self._verifier.record(forward.result, [], columns, None, None)
        self._later = later_sizes(self._limits)
        return len(self._recordings) - num_before

    @torch.inference_mode()
    def record_next(self) -> bool:
        size = next((each for each in self._later if each not in self._recordings), None)
        if size is None:
            return False
        try:
            with self._graphs.on_device():
                self._recording(*size)
        except RuntimeError:  # without memory, for example: a step that needs the size tries again
            self._later = iter(())
        return True

    @torch.inference_mode()
    def run_multi_step(
        self, step: SampledStep, count: int, stop_ids: Sequence[int] = (), interrupt: Interrupt | None = None
    ) -> Generated:
        step.check_multi_step()
        size = size_for(len(step.chunks), len(step.chunks), self._limits)
        with self._graphs.on_device():
            forward = self._recording(*size)
            self._inputs.fill(Step.of_chunks(step.chunks, step.starts), *size)
            return self._multi_step.run(forward, self._inputs.step(*size), step, count, stop_ids, interrupt)

    @torch.inference_mode()
    def launch(self, step: SampledStep, behind: PendingStep | None = None) -> PendingStep:
        step.check()
        tokens = Step.of_chunks(step.chunks, step.starts)
        num_logits = len(tokens.logit_indices)
        size = size_for(len(tokens.tokens), num_logits, self._limits)
        with self._graphs.on_device():
            forward = self._recording(*size)
            self._inputs.fill(tokens, *size)
            if behind is not None:
                self._verifier.take_sampled(behind, self._inputs.tokens)
            if not num_logits:
                return self._verifier.launch_without_logits(forward.replay, len(step.chunks))
            return self._verifier.launch(forward, step)

    def profile(self, step: Step) -> list[tuple[str, int]]:
        raise InvalidRequestError("a profile counts the cycles of a CPU's commands: on a GPU use Nsight Systems")

    def _run_piece(self, step: Step) -> Tensor:
        num_logits = len(step.logit_indices)
        size = size_for(len(step.tokens), num_logits, self._limits)
        recording = self._recording(*size)
        self._inputs.fill(step, *size)
        recording.replay()
        return recording.result[:num_logits]

    def _recording(self, num_tokens: int, num_logits: int) -> Recording:
        """Return the recording of this size. A new one is recorded with padding tokens only."""
        size = StepSize(num_tokens, num_logits)
        if size not in self._recordings:
            step = self._inputs.step(*size)
            self._inputs.clear(*size)
            self._recordings[size] = self._graphs.record(lambda: self._with_result(self._forward(step)))
        return self._recordings[size]

    def _with_result(self, logits: Tensor) -> Tensor:
        """Copy the logits to the memory that all recordings share, so that they take that of one, and return it.

        Few requests need many lines. Memory for these is allocated when they are first needed.
        """
        if not len(logits):
            return logits
        num_lines = min(FEW_LINES, self.max_logits) if len(logits) <= FEW_LINES else self.max_logits
        if num_lines not in self._results:
            self._results[num_lines] = logits.new_empty(num_lines, logits.shape[1])
        return self._results[num_lines][: len(logits)].copy_(logits)
