"""The door: refuse a request that would wait too long, before any work is done for it, and say when to retry.

Every tenant has its own door. The sequences of other tenants count as far as they delay this tenant. The door counts
sequences, not requests, because one body may ask for many.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, final

from infer.engine.step.fairness import AnswerLengths
from infer.serving.protocols.refusals import refuse
from infer.serving.server.http_errors import ApiError
from infer.serving.server.wait_forecast import Forecast, RemainingWork, WaitRatio
from infer.serving.server.waiting_line import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, WaitingLine
from infer.serving.server_settings import ServerSettings

_JITTER = 0.05
_SEEN_SECONDS = 0.02  # for which a look at the engine is used again
_LOOK_SHARE = 0.05  # of the event loop's time, for looking at the engine
# Shares of the longest wait that is allowed:
_AIMED = 0.8  # the wait that a client should find when it retries at the time it was told
_LATE = 1.2  # such a client is accepted up to this wait, so that a small prediction error does not refuse it twice
_EARLY = 0.5  # up to this wait all are accepted, even before clients in the line, so that the engine is never idle


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
class Entry:
    """An accepted request. Its sequences count until the engine has them.

    `predicted` is the number of seconds until its first token, according to the engine's cost model.
    """

    def __init__(self, door: "Door", arrival: Arrival, predicted: float) -> None:
        self._door, self._arrival, self._num_submitted = door, arrival, 0
        self._predicted = predicted

    def submit(self) -> None:
        """Count one sequence less: the engine has it now. The first choices of the prompts are submitted first."""
        if self._num_submitted < self._arrival.num_sequences:
            self._door.note_submitted(self._demand(self._num_submitted < self._arrival.num_prompts))
            self._num_submitted += 1

    def close(self) -> None:
        self._door.leave(self)

    def learn_wait(self, seconds: float) -> None:
        """Learn from the seconds between the request's submission and its first token."""
        self._door.wait_ratio.learn(self._predicted, seconds)

    def add_to(self, forecast: Forecast) -> None:
        num_unread = max(0, self._arrival.num_prompts - self._num_submitted)
        num_others = self._arrival.num_sequences - self._num_submitted - num_unread
        for is_first, count in ((True, num_unread), (False, num_others)):
            if count:
                forecast.add(self._demand(is_first), count)

    def _demand(self, is_first: bool) -> RemainingWork:
        arrival = self._arrival
        num_tokens = arrival.num_prompt_tokens // arrival.num_prompts if is_first else 0
        return RemainingWork(arrival.tenant, False, num_tokens, 0, self._door.answer_tokens(arrival))


@final
class Door:
    """Admission of requests, for the event loop only.

    `look` returns the load of the engine, without requests that the engine does not have yet.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.lengths, self.wait_ratio = AnswerLengths(), WaitRatio()
        self._clock = clock
        self._entries = set[Entry]()
        self._submitted: list[RemainingWork] = []  # submitted since the last look at the engine
        self._seen: Forecast | None = None
        self._seen_until = -math.inf
        self._lines: defaultdict[str, WaitingLine] = defaultdict(WaitingLine)

    def answer_tokens(self, arrival: Arrival) -> float:
        """Return the expected length of each answer."""
        expected = self.lengths.expected(arrival.tenant)
        return expected if arrival.num_answer_tokens is None else min(expected, float(arrival.num_answer_tokens))

    def forecast(self, look: Callable[[], Forecast]) -> Forecast:
        began = self._clock()
        if self._seen is None or began >= self._seen_until:
            self._submitted.clear()
            self._seen = look()
            self._seen_until = began + max(_SEEN_SECONDS, (self._clock() - began) / _LOOK_SHARE)
        forecast = self._seen.copy()
        for demand in self._submitted:
            forecast.add(demand)
        for entry in self._entries:
            entry.add_to(forecast)
        return forecast

    def enter(self, arrival: Arrival, body: bytes, look: Callable[[], Forecast]) -> Entry:
        """Return the entry that counts the request until its end.

        Raises ApiError 429, or 400 for a request that can never enter. An idle server never answers 429, because a
        retry would not help.
        """
        most = self.settings.slots + self.settings.max_queue
        if arrival.num_sequences > most:
            given = f"{arrival.num_prompts} times {arrival.num_choices}"
            raise refuse(f"prompts times n must be at most {most} here, got {given}: split the request", "n")
        forecast = self.forecast(look)
        ahead = forecast.seconds_ahead(arrival.tenant, arrival.num_prompt_tokens)
        if forecast.count:
            self._check(arrival, body, forecast, self.wait_ratio.value * ahead)
        own = forecast.service_seconds(arrival.num_prompt_tokens // arrival.num_prompts, 0.0)
        entry = Entry(self, arrival, ahead + own)
        self._entries.add(entry)
        return entry

    def leave(self, entry: Entry) -> None:
        self._entries.discard(entry)

    def note_submitted(self, demand: RemainingWork) -> None:
        self._submitted.append(demand)

    def _check(self, arrival: Arrival, body: bytes, forecast: Forecast, wait: float) -> None:
        """Raise ApiError 429 unless a request that would wait for `wait` seconds may enter now.

        A refused client gets a place in its tenant's line, or keeps its place.
        """
        settings, now, tenant = self.settings, self._clock(), arrival.tenant
        line, num_waiting = self._lines[tenant], forecast.num_waiting(tenant)
        num_free = max(0, forecast.num_slots - forecast.count)
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
        seconds *= 1 - random.uniform(0, _JITTER)
        if place:
            place.due = now + seconds
        else:
            line.append(body, self._seconds_of(arrival, forecast), now + seconds)
        reason = f"the first token would arrive after {wait:.0f} s, at most {settings.max_ttft:g} s are allowed"
        if wait <= longest:
            reason = f"clients of this key that were refused earlier come first, retry after {seconds:.0f} s"
        if is_full:
            reason = f"{num_waiting} of your answers already wait, at most {settings.max_queue} may wait"
        raise ApiError(429, f"the server is busy: {reason}", code="rate_limit_exceeded", headers=retry_headers(seconds))

    def _seconds_of(self, arrival: Arrival, forecast: Forecast) -> float:
        """Return the number of seconds by which the request delays the tenant's next requests."""
        num_answer_tokens = arrival.num_sequences * self.answer_tokens(arrival)
        service = forecast.service_seconds(arrival.num_prompt_tokens, num_answer_tokens)
        return self.wait_ratio.value * forecast.shared_seconds(arrival.tenant, service)
