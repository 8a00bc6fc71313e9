"""Sampled steps without a return to Python: several steps as replays, and a step that verifies drafts.

Several steps are forward, then sampler and `advance_rows`, which `DeviceSteps` submits. A step with drafts is forward,
sampler and `accept_rows`, for all lines in one batch. Noise is keyed by the position, and a line counts only if every
draft before it was right. So each line is sampled as if they were right, penalties included, and the lines after a
wrong draft are dropped.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, final

import torch
import triton
from torch import Tensor

from infer.compute.backends.base import Generated, PendingStep, SampledStep
from infer.compute.backends.cuda.graphs import Event, Graphs, Recording, aligned_parts
from infer.compute.backends.cuda.sampling.after_sampling import HEADER, NUM_ROWS, accept_rows, advance_rows, take_tokens
from infer.compute.backends.cuda.sampling.kernel_arguments import Lines
from infer.compute.backends.cuda.sampling.recorded_sampler import RecordedSampler, SamplerArguments
from infer.compute.backends.device_steps import IS_STOPPED, NUM_GENERATED, NUM_STOP_IDS, DeviceSteps, Header
from infer.compute.operands.step import Chunk, Interrupt, Masks, Step, StepEnd
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError

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


_PROGRAMS = 8, 64  # of `accept_rows`, one per row, or as many as there may be rows: so there are few recordings
_LINES = 64  # of a row that a program takes, or all lines
_NONE = -1  # what is drafted after a row's last line


class _Words(NamedTuple):
    """int64 arrays, one after the other: first with an entry per line, then with an entry per row."""

    rows: Any
    entries: Any  # how many drafts of its row come before
    drafts: Any  # what is drafted after it
    positions: Any
    token_ids: Any
    counts: Any  # how many of a row's lines count
    starts: Any  # a row's first line; one more than there are rows


class _Place(NamedTuple):
    """Memory and events of a step that was launched."""

    on_host: Tensor
    host: _Words
    began: Event
    ended: Event


_TAKEN = 128  # tokens that one program of `take_tokens` looks at


@final
class Verifier:
    """Launches steps that verify drafts. Two of them may be under way: each has a place of its own on the host.

    On the device they follow one another in the same memory, because a stream runs its work in order.
    """

    def __init__(self, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        self._max_logits, self._graphs = max_logits, graphs
        parts = aligned_parts([max_logits] * 6 + [max_logits + 1])
        self._on_device = torch.zeros(parts[-1].stop, dtype=torch.int64, device=device)
        self._words = _Words(*(self._on_device[part] for part in parts))
        self._places = cycle([self._make_place(parts) for _ in range(2)])
        self._sampler = RecordedSampler(max_logits, device, graphs)
        self._no_steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._launched = deque[PendingStep](maxlen=2)
        self._ended = 0.0  # when the last step ended that was waited for, by time.perf_counter
        self._take: Recording | None = None

    def _make_place(self, parts: Sequence[slice]) -> _Place:
        on_host = self._graphs.mirror(parts[-1].stop)
        words = _Words(*(on_host[part].numpy() for part in parts))
        return _Place(on_host, words, self._graphs.event(), self._graphs.event())

    def take_sampled(self, behind: PendingStep, tokens: Tensor) -> None:
        """Replace ids of `sampled_after` by the tokens that the last step sampled. `tokens` is always the same memory.

        A row that failed gets the token 0. Nothing of what follows it counts.
        """
        if not self._launched or behind is not self._launched[-1]:
            raise InvalidRequestError("a step can only be launched behind the one that was launched last")
        self.record_taking(tokens).replay()

    def record_taking(self, tokens: Tensor) -> Recording:
        """Return the recording that `take_sampled` replays."""
        if self._take is None:
            self._take = self._graphs.record(partial(self._replace, tokens))  # this replaces them, too
        return self._take

    def _replace(self, tokens: Tensor) -> Tensor:
        grid = (triton.cdiv(len(tokens), _TAKEN),)
        take_tokens[grid](tokens, self._words.starts, self._words.token_ids, len(tokens), BLOCK=_TAKEN, num_warps=1)
        return tokens

    def launch(self, forward: Recording, step: SampledStep) -> PendingStep:
        """Launch a step. `forward` has a line for each of the chunks' logits, or more."""
        chunks, starts, columns, history, masks = step
        place, launched_at = self._next_place(), time.perf_counter()
        place.began.record()
        sampler = self.record(forward.result, chunks, columns, history, masks)
        self._fill(place.host, chunks, starts)
        self._graphs.copy(self._on_device, place.on_host)
        forward.replay()
        if masks is not None:
            masks.wait()
            self._sampler.allow(masks.words)
        sampler.replay()
        records = self._sampler.logprobs.fetch(columns, len(forward.result))
        self._graphs.copy(place.on_host, self._on_device)
        place.ended.record()
        num_rows, is_in_use = len(chunks), (forward, sampler)  # as long as the device may run them

        def wait() -> Generated:
            place.ended.synchronize()
            assert is_in_use
            firsts, counts = (each[:num_rows].tolist() for each in (place.host.starts, place.host.counts))
            lines = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
            token_ids = [place.host.token_ids[mine.start : mine.stop].tolist() for mine in lines]
            ends = [self._end_of(place, launched_at)] * max(map(len, token_ids))
            return Generated(token_ids, ends, [[] for _ in lines] if records is None else records.of(lines, token_ids))

        return self._pending(wait)

    def launch_without_logits(self, forward: Callable[[], object], num_rows: int) -> PendingStep:
        """Launch a step that samples nothing."""
        place, launched_at = self._next_place(), time.perf_counter()
        place.began.record()
        forward()
        place.ended.record()

        def wait() -> Generated:
            place.ended.synchronize()
            nothing: list[list[Any]] = [[] for _ in range(num_rows)]
            return Generated(nothing, [self._end_of(place, launched_at)], nothing)

        return self._pending(wait)

    def _pending(self, wait: Callable[[], Generated]) -> PendingStep:
        self._launched.append(PendingStep(wait, is_running=True))
        return self._launched[-1]

    def _next_place(self) -> _Place:
        """Return the place of the next step, after the end of the step that had it before."""
        if len(self._launched) == 2:
            self._launched[0].wait()
        return next(self._places)

    def _end_of(self, place: _Place, launched_at: float) -> StepEnd:
        """Return the end of a step by the host's clock. A host that waits too late does not lengthen the step."""
        seconds = place.ended.seconds_since(place.began)
        self._ended = min(time.perf_counter(), max(launched_at, self._ended) + seconds)
        return StepEnd(self._ended, self._ended)

    @staticmethod
    def _fill(host: _Words, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """Fill the words on the host. Unused lines belong to the line of padding after all rows."""
        line = 0
        host.rows[:], host.entries[:], host.drafts[:] = len(host.rows), 0, _NONE
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            host.starts[row], count = line, chunk.num_logits
            if count:
                lines, end = slice(line, line + count), start + len(chunk.token_ids) + 1
                host.rows[lines], host.entries[lines] = row, range(count)
                host.positions[lines] = range(end - count, end)
                host.drafts[line : line + count - 1] = chunk.drafts
            line += count
        host.starts[len(chunks) :] = line

    def record(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        columns: SamplingColumns,
        history: History | None,
        masks: Masks | None,
    ) -> Recording:
        """Return the recording of the sampler and `accept_rows` for the stages of the selected rows."""
        num_lines = max([chunk.num_logits for chunk in chunks], default=0)
        num_programs = next((each for each in _PROGRAMS if len(chunks) <= each < self._max_logits), self._max_logits)
        variant = num_programs, _LINES if num_lines <= _LINES else 1 << (self._max_logits - 1).bit_length()
        records = self._sampler.logprobs.records(columns, self._max_logits, self._no_steps)
        return self._sampler.recording(
            logits, columns, history, masks, records, self._on_device, self._clear,
            partial(self._sample, *variant), variant=variant,
        )  # fmt: skip

    def _clear(self) -> None:
        """Let the sampler change no row: there is no line."""
        self._graphs.submit(self._on_device.zero_)

    def _sample(self, num_programs: int, width: int, logits: Tensor, arguments: SamplerArguments) -> Tensor:
        words = _Words(*(each[: len(logits)] for each in self._words))
        sampled = arguments.choose(logits, words.positions, Lines(words.rows, words.entries, words.drafts))
        arguments.launch_after(
            accept_rows, (num_programs,), sampled, words.drafts, self._words.starts, self._words.counts,
            words.token_ids, LINES=width,
        )  # fmt: skip
        token_ids: Tensor = words.token_ids
        return token_ids
