"""A recorded forward with the sampler's commands after it, so that tokens are chosen within compiled code.

Both tables are made once per recording, whatever is sampled: sequences that join or leave change some words of the
arguments. Everything that a run needs is written before it, so a run that an exception interrupted has no effect on the
next.

    MultiStep  forward, await_mask, scan, narrow, choose,       run once per token, each the next one's input
               score, merge, advance, and of a group lead
    Followed   forward, follow                                  the same steps of another rank
    Verifier   forward, await_mask; scan, narrow, choose,       the rest run once per entry: a row's entries are its
               score, merge, accept                             line after the last known token and one after each draft

`Logprobs` makes the caller's log-probabilities of the records that a run stores.
"""

import ctypes
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.compute.backends.base import Generated, SampledStep
from infer.compute.backends.cpu.ranks.memory_group import MemoryGroup
from infer.compute.backends.cpu.recording import Recording
from infer.compute.backends.cpu.sample_records import LOGPROB
from infer.compute.backends.cpu.sampling import launch
from infer.compute.backends.cpu.sampling.launch import SampleArguments
from infer.compute.backends.cpu.thread_records import integers
from infer.compute.backends.cpu.threads.dispatch_table import Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.operands.step import Interrupt, Masks, StepEnd
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.sampler import Sampled, normalized
from infer.outputs import TokenLogprob


@final
class Logprobs:
    """Log-probabilities of sampled tokens, one record per row and step. The first row that requests them allocates."""

    def __init__(self, arguments: SampleArguments) -> None:
        self._arguments, self._records = arguments, np.zeros(0, LOGPROB)

    def begin(self, columns: SamplingColumns, num_steps: int) -> None:
        """Allocate records for up to `num_steps` steps in which a row requests log-probabilities."""
        if (count := num_steps * len(columns)) > len(self._records):
            self._records = np.zeros(count, LOGPROB)
        self._arguments.set(logprobs=self._records.ctypes.data)

    def of(self, token_ids: Sequence[Sequence[int]], columns: SamplingColumns) -> list[list[TokenLogprob]]:
        """Return the log-probabilities of each row's sampled tokens.

        Rows that ask for none have an empty list. A failed row's code has no entry.
        """
        counts = enumerate(columns.num_logprobs)
        return [[] if count is None else self._of_row(row, token_ids[row], count, columns) for row, count in counts]

    def _of_row(self, row: int, token_ids: Sequence[int], num_top: int, columns: SamplingColumns) -> list[TokenLogprob]:
        tokens = [token_id for token_id in token_ids if token_id >= 0]
        records = self._records[row :: len(columns)][: len(tokens)]
        num_top = min(num_top, columns.vocab_size)
        logit, largest, total, rank = (
            torch.from_numpy(records[name][:, None]) for name in ("logit", "largest", "total", "rank")
        )
        logits, ids = (torch.from_numpy(records[name][:, :num_top]) for name in ("logits", "ids"))
        sampled = Sampled(
            torch.tensor(tokens, dtype=torch.int64),
            normalized(logit, largest, total)[:, 0],
            rank[:, 0],
            ids,
            normalized(logits, largest, total),
        )
        return [sampled.logprob_of(index, num_top) for index in range(len(tokens))]


State = npt.NDArray[Any]
_STEPS = 64  # without a return, that there is room for from the beginning
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@final
class MultiStep:
    """Several sampled steps without a return to Python.

    Single integers are read through `ctypes`: between two steps Python's code is cold, and numpy's index takes ten
    times as long.
    """

    def __init__(self, recording: Recording, forward: DispatchTable, logits: Tensor) -> None:
        self._arguments = SampleArguments(logits, recording.step.positions.data_ptr(), position_offset=1)
        stop_at, group = _stop_at(self._arguments), recording.group
        after = [] if group is None else [group.transfer("lead", stop_at)]
        self._table = _table(forward, self._arguments, ".sampling.advance:advance", after)
        self._logprobs = Logprobs(self._arguments)

    def run(
        self, state: State, step: SampledStep, count: int, stop_ids: Sequence[int], interrupt: Interrupt | None
    ) -> Generated:
        columns, masks = step.columns, step.masks
        arguments, num_rows, room = self._arguments, len(columns), max(count, _STEPS)
        arguments.bind(columns, step.history)
        generated, stamps, ended = arguments.arrays(
            generated=room * arguments.room, stamps=2 * room, ended=arguments.room
        )
        if columns.has_logprobs:  # otherwise `bind` has set their address to 0
            self._logprobs.begin(columns, count)
        stops = (ctypes.c_int64 * len(stop_ids))(*stop_ids)
        arguments.set(num_generated=0, stop=0, stop_ids=ctypes.addressof(stops), num_stop_ids=len(stops), after_step=0)
        arguments.set(interrupt=0 if interrupt is None else ctypes.addressof(interrupt))
        ctypes.memset(ended, 0, ctypes.sizeof(ended))
        self._table.fields.repeats = count
        _bind_masks(arguments, masks)
        callback = None
        if masks is not None:
            callback = StepCallback(partial(masks.advance, generated, count), arguments.fields)
            arguments.set(after_step=callback.address)
        thread_pool().run(self._table, state)
        if callback is not None:
            callback.close()
        num_steps = arguments.fields.num_generated
        seconds = [stamp / 1e9 for stamp in stamps[: 2 * num_steps]]
        token_ids = [generated[row : num_steps * num_rows : num_rows] for row in range(num_rows)]
        ends = [StepEnd(*pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]
        logprobs = self._logprobs.of(token_ids, columns) if columns.has_logprobs else [[] for _ in token_ids]
        return Generated(token_ids, ends, logprobs)


@final
class StepCallback:
    """A Python function that compiled code calls after each step, in the thread that began the run. False ends the run.

    The step is the last unless the function has returned: compiled code sets `stop` before the call, and only True
    clears it. It is a generator, because an interrupt that arrived while compiled code ran is raised where Python
    resumes: here within a `try`. In a plain function that would be before its first line, and ctypes drops exceptions
    of a callback.
    """

    def __init__(self, after_step: Callable[[int], bool], fields: Any) -> None:
        """Wrap `after_step`. `fields` are those of SAMPLE."""
        self._error: BaseException | None = None
        self._steps = self._run(after_step, fields)
        next(self._steps)
        self._callback = _CALLBACK(self._steps.send)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def close(self) -> None:
        """End the generator after the run, and raise the exception that the function raised, if any."""
        self._steps.close()
        if self._error is not None:
            raise self._error

    def _run(self, after_step: Callable[[int], bool], fields: Any) -> Generator[None, int, None]:
        try:
            while True:
                if after_step((yield)):
                    fields.stop = 0
        except GeneratorExit:
            return
        except BaseException as error:
            self._error = error
        yield


@final
class Verifier:
    """A step that samples some of its rows. It samples a row again as long as the row's drafts are right."""

    def __init__(self, forward: DispatchTable, logits: Tensor) -> None:
        self._arguments = SampleArguments(logits, positions=0, position_offset=0)
        self._table = _table(forward, self._arguments, ".sampling.advance:accept")
        self._table.fields.again = len(forward.rows) + 1
        self._max_entries = len(logits)
        self._arguments.set(draft_stride=self._max_entries)
        self._logprobs = Logprobs(self._arguments)

    def run(self, state: State, step: SampledStep, num_threads: int | None = None) -> Generated:
        chunks, starts, columns, history, masks = step
        arguments, most_entries, lines, most = self._arguments, self._max_entries, 0, 0
        arguments.bind(columns, history)
        room, of_entries = arguments.room, arguments.room * most_entries
        positions, drafted, counts, drafts, generated, stamps = arguments.arrays(
            positions=room, num_drafts=room, counts_sampled=room, drafts=of_entries, generated=of_entries,
            stamps=most_entries + 1,
        )  # fmt: skip
        for row, ((_, ids, num_drafts, has_logits), start) in enumerate(zip(chunks, starts, strict=True)):
            positions[row], arguments.starts[row] = start + len(ids) - num_drafts, lines
            arguments.alive[row], drafted[row], counts[row] = has_logits, num_drafts, 0
            if num_drafts:
                at, most = row * most_entries, max(most, num_drafts)
                drafts[at : at + num_drafts] = list(ids[-num_drafts:])
            lines += num_drafts + 1 if has_logits else 0
        if columns.has_logprobs:
            self._logprobs.begin(columns, 1 + most)
        arguments.set(entry=0, stop=0)
        self._table.fields.repeats = 1 + most
        _bind_masks(arguments, masks)
        thread_pool().run(self._table, state, num_threads)
        num_rows = len(chunks)
        seconds = [stamp / 1e9 for stamp in stamps[: arguments.fields.entry + 1]]
        token_ids = [generated[row : num_rows * counts[row] : num_rows] for row in range(num_rows)]
        ends = [StepEnd(*pair) for pair in pairwise(seconds)]
        logprobs = self._logprobs.of(token_ids, columns) if columns.has_logprobs else [[] for _ in token_ids]
        return Generated(token_ids, ends, logprobs)


@final
class Followed:
    """The forwards of a multi-step that rank 0 of a group runs. Rank 0 samples, and sends the tokens to the other
    ranks.
    """

    def __init__(self, group: MemoryGroup, forward: DispatchTable) -> None:
        self._stop = integers(1)
        self._table = DispatchTable([group.transfer("follow", ctypes.addressof(self._stop))], forward)
        self._table.fields.stop = ctypes.addressof(self._stop)

    def run(self, state: State, count: int, num_threads: int | None) -> int:
        self._stop[0] = 0
        self._table.fields.repeats = count
        thread_pool().run(self._table, state, num_threads)
        return int(self._table.fields.completed)


def _stop_at(arguments: SampleArguments) -> int:
    """Return the address of the field `stop`."""
    return int(arguments.record["stop"].ctypes.data)


def _table(
    forward: DispatchTable, arguments: SampleArguments, last: str, after: Sequence[Command] = ()
) -> DispatchTable:
    """Return the forward, the sampler's commands, and the commands that turn their tokens into the next repeat."""
    first = launch.command(".sampling.advance:await_mask", arguments)
    sampler = [*launch.choice_commands(arguments), *launch.logprob_commands(arguments)]
    table = DispatchTable([first, *sampler, launch.command(last, arguments), *after], forward)
    table.fields.stop = _stop_at(arguments)
    return table


def _bind_masks(arguments: SampleArguments, masks: Masks | None) -> None:
    if masks is None:
        arguments.set(allowed=0, mask_ready=0)
    else:
        arguments.set(allowed=masks.words.data_ptr(), mask_ready=masks.is_ready.ctypes.data)
