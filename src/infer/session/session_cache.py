"""What a session's cache holds: a context of one row, and the ids whose keys and values lie in it.

A signal's exception may leave any change midway. So a change is marked before it begins and after it has ended; where
the second mark is missing, the next use begins with an empty context, and the prompt is run again.
"""

from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from infer.errors import InferError, InvalidRequestError
from infer.runner.closing import closed
from infer.runner.context import CachedContext
from infer.runner.context_pool import ContextPool
from infer.session.spelling import common_length


@final
class SessionCache:
    """For one call at a time; `give_back` is for any thread."""

    def __init__(self, contexts: ContextPool) -> None:
        self._contexts = contexts
        self._context: CachedContext | None = contexts.take()
        self._token_ids: list[int] = []
        self._is_whole = True  # no change is under way, and none was left midway

    @property
    def token_ids(self) -> Sequence[int]:
        """None while an answer uses the context."""
        return self._token_ids if self._is_whole else ()

    @property
    def context(self) -> CachedContext:
        """Holds `token_ids`. Raises ClosedError after `give_back`."""
        context = self._context
        if context is None:
            raise closed("session")
        if not self._is_whole:
            self._context = context = self._contexts.take()
            self._token_ids = []
            self._is_whole = True
        return context

    def give_back(self) -> None:
        """To the next session or answer. Again does nothing."""
        context, self._context = self._context, None
        if context is not None and self._is_whole:
            self._contexts.give_back(context)

    def keep_common(self, token_ids: Sequence[int], most: int | None = None) -> int:
        """Forget all but what these ids begin with, and all behind the first `most`: how many are left.

        Where the cache has forgotten what the next token must see, nothing is left.
        """
        context = self.context
        length = common_length(self._token_ids, token_ids)
        length = length if most is None else min(length, most)
        self._is_whole = False
        context.truncate(0, length)
        num_held = context.lengths[0]
        del self._token_ids[num_held:]
        if not len(self._token_ids) == num_held <= length:  # what is run next would be nothing, for ever, or wrong
            raise InferError(
                f"the session's cache held {num_held} tokens where it must hold {len(self._token_ids)} and {length} "
                "at most, a fault of ours: ask again, and it begins with an empty one"
            )
        self._is_whole = True
        return num_held

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hold exactly these ids: what is missing is run."""
        num_held, context = self.keep_common(token_ids), self.context
        self._is_whole = False
        context.extend(0, token_ids[num_held:])
        self._token_ids = list(token_ids[: context.lengths[0]])
        self._is_whole = True

    def begin_answer(self) -> CachedContext:
        """The context, for an answer's loop to use until `end_answer`."""
        context = self.context
        self._is_whole = False
        return context

    def end_answer(self, token_ids: Sequence[int]) -> None:
        """The loop has run these ids, or the first of them. Where it left the midst of a step, nothing is held."""
        context = self._context
        if context is None or not context.is_sound:
            return
        context.end_answer(0)
        self._token_ids = list(token_ids[: context.lengths[0]])
        self._is_whole = True

    def copy_of(self, other: "SessionCache") -> None:
        source, context = other.context, self.context
        self._is_whole = False
        context.cache.copy_row(0, source.cache, 0)
        context.restore(0, other.token_ids)
        self._token_ids = list(other.token_ids)
        self._is_whole = True

    def load(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> None:
        """Hold what was exported for these ids. Raises InvalidRequestError, nothing changed, for what does not fit."""
        context = self.context
        self._is_whole = False
        try:
            context.import_row(0, tensors, token_ids)
        except InvalidRequestError:
            self._is_whole = True
            raise
        self._token_ids = list(token_ids)
        self._is_whole = True
