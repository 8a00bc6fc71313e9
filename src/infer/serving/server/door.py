"""The door: refuse a request that would wait too long, before any work is done for it, and say when to retry.

Every tenant has its own door. The sequences of other tenants count as far as they delay this tenant. The door counts
sequences, not requests, because one body may ask for many. A `Forecast` tells how long a tenant's next request would
wait, from the engine's sequences and from its cost model.

Tenants share the computation (`step.fairness.Tenants`). While a tenant gets the work that is ahead of a request,
every other tenant gets the same amount, or all that it needs if that is less. So the requests of one tenant cannot
lengthen the wait of another without bound. Weights of tenants are ignored, because a server has none.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple, final

from infer.engine.step.fairness import AnswerLengths
from infer.engine.step.scheduler import STREAM_SECONDS
from infer.engine.step.step_costs import StepCosts, StepWork, context_of
from infer.serving.protocols.errors import ApiError
from infer.serving.protocols.fields import refuse
from infer.serving.server.waiting_line import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, WaitingLine
from infer.serving.server_settings import ServerSettings

_JITTER = 0.05
_SEEN_SECONDS = 0.02  # for which a look at the engine is used again
_LOOK_SHARE = 0.05  # of the event loop's time, for looking at the engine
_LEAST_SECONDS = 1.0  # the shortest prediction to learn from: shorter waits are mostly chance
_STEP = 1.01  # factor by which one request changes the ratio of measured to predicted waits
_LEAST, _MOST = 0.5, 3.0  # limits of that ratio
# Shares of the longest wait that is allowed:
_AIMED = 0.8  # the wait that a client should find when it retries at the time it was told
_LATE = 1.2  # such a client is accepted up to this wait, so that a small prediction error does not refuse it twice
_EARLY = 0.5  # up to this wait all are accepted, even before clients in the line, so that the engine is never idle


class RemainingWork(NamedTuple):
    """The remaining work of one sequence, in tokens."""

    tenant: str
    has_slot: bool
    num_pending: int  # unread tokens of its prompt
    num_computed: int  # positions before the unread ones
    num_answer: float  # expected tokens of its answer


class _Work(NamedTuple):
    """The work that sequences still need: seconds to read prompts, and tokens of answers."""

    prompt_seconds: float = 0.0
    answer_tokens: float = 0.0


@final
@dataclass
class _Load:
    """The sequences of one tenant."""

    running: list[_Work] = field(default_factory=list)
    num_waiting: int = 0
    waiting: _Work = field(default_factory=_Work)

    @property
    def count(self) -> int:
        return len(self.running) + self.num_waiting


@final
class Forecast:
    """The load of an engine, and the waits that follow from it.

    `fitting` returns how many sequences of a given length have pages. `reading_tokens` returns how many prompt tokens a
    step reads. Its arguments are the number of answers in the step and the number of positions before their tokens.
    None means no limit.
    """

    def __init__(
        self,
        costs: StepCosts,
        num_slots: int,
        fitting: Callable[[int], int] | None = None,
        reading_tokens: Callable[[int, int], int] | None = None,
    ) -> None:
        self._costs, self._max_slots, self._fitting, self._reading_tokens = costs, num_slots, fitting, reading_tokens
        self._loads: dict[str, _Load] = {}
        self._reading: list[tuple[int, float]] = []  # tokens and seconds of each prompt that is being read
        self._count = 0
        self._num_pending, self._num_answer, self._num_tokens = 0, 0.0, 0.0  # sums over all sequences
        self._known_token_seconds: float | None = None

    def copy(self) -> "Forecast":
        copied = copy(self)
        copied._loads = {tenant: replace(load, running=list(load.running)) for tenant, load in self._loads.items()}
        copied._reading = list(self._reading)
        return copied

    def add(self, demand: RemainingWork, count: int = 1) -> None:
        """Count `count` sequences of this kind."""
        load = self._loads.setdefault(demand.tenant, _Load())
        seconds = self._prompt_seconds(demand.num_pending, demand.num_computed)
        if demand.num_pending and (demand.has_slot or self._count < self._max_slots):
            self._reading += [(demand.num_pending, seconds)] * count
        if demand.has_slot:
            load.running += [_Work(seconds, demand.num_answer)] * count
        else:
            load.num_waiting += count
            before = load.waiting
            answers = before.answer_tokens + count * demand.num_answer
            load.waiting = _Work(before.prompt_seconds + count * seconds, answers)
        self._count += count
        self._num_pending += count * demand.num_pending
        self._num_answer += count * demand.num_answer
        self._num_tokens += count * (demand.num_computed + demand.num_pending + demand.num_answer)
        self._known_token_seconds = None

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self._count

    @property
    def num_slots(self) -> int:
        """Number of sequences that can run at the same time, limited by slots and pages."""
        if self._fitting is None or self._count == 0:
            return self._max_slots
        return max(1, min(self._max_slots, self._fitting(round(self._num_tokens / self._count))))

    def num_waiting(self, tenant: str) -> int:
        return self._load(tenant).num_waiting

    def seconds_to_slot(self, tenant: str) -> float:
        """Return the seconds until the tenant's next sequence gets a slot."""
        num_slots, own = self.num_slots, self._load(tenant)
        if self._count < num_slots:
            return 0.0
        num_tenants = len(self._loads) + (tenant not in self._loads)
        share = max(1.0, num_slots / num_tenants, float(num_slots - (self._count - own.count)))
        num_before = ceil(own.count + 1 - share)  # sequences of this tenant that must end first
        if num_before > 0:
            return self.shared_seconds(tenant, self._seconds_until(own, num_before, share))
        num_free = max(0, num_slots - sum(len(load.running) for load in self._loads.values()))
        others = (load for name, load in self._loads.items() if name != tenant)
        if own.count == 0 and any(min(load.count, len(load.running) + num_free) > 1 for load in others):
            return 0.0  # a tenant above its share loses a slot, even one that it is only about to get
        running = self._all_seconds(work for load in self._loads.values() for work in load.running)
        return len(running) * min(running, default=0.0)

    def _seconds_until(self, load: _Load, num_ended: int, share: float) -> float:
        """Return the seconds until `num_ended` sequences of a tenant have ended, if no other tenant uses the engine.

        All running sequences are computed at the same speed. Sequences that still run at the end count as half done.
        """
        running = sorted(self._all_seconds(load.running))
        if num_ended <= len(running):
            return len(running) * running[num_ended - 1]
        waiting = self._seconds_of(load.waiting)
        return sum(running) + waiting - (share - 1) * waiting / load.num_waiting / 2

    def seconds_ahead(self, tenant: str, num_prompt_tokens: int) -> float:
        """Return the seconds before the tenant's next prompt is read: the wait for a slot, or for shorter prompts."""
        if waiting := self.seconds_to_slot(tenant):
            return waiting
        decoding = self._costs.predict(self._decoding(min(self._count, self._max_slots)))
        share = max(0.5, 1 - decoding / STREAM_SECONDS)
        return sum(seconds for tokens, seconds in self._reading if tokens <= num_prompt_tokens) / share

    def shared_seconds(self, tenant: str, seconds: float) -> float:
        """Return the seconds that work takes which would take `seconds` without the other tenants."""
        others = (load for name, load in self._loads.items() if name != tenant)
        return seconds + sum(min(self._seconds(load), seconds) for load in others)

    def service_seconds(self, prompt_tokens: int, answer_tokens: float) -> float:
        """Return the seconds for which a request of this size occupies a busy engine."""
        return self._prompt_seconds(prompt_tokens, 0) + answer_tokens * self._token_seconds()

    def _load(self, tenant: str) -> _Load:
        return self._loads.get(tenant, _Load())

    def _seconds(self, load: _Load) -> float:
        return sum(self._all_seconds(load.running)) + self._seconds_of(load.waiting)

    def _all_seconds(self, works: Iterable[_Work]) -> list[float]:
        token_seconds = self._token_seconds()
        return [work.prompt_seconds + work.answer_tokens * token_seconds for work in works]

    def _seconds_of(self, work: _Work) -> float:
        return work.prompt_seconds + work.answer_tokens * self._token_seconds()

    def _prompt_seconds(self, num_tokens: int, start: int) -> float:
        return self._costs.predict_further(num_tokens, context_of(num_tokens, start))

    def _token_seconds(self) -> float:
        """Return the seconds per token of an answer while the engine is busy."""
        if self._known_token_seconds is None:
            self._known_token_seconds = self._costs.predict(self._decoding(self.num_decoding)) / self.num_decoding
        return self._known_token_seconds

    @property
    def num_decoding(self) -> int:
        """Number of answers that are computed together while the engine is busy.

        Each step computes one token of each answer, and reads some tokens of prompts. If prompts are read slowly,
        answers end as fast as new prompts are read, before the slots are full.
        """
        if self._reading_tokens is None or not self._num_pending or not self._num_answer:
            return self.num_slots
        low, high = 1, self.num_slots
        while low < high:  # the largest number for which prompts are read as fast as answers end
            middle = (low + high + 1) // 2
            num_read = self._reading_tokens(middle, self._decoding(middle).context)
            if num_read * self._num_answer >= middle * self._num_pending:
                low = middle
            else:
                high = middle - 1
        return low

    def _decoding(self, num_sequences: int) -> StepWork:
        mean = self._num_tokens / self._count if self._count else 0.0
        return StepWork(num_sequences, num_sequences, round(num_sequences * mean))


@final
class WaitRatio:
    """The ratio of measured to predicted waits for a first token, learnt from the accepted requests.

    The forecast knows the time of steps. It knows neither the time between two steps nor requests that arrive later.
    The ratio stays near the median of the last requests, so a few outliers change little.
    """

    def __init__(self) -> None:
        self.value = 1.0  # measured over predicted seconds

    def learn(self, predicted: float, measured: float) -> None:
        """Learn from a request that waited for `measured` seconds. `predicted` is in seconds, without this ratio."""
        if predicted >= _LEAST_SECONDS:
            changed = self.value * _STEP if measured > predicted * self.value else self.value / _STEP
            self.value = max(_LEAST, min(changed, _MOST))


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
