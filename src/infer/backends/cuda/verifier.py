"""A step whose drafts are verified without a return to Python: forward, sampler and `accept`, for all lines at once.

Noise is keyed by the position, and a line counts only where every draft before it was right: so each is sampled as if
they were, penalties included, and those after a surprise are dropped.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
import triton
from torch import Tensor

from infer.backends.cuda.accept import accept_rows
from infer.backends.cuda.batch import Lines, Seen, seen_of
from infer.backends.cuda.graphs import Graphs, Recording
from infer.backends.cuda.sampler import EXACT, choose_lines
from infer.operands.step import Chunk, Masks
from infer.outputs import TokenLogprob
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.sampling.sampler import Sampled, log_probabilities

_NONE = -1  # what is drafted after a row's last line


class _Words(NamedTuple):
    """int64, one after the other: an entry for each line, then for each row."""

    rows: Any
    entries: Any  # how many drafts of its row come before
    drafts: Any  # what is drafted after it
    positions: Any
    token_ids: Any
    counts: Any  # how many of a row's lines count
    starts: Any  # a row's first line; one more than there are rows


class Verified(NamedTuple):
    """What counts of what was sampled after each chunk, and its log-probabilities where a row asks for them."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]


@final
class Verifier:
    def __init__(self, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        self._max_logits, self._device, self._graphs = max_logits, device, graphs
        sizes = [max_logits] * 6 + [max_logits + 1]
        self._on_host, self._copied = graphs.mirror(sum(sizes)), graphs.event()
        self._on_device = self._on_host.to(device, copy=True)
        self._host = _Words(*(words.numpy() for words in self._on_host.split(sizes)))
        self._words = _Words(*self._on_device.split(sizes))
        self._samplers = dict[int, Recording]()  # by the logits that they read
        self._made_of: tuple[object, ...] = (None, None, None)  # the samplers: what others are needed for
        self._allowed = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def run(
        self,
        forward: Recording,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None,
        masks: Masks | None,
    ) -> Verified:
        """`forward` has a line for each of the chunks' logits, or more."""
        sampler = self._record(forward.result, columns, history, masks)
        self._fill(chunks, starts)
        self._on_device.copy_(self._on_host, non_blocking=True)
        forward.replay()
        if masks is not None:
            masks.wait()
            self._allowed[: len(masks.words)].copy_(masks.words)
        sampler.replay()
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()
        firsts, counts = (each[: len(chunks)].tolist() for each in (self._host.starts, self._host.counts))
        lines = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        token_ids = [self._host.token_ids[mine.start : mine.stop].tolist() for mine in lines]
        return Verified(token_ids, self._logprobs(forward.result[:, : columns.vocab_size], lines, columns))

    def _logprobs(self, logits: Tensor, lines: Sequence[range], columns: SamplingColumns) -> list[list[TokenLogprob]]:
        """Those of raw logits, for rows that ask for them."""
        if not columns.has_logprobs:
            return [[] for _ in lines]
        count = max(mine.stop for mine in lines)
        token_ids, most = self._words.token_ids[:count], max(number or 0 for number in columns.num_logprobs)
        scores = log_probabilities(logits[:count].float(), token_ids.clamp(min=0), most)
        sampled = Sampled(token_ids.cpu(), *(each.cpu() for each in scores))
        return [
            []
            if number is None
            else [sampled.logprob_of(line, number) for line in mine if self._host.token_ids[line] >= 0]
            for mine, number in zip(lines, columns.num_logprobs, strict=True)
        ]

    def _fill(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """Lines that no row has are sampled with the parameters of the first."""
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
        made_of = (columns.selection, history, None if masks is None else self._allowed)
        if any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._samplers, self._made_of = {}, made_of
        if logits.data_ptr() not in self._samplers:
            self._on_device.zero_()  # no row has a line: recording it changes nothing
            allowed = None if masks is None else self._allowed[: len(logits)]
            work = partial(self._sample, logits[:, : columns.vocab_size], columns, history, allowed)
            self._samplers[logits.data_ptr()] = self._graphs.record(work)
        return self._samplers[logits.data_ptr()]

    def _sample(
        self, logits: Tensor, columns: SamplingColumns, history: History | None, allowed: Tensor | None
    ) -> Tensor:
        words = _Words(*(each[: len(logits)] for each in self._words))
        lines = Lines(words.rows, words.entries, words.drafts)
        sampled = choose_lines(logits, columns, history, words.positions, allowed, lines)
        seen = seen_of(columns, history) or Seen(sampled, sampled, sampled, sampled)
        accept_rows[(len(columns),)](
            sampled, words.drafts, self._words.starts, self._words.counts, words.token_ids,
            columns.history_slot, *seen, seen.tokens.shape[-1], columns.vocab_size,
            LINES=triton.next_power_of_2(len(logits)), HAS_HISTORY=seen.tokens is not sampled, num_warps=1, **EXACT,
        )  # fmt: skip
        token_ids: Tensor = words.token_ids
        return token_ids
