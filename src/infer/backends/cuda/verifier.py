"""A step that verifies drafts without a return to Python: forward, sampler and `accept`, for all lines in one batch.

Noise is keyed by the position, and a line counts only if every draft before it was right. So each line is sampled as if
they were right, penalties included, and the lines after a wrong draft are dropped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import triton
from torch import Tensor

from infer.backends.cuda.graphs import Graphs, Recording
from infer.backends.cuda.sampling.after_sampling import accept_rows
from infer.backends.cuda.sampling.kernel_arguments import Lines
from infer.backends.cuda.sampling.recorded_sampler import RecordedSampler, SamplerArguments
from infer.backends.cuda.step_inputs import aligned_parts
from infer.operands.step import Chunk, Masks
from infer.outputs import TokenLogprob
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

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


class Verified(NamedTuple):
    """Accepted tokens after each chunk, and their log-probabilities if a row asks for them."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]


@final
class Verifier:
    def __init__(self, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        self._max_logits = max_logits
        parts = aligned_parts([max_logits] * 6 + [max_logits + 1])
        self._on_host, self._copied = graphs.mirror(parts[-1].stop), graphs.event()
        self._on_device = self._on_host.to(device, copy=True)
        self._host = _Words(*(self._on_host[part].numpy() for part in parts))
        self._words = _Words(*(self._on_device[part] for part in parts))
        self._sampler = RecordedSampler(max_logits, device, graphs)
        self._no_steps = torch.zeros(1, dtype=torch.int64, device=device)

    def run(
        self,
        forward: Recording,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None,
        masks: Masks | None,
    ) -> Verified:
        """Run and verify a step. `forward` has a line for each of the chunks' logits, or more."""
        sampler = self._record(forward.result, columns, history, masks)
        self._fill(chunks, starts)
        self._on_device.copy_(self._on_host, non_blocking=True)
        forward.replay()
        if masks is not None:
            masks.wait()
            self._sampler.allow(masks.words)
        sampler.replay()
        self._sampler.logprobs.fetch(columns, self._max_logits)
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()
        firsts, counts = (each[: len(chunks)].tolist() for each in (self._host.starts, self._host.counts))
        lines = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        token_ids = [self._host.token_ids[mine.start : mine.stop].tolist() for mine in lines]
        return Verified(token_ids, self._sampler.logprobs.of(columns, lines, token_ids))

    def _fill(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """Fill the words on the host. Unused lines are sampled with the parameters of the first row."""
        host, line = self._host, 0
        host.rows[:], host.entries[:], host.drafts[:] = 0, 0, _NONE
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            host.starts[row], count = line, chunk.num_logits
            if count:
                lines, end = slice(line, line + count), start + len(chunk.token_ids) + 1
                host.rows[lines], host.entries[lines] = row, range(count)
                host.positions[lines] = range(end - count, end)
                host.drafts[line : line + count - 1] = chunk.drafts
            line += count
        host.starts[len(chunks)] = line

    def _record(
        self, logits: Tensor, columns: SamplingColumns, history: History | None, masks: Masks | None
    ) -> Recording:
        records = self._sampler.logprobs.records(columns, self._max_logits, self._no_steps)
        return self._sampler.recording(
            logits, columns, history, masks, records, self._on_device, self._on_device.zero_, self._sample
        )  # without a line, no row is changed

    def _sample(self, logits: Tensor, arguments: SamplerArguments) -> Tensor:
        words = _Words(*(each[: len(logits)] for each in self._words))
        sampled = arguments.choose(logits, words.positions, Lines(words.rows, words.entries, words.drafts))
        arguments.launch_after(
            accept_rows, (len(arguments.columns),), sampled, words.drafts, self._words.starts, self._words.counts,
            words.token_ids, LINES=triton.next_power_of_2(len(logits)),
        )  # fmt: skip
        token_ids: Tensor = words.token_ids
        return token_ids
