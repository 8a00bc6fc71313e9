"""Clients of a model that were told when to retry. The model is loaded meanwhile, and kept until they can be back."""

import math
from typing import NamedTuple, final

from infer.server.waiting_line import MAX_RETRY_SECONDS

SLACK_SECONDS = 10.0  # after the time that a client was told: until then its model is kept


class _Wish(NamedTuple):
    """A client that wants the model since a time, returns at `due_at`, and is waited for until a time."""

    since: float
    due_at: float
    until: float


@final
class Wishes:
    """The wishes for one model. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._wishes = list[_Wish]()

    def add(self, since: float, now: float, seconds: float) -> None:
        """Add a client that was told to return after these seconds, or after the longest time that clients are told."""
        self._wishes.append(_Wish(since, now + min(seconds, MAX_RETRY_SECONDS), now + seconds + SLACK_SECONDS))

    def take(self, now: float) -> float:
        """Remove the wish of a client that returns, and return since when it wants the model: now if it is new.

        Clients cannot be told apart, so the first one that is due is taken for the one that returns.
        """
        due = [wish for wish in self._alive(now) if wish.due_at <= now]
        if not due:
            return now
        found = min(due, key=lambda wish: wish.due_at)
        self._wishes.remove(found)
        return found.since

    def since(self, now: float) -> float:
        """Return since when the model is wanted: infinite if it is not."""
        return min((wish.since for wish in self._alive(now)), default=math.inf)

    def seconds_left(self, now: float) -> float:
        """Return for how many seconds the model is kept at most."""
        return max((wish.until - now for wish in self._alive(now)), default=0.0)

    def clear(self) -> None:
        self._wishes.clear()

    def _alive(self, now: float) -> list[_Wish]:
        self._wishes = [wish for wish in self._wishes if now < wish.until]
        return self._wishes
