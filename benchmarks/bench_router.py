"""The router of `infer.distributed` by simulation: many replicas, several fronts with a router each, no model.

Conversations begin with one of few system prompts and go on after a while; a replica's cache holds pages by their keys,
and the ideal is one cache with the pages of all. Printed: the share of the ideal's hits, the most loaded replica over
the mean, seconds to choose one, and what a router's memory takes.
"""

import heapq
import random
import sys
import time
import tracemalloc
from collections import Counter
from hashlib import blake2b

from command_line import REPORTS, make_parser
from infer.distributed.router import RoutedPrompt, Router
from machine import write_report

PAGE_TOKENS, CACHE_PAGES = 64, 1500
PROMPT_RATE, ANSWER_COST = 4000.0, 8.0  # tokens of prompts a second; what a token of an answer costs in these
TURNS, SYSTEM_PROMPTS, NEW_TOKENS, ANSWER_TOKENS, PAUSE_SECONDS = 4, 6, 160, 150, 15.0
LOAD = 0.7
# Replicas, fronts, whether conversations are sticky. The last is for the seconds of a choice alone.
ASKED = [(8, 1, True), (8, 2, True), (8, 2, False), (40, 1, True), (40, 10, True), (40, 10, False), (800, 1, True)]


class Cache:
    """Of a replica: the pages used last."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.pages = num_pages, dict[bytes, None]()

    def read(self, keys: list[bytes]) -> int:
        """How many of them were there; now all are."""
        count = next((index for index, key in enumerate(keys) if key not in self.pages), len(keys))
        for key in reversed(keys):
            self.pages.pop(key, None)
            self.pages[key] = None
        while len(self.pages) > self.num_pages:
            del self.pages[next(iter(self.pages))]
        return count


def keys_of(name: str, count: int, before: list[bytes]) -> list[bytes]:
    return before + [blake2b(f"{name} {index}".encode(), digest_size=16).digest() for index in range(count)]


def simulate(num_replicas: int, num_fronts: int, num_requests: int, *, is_sticky: bool) -> dict[str, float]:
    """`is_sticky`: a conversation's requests all come to one front."""
    rng = random.Random(1)
    names = [f"r{index}" for index in range(num_replicas)]
    systems = [keys_of(f"system {index}", rng.randrange(4, 20), []) for index in range(SYSTEM_PROMPTS)]
    routers = [Router(CACHE_PAGES) for _ in range(num_fronts)]
    caches, ideal = {name: Cache(CACHE_PAGES) for name in names}, Cache(CACHE_PAGES * num_replicas)
    free_at, work, hits, ideal_hits, chosen_in = dict.fromkeys(names, 0.0), Counter[str](), 0, 0, 0.0
    usual = NEW_TOKENS / PROMPT_RATE + ANSWER_TOKENS * ANSWER_COST / PROMPT_RATE
    num_open = max(1, round(LOAD * num_replicas * (PAUSE_SECONDS + usual) / usual))  # so many talk at once
    talks = [(rng.random() * PAUSE_SECONDS, number, 0, list[bytes]()) for number in range(num_open)]
    heapq.heapify(talks)
    for number in range(num_requests):
        now, talk, turn, keys = heapq.heappop(talks)
        keys = keys_of(f"{talk} {turn} {number}", NEW_TOKENS // PAGE_TOKENS, keys or rng.choice(systems))
        router = routers[(talk if is_sticky else number) % num_fronts]
        prompt = RoutedPrompt(len(keys) * PAGE_TOKENS, keys, "", ANSWER_TOKENS * ANSWER_COST)
        queued = {name: max(0.0, free_at[name] - now) * PROMPT_RATE for name in names}
        began = time.perf_counter()
        name = router.choose(prompt, queued)
        router.sent(prompt, name)
        chosen_in += time.perf_counter() - began
        found = caches[name].read(keys)
        hits, ideal_hits = hits + found, ideal_hits + ideal.read(keys)
        cost = (len(keys) - found) * PAGE_TOKENS + ANSWER_TOKENS * ANSWER_COST
        work[name] += cost
        free_at[name] = max(now, free_at[name]) + cost / PROMPT_RATE
        again = free_at[name] + rng.expovariate(1 / PAUSE_SECONDS)
        heapq.heappush(talks, (again, talk, turn + 1, keys) if turn + 1 < TURNS else (again, talk + num_open, 0, []))
    return {
        "replicas": num_replicas,
        "fronts": num_fronts,
        "sticky": is_sticky,
        "share_of_ideal_hits": round(hits / ideal_hits, 3),
        "most_loaded_over_mean": round(max(work.values()) * num_replicas / work.total(), 3),
        "choose_ms": round(1000 * chosen_in / num_requests, 3),
    }


def bytes_per_page() -> float:
    """Of a router that knows many."""
    tracemalloc.start()
    router, count = Router(10**6), 20_000
    for number in range(count // 100):
        router.sent(RoutedPrompt(6400, keys_of(f"{number}", 100, [])), "r0")
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / count


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests-each", type=int, default=150, help="of a replica")
    arguments = parser.parse_args()
    found = []
    for num_replicas, num_fronts, is_sticky in ASKED:
        requests = 400 if num_replicas > 100 else arguments.requests_each * num_replicas
        found.append(simulate(num_replicas, num_fronts, requests, is_sticky=is_sticky))
        print(found[-1], flush=True)
    results = {"simulated": found, "bytes_per_page": round(bytes_per_page())}
    print(f"{results['bytes_per_page']} bytes for a page that a router knows")
    write_report(REPORTS, "router", vars(arguments), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
