"""A budget of reasoning tokens: a constraint that wraps the answer's constraint and only restricts it further."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, final

from infer.text.grammar.constraint import Constraint, Mask, keep_only

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
