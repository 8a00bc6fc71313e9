"""The contract of every KV cache: `attend` is provisional, `commit` keeps, and what was kept alone decides what is
forgotten.

So a rejected draft is always dropped cleanly, whatever the cache stores or evicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Self

from jaxtyping import Float
from torch import Tensor

from infer.operands.step import Step
from infer.operands.weights import Heads


class KVCache(ABC):
    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many tokens a row can hold."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What keys and values take when every slot has been written."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each row: the next token's position."""

    @abstractmethod
    def reserve(self, row: int, num_tokens: int) -> None:
        """Make room for a row's next tokens. Before the step, or the chain of steps, that attends with them.

        Raises InvalidRequestError where the row would hold more than `capacity`.
        """

    @abstractmethod
    def attend(
        self, layer: int, qkv: Float[Tensor, "tokens out"], heads: Heads, step: Step
    ) -> Float[Tensor, "tokens heads_dim"]:
        """Append the step's keys and values provisionally and attend over what each token may see.

        Raises InvalidRequestError, nothing written, for a position that is committed or was not reserved.
        """

    @abstractmethod
    def commit(self, num_accepted: Sequence[int]) -> None:
        """Keep this many of each row's tokens since the last commit and drop the others."""

    @abstractmethod
    def commit_row(self, row: int, num_accepted: int) -> None:
        """`commit` of one row; the others stay as they are."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from position `length` on; 0 empties it.

        Where what the next token must see is already forgotten, all is: `lengths` says what is left.
        """

    # What a prompt leaves behind

    @property
    @abstractmethod
    def compresses_prompts(self) -> bool:
        """Whether `end_prompt` changes what the next tokens see."""

    @abstractmethod
    def end_prompt(self, row: int) -> int:
        """All of a prompt is committed. How many of its last tokens must be run once more in `observing`; mostly 0."""

    @abstractmethod
    def observing(self, row: int) -> AbstractContextManager[None]:
        """While it is open, `attend` notes what tokens look at; on closing, only what matters of a row is kept."""

    @abstractmethod
    def end_answer(self, row: int) -> None:
        """No further token of this answer. Forgets a row in which a longer prompt would not find what it needs."""

    # What several rows begin with

    @abstractmethod
    def remember(self, row: int, token_ids: Sequence[int]) -> None:
        """These are the row's committed tokens: other rows that begin with them may share what is stored."""

    @abstractmethod
    def forget(self, row: int) -> None:
        """What the row has stored, no other row may begin with from now on."""

    @abstractmethod
    def adopt(self, row: int, token_ids: Sequence[int]) -> int:
        """Give an empty row what is stored for the first of these tokens; how many, and never the last."""

    # A row by itself: to save it, to load it, to go two ways from it

    @property
    @abstractmethod
    def kind(self) -> str:
        """What is stored and how: a row goes from one cache to another only if they agree in this."""

    @abstractmethod
    def export_row(self, row: int) -> Iterator[tuple[str, Tensor]]:
        """Copies of what the row's committed tokens have stored, a few at a time; of nothing else.

        All that the next token sees, and so much more that a few of the last tokens can be taken back.
        """

    @abstractmethod
    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int) -> None:
        """Replace a row by `length` tokens that a cache of this kind exported.

        Raises InvalidRequestError, nothing changed, where they are not what `length` tokens store or do not fit.
        """

    @abstractmethod
    def copy_row(self, row: int, source: Self, source_row: int) -> None:
        """Replace a row by the committed tokens of another, of this cache or of one of the same shape."""
