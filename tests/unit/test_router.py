"""The router by simulation: a chat trace over eight replicas, whose caches hold pages by the cache's own keys."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from infer.distributed.router import RoutedPrompt, Router, text_keys
from infer.kvcache.page_rows import page_keys

PAGE_TOKENS, NUM_PAGES, NUM_REPLICAS = 64, 1500, 8
PROMPT_RATE, ANSWER_RATE = 4000.0, 500.0  # tokens a second, of a replica
ANSWER_TOKENS = 150 * PROMPT_RATE / ANSWER_RATE  # what a mean answer costs, in tokens of a prompt
NAMES = [f"replica{index}" for index in range(NUM_REPLICAS)]


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


Choose = Callable[[RoutedPrompt, dict[str, float]], str]


@dataclass
class Outcome:
    hits: int
    ideal_hits: int
    seconds: dict[str, float]  # of work, by replica


def simulate(choose: Choose, *, load: float, num_requests: int, has_sessions: bool = False, seed: int = 1) -> Outcome:
    """Conversations come at random, have one of few system prompts, and go on after a while. Replicas work one after
    the other; the ideal is one cache with the pages of all.
    """
    rng = random.Random(seed)
    systems = [[rng.randrange(1000) for _ in range(rng.randrange(200, 1200))] for _ in range(6)]
    caches, ideal = {name: Cache(NUM_PAGES) for name in NAMES}, Cache(NUM_PAGES * NUM_REPLICAS)
    free_at, seconds = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    hits = ideal_hits = 0
    events = list[tuple[float, int, Conversation | None]]([(0.0, 0, None)])
    mean_seconds = 4 * (300 / PROMPT_RATE + 150 / ANSWER_RATE)  # of a conversation's work
    for number in range(1, num_requests + 1):
        now, _, conversation = heapq.heappop(events)
        while conversation is None:
            system = rng.choices(systems, [2.0**-index for index in range(len(systems))])[0]
            begun = Conversation(list(system), rng.randrange(1, 8), f"session{number}-{now}")
            heapq.heappush(events, (now, number, begun))
            gap = rng.expovariate(load * NUM_REPLICAS / mean_seconds)
            heapq.heappush(events, (now + gap, -number, None))
            now, _, conversation = heapq.heappop(events)
        conversation.add(rng, rng.randrange(20, 300))
        num_tokens, session = len(conversation.ids), conversation.name if has_sessions else ""
        queued = {name: max(0.0, free_at[name] - now) * PROMPT_RATE for name in NAMES}
        name = choose(RoutedPrompt(num_tokens, conversation.keys, session, ANSWER_TOKENS), queued)
        found, num_answer = caches[name].read(conversation.keys), rng.randrange(50, 250)
        hits, ideal_hits = hits + found, ideal_hits + ideal.read(conversation.keys)
        work = (num_tokens - found) / PROMPT_RATE + num_answer / ANSWER_RATE
        free_at[name] = max(now, free_at[name]) + work
        seconds[name] += work
        conversation.add(rng, num_answer)
        caches[name].read(conversation.keys)
        ideal.read(conversation.keys)
        conversation.num_turns -= 1
        if conversation.num_turns:
            heapq.heappush(events, (free_at[name] + rng.expovariate(1 / 15), number, conversation))
    return Outcome(hits, ideal_hits, seconds)


def by_router() -> Choose:
    router = Router(NUM_PAGES)

    def choose(prompt: RoutedPrompt, queued: dict[str, float]) -> str:
        name = router.choose(prompt, queued)
        router.sent(prompt, name)
        return name

    return choose


@pytest.mark.parametrize(("load", "has_sessions"), [(0.2, False), (0.8, False), (0.8, True)])
def test_a_chat_trace_finds_its_prefixes_and_loads_all_replicas_alike(load: float, has_sessions: bool) -> None:
    found = simulate(by_router(), load=load, num_requests=2500, has_sessions=has_sessions)
    assert found.hits >= 0.95 * found.ideal_hits
    mean = sum(found.seconds.values()) / NUM_REPLICAS
    assert max(found.seconds.values()) <= 1.1 * mean
    assert min(found.seconds.values()) >= 0.9 * mean


def test_without_the_router_most_prefixes_are_lost() -> None:
    names = iter(NAMES * 1000)
    found = simulate(lambda prompt, queued: next(names), load=0.8, num_requests=1000)
    assert found.hits < 0.6 * found.ideal_hits


def prompt_of(text: bytes, session: str = "") -> RoutedPrompt:
    return RoutedPrompt(len(text) // 4, text_keys(text), session)


def test_a_prompt_goes_where_it_began() -> None:
    router, idle = Router(100), {"a": 0.0, "b": 0.0}
    first = prompt_of(b"x" * 2000)
    router.sent(first, "b")
    assert router.choose(prompt_of(b"x" * 2000 + b"and more"), idle) == "b"
    assert router.choose(prompt_of(b"y" * 2000), idle) == "a"


def test_what_is_queued_outweighs_a_short_prefix() -> None:
    router = Router(100)
    router.sent(prompt_of(b"x" * 2000), "b")
    assert router.choose(prompt_of(b"x" * 2000), {"a": 0.0, "b": 3000.0}) == "b"
    assert router.choose(prompt_of(b"x" * 2000), {"a": 0.0, "b": 5000.0}) == "a"


def test_a_session_stays_where_it_is_though_its_prompts_have_no_page() -> None:
    router, idle = Router(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"hello", "s"), "b")
    router.sent(prompt_of(b"something else"), "a")
    router.sent(prompt_of(b"something else"), "a")
    assert router.choose(prompt_of(b"other text", "s"), idle) == "b"


def test_a_replica_that_was_started_again_has_nothing() -> None:
    router, idle = Router(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 4000, "s"), "b")
    router.forget("b")
    assert router.choose(prompt_of(b"x" * 4000, "s"), idle) == "a"


def test_only_the_last_pages_of_a_replica_are_known() -> None:
    router, idle = Router(4), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 1024), "b")
    router.sent(prompt_of(b"y" * 1024), "b")
    assert router.choose(prompt_of(b"x" * 1024), idle) == "a"


def test_texts_of_different_salts_share_no_key() -> None:
    text = b"x" * 600
    assert len(text_keys(text)) == 2
    assert not set(text_keys(text, b"ann")) & set(text_keys(text))
