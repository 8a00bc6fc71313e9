"""The door: a request that would wait too long is refused before any work is done for it, and told when to come back.

How long one waits is predicted from what the engine has learnt of its steps, and from what goes on.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, final, runtime_checkable

from infer.engine.admission import EXPECTED_ANSWER
from infer.engine.scheduler import STREAM_SECONDS
from infer.engine.step_costs import Costs
from infer.server.errors import ApiError
from infer.server.settings import ServerSettings

MAX_RETRY_SECONDS = 60.0
_JITTER = 0.2
_SEEN_SECONDS = 0.02  # in which what the engine has is not looked at again
_LEARNT = 0.1  # what an answer that ends weighs in the mean length


class Ahead(NamedTuple):
    """What goes on: requests that have come, the tokens of prompts yet to be read, and those of answers to follow."""

    num_requests: int
    num_waiting: int  # of them, those without a slot
    prompt_tokens: int
    answer_tokens: float


def seconds_to_slot(ahead: Ahead, costs: Costs, num_slots: int) -> float:
    """Until one that comes now gets a slot."""
    if ahead.num_requests < num_slots:
        return 0.0
    step = costs.base + num_slots * costs.per_sequence
    all_seconds = ahead.answer_tokens * step / num_slots + ahead.prompt_tokens * costs.per_token
    return all_seconds * (ahead.num_requests - num_slots + 1) / ahead.num_requests


def seconds_to_first_token(ahead: Ahead, costs: Costs, num_slots: int, num_prompt_tokens: int) -> float:
    """Of one that comes now. While others decode, prompts have what is left of a step, and half of it at least."""
    waiting = seconds_to_slot(ahead, costs, num_slots)
    num_others = min(ahead.num_requests, num_slots - 1)
    decoding = (costs.base + num_others * costs.per_sequence) if num_others else 0.0
    share = max(0.5, 1 - decoding / STREAM_SECONDS)
    before = 0 if waiting else ahead.prompt_tokens
    return waiting + (num_prompt_tokens + before) * costs.per_token / share + costs.base


def retry_headers(seconds: float, jitter: float) -> dict[str, str]:
    """`jitter` in [−1, 1]: clients that were refused together do not come back together."""
    told = min(max(seconds, 0.5) * (1 + _JITTER * jitter), MAX_RETRY_SECONDS)
    return {"Retry-After": str(math.ceil(told)), "retry-after-ms": str(round(1000 * told)), "x-should-retry": "true"}


@runtime_checkable
class Demanding(Protocol):
    """A sequence of an engine, as the door sees it."""

    @property
    def has_slot(self) -> bool: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def room(self) -> int: ...


def _counted(demands: Sequence[Demanding], mean_answer: float) -> Ahead:
    return Ahead(
        num_requests=len(demands),
        num_waiting=sum(not each.has_slot for each in demands),
        prompt_tokens=sum(max(0, each.num_pending - 1) for each in demands),
        answer_tokens=sum(min(each.room, mean_answer) for each in demands),
    )


@final
class Door:
    """For the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._preparing: dict[object, int] = {}  # tokens of prompts that are not yet in the engine
        self._mean_answer = float(EXPECTED_ANSWER)
        self._seen_at, self._seen = -math.inf, Ahead(0, 0, 0, 0.0)

    @contextmanager
    def preparing(self, num_prompt_tokens: int) -> Iterator[None]:
        """Within, a request counts that the engine does not know yet."""
        key = object()
        self._preparing[key] = num_prompt_tokens
        try:
            yield
        finally:
            del self._preparing[key]

    def learn(self, num_answer_tokens: int) -> None:
        """An answer has ended."""
        self._mean_answer += _LEARNT * (num_answer_tokens - self._mean_answer)

    def ahead(self, demands: Callable[[], Sequence[Demanding]]) -> Ahead:
        """`demands` are what the engine has, asked for now and then."""
        now = time.monotonic()
        if now - self._seen_at > _SEEN_SECONDS:
            self._seen_at, self._seen = now, _counted(demands(), self._mean_answer)
        preparing, seen = len(self._preparing), self._seen
        return Ahead(
            num_requests=preparing + seen.num_requests,
            num_waiting=preparing + seen.num_waiting,
            prompt_tokens=sum(self._preparing.values()) + seen.prompt_tokens,
            answer_tokens=preparing * self._mean_answer + seen.answer_tokens,
        )

    def is_full(self, ahead: Ahead) -> bool:
        """Whether as many wait as may."""
        return ahead.num_waiting >= self.settings.max_queue

    def check(self, ahead: Ahead, costs: Costs, num_prompt_tokens: int) -> None:
        """Raises ApiError 429, but never of a server that has nothing to do: to come back would not help."""
        settings = self.settings
        wait = seconds_to_first_token(ahead, costs, settings.slots, num_prompt_tokens)
        if self.is_full(ahead):
            told = f"{ahead.num_waiting} requests wait already"
            retry = seconds_to_slot(ahead, costs, settings.slots) / max(1, ahead.num_waiting)
        elif ahead.num_requests and wait > settings.max_ttft:
            told = f"the first token would come after {wait:.0f} s, {settings.max_ttft:g} s are allowed"
            retry = wait - settings.max_ttft
        else:
            return
        headers = retry_headers(retry, random.uniform(-1, 1))
        raise ApiError(429, f"the server is busy: {told}", code="rate_limit_exceeded", headers=headers)
