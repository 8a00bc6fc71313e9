"""The sampler on the device for rows that are greedy or have only noise, and its multi-steps.

`advance` turns a step's tokens into the next step's input, and `DeviceSteps` submits the steps.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import pyopencl as cl
import torch
from torch import Tensor

from infer.compute.backends import host_memory
from infer.compute.backends.base import Generated
from infer.compute.backends.device_steps import IS_STOPPED, NUM_GENERATED, DeviceSteps, Header
from infer.compute.backends.opencl.launches import Launch, Recording
from infer.compute.operands.step import Interrupt, Masks
from infer.compute.sampling import constants
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.masks import num_mask_words

_PARTS = 64  # of a row's vocabulary
_ROOM = 64  # for steps, and for stop ids, from the beginning
_MACROS: dict[str, Any] = {
    "PARTS": _PARTS,
    "LOG_COEFFICIENTS": "{" + ",".join(f"{value!r}f" for value in constants.LOG_COEFFICIENTS) + "}",
    **{name: f"{getattr(constants, name)!r}f" for name in ("LN2_HIGH_32", "LN2_LOW_32", "MAX_NOISE")},
    **{name: getattr(constants, name) for name in ("SQRT_HALF_BITS", "ONE_BITS")},
    **{name: f"({getattr(constants, name)})" for name in ("NOT_A_NUMBER", "NOTHING_ALLOWED")},
}


def is_plain(columns: SamplingColumns) -> bool:
    """Return True if no row has more than a temperature."""
    return not (columns.has_filters or columns.has_edits or columns.has_logprobs)


@final
class Sampler:
    """Sampler after the forward of a recording, to which it adds four launches."""

    def __init__(self, recording: Recording, logits: Tensor, vocab_size: int) -> None:
        self._recording, self._forward = recording, list(recording.launches)
        self._memory = recording.runtime.memory
        lines = recording.max_logits
        self._temperatures = host_memory.zeros((lines,), torch.float32)
        self._seeds, self._has_ended = (host_memory.zeros((lines,), torch.int64) for _ in range(2))
        self._control = host_memory.zeros((4,), torch.int64)  # the header, and whether there are masks
        self._sampled = recording.tensor("sampled", lines, dtype=torch.int64)
        self._words = recording.tensor("masks", lines, num_mask_words(vocab_size), dtype=torch.int32)
        self._sampler = self._record(logits, vocab_size)
        self._num_steps, self._num_stop_ids = 0, 0  # that there is room for
        self._make_room(_ROOM, _ROOM)

    def run(self, columns: SamplingColumns, rows: Sequence[int], num_tokens: int, masks: Masks | None) -> list[int]:
        """Run the recording's step, and return the tokens sampled after its logits, one per row of `rows`."""
        self._begin(columns, rows, num_tokens, (), masks)
        try:
            self._enqueue_forward()
            if masks is not None:
                masks.wait()
            self._enqueue_sampler(self._sampler[:-1], None if masks is None else masks.words)
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
        num_rows = len(columns)
        self._make_room(count, len(stop_ids))
        self._begin(columns, range(num_rows), num_rows, stop_ids, masks)
        enqueue_sampler = partial(self._enqueue_sampler, self._sampler)
        steps = DeviceSteps(1, self._enqueue_forward, enqueue_sampler, self._mark, self._look, self._ids)
        try:
            token_ids, ends = steps.run(count, num_rows, masks, interrupt)
        finally:
            self._memory.finish()
        return Generated(token_ids, ends, [[] for _ in token_ids])

    def _mark(self) -> Callable[[], bool]:
        self._memory.to_host(self._control)
        ended = cl.enqueue_marker(self._recording.runtime.queue)
        self._recording.runtime.queue.flush()

        def is_over() -> bool:
            ended.wait()
            return bool(self._control[IS_STOPPED])

        return is_over

    def _look(self) -> Header:
        self._memory.to_host(self._control)
        self._memory.to_host(self._generated)
        self._memory.finish()
        return Header(int(self._control[NUM_GENERATED]), bool(self._control[IS_STOPPED]))

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

    def _enqueue_forward(self) -> None:
        self._recording.enqueue(self._forward)
        self._recording.runtime.queue.flush()  # masks may be filled meanwhile

    def _enqueue_sampler(self, sampler: Sequence[Launch], words: Tensor | None) -> None:
        if words is not None:
            self._words[: len(words)] = words
            self._memory.to_device(self._words, 0, len(words))
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
