"""Log-probabilities of rows that ask for them, after the sampler, as `sampling.sampler.log_probabilities` defines them.

`weigh_scores` processes one block of the vocabulary, and `join_scores` combines a row's blocks. The sum of weights is a
sum of integers, and the likeliest tokens follow the total order. So neither depends on the number of blocks. The
kernels store logits and sums; `normalized` computes log-probabilities from them on the host, as for a CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.compute.backends.cuda.graphs import Graphs
from infer.compute.backends.cuda.sampling.edits import INFINITY, divisors_of, edited, raw_logits, shift_of, tempered
from infer.compute.backends.cuda.sampling.kernel_arguments import (
    IS_FILTERED,
    IS_PROCESSED,
    NUM_TOP,
    TEMPERATURE,
    integer,
    single,
)
from infer.compute.backends.cuda.sampling.noise import MAX_ID, MIN, best_of, key_of, logit_of, weights
from infer.compute.backends.cuda.sampling.unfiltered import lifted_largest_of_row
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.sampler import Sampled, normalized
from infer.outputs import TokenLogprob

_COUNTS = 4  # words of a record before the likeliest tokens: logit, largest logit, sum of weights, rank


class Records(NamedTuple):
    """Target of log-probabilities: int64 [steps, lines, 4 + 2 most]. The step number `done` is written."""

    words: Tensor
    done: Tensor  # how many steps there were before
    most: int  # alternatives that there is room for, a power of 2


class Found(NamedTuple):
    """The sampler's results for each line. `ends` are the key and the id of the last token that the filters keep."""

    token_ids: Any
    largests: Any  # of each block after the edits
    raw_largests: Any
    ends: Any


class BlockParts(NamedTuple):
    """Results of a block, [lines, blocks]: the sum of weights, the count of likelier tokens, and the likeliest ones."""

    totals: Any
    ahead: Any
    keys: Any  # [lines, blocks, most]
    ids: Any


class FetchedRecords(NamedTuple):
    """A step's records on the host, for the rows that were selected then."""

    words: Tensor
    num_logprobs: tuple[int | None, ...]
    vocab_size: int

    def of(self, lines: Sequence[range], token_ids: Sequence[Sequence[int]]) -> list[list[TokenLogprob]]:
        """Return the log-probabilities of each row's tokens, which were sampled in these lines.

        Rows that ask for none have an empty list. Failure codes have no entry.
        """
        return [
            [] if count is None else self._of_row(count, mine, [each for each in ids if each >= 0])
            for count, mine, ids in zip(self.num_logprobs, lines, token_ids, strict=True)
        ]

    def _of_row(self, num_top: int, lines: range, token_ids: Sequence[int]) -> list[TokenLogprob]:
        most, num_top = _most(self.num_logprobs), min(num_top, self.vocab_size)
        width, mine = _COUNTS + 2 * most, list(lines[: len(token_ids)])
        words = self.words[: len(self.words) // width * width].view(-1, width)[mine]
        logits = words.to(torch.int32).view(torch.float32)
        largest, totals, top = logits[:, 1:2], words[:, 2:3], logits[:, _COUNTS + most :][:, :num_top]
        sampled = Sampled(
            torch.tensor(token_ids, dtype=torch.int64),
            normalized(logits[:, :1], largest, totals)[:, 0],
            words[:, 3],
            words[:, _COUNTS:][:, :num_top],
            normalized(top, largest, totals),
        )
        return [sampled.logprob_of(index, num_top) for index in range(len(token_ids))]


@final
class Logprobs:
    """Records on the device, and two mirrors on the host: one step may be read while the next one runs."""

    def __init__(self, device: torch.device, graphs: Graphs) -> None:
        self._graphs = graphs
        self._on_device = torch.zeros(0, dtype=torch.int64, device=device)
        self._mirrors = [graphs.mirror(0), graphs.mirror(0)]

    def records(self, columns: SamplingColumns, num_lines: int, done: Tensor) -> Records | None:
        """Return records for `num_lines` lines, at the same address as before if there is room; None if no row asks for
        any.
        """
        if not columns.has_logprobs:
            return None
        most = _most(columns.num_logprobs)
        size = num_lines * (_COUNTS + 2 * most)
        if size > len(self._on_device):
            self._mirrors = [self._graphs.mirror(size), self._graphs.mirror(size)]
            self._on_device = torch.zeros(size, dtype=torch.int64, device=self._on_device.device)
        return Records(self._on_device, done, most)

    def fetch(self, columns: SamplingColumns, num_lines: int) -> FetchedRecords | None:
        """Start copying the records to the host; None if no row asks for any.

        They may be read when the device has finished the copy, until the copy after the next one begins.
        """
        if not columns.has_logprobs:
            return None
        self._mirrors.reverse()
        on_host = self._mirrors[0]
        size = num_lines * (_COUNTS + 2 * _most(columns.num_logprobs))
        self._graphs.copy(on_host[:size], self._on_device[:size])
        return FetchedRecords(on_host, columns.num_logprobs, columns.vocab_size)


def _most(num_logprobs: Sequence[int | None]) -> int:
    most: int = triton.next_power_of_2(max(1, *(count or 0 for count in num_logprobs)))
    return most


@triton.jit
def weigh_scores(
    batch, found, parts, num_blocks,
    MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, num_top = tl.load(found.token_ids + row), integer(batch, row, NUM_TOP)
    if (token >= 0) & (num_top >= 0):
        view, largest = _view(batch, row, found, num_blocks, BLOCK, BLOCKS, EDITS, FILTERS)
        ids, at = block * BLOCK + tl.arange(0, BLOCK), row * num_blocks + block
        x, is_there = _scored(batch, row, ids, view, EDITS), ids < batch.vocab_size
        chosen = _scored(batch, row, token.to(tl.int32), view, EDITS)
        is_ahead = is_there & ((x > chosen) | ((x == chosen) & (ids < token)))
        tl.store(parts.totals + at, tl.sum(tl.where(is_there, weights(x, largest), 0)))
        tl.store(parts.ahead + at, tl.sum(is_ahead.to(tl.int32)))
        keys = tl.where(is_there, key_of(x), MIN)
        for i in range(num_top):
            key, best = best_of(keys, ids)
            tl.store(parts.keys + at * MOST + i, key)
            tl.store(parts.ids + at * MOST + i, best)
            keys = tl.where(ids == best, MIN, keys)


@triton.jit
def join_scores(
    batch, found, parts, words, done, num_blocks,
    MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, num_top = tl.load(found.token_ids + row), integer(batch, row, NUM_TOP)
    if (token >= 0) & (num_top >= 0):
        view, largest = _view(batch, row, found, num_blocks, BLOCK, BLOCKS, EDITS, FILTERS)
        blocks = tl.arange(0, BLOCKS)
        is_block, at = blocks < num_blocks, row * num_blocks + blocks
        to = words + (tl.load(done) * tl.num_programs(0) + row) * (4 + 2 * MOST)
        tl.store(to, _bits(_scored(batch, row, token.to(tl.int32), view, EDITS)))
        tl.store(to + 1, _bits(largest))
        tl.store(to + 2, tl.sum(tl.load(parts.totals + at, mask=is_block, other=0)))
        tl.store(to + 3, tl.sum(tl.load(parts.ahead + at, mask=is_block, other=0)) + 1)
        entries = tl.arange(0, BLOCKS * MOST)
        is_there, at = (entries < num_blocks * MOST) & (entries % MOST < num_top), row * num_blocks * MOST + entries
        keys = tl.load(parts.keys + at, mask=is_there, other=MIN)
        ids = tl.load(parts.ids + at, mask=is_there, other=MAX_ID)
        for i in range(num_top):
            key, best = best_of(keys, ids)
            tl.store(to + 4 + i, best.to(tl.int64))
            tl.store(to + 4 + MOST + i, _bits(logit_of(key)))
            keys = tl.where(ids == best, MIN, keys)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _view(
    batch, row, found, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr, FILTERS: tl.constexpr
):
    """Return the values that turn a row's logits into scored ones, and the largest scored logit."""
    blocks = tl.arange(0, BLOCKS)
    is_block, at = blocks < num_blocks, row * num_blocks + blocks
    raw_largest = tl.max(tl.load(found.raw_largests + at, mask=is_block, other=-INFINITY))
    _, edited_largest, is_lifted = lifted_largest_of_row(batch, row, found.largests, num_blocks, BLOCK, BLOCKS, EDITS)
    first, last = divisors_of(batch, row)
    is_greedy = single(batch, row, TEMPERATURE) == 0
    first, last = tl.where(is_greedy, 1.0, first), tl.where(is_greedy, 1.0, last)
    shift = shift_of(edited_largest, first)
    top = tempered(edited_largest, first, shift)
    last_shift = shift_of(top, last)
    pivot, last_id = tl.full((), MIN, tl.int32), tl.full((), MAX_ID, tl.int32)
    if FILTERS:  # noqa: SIM102 - known when compiled
        if integer(batch, row, IS_FILTERED) != 0:
            pivot, last_id = tl.load(found.ends + 2 * row), tl.load(found.ends + 2 * row + 1)
    is_processed = integer(batch, row, IS_PROCESSED) != 0
    largest = tl.where(is_processed, tempered(top, last, last_shift), raw_largest)
    return (is_processed, is_lifted, first, shift, last, last_shift, pivot, last_id), largest


@triton.jit
def _scored(batch, row, ids, view, EDITS: tl.constexpr):
    """Return the raw logits, or those after step 9: −inf for tokens that the filters drop."""
    is_processed, is_lifted, first, shift, last, last_shift, pivot, last_id = view
    x = raw_logits(batch, row, ids)
    if is_processed:
        y = tempered(edited(x, batch, row, ids, is_lifted, EDITS), first, shift)
        key = key_of(y)
        is_kept = (key > pivot) | ((key == pivot) & (ids <= last_id))
        x = tl.where(is_kept, tempered(y, last, last_shift), -INFINITY)
    return x
