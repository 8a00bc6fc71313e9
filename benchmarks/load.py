"""Traces of requests, the answers that clients saw, and their figures: the load for every kind of server.

A request of a trace becomes ready at a moment, or some time after another request has ended. So one type describes an
open loop, clients that ask again when they are answered, and a stream beside which other requests arrive. The module
imports only the standard library, because workers also run in environments without infer.
"""

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import mean
from typing import Any

DELIVERY_SECONDS = 1e-3  # tokens that arrive within this time are one delivery


@dataclass(frozen=True)
class Ask:
    """One request. `kind` is plain, grammar or logprobs; a side without these answers it as plain."""

    prompt: list[int]
    new_tokens: int
    at: float = 0.0  # seconds from the beginning, or from the end of `after`
    after: int | None = None  # index into the trace
    role: str = ""  # figures of some traces are given by role
    kind: str = "plain"
    leaves_after: int | None = None  # tokens, after which the client goes away
    is_background: bool = False  # its client goes away when all others are answered


@dataclass
class Answer:
    """One answer as its client saw it, in seconds from the beginning of the trace."""

    ready: float
    arrivals: list[float] = field(default_factory=list)  # arrival of each token
    token_ids: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.ready

    @property
    def deliveries(self) -> list[float]:
        later = [now for before, now in pairwise(self.arrivals) if now - before > DELIVERY_SECONDS]
        return [*self.arrivals[:1], *later]

    @property
    def gaps(self) -> list[float]:
        return [now - before for before, now in pairwise(self.deliveries)]


# Traces


def make_prompt(length: int, seed: int) -> list[int]:
    """Return ids from 1,000 to 30,999, which every model has. Another seed gives another sequence."""
    state, ids = seed * 2654435761 % 2**32, []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(1000 + (state >> 8) % 30000)
    return ids


def closed(num_clients: int, prompt_tokens: int, new_tokens: int, each: int, seed: int) -> list[Ask]:
    """Return a trace of clients that ask again as soon as they are answered, `each` times."""
    asks = [Ask(make_prompt(prompt_tokens, seed + index), new_tokens) for index in range(num_clients * each)]
    return by_clients(asks, num_clients)


def shared_prefix(num_clients: int, prefix_tokens: int, new_tokens: int, seed: int) -> list[Ask]:
    """Return one request and, after its answer, those of all clients after the same text, 100 ms apart."""
    prefix = make_prompt(prefix_tokens, seed)
    asks = [Ask(prefix + make_prompt(16, seed + 1), new_tokens, role="first")]
    for client in range(num_clients):
        prompt = prefix + make_prompt(16, seed + 2 + client)
        asks.append(Ask(prompt, new_tokens, at=0.1 * client, after=0))
    return asks


def long_prompt(prompt_tokens: int, seed: int) -> list[Ask]:
    """Return a long prompt alone, then four streams, a long prompt a second later, and a short one 200 ms after it."""
    asks = [Ask(make_prompt(prompt_tokens, seed), 16, role="long alone")]
    for stream in range(4):
        asks.append(Ask(make_prompt(64, seed + 1 + stream), 4000, after=0, role="stream", is_background=True))
    asks.append(Ask(make_prompt(prompt_tokens, seed + 9), 16, at=1.0, after=0, role="long"))
    asks.append(Ask(make_prompt(64, seed + 10), 16, at=1.2, after=0, role="short"))
    return asks


def mixed(count: int, seed: int) -> Iterator[Ask]:
    """Return a trace with prompts of 16 to 1,024 tokens and answers of 16 to 256. Short ones are more frequent.

    One request of ten has a grammar, one asks for log-probabilities, and one has a client that goes away.
    """
    draw = random.Random(seed)
    for index in range(count):
        kind = {0: "grammar", 1: "logprobs"}.get(draw.randrange(10), "plain")
        new_tokens = _log_uniform(draw, 16, 256)
        prompt = make_prompt(_log_uniform(draw, 16, 1024), 7919 * seed + index)
        leaves_after = draw.randint(1, new_tokens) if draw.randrange(10) == 0 else None
        yield Ask(prompt, new_tokens, kind=kind, leaves_after=leaves_after)


def at_poisson_times(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    draw, now, found = random.Random(seed), 0.0, []
    for ask in asks:
        now += draw.expovariate(rate)
        found.append(replace(ask, at=now))
    return found


def by_clients(asks: Sequence[Ask], num_clients: int) -> list[Ask]:
    """Return the same requests in a closed loop."""
    return [replace(ask, at=0.0, after=i - num_clients if i >= num_clients else None) for i, ask in enumerate(asks)]


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


# Clients


class Clients(ABC):
    """The clients of a trace, each a task of one event loop."""

    @abstractmethod
    async def read(self, ask: Ask, answer: Answer) -> None:
        """Ask, and note each arrival, until the end or until `has_seen_enough`."""

    def serve(self, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers to a trace, both as JSON."""
        return [asdict(answer) for answer in asyncio.run(self._serve([Ask(**ask) for ask in asks]))]

    def has_seen_enough(self, ask: Ask, answer: Answer) -> bool:
        left = ask.leaves_after is not None and len(answer.arrivals) >= ask.leaves_after
        return left or (ask.is_background and self._num_awaited == 0)

    def note(self, answer: Answer, token_ids: Sequence[int]) -> None:
        answer.token_ids += token_ids
        answer.arrivals += [self._now()] * len(token_ids)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _serve(self, asks: list[Ask]) -> list[Answer]:
        self._started = time.perf_counter()
        self._answers = [Answer(ask.at) for ask in asks]
        self._has_ended = [asyncio.Event() for _ in asks]
        self._num_awaited = sum(not ask.is_background for ask in asks)
        await asyncio.gather(*(self._answer(index, ask) for index, ask in enumerate(asks)))
        return self._answers

    async def _answer(self, index: int, ask: Ask) -> None:
        answer = self._answers[index]
        if ask.after is not None:
            await self._has_ended[ask.after].wait()
            answer.ready += self._answers[ask.after].ended
        await asyncio.sleep(max(0.0, answer.ready - self._now()))
        try:
            await self.read(ask, answer)
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = self._now()
        self._num_awaited -= not ask.is_background
        self._has_ended[index].set()


# Figures


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed; 0 if there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def figures(asks: Sequence[Ask], answers: Sequence[Answer]) -> dict[str, float]:
    """Return the figures of one run of a trace by name."""
    by_role = defaultdict[str, list[Answer]](list)
    for ask, answer in zip(asks, answers, strict=True):
        if answer.arrivals:
            by_role[ask.role].append(answer)
    found = dict(_of_long_prompt(by_role) if "long" in by_role else _of_load(by_role[""]))
    failed = sum(answer.error is not None for answer in answers)
    return found | ({"failed": failed} if failed else {})


def _of_load(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    seconds = max(answer.ended for answer in answers) - min(answer.ready for answer in answers)
    waits, gaps = [answer.first_token for answer in answers], [gap for answer in answers for gap in answer.gaps]
    yield "tok/s", sum(len(answer.arrivals) for answer in answers) / seconds
    for percent in (50, 99):
        yield f"first token p{percent} (ms)", 1e3 * percentile(waits, percent)
    for percent in (50, 99):
        yield f"gap p{percent} (ms)", 1e3 * percentile(gaps, percent)
    yield "longest wait × mean", max(waits) / mean(waits)


def _of_long_prompt(by_role: dict[str, list[Answer]]) -> Iterator[tuple[str, float]]:
    (alone,), (long,), (short,) = (by_role[role] for role in ("long alone", "long", "short"))
    yield "short: first token (ms)", 1e3 * short.first_token
    yield "long: × alone", (long.ended - long.ready) / (alone.ended - alone.ready)
    pairs = [pair for stream in by_role["stream"] for pair in pairwise(stream.deliveries)]
    during = [now - before for before, now in pairs if before < long.ended and now > long.ready]
    yield "streams: gap p50 (ms)", 1e3 * percentile(during, 50)
    yield "streams: gap p99 (ms)", 1e3 * percentile(during, 99)
