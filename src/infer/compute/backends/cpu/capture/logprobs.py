"""Conversion of the log-probabilities that a table run stores, for its caller."""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from infer.compute.backends.cpu.sample_records import LOGPROB
from infer.compute.backends.cpu.sampling.rows import SampleArguments
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.sampler import Sampled, normalized
from infer.outputs import TokenLogprob


@final
class Logprobs:
    """One record per row of each step, or of each entry. Memory is allocated once a row asks for it."""

    def __init__(self, arguments: SampleArguments) -> None:
        self._arguments, self._records = arguments, np.zeros(0, LOGPROB)

    def begin(self, columns: SamplingColumns, num_steps: int) -> None:
        """Make room for a run of up to `num_steps` steps, in which a row asks for log-probabilities."""
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
