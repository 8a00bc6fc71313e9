"""The door: refuse a request that would wait too long, before any work is done for it, and say when to retry.

Every tenant has its own door. A wait is the queued work of the tenant, in seconds of the engine's measured costs, times
a ratio that is learnt from waits. The door counts sequences, not requests, because one body may ask for many.

Tenants share the computation (`step.fairness.Tenants`). While a tenant gets the work that is ahead of a request,
every other tenant gets the same amount, or all that it needs if that is less. So the requests of one tenant cannot
lengthen the wait of another without bound.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple, final

from infer.engine.step.fairness import MeanLengths
from infer.engine.step.step_costs import StepCosts, StepWork
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.fields import refuse
from infer.serving.server_settings import ServerSettings

_SEEN_SECONDS = 0.02  # for which a look at the engine is used again
_LOOK_SHARE = 0.05  # of the event loop's time, for looking at the engine
_LEAST_SECONDS = 1.0  # the shortest prediction to learn from: shorter waits are mostly chance
_STEP = 1.05  # factor by which one request changes the ratio of measured to predicted waits
_LEAST, _MOST = 0.5, 4.0  # limits of that ratio
# Shares of the longest wait that is allowed:
_AIMED = 0.8  # the wait that a client should find when it retries at the time it was told
_LATE = 1.2  # such a client is accepted up to this wait, so that a small prediction error does not refuse it twice
_EARLY = 0.5  # up to this wait all are accepted, even before clients in the line, so that the engine is never idle

MAX_RETRY_SECONDS = 60.0
MIN_RETRY_SECONDS = 0.5
_CLOCK_SECONDS = 0.1  # clocks differ, and milliseconds are rounded
_LATE_SECONDS = 10.0  # a place is forgotten so long after its client's time to retry
_LOOK_SECONDS = 1.0  # between two searches for places to forget
_MOST_PLACES = 4096


class RemainingWork(NamedTuple):
    """The remaining work of one sequence, in tokens."""

    tenant: str
    has_slot: bool
    num_pending: int  # unread tokens of its prompt
    num_computed: int  # positions before the unread ones
    num_answer: float  # expected tokens of its answer

    @property
    def num_tokens(self) -> float:
        return self.num_computed + self.num_pending + self.num_answer


@final
@dataclass
class _Queued:
    """The sequences of one tenant, and the seconds that a busy engine needs for them."""

    count: int = 0
    num_waiting: int = 0
    seconds: float = 0.0


@final
class Load:
    """The work that an engine has, and the waits that follow from it.

    At most `max_slots` sequences run at the same time, and as many as have pages: `fitting` returns how many of a given
    length have.
    """

    def __init__(
        self,
        works: Collection[RemainingWork],
        costs: StepCosts,
        max_slots: int,
        fitting: Callable[[int], int] | None = None,
    ) -> None:
        num_tokens = fmean(each.num_tokens for each in works) if works else 0.0
        num_fitting = fitting(round(num_tokens)) if fitting is not None and works else max_slots
        self.num_slots = max(1, min(max_slots, num_fitting))
        decoding = StepWork(self.num_slots, self.num_slots, round(self.num_slots * num_tokens))
        self._costs, self._token_seconds = costs, costs.predict(decoding) / self.num_slots
        self._by_tenant = defaultdict[str, _Queued](_Queued)
        self._reading: list[tuple[int, float]] = []  # tokens and seconds of each prompt that is being read
        self.count = 0
        for work in works:
            self.add(work)

    def add(self, work: RemainingWork, count: int = 1) -> None:
        """Count `count` sequences of this kind."""
        seconds = self._costs.predict_further(work.num_pending, work.num_computed)
        if work.num_pending and (work.has_slot or self.count < self.num_slots):
            self._reading += [(work.num_pending, seconds)] * count
        own = self._by_tenant[work.tenant]
        own.count += count
        own.num_waiting += 0 if work.has_slot else count
        own.seconds += count * (seconds + work.num_answer * self._token_seconds)
        self.count += count

    def num_waiting(self, tenant: str) -> int:
        return self._by_tenant[tenant].num_waiting

    def seconds_ahead(self, tenant: str, num_prompt_tokens: int) -> float:
        """Return the seconds before the tenant's next prompt is read: the wait for a slot, or for shorter prompts."""
        own = self._by_tenant[tenant]
        num_others = self.count - own.count
        share = max(1.0, self.num_slots / len(self._by_tenant), self.num_slots - num_others)
        if own.count < share:  # a tenant above its share loses a slot
            return sum(seconds for tokens, seconds in self._reading if tokens <= num_prompt_tokens)
        beside = (share - 1) / 2 * own.seconds / own.count  # the other sequences are then half done
        return self.shared_seconds(tenant, own.seconds - beside)

    def shared_seconds(self, tenant: str, seconds: float) -> float:
        """Return the seconds that work takes which would take `seconds` without the other tenants."""
        others = (queued for name, queued in self._by_tenant.items() if name != tenant)
        return seconds + sum(min(queued.seconds, seconds) for queued in others)

    def service_seconds(self, num_prompt_tokens: int, num_answer_tokens: float) -> float:
        """Return the seconds for which a request of this size occupies a busy engine."""
        reading = self._costs.predict_further(num_prompt_tokens, 0)
        return reading + num_answer_tokens * self._token_seconds


class Arrival(NamedTuple):
    """The size of a request. `num_answer_tokens` is the limit of each answer, or None if there is no limit."""

    tenant: str
    num_prompts: int = 1
    num_choices: int = 1  # of each prompt
    num_prompt_tokens: int = 0  # of all prompts together
    num_answer_tokens: int | None = None

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_choices


def retry_headers(seconds: float) -> dict[str, str]:
    told = min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
    return {"Retry-After": str(math.ceil(told)), "retry-after-ms": str(round(1000 * told)), "x-should-retry": "true"}


@final
@dataclass(eq=False)
class Entry:
    """An accepted request. Its sequences count until the engine has them: the first ones of the prompts come first."""

    door: "Door"
    arrival: Arrival
    predicted: float  # seconds until its first token, according to the engine's cost model
    num_submitted: int = 0  # sequences that the engine has

    def add_to(self, load: Load) -> None:
        """Count the sequences that the engine does not have yet."""
        arrival, answer = self.arrival, self.door.answer_tokens(self.arrival)
        num_unread = max(0, arrival.num_prompts - self.num_submitted)
        num_others = max(0, arrival.num_sequences - self.num_submitted) - num_unread
        num_tokens = arrival.num_prompt_tokens // arrival.num_prompts
        for count, num_pending in ((num_unread, num_tokens), (num_others, 0)):
            if count:
                load.add(RemainingWork(arrival.tenant, False, num_pending, 0, answer), count)


@final
@dataclass(eq=False)
class WaitingPlace:
    digest: bytes  # of the request's body
    service: float  # seconds for which the request occupies the engine
    due: float  # time at which its client retries


@final
class WaitingLine:
    """The line of one tenant's refused clients. Each is told to retry after the clients before it have been served.

    The time to retry is at most a minute, because OpenAI's clients ignore longer times. A client that would wait longer
    keeps its place in the line when it retries. A client is recognised by its body.
    """

    def __init__(self) -> None:
        self._places: dict[WaitingPlace, None] = {}  # in the order of the line
        self._looked_at = -math.inf

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
        own, latest = _digest(body), now + _CLOCK_SECONDS
        return next((each for each in self._places if each.digest == own and each.due <= latest), None)

    def seconds_before(self, place: WaitingPlace | None) -> float:
        """Return the seconds of work before this place. None means the end of the line."""
        return math.fsum(each.service for each in takewhile(lambda each: each is not place, self._places))

    def append(self, body: bytes, service: float, due: float) -> None:
        """Append a new client to the line unless the line is too long."""
        if len(self._places) < _MOST_PLACES:
            self._places[WaitingPlace(_digest(body), service, due)] = None

    def remove(self, place: WaitingPlace) -> None:
        del self._places[place]


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()


@final
class Door:
    """Admission of requests, for the event loop only.

    `look` returns the load of the engine, without requests that the engine does not have yet.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.lengths = MeanLengths()
        self.wait_ratio = 1.0  # measured over predicted seconds
        self._clock = clock
        self._entries = set[Entry]()
        self._load: Load | None = None
        self._used_until = -math.inf
        self._lines: defaultdict[str, WaitingLine] = defaultdict(WaitingLine)

    def answer_tokens(self, arrival: Arrival) -> float:
        """Return the expected length of each answer."""
        expected = self.lengths.expected(arrival.tenant)
        return expected if arrival.num_answer_tokens is None else min(expected, float(arrival.num_answer_tokens))

    def load(self, look: Callable[[], Load]) -> Load:
        """Return the load of the engine and of the accepted requests, seen a moment ago."""
        began = self._clock()
        if self._load is None or began >= self._used_until:
            self._load = look()
            for entry in self._entries:
                entry.add_to(self._load)
            self._used_until = began + max(_SEEN_SECONDS, (self._clock() - began) / _LOOK_SHARE)
        return self._load

    def learn(self, predicted: float, measured: float) -> None:
        """Learn the ratio of waits from a request that waited for `measured` seconds for its first token.

        The `predicted` seconds are without this ratio. The costs contain the time of steps. They contain neither the
        time between two steps nor requests that arrive later. The ratio stays near the median of the last requests, so
        a few outliers change little.
        """
        if predicted >= _LEAST_SECONDS:
            ratio = self.wait_ratio
            changed = ratio * _STEP if measured > predicted * ratio else ratio / _STEP
            self.wait_ratio = max(_LEAST, min(changed, _MOST))

    def enter(self, arrival: Arrival, body: bytes, look: Callable[[], Load]) -> Entry:
        """Return the entry that counts the request until its end.

        Raises ApiError 429, or 400 for a request that can never enter. An idle server never answers 429, because a
        retry would not help.
        """
        most = self.settings.slots + self.settings.max_queue
        if arrival.num_sequences > most:
            given = f"{arrival.num_prompts} times {arrival.num_choices}"
            raise refuse(f"prompts times n must be at most {most} here, got {given}: split the request", "n")
        load = self.load(look)
        ahead = load.seconds_ahead(arrival.tenant, arrival.num_prompt_tokens)
        if load.count:
            self._check(arrival, body, load, self.wait_ratio * ahead)
        own = load.service_seconds(arrival.num_prompt_tokens // arrival.num_prompts, 0.0)
        entry = Entry(self, arrival, ahead + own)
        self._entries.add(entry)
        entry.add_to(load)
        return entry

    def leave(self, entry: Entry) -> None:
        self._entries.discard(entry)

    def _check(self, arrival: Arrival, body: bytes, load: Load, wait: float) -> None:
        """Raise ApiError 429 unless a request that would wait for `wait` seconds may enter now.

        A refused client gets a place in its tenant's line, or keeps its place.
        """
        settings, now, tenant = self.settings, self._clock(), arrival.tenant
        line, num_waiting = self._lines[tenant], load.num_waiting(tenant)
        num_free = max(0, load.num_slots - load.count)
        is_full = num_waiting + arrival.num_sequences > num_free + settings.max_queue
        if not (wait or is_full or line):
            return
        longest = min(settings.max_ttft, wait * settings.max_queue / num_waiting if num_waiting else math.inf)
        place = line.find(body, now)
        with_line = wait + line.seconds_before(place)
        if not is_full and (with_line <= longest * (_LATE if place else 1.0) or wait <= longest * _EARLY):
            if place:
                line.remove(place)
            return
        seconds = min(max(with_line - longest * _AIMED, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        if place:
            place.due = now + seconds
        else:
            line.append(body, self._delay(arrival, load), now + seconds)
        reason = f"the first token would arrive after {wait:.0f} s, at most {settings.max_ttft:g} s are allowed"
        if wait <= longest:
            reason = f"clients of this key that were refused earlier come first, retry after {seconds:.0f} s"
        if is_full:
            reason = f"{num_waiting} of your answers already wait, at most {settings.max_queue} may wait"
        raise ApiError(429, f"the server is busy: {reason}", code="rate_limit_exceeded", headers=retry_headers(seconds))

    def _delay(self, arrival: Arrival, load: Load) -> float:
        """Return the number of seconds by which the request delays the tenant's next requests."""
        num_answer_tokens = arrival.num_sequences * self.answer_tokens(arrival)
        service = load.service_seconds(arrival.num_prompt_tokens, num_answer_tokens)
        return self.wait_ratio * load.shared_seconds(arrival.tenant, service)
