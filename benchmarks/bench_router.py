"""Measure the router of `infer.serving.distributed` by simulation: many replicas, several fronts, no model.

    python benchmarks/bench_router.py --requests-each 150

A chat trace runs in simulated time over replicas whose caches hold pages by the cache's own keys. Conversations begin
at random moments with one of six system prompts, and continue after a while. A replica does its work one request after
the other. The ideal is one cache with the pages of all replicas.

The script prints the share of the ideal's hits, the load of the most loaded replica over the mean, the milliseconds of
a choice, and the memory of a router.
"""

import heapq
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import make_parser, write_report
from infer.compute.kvcache.page_rows import page_keys
from infer.serving.distributed.router import ReplicaRouter, RoutedPrompt

LOAD = 0.7
# Numbers of replicas and fronts, and True if conversations are sticky. The last entry is for the time of a choice.
ASKED = [(8, 1, True), (8, 2, True), (8, 2, False), (40, 1, True), (40, 10, True), (40, 10, False), (800, 1, True)]
PAGE_TOKENS, CACHE_PAGES = 64, 1500
PROMPT_RATE, ANSWER_RATE = 4000.0, 500.0  # tokens per second of a replica
ANSWER_TOKENS = 150 * PROMPT_RATE / ANSWER_RATE  # cost of a mean answer, in tokens of a prompt
MEAN_SECONDS = 4 * (300 / PROMPT_RATE + 150 / ANSWER_RATE)  # work of a mean conversation
PAUSE_SECONDS = 15.0  # mean time between an answer and the next question

Choose = Callable[[RoutedPrompt, Mapping[str, float], str], str]  # prompt, queued tokens by replica, conversation


@dataclass
class Cache:
    """The pages of a replica. The least recently used pages go first."""

    num_pages: int
    pages: dict[bytes, None] = field(default_factory=dict)

    def read(self, keys: list[bytes]) -> int:
        """Return the number of tokens that were cached, and cache all pages."""
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
    seconds: dict[str, float]  # seconds of work, by replica

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
    """Simulate a trace. `load` is the share of the replicas' time that the mean work takes."""
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
    """Return a choice by the router of each front. If `is_sticky`, all requests of a conversation go to one front."""
    routers, rng, front_by_name = (
        [ReplicaRouter(CACHE_PAGES) for _ in range(num_fronts)],
        random.Random(1),
        dict[str, int](),
    )

    def choose(prompt: RoutedPrompt, queued: Mapping[str, float], conversation: str) -> str:
        front = rng.randrange(num_fronts)
        if is_sticky:
            front = front_by_name.setdefault(conversation, front)
        name = routers[front].choose(prompt, queued)
        routers[front].sent(prompt, name)
        return name

    return choose


def measure(num_replicas: int, num_fronts: int, num_requests: int, *, is_sticky: bool) -> dict[str, Any]:
    choose, chosen_in = by_routers(num_fronts, is_sticky=is_sticky), list[float]()

    def timed(prompt: RoutedPrompt, queued: Mapping[str, float], conversation: str) -> str:
        began = time.perf_counter()
        name = choose(prompt, queued, conversation)
        chosen_in.append(time.perf_counter() - began)
        return name

    found = simulate(timed, num_replicas=num_replicas, load=LOAD, num_requests=num_requests)
    return {
        "replicas": num_replicas,
        "fronts": num_fronts,
        "sticky": is_sticky,
        "share_of_ideal_hits": round(found.share_of_ideal, 3),
        "most_loaded_over_mean": round(max(map(found.load_over_mean, replica_names(num_replicas))), 3),
        "choose_ms": round(1000 * sum(chosen_in) / num_requests, 3),
    }


def bytes_per_page() -> float:
    """Return the memory per page of a router that knows many pages."""
    tracemalloc.start()
    router, count = ReplicaRouter(10**6), 20_000
    for number in range(count // 100):
        router.sent(RoutedPrompt(6400, [b"%8d%8d" % (number, index) for index in range(100)]), "r0")
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / count


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests-each", type=int, default=150, help="requests per replica")
    options = parser.parse_args()
    found = []
    for num_replicas, num_fronts, is_sticky in ASKED:
        requests = 400 if num_replicas > 100 else options.requests_each * num_replicas
        found.append(measure(num_replicas, num_fronts, requests, is_sticky=is_sticky))
        print(found[-1], flush=True)
    size = round(bytes_per_page())
    print(f"{size} bytes for a page that a router knows")
    write_report(options, simulated=found, bytes_per_page=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
