"""The place of an answer in its grammar: the mask of the next token, advanced by the chosen tokens.

All results depend only on the tokens accepted so far. A rolled-back constraint equals one that never accepted the
tokens. `StepwiseConstraint` follows the matcher of any library: it plans forced tokens, knows end ids, and has a lock
that makes it safe to share. `BudgetConstraint` wraps another one and only restricts it further: it limits reasoning.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Literal, NamedTuple, final

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
        return not (self.done or self.forced()) and (is_last or _is_filled(self, mask))


def _is_filled(source: "Constraint | Matcher", mask: Mask) -> bool:
    """Fill the mask and return True, or return False if it fails. `fill` raises again when the mask is needed."""
    try:
        source.fill(mask)
    except ConstraintError:
        return False
    return True


def keep_only(mask: Mask, token_ids: Sequence[int]) -> None:
    """Allow only these ids."""
    mask[:] = 0
    words = mask.view("uint32")
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32


MAX_FORCED = 64  # tokens in one plan; later tokens are planned when these are written


class Matcher(ABC):
    """A backend's state in a grammar. It keeps every token that can be rolled back."""

    @abstractmethod
    def fill(self, mask: Mask) -> None:
        """Write the tokens that the grammar allows, including end ids. The whole row is written."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Move past a token that is not an end id, or return False and stay."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None: ...

    @abstractmethod
    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, in the tokenizer's spelling, without end ids.

        Text that follows cannot change these tokens.
        """

    @abstractmethod
    def may_end(self) -> bool:
        """Return True if the text so far fulfils the grammar."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return True if the text so far fulfils the grammar and no text may follow."""

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        """Advance as `Constraint.advance` does. The token is not an end id, and no token is forced before it."""
        if not self.accept(token_id):
            raise ConstraintError(f"the grammar refuses token {token_id}, which its mask allows")
        return not (self.forced() or self.is_stopped()) and (is_last or _is_filled(self, mask))


@final
class StepwiseConstraint(Constraint):
    """A constraint with a plan for every place, made when the place is reached. `forced` returns the plan.

    So the plan depends only on the tokens, not on the time of a call. Following a plan token by token gives the same
    plan as following it in one call.
    """

    def __init__(self, matcher: Matcher, end_ids: Sequence[int]) -> None:
        self._matcher, self._end_ids = matcher, end_ids
        self._lock = Lock()
        self._has_ended = False
        self._plans: list[tuple[int, ...]] = [self._plan()]
        self._is_stopped = matcher.is_stopped()

    def fill(self, mask: Mask) -> None:
        with self._lock:
            if self._has_ended:
                keep_only(mask, self._end_ids)
            elif self._plans[-1]:
                keep_only(mask, self._plans[-1][:1])
            else:
                self._matcher.fill(mask)

    def accept(self, token_ids: Sequence[int]) -> int:
        with self._lock:
            for index, token_id in enumerate(token_ids):
                if not self._accept(token_id):
                    return index
            return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        with self._lock:
            if not 0 <= num_tokens < len(self._plans):
                raise ValueError(f"num_tokens must be from 0 to the {len(self._plans) - 1} accepted, got {num_tokens}")
            if num_tokens:
                self._matcher.rollback(num_tokens - self._has_ended)
                self._has_ended = False
                self._is_stopped = self._matcher.is_stopped()
                del self._plans[-num_tokens:]

    @property
    def num_accepted(self) -> int:
        with self._lock:
            return len(self._plans) - 1

    def forced(self) -> list[int]:
        with self._lock:
            return list(self._plans[-1])

    @property
    def done(self) -> bool:
        with self._lock:
            return self._has_ended or self._is_stopped

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        plans = self._plans
        if plans[-1]:
            return super().advance(token_id, mask, is_last)
        if token_id in self._end_ids:
            self._accept(token_id)
            return False
        if self._matcher.advance(token_id, mask, is_last):
            plans.append(())
            return True
        plans.append(self._plan())
        self._is_stopped = self._matcher.is_stopped()
        return False

    def _accept(self, token_id: int) -> bool:
        plan = self._plans[-1]
        if self._has_ended or (plan and token_id != plan[0]):
            return False
        if token_id in self._end_ids:  # the libraries do not see the end id
            self._has_ended = self._matcher.may_end()
            if self._has_ended:
                self._plans.append(())
            return self._has_ended
        if not self._matcher.accept(token_id):
            return False
        self._plans.append(plan[1:] or self._plan())
        self._is_stopped = self._matcher.is_stopped()
        return True

    def _plan(self) -> tuple[int, ...]:
        return tuple(self._matcher.forced()[:MAX_FORCED])


_SPACES = b" \t\r\n"


class _Place(NamedTuple):
    """State after `num_tokens` tokens of reasoning. `tail` has the last bytes that may still matter."""

    phase: Literal["before", "inside", "after"]
    num_tokens: int = 0
    tail: bytes = b""


class Budget(NamedTuple):
    """A limit of reasoning tokens. `opening` and `closing` are the bytes of their tokens, made by `bytes_of`."""

    num_tokens: int
    opening: bytes
    closing: bytes
    closing_ids: tuple[int, ...]
    bytes_of: Callable[[int], bytes]
    is_open: bool


@final
class BudgetConstraint(Constraint):
    """A constraint that closes the reasoning: after the last token of the budget, exactly the closing ids follow."""

    def __init__(self, inner: Constraint, budget: Budget) -> None:
        self._inner, self._budget = inner, budget
        self._places = [_Place("inside" if budget.is_open else "before")]

    def fill(self, mask: Mask) -> None:
        if closing := self._closing():
            keep_only(mask, closing[:1])
        else:
            self._inner.fill(mask)

    def accept(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            closing = self._closing()
            if (closing and token_id != closing[0]) or not self._inner.accept([token_id]):
                return index
            self._places.append(self._after(token_id))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._places[-num_tokens:]

    @property
    def num_accepted(self) -> int:
        return self._inner.num_accepted

    def forced(self) -> list[int]:
        return list(self._closing()) or self._inner.forced()

    @property
    def done(self) -> bool:
        return self._inner.done

    def advance(self, token_id: int, mask: Mask, is_last: bool) -> bool:
        if self._closing():
            return super().advance(token_id, mask, is_last)
        goes_on = self._inner.advance(token_id, mask, is_last)
        if self._inner.num_accepted == len(self._places):
            self._places.append(self._after(token_id))
        return goes_on and not self._closing()

    def _closing(self) -> tuple[int, ...]:
        """Return the closing ids that must still follow."""
        place, budget = self._places[-1], self._budget
        if place.phase != "inside" or place.num_tokens < budget.num_tokens:
            return ()
        return budget.closing_ids[place.num_tokens - budget.num_tokens :]

    def _after(self, token_id: int) -> _Place:
        place, budget = self._places[-1], self._budget
        if place.phase == "after":
            return place
        tail = place.tail + budget.bytes_of(token_id)
        if place.phase == "inside":
            if budget.closing in tail:
                return _Place("after")
            return _Place("inside", place.num_tokens + 1, tail[-len(budget.closing) :])
        begun = tail.lstrip(_SPACES)
        if begun.startswith(budget.opening):
            return _Place("inside", 0, begun[len(budget.opening) :])
        return _Place("before", 0, tail) if budget.opening.startswith(begun) else _Place("after")
