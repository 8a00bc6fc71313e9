"""The line of one tenant's refused clients. Each is told to retry after the clients before it have been served.

The time to retry is at most a minute, because OpenAI's clients ignore longer times. A client that would wait longer
keeps its place in the line when it retries. A client is recognised by its body.
"""

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from math import fsum, inf
from typing import final

MAX_RETRY_SECONDS = 60.0
MIN_RETRY_SECONDS = 0.5
_EARLY_SECONDS = 0.1  # clocks differ, and milliseconds are rounded
_LATE_SECONDS = 10.0  # a place is forgotten so long after its client's time to retry
_LOOK_SECONDS = 1.0  # between two searches for places to forget
_MOST = 4096


@final
@dataclass(eq=False)
class WaitingPlace:
    digest: bytes  # of the request's body
    service: float  # seconds for which the request occupies the engine
    due: float  # time at which its client retries


@final
class WaitingLine:
    def __init__(self) -> None:
        self._places: dict[WaitingPlace, None] = {}  # in the order of the line
        self._by_digest: defaultdict[bytes, list[WaitingPlace]] = defaultdict(list)
        self._seconds = 0.0  # the work of all places
        self._looked_at = -inf

    def __len__(self) -> int:
        return len(self._places)

    def find(self, body: bytes, now: float) -> WaitingPlace | None:
        """Return the place of a client with this body that retries at its time, or None.

        Places of clients that did not retry at their time are removed.
        """
        if now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            for late in [each for each in self._places if each.due + _LATE_SECONDS < now]:
                self.remove(late)
            self._seconds = fsum(each.service for each in self._places)
        same = self._by_digest.get(_digest(body), [])
        return next((each for each in same if each.due <= now + _EARLY_SECONDS), None)

    def seconds_before(self, place: WaitingPlace | None) -> float:
        """Return the seconds of work before this place. None means the end of the line."""
        if place is None:
            return self._seconds
        return fsum(each.service for each in takewhile(lambda each: each is not place, self._places))

    def append(self, body: bytes, service: float, due: float) -> None:
        """Append a new client to the line unless the line is too long."""
        if len(self._places) < _MOST:
            place = WaitingPlace(_digest(body), service, due)
            self._places[place] = None
            self._by_digest[place.digest].append(place)
            self._seconds += service

    def remove(self, place: WaitingPlace) -> None:
        del self._places[place]
        self._by_digest[place.digest].remove(place)
        if not self._by_digest[place.digest]:
            del self._by_digest[place.digest]
        self._seconds -= place.service


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
