"""The sampler and the kernel after it, recorded once for each combination of stages and for each size.

A recording reads the rows' parameters from `SelectedRows`. So it is valid for any rows that take part in its stages.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from infer.compute.backends.cuda.graphs import Graphs, Recording
from infer.compute.backends.cuda.sampling.kernel_arguments import Lines, Seen, Selection, Stages, seen_of
from infer.compute.backends.cuda.sampling.logprobs import Logprobs, Records
from infer.compute.backends.cuda.sampling.sampler import EXACT, choose_selected, tiling_of
from infer.compute.backends.cuda.sampling.selected_rows import SelectedRows
from infer.compute.operands.step import Masks
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History


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
