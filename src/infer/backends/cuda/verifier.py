"""A step that verifies drafts without a return to Python: forward, sampler and `accept`, for all lines in one batch.

Noise is keyed by the position, and a line counts only if every draft before it was right. So each line is sampled as if
they were right, penalties included, and the lines after a wrong draft are dropped.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
import triton
from torch import Tensor

from infer.backends.cuda.graphs import Graphs, Recording
from infer.backends.cuda.sampling.after_sampling import accept_rows
from infer.backends.cuda.sampling.kernel_arguments import Lines, Seen, seen_of
from infer.backends.cuda.sampling.logprobs import Logprobs, Records
from infer.backends.cuda.sampling.sampler import EXACT, choose_lines
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
        self._max_logits, self._device, self._graphs = max_logits, device, graphs
        parts = aligned_parts([max_logits] * 6 + [max_logits + 1])
        self._on_host, self._copied = graphs.mirror(parts[-1].stop), graphs.event()
        self._on_device = self._on_host.to(device, copy=True)
        self._host = _Words(*(self._on_host[part].numpy() for part in parts))
        self._words = _Words(*(self._on_device[part] for part in parts))
        self._samplers = dict[int, Recording]()  # by the logits that they read
        self._made_of: tuple[object, ...] = (None, None, None, None)  # the samplers: what others are needed for
        self._allowed = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._logprobs, self._no_steps = Logprobs(device, graphs), torch.zeros(1, dtype=torch.int64, device=device)

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
            self._allowed[: len(masks.words)].copy_(masks.words)
        sampler.replay()
        self._logprobs.fetch(columns, self._max_logits)
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()
        firsts, counts = (each[: len(chunks)].tolist() for each in (self._host.starts, self._host.counts))
        lines = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        token_ids = [self._host.token_ids[mine.start : mine.stop].tolist() for mine in lines]
        return Verified(token_ids, self._logprobs.of(columns, lines, token_ids))

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
        if masks is not None and len(self._allowed) < len(masks.words):
            self._allowed = torch.empty(self._max_logits, masks.words.shape[1], dtype=torch.int32, device=self._device)
        records = self._logprobs.records(columns, self._max_logits, self._no_steps)
        words = None if records is None else records.words
        made_of = (columns.selection, history, None if masks is None else self._allowed, words)
        if any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._samplers, self._made_of = {}, made_of
        if logits.data_ptr() not in self._samplers:
            self._on_device.zero_()  # no row has a line: recording it changes nothing
            allowed = None if masks is None else self._allowed[: len(logits)]
            work = partial(self._sample, logits[:, : columns.vocab_size], columns, history, allowed, records)
            self._samplers[logits.data_ptr()] = self._graphs.record(work)
        return self._samplers[logits.data_ptr()]

    def _sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: History | None,
        allowed: Tensor | None,
        records: Records | None,
    ) -> Tensor:
        words = _Words(*(each[: len(logits)] for each in self._words))
        lines = Lines(words.rows, words.entries, words.drafts)
        sampled = choose_lines(logits, columns, history, words.positions, allowed, lines, records)
        seen = seen_of(columns, history) or Seen(sampled, sampled, sampled, sampled)
        accept_rows[(len(columns),)](
            sampled, words.drafts, self._words.starts, self._words.counts, words.token_ids,
            columns.history_slot, *seen, seen.tokens.shape[-1], columns.vocab_size,
            LINES=triton.next_power_of_2(len(logits)), HAS_HISTORY=seen.tokens is not sampled, num_warps=1, **EXACT,
        )  # fmt: skip
        token_ids: Tensor = words.token_ids
        return token_ids
