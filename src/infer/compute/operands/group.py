"""A model divided among ranks: each rank of a group computes some columns of an activation, and all are gathered.

Each output element is summed by one rank, always in the same order. So a group's results equal those of a single
process to the bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from jaxtyping import Float
from torch import Tensor


class Group(ABC):
    """The ranks that run a model together, as seen by one rank. All ranks call the same ops in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        """Return the ranks' columns side by side. `widths` are the numbers of columns, by rank.

        Raises InferError if a rank has ended.
        """

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed. Values gathered since then are meaningless."""
        return False

    def fail(self) -> None:
        """Release every rank from waiting for another. For any thread of any rank."""
        return

    def begin_anew(self) -> None:
        """Reset this rank, as if it had gathered nothing. For each rank, between steps or after `fail`.

        Raises InferError if the rank cannot leave a step.
        """
        return

    def mend(self) -> None:
        """Let the ranks wait for each other again, after all ranks were reset."""
        return


@final
@dataclass(frozen=True)
class Shares:
    """The parts of the columns: rank r computes [starts[r], starts[r + 1])."""

    group: Group
    starts: tuple[int, ...]

    @property
    def own(self) -> tuple[int, int]:
        rank = self.group.rank
        return self.starts[rank], self.starts[rank + 1]

    @property
    def width(self) -> int:
        return self.starts[-1]

    def gather(self, own: Float[Tensor, "rows own"]) -> Float[Tensor, "rows width"]:
        return self.group.gather(own, [end - start for start, end in pairwise(self.starts)])
