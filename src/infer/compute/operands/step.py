"""The ragged batch that every path hands to `forward`, and the axis names that tensors carry in their types.

    tokens   all tokens of a step, sequence after sequence      rows     sequences in the step
    logits   tokens of a step whose logits are computed         vocab    entries of the vocabulary
    hidden   the residual stream                                out      columns that a projection makes

Prefill, decode and verify are one thing: a number of tokens per sequence.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from infer.errors import InvalidRequestError

TokenIds = ctypes.Array[ctypes.c_int64]
Interrupt = ctypes.c_int64
"""A number that any thread may set to 1: a multi-step ends after the step that is under way."""


@final
class Chunk(NamedTuple):
    """One sequence's share of a step: `token_ids` to compute, the last `num_drafts` of them drafts.

    `num_drafts + 1` logits are returned, or none inside a prompt.
    """

    row: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    has_logits: bool = True

    @property
    def num_logits(self) -> int:
        return self.num_drafts + 1 if self.has_logits else 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


def sampled_after(chunk_index: int) -> int:
    """Return the id that stands for the token which the step before samples after its chunk of this index.

    Only a step that is launched behind that one may have such an id. The device puts the token in its place.
    """
    return -2 - chunk_index


@dataclass(frozen=True)
class Step:
    """One forward. A sequence's tokens are contiguous and its positions increase by one."""

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]  # absolute; they keep growing when the cache forgets
    rows: Int[Tensor, "tokens"]  # the sequence that owns the token
    logit_indices: Int[Tensor, "logits"]  # indices into tokens
    is_recorded: bool = field(
        default=False, kw_only=True
    )  # a recording's own, filled for each replay: there a row of −1 means no token
    # Values that a backend computes once per forward for several layers, by their own keys. A copy has none.
    shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, token_ids: Sequence[int], start: int = 0, *, row: int = 0, logit_indices: Sequence[int] | None = None
    ) -> Self:
        """Return a step of one sequence's tokens from position `start`. `logit_indices` defaults to the last token."""
        count = len(token_ids)
        return cls(
            tokens=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.arange(start, start + count),
            rows=torch.full((count,), row, dtype=torch.int64),
            logit_indices=torch.tensor([count - 1] if logit_indices is None else logit_indices, dtype=torch.int64),
        )

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], starts: Sequence[int]) -> Self:
        """Return a step of several rows' chunks, each starting at its row's position in `starts`."""
        if all(len(chunk.token_ids) == chunk.num_logits == 1 for chunk in chunks):  # a step of decoding: half the time
            columns = (
                [chunk.token_ids[0] for chunk in chunks],
                starts,
                [chunk.row for chunk in chunks],
                range(len(chunks)),
            )
            return cls(*(torch.from_numpy(np.array(column, np.int64)) for column in columns))
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
        logit_indices = [
            np.arange(end - chunk.num_logits, end) for chunk, end in zip(chunks, ends.tolist(), strict=True)
        ]
        positions = [np.arange(at, at + len(chunk.token_ids)) for chunk, at in zip(chunks, starts, strict=True)]
        rows = np.repeat([chunk.row for chunk in chunks], [len(chunk.token_ids) for chunk in chunks])
        token_ids = np.array([token_id for chunk in chunks for token_id in chunk.token_ids], np.int64)
        arrays = (token_ids, np.concatenate(positions), rows, np.concatenate(logit_indices))
        return cls(*(torch.from_numpy(array) for array in arrays))

    def pieces(self, capacity: int, max_logits: int) -> Iterator["Step"]:
        """Yield the step in consecutive parts of up to `capacity` tokens and `max_logits` logits.

        Raises InvalidRequestError if a step that must be divided has logit indices out of order.
        """
        num_tokens = len(self.tokens)
        if num_tokens <= capacity and len(self.logit_indices) <= max_logits:
            yield self
            return
        logit_indices = self.logit_indices.tolist()
        if logit_indices != sorted(logit_indices):
            raise InvalidRequestError(
                f"the logit indices of a step of more than {capacity} tokens or {max_logits} logits must be in order"
            )
        start = 0
        while start < num_tokens:
            end = min(num_tokens, start + capacity)
            mine = [index for index in logit_indices if start <= index < end]
            if len(mine) > max_logits:
                mine = mine[:max_logits]
                end = mine[-1] + 1
            tokens, positions, rows = (x[start:end] for x in (self.tokens, self.positions, self.rows))
            yield Step(tokens, positions, rows, torch.tensor([index - start for index in mine], dtype=torch.int64))
            start = end

    def to(self, device: torch.device) -> "Step":
        return Step(*(t.to(device) for t in (self.tokens, self.positions, self.rows, self.logit_indices)))


class StepEnd(NamedTuple):
    """Times at which a step's forward and the sampling after it had ended, in seconds of `time.perf_counter`."""

    forward: float
    sampling: float


class Clock(NamedTuple):
    """Times of one step, or of a multi-step, from its planning until all that it needs is done.

    `ends` has one entry per step. A step that verifies drafts has one entry per line, with the forward's time in the
    first only.
    """

    started: float
    ends: Sequence[StepEnd]
    ended: float


@final
@dataclass
class Masks:
    """The grammars' masks of one step, one line per logit. Another thread may fill them while the step runs."""

    words: Int[Tensor, "lines words"]
    is_ready: npt.NDArray[np.int64]  # one number: 1 when all are filled
    wait: Callable[[], object]  # returns when all are filled
    advance: Callable[[TokenIds, int, int], bool]
    """A multi-step calls it after each step, with the array of its tokens, row after row, the number of its steps, and
    the number of those that are done. It makes sure that the lines of the next step are filled. False ends the
    multi-step. A step leaves nothing of Python's in the caches, so the call must touch little memory."""
