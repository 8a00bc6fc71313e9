"""What bench_serving asks for: traces of requests, and what came of each. No library: every side reads this.

A trace is a list of `Ask`. One becomes ready at a moment of the trace, or so long after another of it has ended: so one
type says an open loop, clients that ask again when they are answered, and a stream beside which others come.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peer_worker import make_prompt

CONTEXT = 8192
LONG_PROMPT = 8000


@dataclass(frozen=True)
class Ask:
    """One request. `kind` is plain, grammar or logprobs; a side that has no such thing answers it as plain."""

    prompt: list[int]
    new_tokens: int
    at: float = 0.0  # seconds from the beginning, or from the end of `after`
    after: int | None = None  # index into the trace
    role: str = ""  # what is told of it apart
    kind: str = "plain"
    tenant: str = ""
    leaves_after: int | None = None  # pieces, after which the client goes away
    is_background: bool = False  # its client goes away when all others are answered


@dataclass
class Answer:
    """As its client saw it, in seconds from the beginning of the trace."""

    ready: float
    arrivals: list[float] = field(default_factory=list)  # of each token
    token_ids: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None
    stats: dict[str, float] = field(default_factory=dict)  # the library's own


@dataclass(frozen=True)
class Scenario:
    """`slots` is how many sequences llama.cpp takes at once; `options` are those of `LLM`."""

    name: str
    asks: list[Ask]
    slots: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def closed(num_clients: int, prompt_tokens: int, new_tokens: int, each: int, seed: int) -> list[Ask]:
    """Clients that ask again as soon as they are answered, `each` times."""
    asks = [
        Ask(make_prompt(prompt_tokens, seed + index), new_tokens, role="closed") for index in range(num_clients * each)
    ]
    return [replace(ask, after=i - num_clients if i >= num_clients else None) for i, ask in enumerate(asks)]


def shared_prefix(num_clients: int, prefix_tokens: int, new_tokens: int, seed: int) -> list[Ask]:
    """One request, and when it is answered all clients with other questions after the same text, 100 ms apart."""
    prefix = make_prompt(prefix_tokens, seed)
    asks = [Ask(prefix + make_prompt(16, seed + 1), new_tokens, role="first")]
    for client in range(num_clients):
        prompt = prefix + make_prompt(16, seed + 2 + client)
        asks.append(Ask(prompt, new_tokens, at=0.1 * client, after=0, role="next"))
    return asks


def long_prompt(prompt_tokens: int, seed: int) -> list[Ask]:
    """A long prompt alone; then four streams, the same length again a second later, and 200 ms later a short one."""
    asks = [Ask(make_prompt(prompt_tokens, seed), 16, role="long alone")]
    for stream in range(4):
        asks.append(Ask(make_prompt(64, seed + 1 + stream), 4000, after=0, role="stream", is_background=True))
    asks.append(Ask(make_prompt(prompt_tokens, seed + 9), 16, at=1.0, after=0, role="long"))
    asks.append(Ask(make_prompt(64, seed + 10), 16, at=1.2, after=0, role="short"))
    return asks


def tenants(seed: int) -> list[Ask]:
    """All at once from two, of whom one asks ten times as much."""
    names = ["much"] * 160 + ["little"] * 16
    return [Ask(make_prompt(64, seed + index), 32, role="tenants", tenant=tenant) for index, tenant in enumerate(names)]


def mixed(count: int, seed: int) -> Iterator[Ask]:
    """Prompts of 16 to 1,024 tokens and answers of 16 to 256, short ones more often; one of ten with a grammar, one
    with log-probabilities, one whose client goes away. Four tenants, of whom the first asks for half."""
    draw = random.Random(seed)
    for index in range(count):
        kind = {0: "grammar", 1: "logprobs"}.get(draw.randrange(10), "plain")
        new_tokens = _log_uniform(draw, 16, 256)
        yield Ask(
            make_prompt(_log_uniform(draw, 16, 1024), 7919 * seed + index),
            new_tokens,
            role="mixed",
            kind=kind,
            tenant=f"tenant {max(0, draw.randrange(6) - 2)}",
            leaves_after=draw.randint(1, new_tokens) if draw.randrange(10) == 0 else None,
        )


def at_poisson_times(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """So many a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for ask in asks:
        now += draw.expovariate(rate)
        found.append(replace(ask, at=now))
    return found


def by_clients(asks: Sequence[Ask], num_clients: int) -> list[Ask]:
    """The same in a closed loop."""
    return [replace(ask, at=0.0, after=i - num_clients if i >= num_clients else None) for i, ask in enumerate(asks)]


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))
