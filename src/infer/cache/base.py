"""The contract of every KV cache: `attend` is provisional, `commit` keeps, and only `commit` may forget.

So a rejected draft is always dropped cleanly, whatever the cache stores or evicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from infer.batch import Step
from infer.weights import Heads


class KVCache(ABC):
    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many tokens a row can hold."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row: the next token's position."""

    @abstractmethod
    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        """Append the step's keys and values provisionally and attend over what each token may see."""

    @abstractmethod
    def commit(self, num_accepted: Sequence[int]) -> None:
        """Keep this many of each row's tokens since the last commit and drop the others."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from position `length` on; 0 empties it."""
