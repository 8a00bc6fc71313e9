"""A model shared out: each rank of a group computes some columns of an activation, and all of them are gathered.

Each output element is summed whole by one rank, in the one order: so a group gives the bits of a model by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from jaxtyping import Float
from torch import Tensor


class Group(ABC):
    """The ranks that run a model together, as one of them sees it. All call the same ops in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def gather(self, own: Float[Tensor, "rows own"], widths: Sequence[int]) -> Float[Tensor, "rows width"]:
        """The ranks' columns side by side; `widths` are their numbers, by rank. Raises InferError where a rank has
        ended.
        """

    @property
    def has_failed(self) -> bool:
        """Then what was gathered since means nothing."""
        return False

    def fail(self) -> None:
        """Let no rank wait for another. For any thread of any rank."""
        return

    def begin_anew(self) -> None:
        """For each rank, between steps or after `fail`: as if it had gathered nothing. InferError where it cannot
        leave a step.
        """
        return

    def mend(self) -> None:
        """After all ranks have begun anew: they wait for each other again."""
        return


@final
@dataclass(frozen=True)
class Shares:
    """Rank r computes the columns [starts[r], starts[r + 1])."""

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
