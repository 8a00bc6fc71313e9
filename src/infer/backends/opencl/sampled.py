"""The sampler on the device for rows that are greedy or have only noise, and multi-steps without a wait between steps.

`advance` turns a step's tokens into the next step's input, and the host reads a step's result while the next one runs.
A step begun after the last one computes one more token, in reserved positions, and its result is discarded.
"""

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

import pyopencl as cl
import torch
from torch import Tensor

from infer.backends import host_memory
from infer.backends.base import Generated
from infer.backends.opencl.launches import Launch, Recording
from infer.operands.step import Interrupt, Masks, StepEnd
from infer.sampling import constants
from infer.sampling.columns import SamplingColumns
from infer.sampling.masks import num_mask_words

_PARTS = 64  # of a row's vocabulary
_ROOM = 64  # for steps, and for stop ids, from the beginning
_AHEAD = 2  # steps that are under way at once
_IS_STOPPED = 1  # of `control`: steps that count, whether they are over, how many stop ids, whether there are masks
_MACROS: dict[str, Any] = {
    "PARTS": _PARTS,
    "LOG_COEFFICIENTS": "{" + ",".join(f"{value!r}f" for value in constants.LOG_COEFFICIENTS) + "}",
    **{name: f"{getattr(constants, name)!r}f" for name in ("LN2_HIGH_32", "LN2_LOW_32", "MAX_NOISE")},
    **{name: getattr(constants, name) for name in ("SQRT_HALF_BITS", "ONE_BITS")},
    **{name: f"({getattr(constants, name)})" for name in ("NOT_A_NUMBER", "NOTHING_ALLOWED")},
}


def is_plain(columns: SamplingColumns) -> bool:
    """Return True if no row has more than a temperature."""
    has_filters = columns.max_top_k or columns.has_top_p or columns.has_min_p
    return not (has_filters or columns.has_edits or columns.has_logprobs)


@final
class Sampler:
    """Sampler after the forward of a recording, to which it adds four launches."""

    def __init__(self, recording: Recording, logits: Tensor, vocab_size: int) -> None:
        self._recording, self._forward = recording, list(recording.launches)
        self._memory = recording.runtime.memory
        lines = recording.max_logits
        self._temperatures = host_memory.zeros((lines,), torch.float32)
        self._seeds, self._has_ended = (host_memory.zeros((lines,), torch.int64) for _ in range(2))
        self._control = host_memory.zeros((4,), torch.int64)
        self._sampled = recording.tensor("sampled", lines, dtype=torch.int64)
        self._words = recording.tensor("masks", lines, num_mask_words(vocab_size), dtype=torch.int32)
        self._sampler = self._record(logits, vocab_size)
        self._num_steps, self._num_stop_ids = 0, 0  # that there is room for
        self._make_room(_ROOM, _ROOM)

    def run(self, columns: SamplingColumns, rows: Sequence[int], num_tokens: int, masks: Masks | None) -> list[int]:
        """Run the recording's step, and return the tokens sampled after its logits, one per row of `rows`."""
        self._begin(columns, rows, num_tokens, (), masks)
        try:
            self._enqueue(self._sampler[:-1], masks)
            self._memory.to_host(self._sampled)
        finally:
            self._memory.finish()
        token_ids: list[int] = self._sampled[: len(rows)].tolist()
        return token_ids

    def run_multi_step(
        self,
        count: int,
        columns: SamplingColumns,
        stop_ids: Sequence[int],
        masks: Masks | None,
        interrupt: Interrupt | None,
    ) -> Generated:
        """Run the recording's step, which has one token per row, and the steps after it."""
        num_rows, ends = len(columns), list[float]()
        self._make_room(count, len(stop_ids))
        self._begin(columns, range(num_rows), num_rows, stop_ids, masks)
        try:
            for done, ended in enumerate(self._steps(count, masks), 1):
                ended.wait()
                ends.append(time.perf_counter())
                is_over = self._control[_IS_STOPPED] or (interrupt is not None and interrupt.value)
                if is_over or (masks is not None and not masks.advance(self._ids, count, done)):
                    break
            self._memory.to_host(self._control)
            self._memory.to_host(self._generated)
        finally:
            self._memory.finish()
        num_steps = int(self._control[0])
        ends += [time.perf_counter()] * (num_steps - len(ends))
        token_ids = [self._ids[row : num_steps * num_rows : num_rows] for row in range(num_rows)]
        return Generated(token_ids, [StepEnd(end, end) for end in ends[:num_steps]], [[] for _ in token_ids])

    def _steps(self, count: int, masks: Masks | None) -> Iterator[cl.Event]:
        """Yield the event at the end of each step. Without masks, the next step is enqueued before."""
        under_way = deque[cl.Event]()
        for _ in range(count):
            self._enqueue(self._sampler, masks)
            self._memory.to_host(self._control)
            if masks is not None:
                self._memory.to_host(self._generated)
            under_way.append(cl.enqueue_marker(self._recording.runtime.queue))
            self._recording.runtime.queue.flush()
            if masks is not None or len(under_way) == _AHEAD:
                yield under_way.popleft()
        yield from under_way

    def _begin(
        self,
        columns: SamplingColumns,
        rows: Sequence[int],
        num_tokens: int,
        stop_ids: Sequence[int],
        masks: Masks | None,
    ) -> None:
        num_lines, index = len(rows), list(rows)
        self._temperatures[:num_lines], self._seeds[:num_lines] = columns.temperature[index], columns.seed[index]
        self._control.copy_(torch.tensor([0, 0, len(stop_ids), masks is not None]))
        self._stop_ids[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
        self._has_ended.zero_()
        self._recording.begin(num_tokens, num_lines)

    def _enqueue(self, sampler: Sequence[Launch], masks: Masks | None) -> None:
        """Enqueue the forward, wait for the masks, which may be filled meanwhile, and enqueue the sampler."""
        self._recording.enqueue(self._forward)
        if masks is not None:
            self._recording.runtime.queue.flush()
            masks.wait()
            self._words[: len(masks.words)] = masks.words
            self._memory.to_device(self._words, 0, len(masks.words))
        self._recording.enqueue(sampler)

    def _make_room(self, num_steps: int, num_stop_ids: int) -> None:
        num_steps, num_stop_ids = max(num_steps, self._num_steps), max(num_stop_ids, self._num_stop_ids)
        if (num_steps, num_stop_ids) == (self._num_steps, self._num_stop_ids):
            return
        run = self._recording
        self._stop_ids = host_memory.zeros((num_stop_ids,), torch.int64)
        self._generated = run.tensor("generated", num_steps * run.max_logits, dtype=torch.int64)
        self._ids = (ctypes.c_int64 * len(self._generated)).from_address(self._generated.data_ptr())
        self._sampler[-1].set(6, run.buffer(self._stop_ids))
        self._sampler[-1].set(7, run.buffer(self._generated))
        self._num_steps, self._num_stop_ids = num_steps, num_stop_ids

    def _record(self, logits: Tensor, vocab_size: int) -> list[Launch]:
        run, step = self._recording, self._recording.step
        largest, scores = (run.tensor(role, run.max_logits, _PARTS) for role in ("largest", "scores"))
        found = run.tensor("found", run.max_logits, _PARTS, dtype=torch.int32)
        inputs = [logits, logits.shape[1], vocab_size, self._words, self._words.shape[1], self._control, largest]
        own = [self._temperatures, self._seeds, step.positions, step.logit_indices, scores, found]
        ends = [self._control, self._has_ended, None, None]
        after = [self._sampled, run.counts["logits"], step.tokens, step.positions, *ends]
        return [
            run.launch("sample.cl", "find_largest", _PARTS, inputs, _MACROS, axis="logits"),
            run.launch("sample.cl", "score", _PARTS, [*inputs, *own], _MACROS, axis="logits"),
            run.launch("sample.cl", "choose", 1, [scores, found, self._sampled], _MACROS, axis="logits"),
            run.launch("sample.cl", "advance", 1, after, _MACROS, axis="once"),
        ]
