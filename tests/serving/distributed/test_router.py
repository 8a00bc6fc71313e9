"""The router in a simulation: a chat trace over eight replicas, whose caches use the real keys of pages."""

import sys
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from infer.serving.distributed.router import ReplicaRouter, RoutedPrompt, text_keys

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from bench_router import by_routers, replica_names, simulate

NAMES = replica_names(8)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("load", "has_sessions"), [(0.2, False), (0.8, False), (0.8, True)])
def test_a_chat_trace_finds_its_prefixes_and_loads_all_replicas_alike(load: float, has_sessions: bool) -> None:
    found = simulate(by_routers(), num_replicas=8, load=load, num_requests=2500, has_sessions=has_sessions)
    assert found.share_of_ideal >= 0.95
    assert all(0.9 <= found.load_over_mean(name) <= 1.1 for name in NAMES)


def test_without_the_router_most_prefixes_are_lost() -> None:
    names = cycle(NAMES)
    found = simulate(lambda prompt, queued, name: next(names), num_replicas=8, load=0.8, num_requests=1000)
    assert found.share_of_ideal < 0.6


@pytest.mark.slow
def test_routers_that_learn_apart_need_conversations_that_stay_at_one() -> None:
    sticky, apart = (
        simulate(by_routers(4, is_sticky=is_sticky), num_replicas=8, load=0.7, num_requests=1000).share_of_ideal
        for is_sticky in (True, False)
    )
    assert sticky > 0.9 > apart


def prompt_of(text: bytes, session: str = "") -> RoutedPrompt:
    return RoutedPrompt(len(text) // 4, text_keys(text), session)


def test_a_prompt_goes_where_it_began_unless_queued_work_outweighs_its_prefix() -> None:
    router = ReplicaRouter(100)
    router.sent(prompt_of(b"x" * 2000), "b")
    asked = ((b"x" * 2000 + b"and more", 0.0), (b"y" * 2000, 0.0), (b"x" * 2000, 3000.0), (b"x" * 2000, 5000.0))
    found = [router.choose(prompt_of(text), {"a": 0.0, "b": queued}) for text, queued in asked]
    assert found == ["b", "a", "b", "a"]


def test_a_session_stays_where_it_is_though_its_prompts_have_no_page() -> None:
    router, idle = ReplicaRouter(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"hello", "s"), "b")
    router.sent(prompt_of(b"something else"), "a")
    router.sent(prompt_of(b"something else"), "a")
    assert router.choose(prompt_of(b"other text", "s"), idle) == "b"


def test_a_replica_that_was_started_again_has_nothing() -> None:
    router, idle = ReplicaRouter(100), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 4000, "s"), "b")
    router.forget("b")
    assert router.choose(prompt_of(b"x" * 4000, "s"), idle) == "a"


def test_a_replica_in_the_place_of_dead_ones_gets_no_more_than_its_share() -> None:
    """Ray gives each new replica a new name."""
    router, shares = ReplicaRouter(100), Counter[str]()

    def send(names: set[str], count: int) -> None:
        shares.clear()
        for number in range(count):
            prompt = RoutedPrompt(100, text_keys(b"%d" % number * 600))
            name = router.choose(prompt, dict.fromkeys(names, 0.0))
            router.sent(prompt, name)
            shares[name] += 1

    send({"a", "b"}, 400)
    router.forget("b")
    send({"a"}, 400)
    send({"a", "c"}, 200)
    assert abs(shares["a"] - shares["c"]) <= 20


def test_only_the_last_pages_of_a_replica_are_known() -> None:
    router, idle = ReplicaRouter(4), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 1024), "b")
    router.sent(prompt_of(b"y" * 1024), "b")
    assert router.choose(prompt_of(b"x" * 1024), idle) == "a"


def test_the_router_knows_the_first_pages_of_a_prompt_longer_than_a_cache() -> None:
    """A later page is of no use without those before it."""
    router, idle = ReplicaRouter(2), {"a": 0.0, "b": 0.0}
    router.sent(prompt_of(b"x" * 768), "b")
    assert router.choose(prompt_of(b"x" * 512 + b"y" * 512), idle) == "b"


def test_texts_of_different_salts_share_no_key() -> None:
    text = b"x" * 600
    assert len(text_keys(text)) == 2
    assert not set(text_keys(text, b"ann")) & set(text_keys(text))
