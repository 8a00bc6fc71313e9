"""What a constraint is to the decode loop: a mask for the next token, moved along by the tokens that were chosen.

Everything is a function of the tokens accepted so far: a constraint that was rolled back is one that never went there.
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

        End ids are allowed exactly where the grammar may end. Where `forced` is not empty, its first token is the only
        one allowed, so that jumping forward and sampling give the same text. At least one bit is set. Raises
        ConstraintError where the grammar has become too complex to go on.
        """

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> int:
        """Move past the longest beginning of `token_ids` that the masks allow; returns its length.

        Nothing is accepted after an end id. Raises ConstraintError as `fill` does.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, an end id among them."""

    @property
    @abstractmethod
    def num_accepted(self) -> int:
        """How many tokens it has accepted and not taken back, an end id among them."""

    @abstractmethod
    def forced(self) -> list[int]:
        """Tokens that must follow, as the tokenizer would spell the text that must follow; none of them an end id.

        Left out at its end are tokens that could become others by what is written after them. There may be more once
        these are accepted.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the text is complete and nothing but an end id may follow."""

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        """Between two steps of a multi-step: accept a token that the last mask allows and, unless it is the last, fill
        `mask` with what may follow it.

        False where there is no choice to make: it is done, something is forced, or `fill` would raise; then `mask` is
        not to be used. Raises as `accept` does. Nobody else may call meanwhile.

        The other methods, one by one. There Python is cold and each call costs: those of a library that are left out
        save 60 µs a token.
        """
        self.accept([token_id])
        if self.done or self.forced():
            return False
        try:
            if not is_last:
                self.fill(mask)
        except ConstraintError:  # which it raises again when it is asked for the mask
            return False
        return True


def keep_only(mask: Mask, token_ids: Sequence[int]) -> None:
    """Allow these ids alone."""
    mask[:] = 0
    words = mask.view("uint32")
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
