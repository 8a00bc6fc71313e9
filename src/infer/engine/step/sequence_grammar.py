"""A sequence's grammar: which tokens it has followed, where it was complete, and why it failed."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import final

from infer.errors import ConstraintError
from infer.text.grammar.constraint import Constraint, Mask


@final
class SequenceGrammar:
    """The grammar of a sequence.

    A step may move the constraint past tokens before the sequence accepts them. Tokens that are not accepted are
    undone.
    """

    def __init__(self, make_constraint: Callable[[], Constraint]) -> None:
        self._make = make_constraint
        self.constraint = make_constraint()
        self._num_followed = self.constraint.num_accepted  # accepted tokens that it has followed
        self._complete_at: int | None = None  # number of tokens after which the grammar was complete
        self.error: str | None = None  # why the last masks must not be used

    @property
    def is_complete(self) -> bool:
        """True if the grammar was complete after any token."""
        return self._complete_at is not None

    def is_complete_at(self, num_tokens: int) -> bool:
        return self._complete_at == num_tokens

    def replay(self, token_ids: Items[int]) -> None:
        """Go back to these tokens, which are the first ones that the grammar has seen."""
        self.constraint = self._make()
        self.constraint.accept(token_ids)
        self._num_followed = self.constraint.num_accepted
        if self._complete_at is not None and self._complete_at > len(token_ids):
            self._complete_at = None
        self.error = None

    def follow(self, token_id: int, num_tokens: int) -> bool:
        """Move past token number `num_tokens` of the answer, if that is not done.

        Return True if the grammar is complete there. Raises ConstraintError.
        """
        if self.constraint.num_accepted == self._num_followed:
            self._num_followed += self.constraint.accept([token_id])
        else:
            self._num_followed += 1
        is_complete = self.constraint.num_accepted == self._num_followed and self.constraint.done
        if is_complete and self._complete_at is None:
            self._complete_at = num_tokens
        return is_complete

    def allowed(self, drafts: Items[int]) -> Items[int]:
        """Return the drafts up to the first one that the grammar forbids, because a step need not run the others."""
        count = 0
        with suppress(ConstraintError):  # it is raised again when the masks are filled
            while count < len(drafts) and self.constraint.accept([drafts[count]]):
                count += 1
        try:
            self.constraint.rollback(count)
        except ConstraintError:  # as above
            return []
        return drafts[:count]

    def fill(self, masks: Items[Mask], drafts: Items[int]) -> int:
        """Fill a mask for the next token, and one after each allowed draft. Return the number of masks."""
        num_filled, num_accepted, self.error = 0, 0, None
        try:
            for index, mask in enumerate(masks):
                self.constraint.fill(mask)
                num_filled += 1
                if index == len(drafts) or self.constraint.accept([drafts[index]]) == 0:
                    break
                num_accepted += 1
        except ConstraintError as error:
            masks[num_accepted][:] = 0
            self.error = str(error)
        try:
            self.constraint.rollback(num_accepted)
        except ConstraintError as error:  # no further token is allowed
            masks[0][:] = 0
            self.error = str(error)
        return num_filled
