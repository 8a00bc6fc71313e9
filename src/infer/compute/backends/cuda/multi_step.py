"""Several sampled steps as replays: forward, then sampler and `advance_rows`, which `DeviceSteps` submits."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple, final

import torch
from torch import Tensor

from infer.compute.backends.base import Generated, SampledStep
from infer.compute.backends.cuda.graphs import Event, Graphs, Recording, aligned_parts
from infer.compute.backends.cuda.sampling.after_sampling import HEADER, NUM_ROWS, advance_rows
from infer.compute.backends.cuda.sampling.recorded_sampler import RecordedSampler, SamplerArguments
from infer.compute.backends.device_steps import IS_STOPPED, NUM_GENERATED, NUM_STOP_IDS, DeviceSteps, Header
from infer.compute.operands.step import Interrupt, Masks, Step
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History

GROUP = 4  # steps that are given to the device at once
_ROWS = 64  # that `advance_rows` takes at a time
_STEPS, _STOP_IDS = 64, 64  # that there is room for from the beginning
_HEADER = HEADER.value


class _Copy(NamedTuple):
    """The header of `control` at the time when a group of steps had ended."""

    words: Tensor
    copied: Event


@final
class MultiStep:
    def __init__(self, max_rows: int, device: torch.device, graphs: Graphs) -> None:
        self._max_rows, self._device, self._graphs = max_rows, device, graphs
        self._copies = cycle([_Copy(graphs.mirror(_HEADER), graphs.event()) for _ in range(2)])
        self._copied = graphs.event()
        self._sampler = RecordedSampler(max_rows, device, graphs)
        self._size: int = 0  # words that a look copies: `control` and the tokens of a multi-step
        self._make_room(_STEPS, _STOP_IDS)

    def run(
        self,
        forward: Recording,
        tokens: Step,
        step: SampledStep,
        count: int,
        stop_ids: Sequence[int],
        interrupt: Interrupt | None,
    ) -> Generated:
        """Run up to `count` steps. `tokens` is the step that `forward` reads, and holds one token per row."""
        if count > self._num_steps or len(stop_ids) > self._num_stop_ids:
            self._make_room(max(count, self._num_steps), max(len(stop_ids), self._num_stop_ids))
        sampler = self.record(forward.result, tokens, step.columns, step.history, step.masks)
        num_rows, num_lines = len(step.columns), len(forward.result)
        self._begin(stop_ids, num_rows, count)

        def enqueue_sampler(words: Tensor | None) -> None:
            if words is not None:
                self._sampler.allow(words)
            sampler.replay()

        steps = DeviceSteps(GROUP, forward.replay, enqueue_sampler, self._mark, self._look, self._ids)
        token_ids, ends = steps.run(count, num_rows, step.masks, interrupt)
        records = self._sampler.logprobs.fetch(step.columns, len(ends) * num_lines)
        if records is None:
            return Generated(token_ids, ends, [[] for _ in token_ids])
        self._wait()
        lines = [range(row, len(ends) * num_lines, num_lines) for row in range(num_rows)]
        return Generated(token_ids, ends, records.of(lines, token_ids))

    def _mark(self) -> Callable[[], bool]:
        copy = next(self._copies)
        self._graphs.copy(copy.words, self._control[:_HEADER])
        copy.copied.record()

        def is_over() -> bool:
            copy.copied.synchronize()
            return bool(copy.words[IS_STOPPED])

        return is_over

    def _look(self) -> Header:
        """Copy the results to the host, wait for them, and return the header. The tokens are then in `_ids`."""
        self._graphs.copy(self._on_host[: self._size], self._on_device[: self._size])
        self._wait()
        return Header(int(self._words[NUM_GENERATED]), bool(self._words[IS_STOPPED]))

    def _wait(self) -> None:
        self._copied.record()
        self._copied.synchronize()

    def _begin(self, stop_ids: Sequence[int], num_rows: int, count: int) -> None:
        size = len(self._control)
        self._size = size + count * num_rows
        words = self._words[:size]
        words[:] = 0
        words[NUM_STOP_IDS], words[NUM_ROWS.value] = len(stop_ids), num_rows
        words[_HEADER + self._max_rows :][: len(stop_ids)] = stop_ids
        self._graphs.copy(self._control, self._on_host[:size])

    def _make_room(self, num_steps: int, num_stop_ids: int) -> None:
        """Allocate `control` and the generated tokens, in this order, on the device and on the host."""
        self._num_steps, self._num_stop_ids = num_steps, num_stop_ids
        size = aligned_parts([_HEADER + self._max_rows + num_stop_ids, 0])[1].start
        self._on_host = self._graphs.mirror(size + num_steps * self._max_rows)
        self._on_device = self._on_host.to(self._device, copy=True)
        self._words = self._on_host.numpy()
        self._control, self._generated = self._on_device[:size], self._on_device[size:]
        self._ids = (ctypes.c_int64 * len(self._generated)).from_address(self._on_host[size:].data_ptr())

    def record(
        self, logits: Tensor, step: Step, columns: SamplingColumns, history: History | None, masks: Masks | None
    ) -> Recording:
        """Return the recording of the sampler and `advance_rows` for the stages of the selected rows."""
        records = self._sampler.logprobs.records(columns, self._num_steps * len(logits), self._control)
        return self._sampler.recording(
            logits, columns, history, masks, records, self._on_device, self._stop, partial(self._sample, step),
            variant=len(step.tokens),
        )  # fmt: skip

    def _stop(self) -> None:
        self._control.zero_()
        self._control[IS_STOPPED] = 1

    def _sample(self, step: Step, logits: Tensor, arguments: SamplerArguments) -> Tensor:
        sampled = arguments.choose(logits, step.positions[: len(logits)] + 1)
        arguments.launch_after(
            advance_rows, (1,), sampled, step.tokens, step.positions, self._control, self._generated,
            self._max_rows, ROWS=_ROWS,
        )  # fmt: skip
        return sampled
