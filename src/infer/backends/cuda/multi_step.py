"""Several sampled steps as replays submitted to the device one after the other: forward, then sampler and `advance`.

Without masks there is no wait between two steps: the host reads the result of one group of steps while the next group
runs. A step begun after the last one computes one more token, in reserved positions, and `advance` discards it. With
masks, the host fills them between the two replays of a step.
"""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, final

import torch
import triton
from torch import Tensor

from infer.backends.base import Generated
from infer.backends.cuda.graphs import Event, Graphs, Recording
from infer.backends.cuda.sampling.after_sampling import HEADER, IS_STOPPED, NUM_GENERATED, NUM_STOP_IDS, advance_rows
from infer.backends.cuda.sampling.kernel_arguments import Seen, seen_of
from infer.backends.cuda.sampling.logprobs import Logprobs, Records
from infer.backends.cuda.sampling.sampler import EXACT, choose_lines
from infer.backends.cuda.step_inputs import aligned_parts
from infer.operands.step import Interrupt, Masks, Step, StepEnd
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

GROUP = 4  # steps that are given to the device at once
_STEPS, _STOP_IDS = 64, 64  # that there is room for from the beginning
_HEADER = HEADER.value


class _Seen(NamedTuple):
    num_generated: int
    is_stopped: bool


class _Header(NamedTuple):
    """The header of `control` at the time when a group of steps had ended."""

    words: Tensor
    copied: Event


@final
class MultiStep:
    def __init__(self, max_rows: int, device: torch.device, graphs: Graphs) -> None:
        self._max_rows, self._device, self._graphs = max_rows, device, graphs
        self._headers = [_Header(graphs.mirror(_HEADER), graphs.event()) for _ in range(2)]
        self._copied = graphs.event()
        self._sampler: Recording | None = None
        self._made_of: tuple[object, ...] = ()  # the sampler: what another recording is needed for
        self._allowed = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._logprobs = Logprobs(device, graphs)
        self._make_room(_STEPS, _STOP_IDS)

    def run(
        self,
        forward: Recording,
        step: Step,
        count: int,
        columns: SamplingColumns,
        history: History | None,
        stop_ids: Sequence[int],
        masks: Masks | None,
        interrupt: Interrupt | None,
    ) -> Generated:
        """Run up to `count` steps. `step` is the step that `forward` reads, and holds one token per row."""
        if count > self._num_steps or len(stop_ids) > self._num_stop_ids:
            self._make_room(max(count, self._num_steps), max(len(stop_ids), self._num_stop_ids))
        sampler = self._record(forward.result, step, columns, history, masks)
        self._begin(stop_ids)
        started = time.perf_counter()
        if masks is None:
            self._run_ahead(forward, sampler, count, interrupt)
        else:
            self._run_masked(forward, sampler, count, masks, interrupt)
        num_rows = len(columns)
        self._logprobs.fetch(columns, count * num_rows)
        num_steps = self._look().num_generated
        lines = [range(row, num_steps * num_rows, num_rows) for row in range(num_rows)]
        token_ids = [[self._ids[line] for line in mine] for mine in lines]
        seconds = (time.perf_counter() - started) / num_steps
        ends = [started + seconds * (index + 1) for index in range(num_steps)]
        logprobs = self._logprobs.of(columns, lines, token_ids)
        return Generated(token_ids, [StepEnd(end, end) for end in ends], logprobs)

    def _run_ahead(self, forward: Recording, sampler: Recording, count: int, interrupt: Interrupt | None) -> None:
        under_way = deque[_Header]()
        for first in range(0, count, GROUP):
            for _ in range(first, min(first + GROUP, count)):
                forward.replay()
                sampler.replay()
            header = self._headers[first // GROUP % 2]
            header.words.copy_(self._control[:_HEADER], non_blocking=True)
            header.copied.record()
            under_way.append(header)
            if len(under_way) == 2:
                before = under_way.popleft()
                before.copied.synchronize()
                if before.words[IS_STOPPED.value] or _is_set(interrupt):
                    return

    def _run_masked(
        self, forward: Recording, sampler: Recording, count: int, masks: Masks, interrupt: Interrupt | None
    ) -> None:
        """Run steps with masks. `masks.advance` fills the next step's lines, or lets a thread fill them during the
        forward.
        """
        for done in range(1, count + 1):
            forward.replay()
            masks.wait()
            self._allowed[: len(masks.words)].copy_(masks.words)
            sampler.replay()
            if self._look().is_stopped or _is_set(interrupt) or not masks.advance(self._ids, count, done):
                return

    def _look(self) -> _Seen:
        """Copy the results to the host, wait for them, and return the header. The tokens are then in `_ids`."""
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()
        return _Seen(int(self._words[NUM_GENERATED.value]), bool(self._words[IS_STOPPED.value]))

    def _begin(self, stop_ids: Sequence[int]) -> None:
        size = len(self._control)
        words = self._words[:size]
        words[:] = 0
        words[NUM_STOP_IDS.value] = len(stop_ids)
        words[_HEADER + self._max_rows :][: len(stop_ids)] = stop_ids
        self._control.copy_(self._on_host[:size], non_blocking=True)

    def _make_room(self, num_steps: int, num_stop_ids: int) -> None:
        """Allocate `control` and the generated tokens, in this order, on the device and on the host."""
        self._num_steps, self._num_stop_ids = num_steps, num_stop_ids
        size = aligned_parts([_HEADER + self._max_rows + num_stop_ids, 0])[1].start
        self._on_host = self._graphs.mirror(size + num_steps * self._max_rows)
        self._on_device = self._on_host.to(self._device, copy=True)
        self._words = self._on_host.numpy()
        self._control, self._generated = self._on_device[:size], self._on_device[size:]
        self._ids = (ctypes.c_int64 * len(self._generated)).from_address(self._on_host[size:].data_ptr())

    def _record(
        self, logits: Tensor, step: Step, columns: SamplingColumns, history: History | None, masks: Masks | None
    ) -> Recording:
        """Return the recording of the sampler and `advance` for a selection of rows."""
        if masks is not None and len(self._allowed) < len(masks.words):
            self._allowed = torch.empty(self._max_rows, masks.words.shape[1], dtype=torch.int32, device=self._device)
        records = self._logprobs.records(columns, self._num_steps * len(columns), self._control)
        words = None if records is None else records.words
        made_of = (logits, self._on_device, columns.selection, history, None if masks is None else self._allowed, words)
        if self._sampler is None or any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._control.zero_()
            self._control[IS_STOPPED.value] = 1  # recording it changes nothing
            allowed = None if masks is None else self._allowed[: len(columns)]
            self._sampler = self._graphs.record(partial(self._sample, logits, step, columns, history, allowed, records))
            self._made_of = made_of
        return self._sampler

    def _sample(
        self,
        logits: Tensor,
        step: Step,
        columns: SamplingColumns,
        history: History | None,
        allowed: Tensor | None,
        records: Records | None,
    ) -> Tensor:
        num_rows = len(columns)
        logits, positions = logits[:num_rows, : columns.vocab_size], step.positions[:num_rows]
        sampled = choose_lines(logits, columns, history, positions + 1, allowed, None, records)
        seen = seen_of(columns, history) or Seen(sampled, sampled, sampled, sampled)
        advance_rows[(1,)](
            sampled, step.tokens, step.positions, self._control, self._generated, num_rows, self._max_rows,
            columns.history_slot, *seen, seen.tokens.shape[-1], columns.vocab_size,
            ROWS=triton.next_power_of_2(num_rows), HAS_HISTORY=seen.tokens is not sampled, num_warps=1, **EXACT,
        )  # fmt: skip
        return sampled


def _is_set(interrupt: Interrupt | None) -> bool:
    return interrupt is not None and interrupt.value != 0
