"""A constraint over any grammar library: plans of forced tokens, end ids, and a lock that makes it safe to share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Any, ClassVar, final

from infer.errors import ConstraintError
from infer.text.grammar.constraint import Constraint, Mask, keep_only
from infer.text.grammar.grammar import Source
from infer.text.grammar.vocabulary import Vocabulary

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
        if self.forced() or self.is_stopped():
            return False
        try:
            if not is_last:
                self.fill(mask)
        except ConstraintError:
            return False
        return True


class GrammarBackend(ABC):
    """A grammar library for one vocabulary. Sequences share compiled grammars; each sequence has its own matcher."""

    name: ClassVar[str]

    @abstractmethod
    def compile(self, source: Source) -> Any:
        """Return a compiled grammar. Call only after a trial of the same source in another process."""

    @abstractmethod
    def make_matcher(self, compiled: Any) -> Matcher: ...

    @abstractmethod
    def num_bytes(self, compiled: Any, source: Source) -> int:
        """Return the memory of a compiled grammar in bytes, measured or estimated."""


@final
class StepwiseConstraint(Constraint):
    """A constraint with a plan for every place, made when the place is reached. `forced` returns the plan.

    So the plan depends only on the tokens, not on the time of a call. Following a plan token by token gives the same
    plan as following it in one call.
    """

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._end_ids = vocabulary.end_ids
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
