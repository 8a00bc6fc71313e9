"""The ragged batch that every path hands to `forward`, and the axis names that tensors carry in their types.

    tokens   all tokens of a step, rows one after the other     rows     sequences in the batch
    wanted   tokens whose logits are asked for                  vocab    entries of the vocabulary
    hidden   the residual stream                                out      whatever a projection makes

Prefill, decode and verify are one thing: a number of tokens per row.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

TokenIds = ctypes.Array[ctypes.c_int64]


@dataclass(frozen=True)
class Part:
    """What one row brings to a step: tokens that its cache has not, of which the last `num_drafts` are guesses.

    Wanted are the logits behind the last known token and behind each draft, or none in the midst of a prompt.
    """

    row: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    is_wanted: bool = True

    @property
    def num_lines(self) -> int:
        return self.num_drafts + 1 if self.is_wanted else 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True)
class Step:
    """One forward. A row's tokens are contiguous and its positions increase by one."""

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]  # absolute; they keep growing when the cache forgets
    rows: Int[Tensor, "tokens"]  # the sequence that owns the token
    wanted: Int[Tensor, "wanted"]  # indices into tokens

    @classmethod
    def of(cls, token_ids: Sequence[int], start: int = 0, *, row: int = 0, wanted: Sequence[int] | None = None) -> Self:
        """One row's tokens from position `start`; `wanted` defaults to the last one."""
        count = len(token_ids)
        return cls(
            tokens=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.arange(start, start + count),
            rows=torch.full((count,), row, dtype=torch.int64),
            wanted=torch.tensor([count - 1] if wanted is None else wanted, dtype=torch.int64),
        )

    @classmethod
    def join(cls, steps: Sequence[Self]) -> Self:
        """Several rows' steps as one."""
        offsets = [0]
        for step in steps:
            offsets.append(offsets[-1] + len(step.tokens))
        return cls(
            tokens=torch.cat([s.tokens for s in steps]),
            positions=torch.cat([s.positions for s in steps]),
            rows=torch.cat([s.rows for s in steps]),
            wanted=torch.cat([s.wanted + offset for s, offset in zip(steps, offsets, strict=False)]),
        )

    @classmethod
    def of_parts(cls, parts: Sequence[Part], starts: Sequence[int]) -> Self:
        """Several rows' parts, each from its row's position in `starts` on."""
        if all(len(part.token_ids) == part.num_lines == 1 for part in parts):  # a step of decoding: half the time
            columns = ([part.token_ids[0] for part in parts], starts, [part.row for part in parts], range(len(parts)))
            return cls(*(torch.from_numpy(np.array(column, np.int64)) for column in columns))
        ends = np.cumsum([len(part.token_ids) for part in parts])
        wanted = [np.arange(end - part.num_lines, end) for part, end in zip(parts, ends.tolist(), strict=True)]
        positions = [np.arange(at, at + len(part.token_ids)) for part, at in zip(parts, starts, strict=True)]
        rows = np.repeat([part.row for part in parts], [len(part.token_ids) for part in parts])
        token_ids = np.array([token_id for part in parts for token_id in part.token_ids], np.int64)
        arrays = (token_ids, np.concatenate(positions), rows, np.concatenate(wanted))
        return cls(*(torch.from_numpy(array) for array in arrays))

    def to(self, device: torch.device) -> "Step":
        return Step(*(t.to(device) for t in (self.tokens, self.positions, self.rows, self.wanted)))


class StepEnd(NamedTuple):
    """When a step's forward and the sampling after it had ended, in seconds of `time.perf_counter`."""

    forward: float
    sampling: float


class Clock(NamedTuple):
    """From the planning of a step, or of several without a return, to the last of what it needs: when each ended. Of
    a step that verifies drafts there is an entry for each line, the forward's time being in the first alone."""

    started: float
    ends: Sequence[StepEnd]
    ended: float


@final
@dataclass
class Masks:
    """The grammars' masks of one step, a line for each of its logits; another thread may fill them while it runs."""

    words: Int[Tensor, "lines words"]
    is_ready: npt.NDArray[np.int64]  # one number: 1 when all are filled
    wait: Callable[[], object]  # returns when they are
    advance: Callable[[TokenIds, int, int], bool]
    """In a multi-step, called after each step: the array in which its tokens stand, row after row, the number of its
    steps, and how many of them are done. It fills the lines for the next one, or has them filled; False ends the
    multi-step. Nothing is warm after a step: the less it touches, the sooner it returns."""
