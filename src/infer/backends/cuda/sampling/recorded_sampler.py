"""The sampler of a selection of rows and the kernel after it, recorded once for each tensor of logits."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from infer.backends.cuda.graphs import Graphs, Recording
from infer.backends.cuda.sampling.kernel_arguments import Lines, Seen, seen_of
from infer.backends.cuda.sampling.logprobs import Logprobs, Records
from infer.backends.cuda.sampling.sampler import EXACT, choose_by, tiling_of
from infer.operands.step import Masks
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History


class SamplerArguments(NamedTuple):
    """Arguments of a sampler beside its logits and positions. A recording reads them at the same addresses."""

    columns: SamplingColumns
    history: History | None
    allowed: Tensor | None
    records: Records | None

    def choose(self, logits: Tensor, positions: Tensor, lines: Lines | None = None) -> Tensor:
        tiling, logits = tiling_of(self.columns.vocab_size), logits[:, : self.columns.vocab_size]
        return choose_by(tiling, logits, self.columns, self.history, positions, self.allowed, lines, self.records)

    def launch_after(self, kernel: Any, grid: tuple[int], sampled: Tensor, *arguments: Any, **constants: int) -> None:
        """Launch a kernel of one warp that takes the sampled tokens, arguments of its own, and the history."""
        seen = seen_of(self.columns, self.history) or Seen(sampled, sampled, sampled, sampled)
        kernel[grid](
            sampled, *arguments, self.columns.history_slot, *seen, seen.tokens.shape[-1], self.columns.vocab_size,
            **constants, HAS_HISTORY=seen.tokens is not sampled, num_warps=1, **EXACT,
        )  # fmt: skip


@final
class RecordedSampler:
    """The buffers of a sampler, and its recordings for the rows that were selected last."""

    def __init__(self, max_lines: int, device: torch.device, graphs: Graphs) -> None:
        self.logprobs = Logprobs(device, graphs)
        self._max_lines, self._device, self._graphs = max_lines, device, graphs
        self._allowed = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._recordings = dict[int, Recording]()  # by the address of their logits
        self._made_of: tuple[object, ...] = (None,) * 5  # objects that the recordings are valid for

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
    ) -> Recording:
        """Return the recording of `sample`, which reads and writes `control` as well.

        `idle` is called before a new one is recorded. It makes `sample` change nothing.
        """
        if masks is not None and len(self._allowed) < len(masks.words):
            self._allowed = torch.empty(self._max_lines, masks.words.shape[1], dtype=torch.int32, device=self._device)
        allowed, words = None if masks is None else self._allowed, None if records is None else records.words
        made_of = (columns.selection, history, allowed, words, control)
        if any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._recordings, self._made_of = {}, made_of
        if logits.data_ptr() not in self._recordings:
            idle()
            work = partial(sample, logits, SamplerArguments(columns, history, allowed, records))
            self._recordings[logits.data_ptr()] = self._graphs.record(work)
        return self._recordings[logits.data_ptr()]

    def allow(self, words: Tensor) -> None:
        """Copy a step's masks to the place that the recordings read."""
        self._allowed[: len(words)].copy_(words)
