"""Choose the models that are unloaded to make room for another one, and those that stay for clients. No clock, no I/O.

Clients of a model were told when to retry. The model is loaded and kept until they can be back.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

from infer.serving.server.waiting_line import MAX_RETRY_SECONDS

SLACK_SECONDS = 10.0  # for which a model is kept after the time that a client was told


class Resident(NamedTuple):
    """A model in memory. A busy model is unloaded after its last answer; a model that is kept is never chosen."""

    name: str
    num_bytes: int
    used_at: float  # end of its last answer
    is_busy: bool = False
    is_kept: bool = False


def models_to_unload(missing_bytes: int, residents: Sequence[Resident]) -> list[str] | None:
    """Return the names of models that together have at least the missing bytes of memory, or None if there are too few.

    Idle models are chosen before busy ones, and among these the least recently used first. All chosen models are
    needed: the memory of the others would not be enough.
    """
    candidates = [each for each in residents if not each.is_kept]
    candidates.sort(key=lambda each: (each.is_busy, each.used_at))
    chosen, freed = list[Resident](), 0
    for each in candidates:
        if freed >= missing_bytes:
            break
        chosen.append(each)
        freed += each.num_bytes
    if freed < missing_bytes:
        return None
    for each in reversed(list(chosen)):  # the most recently used ones stay if possible
        if freed - each.num_bytes >= missing_bytes:
            chosen.remove(each)
            freed -= each.num_bytes
    return [each.name for each in chosen]


class _Wish(NamedTuple):
    """A client: since when it wants the model, when it is to return, and until when it is awaited."""

    since: float
    due_at: float
    until: float


@final
class Wishes:
    """The wishes for one model. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._wishes = list[_Wish]()

    def add(self, since: float, now: float, seconds: float) -> None:
        """Add a client that was told to return after these seconds, but at most after the longest time that is told."""
        self._wishes.append(_Wish(since, now + min(seconds, MAX_RETRY_SECONDS), now + seconds + SLACK_SECONDS))

    def take(self, now: float) -> float:
        """Remove the wish of a returning client, and return the time since which it wants the model. For a new client:
        now.

        Clients cannot be distinguished, so the returning client is assumed to be the first one that is due.
        """
        due = [wish for wish in self._alive(now) if wish.due_at <= now]
        if not due:
            return now
        found = min(due, key=lambda wish: wish.due_at)
        self._wishes.remove(found)
        return found.since

    def since(self, now: float) -> float:
        """Return the time since which the model is wanted, or infinity if it is not wanted."""
        return min((wish.since for wish in self._alive(now)), default=math.inf)

    def seconds_left(self, now: float) -> float:
        """Return for how many seconds the model is kept at most."""
        return max((wish.until - now for wish in self._alive(now)), default=0.0)

    def clear(self) -> None:
        self._wishes.clear()

    def _alive(self, now: float) -> list[_Wish]:
        self._wishes = [wish for wish in self._wishes if now < wish.until]
        return self._wishes
