"""A chat trace over replicas without models, in simulated time: their caches hold pages by the cache's own keys.

Conversations come at random, begin with one of few system prompts, and go on after a while. A replica does its work one
request after the other. The ideal is one cache with the pages of all.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infer.distributed.router import RoutedPrompt, Router
from infer.kvcache.page_rows import page_keys

PAGE_TOKENS, CACHE_PAGES = 64, 1500
PROMPT_RATE, ANSWER_RATE = 4000.0, 500.0  # tokens a second, of a replica
ANSWER_TOKENS = 150 * PROMPT_RATE / ANSWER_RATE  # what a mean answer costs, in tokens of a prompt
MEAN_SECONDS = 4 * (300 / PROMPT_RATE + 150 / ANSWER_RATE)  # of a conversation's work
PAUSE_SECONDS = 15.0  # between an answer and the next question, in the mean

Choose = Callable[[RoutedPrompt, Mapping[str, float], str], str]  # prompt, queued tokens by replica, conversation


@dataclass
class Cache:
    """The pages of a replica, the least recently used go first."""

    num_pages: int
    pages: dict[bytes, None] = field(default_factory=dict)

    def read(self, keys: list[bytes]) -> int:
        """How many tokens were there; now all pages are."""
        count = next((index for index, key in enumerate(keys) if key not in self.pages), len(keys))
        for key in reversed(keys):
            self.pages.pop(key, None)
            self.pages[key] = None
        while len(self.pages) > self.num_pages:
            del self.pages[next(iter(self.pages))]
        return count * PAGE_TOKENS


@dataclass
class Conversation:
    ids: list[int]
    num_turns: int
    name: str
    keys: list[bytes] = field(default_factory=list)

    def add(self, rng: random.Random, count: int) -> None:
        self.ids += rng.choices(range(1000), k=count)
        self.keys = page_keys(self.ids, PAGE_TOKENS, self.keys)


@dataclass
class Outcome:
    hits: int
    ideal_hits: int
    seconds: dict[str, float]  # of work, by replica

    @property
    def share_of_ideal(self) -> float:
        return self.hits / self.ideal_hits

    def load_over_mean(self, name: str) -> float:
        return self.seconds[name] * len(self.seconds) / sum(self.seconds.values())


def replica_names(count: int) -> list[str]:
    return [f"replica{index}" for index in range(count)]


def simulate(
    choose: Choose, *, num_replicas: int, load: float, num_requests: int, has_sessions: bool = False, seed: int = 1
) -> Outcome:
    """`load` is the share of the replicas' time that the mean work takes."""
    rng, names = random.Random(seed), replica_names(num_replicas)
    systems = [[rng.randrange(1000) for _ in range(rng.randrange(200, 1200))] for _ in range(6)]
    caches, ideal = {name: Cache(CACHE_PAGES) for name in names}, Cache(CACHE_PAGES * num_replicas)
    free_at, found = dict.fromkeys(names, 0.0), Outcome(0, 0, dict.fromkeys(names, 0.0))
    events = list[tuple[float, int, Conversation | None]]([(0.0, 0, None)])
    for number in range(1, num_requests + 1):
        now, _, conversation = heapq.heappop(events)
        while conversation is None:
            system = rng.choices(systems, [2.0**-index for index in range(len(systems))])[0]
            begun = Conversation(list(system), rng.randrange(1, 8), f"{number}-{now}")
            heapq.heappush(events, (now, number, begun))
            gap = rng.expovariate(load * num_replicas / MEAN_SECONDS)
            heapq.heappush(events, (now + gap, -number, None))
            now, _, conversation = heapq.heappop(events)
        conversation.add(rng, rng.randrange(20, 300))
        num_tokens, session = len(conversation.ids), conversation.name if has_sessions else ""
        queued = {name: max(0.0, free_at[name] - now) * PROMPT_RATE for name in names}
        prompt = RoutedPrompt(num_tokens, conversation.keys, session, ANSWER_TOKENS)
        name = choose(prompt, queued, conversation.name)
        num_found, num_answer = caches[name].read(conversation.keys), rng.randrange(50, 250)
        found.hits += num_found
        found.ideal_hits += ideal.read(conversation.keys)
        work = (num_tokens - num_found) / PROMPT_RATE + num_answer / ANSWER_RATE
        free_at[name] = max(now, free_at[name]) + work
        found.seconds[name] += work
        conversation.add(rng, num_answer)
        caches[name].read(conversation.keys)
        ideal.read(conversation.keys)
        conversation.num_turns -= 1
        if conversation.num_turns:
            heapq.heappush(events, (free_at[name] + rng.expovariate(1 / PAUSE_SECONDS), number, conversation))
    return found


def by_routers(num_fronts: int = 1, *, is_sticky: bool = True) -> Choose:
    """Each front has a router of its own. `is_sticky`: a conversation's requests all come to one front."""
    routers, rng, front_by_name = [Router(CACHE_PAGES) for _ in range(num_fronts)], random.Random(1), dict[str, int]()

    def choose(prompt: RoutedPrompt, queued: Mapping[str, float], conversation: str) -> str:
        front = rng.randrange(num_fronts)
        if is_sticky:
            front = front_by_name.setdefault(conversation, front)
        name = routers[front].choose(prompt, queued)
        routers[front].sent(prompt, name)
        return name

    return choose
