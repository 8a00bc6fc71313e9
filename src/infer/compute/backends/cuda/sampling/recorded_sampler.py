"""The sampler and the kernel after it, recorded once for each combination of stages and for each size.

A recording reads the rows' parameters from `SelectedRows`, at addresses that never change. When sequences join or
leave, only the contents change. So a recording is valid for any rows that take part in its stages.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from infer.compute.backends.cuda.graphs import Graphs, Recording
from infer.compute.backends.cuda.sampling.kernel_arguments import (
    NUM_FIELDS,
    Lines,
    ParameterLists,
    Seen,
    Selection,
    Stages,
    make_fields,
    seen_of,
    unused_line,
)
from infer.compute.backends.cuda.sampling.logprobs import Logprobs, Records
from infer.compute.backends.cuda.sampling.sampler import EXACT, choose_selected, tiling_of
from infer.compute.operands.step import Masks
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError

_LEAST_ENTRIES, _LEAST_MASKS = 256, 8  # of a list; longer ones take their next power of 2


@final
class SelectedRows:
    """Lines of the rows, followed by lines of padding: the last line is always padding.

    `lists` has other tensors after a selection whose lists did not fit.
    """

    def __init__(self, max_rows: int, device: torch.device, graphs: Graphs) -> None:
        self._max_rows, self._graphs, self._copied = max_rows, graphs, graphs.event()
        shape = max_rows + 1, NUM_FIELDS.value
        self._mirror = graphs.mirror(shape[0] * shape[1])
        self._words = self._mirror.numpy().reshape(shape)
        self.fields = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lists = ParameterLists(
            bias_ids=torch.zeros(_LEAST_ENTRIES, dtype=torch.int64, device=device),
            biases=torch.zeros(_LEAST_ENTRIES, dtype=torch.float64, device=device),
            end_ids=torch.zeros(_LEAST_ENTRIES, dtype=torch.int64, device=device),
            masks=torch.zeros(0, 0, dtype=torch.int32, device=device),
        )
        self._selection: object = None

    def fill(self, columns: SamplingColumns) -> None:
        """Copy the rows as they are selected now, in the order of the device's work."""
        if columns.selection is self._selection:
            return
        if len(columns) > self._max_rows:
            raise InvalidRequestError(f"at most {self._max_rows} rows are sampled in one step, got {len(columns)}")
        self._copied.synchronize()  # what was copied last: the mirror is free
        self._words[: len(columns)], self._words[len(columns) :] = make_fields(columns), unused_line()
        self._graphs.copy(self.fields.view(-1), self._mirror)
        self._copied.record()
        given = ParameterLists.of(columns)
        self.lists = ParameterLists(*(_with_room(mine, each) for mine, each in zip(self.lists, given, strict=True)))
        for mine, each in zip(self.lists, given, strict=True):
            if len(each):
                self._graphs.copy(mine[: len(each)], each)
        self._selection = columns.selection


def _with_room(mine: Tensor, given: Tensor) -> Tensor:
    """Return `mine` if it has room for the entries of `given`, or a larger tensor. Its contents do not count."""
    if len(given) <= len(mine) and given.shape[1:] == mine.shape[1:]:
        return mine
    room = max(_LEAST_MASKS, 1 << (len(given) - 1).bit_length() if len(given) else 0)
    return torch.zeros(room, *given.shape[1:], dtype=mine.dtype, device=mine.device)


class SamplerArguments(NamedTuple):
    """Arguments of a sampler beside its logits and positions. A recording reads them at the same addresses."""

    selection: Selection
    allowed: Tensor | None
    records: Records | None

    def choose(self, logits: Tensor, positions: Tensor, lines: Lines | None = None) -> Tensor:
        vocab_size = self.selection.vocab_size
        return choose_selected(
            tiling_of(vocab_size), logits[:, :vocab_size], self.selection, positions, self.allowed, lines, self.records
        )

    def launch_after(self, kernel: Any, grid: tuple[int], sampled: Tensor, *arguments: Any, **constants: int) -> None:
        """Launch a kernel of one warp that takes the sampled tokens, arguments of its own, and the history."""
        seen = self.selection.seen or Seen(sampled, sampled, sampled, sampled)
        kernel[grid](
            sampled, *arguments, self.selection.fields, *seen, seen.tokens.shape[-1], self.selection.vocab_size,
            **constants, HAS_HISTORY=seen.tokens is not sampled, num_warps=1, **EXACT,
        )  # fmt: skip


class _Key(NamedTuple):
    """Everything that a recording depends on, except for the memory that all recordings share."""

    address: int  # of the logits
    shape: tuple[int, ...]
    vocab_size: int
    stages: Stages
    has_masks: bool
    num_alternatives: int | None  # that records have room for
    variant: Hashable  # of the kernel after the sampler


@final
class RecordedSampler:
    """The buffers of a sampler, and its recordings."""

    def __init__(self, max_lines: int, device: torch.device, graphs: Graphs) -> None:
        self.logprobs = Logprobs(device, graphs)
        self._max_lines, self._device, self._graphs = max_lines, device, graphs
        self._rows = SelectedRows(max_lines, device, graphs)
        self._allowed = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._recordings = dict[_Key, Recording]()
        self._memory: tuple[object, ...] = (None,) * 8  # that the recordings are valid for

    def recording(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: History | None,
        masks: Masks | None,
        records: Records | None,
        control: Tensor,
        idle: Callable[[], object],
        sample: Callable[[Tensor, SamplerArguments], Tensor],
        variant: Hashable = None,
    ) -> Recording:
        """Return the recording of `sample`, which reads and writes `control` as well, for the rows selected now.

        `idle` is called before a new one is recorded. It makes `sample` change nothing. `variant` is anything else that
        `sample` depends on.
        """
        self._rows.fill(columns)
        stages = Stages.of(columns, history)
        self._keep_memory(history if stages.has_history else None, masks, records, control)
        key = _Key(
            logits.data_ptr(), tuple(logits.shape), columns.vocab_size, stages, masks is not None,
            None if records is None else records.most, variant,
        )  # fmt: skip
        if key not in self._recordings:
            idle()
            seen = seen_of(history, stages)
            selection = Selection(columns.vocab_size, stages, self._rows.fields, self._rows.lists, seen)
            arguments = SamplerArguments(selection, None if masks is None else self._allowed, records)
            self._recordings[key] = self._graphs.record(partial(sample, logits, arguments))
        return self._recordings[key]

    def allow(self, words: Tensor) -> None:
        """Copy a step's masks to the place that the recordings read."""
        self._allowed[: len(words)].copy_(words)

    def _keep_memory(
        self, history: History | None, masks: Masks | None, records: Records | None, control: Tensor
    ) -> None:
        """Drop all recordings if memory that they read or write has been replaced. None leaves it as it is."""
        if masks is not None and (not len(self._allowed) or self._allowed.shape[1] != masks.words.shape[1]):
            self._allowed = torch.empty(self._max_lines, masks.words.shape[1], dtype=torch.int32, device=self._device)
        words = None if records is None else records.words
        now = (history, words, self._allowed, *self._rows.lists, control)
        pairs = list(zip(now, self._memory, strict=True))
        if any(each is not None and before is not None and each is not before for each, before in pairs):
            self._recordings.clear()
        self._memory = tuple(before if each is None else each for each, before in pairs)
