"""Promises to refused clients of one tenant: each is told to come back when those before it have been served.

A client that comes back is recognised by its body. Work is promised for at most a minute; who is refused beyond that is
told a minute, without a promise.
"""

from collections import defaultdict
from math import inf
from typing import final

MAX_RETRY_SECONDS = 60.0
MIN_RETRY_SECONDS = 0.5
_EARLY_SECONDS = 0.1  # clocks differ, and milliseconds are rounded
_KEPT_SECONDS = 60.0  # after its time a promise is forgotten
_MOST = 4096


@final
class Tickets:
    def __init__(self) -> None:
        self._promised_until = -inf
        self._due: defaultdict[bytes, list[float]] = defaultdict(list)  # by a digest of the body, earliest first
        self._count = 0

    def is_promised(self, now: float) -> bool:
        """True while clients that were refused are yet to come back."""
        return self._promised_until > now

    def take(self, body: bytes, now: float) -> bool:
        """Return whether a client with this body comes back at its time or later. The ticket is used up."""
        due = self._due.get(body)
        if not due or due[0] > now + _EARLY_SECONDS:
            return False
        is_valid = now - due.pop(0) <= _KEPT_SECONDS
        self._count -= 1
        if not due:
            del self._due[body]
        return is_valid

    def issue(self, body: bytes, now: float, wait: float, service: float, jitter: float) -> float:
        """Promise a place after all that were promised: the seconds until then, times `jitter`.

        `wait` is how long the engine is busy with what was accepted, `service` how long with this request.
        """
        until = max(self._promised_until, now + wait) + service
        if until - now > MAX_RETRY_SECONDS:
            return MAX_RETRY_SECONDS * (1 - abs(1 - jitter))
        self._promised_until = until
        return self.renew(body, now, (until - now) * jitter)

    def renew(self, body: bytes, now: float, wait: float) -> float:
        """Promise a place after `wait` seconds, before clients that come for the first time."""
        told = min(max(wait, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        if self._count >= _MOST:
            self._drop_expired(now)
        if self._count < _MOST:
            self._due[body].append(now + told)
            self._due[body].sort()
            self._count += 1
        return told

    def _drop_expired(self, now: float) -> None:
        kept = {body: [each for each in due if now - each <= _KEPT_SECONDS] for body, due in self._due.items()}
        self._due = defaultdict(list, {body: due for body, due in kept.items() if due})
        self._count = sum(map(len, self._due.values()))
