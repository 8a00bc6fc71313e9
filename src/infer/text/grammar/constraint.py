"""Interface of a constraint for the decode loop: a mask for the next token, advanced by the chosen tokens.

All results depend only on the tokens accepted so far. A rolled-back constraint equals one that never accepted the
tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from infer.errors import ConstraintError

Mask = npt.NDArray[np.int32]


class Constraint(ABC):
    """One sequence's place in a grammar. Every method may be called from any thread."""

    @abstractmethod
    def fill(self, mask: Mask) -> None:
        """Write one row of packed words, one bit per token of the model's vocabulary, the lowest bit first.

        End ids are allowed only if the grammar may end. If `forced` is not empty, only its first token is allowed, so
        that jumping forward and sampling give the same text. At least one bit is set. Raises ConstraintError if the
        grammar has become too complex to continue.
        """

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> int:
        """Move past the longest prefix of `token_ids` that the masks allow, and return its length.

        Nothing is accepted after an end id. Raises ConstraintError as `fill` does.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens. An end id counts."""

    @property
    @abstractmethod
    def num_accepted(self) -> int:
        """Number of accepted tokens that were not undone, including an end id."""

    @abstractmethod
    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer spells the text that must follow, without end ids.

        Tokens at the end that could change with the following text are left out. More tokens may be forced after these
        are accepted.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if the text is complete and only an end id may follow."""

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        """Accept a token that the last mask allows and, unless `is_last`, fill `mask` for the next token.

        It is called between two steps of a multi-step. Returns False if there is no choice to make: the constraint is
        done, tokens are forced, or `fill` would raise. Then `mask` must not be used. Raises the errors of `accept`. No
        other thread may use the constraint meanwhile.

        This implementation calls the other methods one by one. Between steps Python is slow, and each call costs time.
        An override with fewer calls of the library saves 60 µs per token.
        """
        self.accept([token_id])
        if self.done or self.forced():
            return False
        try:
            if not is_last:
                self.fill(mask)
        except ConstraintError:  # `fill` raises it again when the mask is needed
            return False
        return True


def keep_only(mask: Mask, token_ids: Sequence[int]) -> None:
    """Allow only these ids."""
    mask[:] = 0
    words = mask.view("uint32")
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
