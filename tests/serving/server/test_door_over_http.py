"""The door over HTTP: a flood of one key refuses no other key, and refused clients return in turn."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from idle import until
from infer import LLM
from infer.engine.step.step_costs import Costs
from served import Served, serving

KEYS = {"secret-of-alice": "alice", "secret-of-bob": "bob"}
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)
PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": [7, 8], "max_tokens": 1}


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let each step take 20 ms until the event is set. The door predicts more."""
    engine, ended = llm._opened.engine, threading.Event()
    step = engine.step

    def slow_step() -> Any:
        ended.wait(0.02)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", slow_step)
        patched.setattr(engine.scheduler, "_max_steps", 1)
        patched.setattr(engine.scheduler.costs, "_costs", Costs(0.05, 0.05, 0.05, 0.0))
        patched.setattr(engine.scheduler.costs, "_pace", 0.0)
        patched.setattr(engine.scheduler.costs, "learn", lambda work, seconds: None)
        yield ended


def post(served: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    return served.client.post(PATH, json=body, headers=headers)


def told(answer: httpx.Response) -> float:
    assert answer.status_code == 429, answer.text
    return int(answer.headers["retry-after-ms"]) / 1000


@pytest.mark.parametrize("limits", [{"max_queue": 4}, {"max_ttft": 1.0}], ids=["queue", "wait"])
def test_a_key_that_floods_the_server_refuses_no_other_key(llm: LLM, slow: threading.Event, limits: Any) -> None:
    with serving(llm, api_keys=KEYS, slots=2, **limits) as served, ThreadPoolExecutor(10) as pool:
        flood = [pool.submit(post, served, LONG | {"seed": index}, ALICE) for index in range(10)]
        until(lambda: sum(each.done() for each in flood) >= 4)  # refused
        answer = post(served, SHORT, BOB)
        assert answer.status_code == 200, answer.text
        slow.set()
        statuses = [each.result().status_code for each in flood]
    assert 200 in statuses
    assert 429 in statuses


def test_a_body_of_more_answers_than_may_wait_is_refused_and_others_are_not(llm: LLM, slow: threading.Event) -> None:
    with serving(llm, slots=2, max_queue=8) as served:
        for body in ({"prompt": ["a"] * 200}, {"prompt": "a", "n": 11}, {"prompt": ["a"] * 6, "n": 2}):
            refused = post(served, SHORT | body)
            assert refused.status_code == 400, refused.text
            assert "must be at most 10 here" in refused.json()["error"]["message"]
        assert post(served, SHORT | {"prompt": ["a"] * 10}).status_code == 200
        assert post(served, SHORT).status_code == 200


def test_answers_are_counted_and_not_requests(llm: LLM, slow: threading.Event) -> None:
    """Answers outside the engine count too: the second to the sixth one wait until the prompt is read."""
    with serving(llm, slots=2, max_queue=4) as served, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, served, LONG | {"n": 6})
        until(lambda: bool(llm._opened.engine.sequences))
        told(post(served, SHORT))
        slow.set()
        assert taken.result().status_code == 200
        assert post(served, SHORT | {"n": 6}).status_code == 200


def test_other_fields_than_the_prompt_are_not_counted(llm: LLM, slow: threading.Event) -> None:
    """While an answer is computed, a body of 60 kB has a prompt of two tokens."""
    with serving(llm, slots=4, max_ttft=5.0) as served, ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(post, served, LONG | {"stop_token_ids": [9] * 20_000}) for _ in range(2)]
        until(lambda: bool(llm._opened.engine.sequences))
        assert post(served, SHORT | {"stop_token_ids": [9] * 20_000}).status_code == 200
        slow.set()
        assert [each.result().status_code for each in taken] == [200, 200]


def test_a_prompt_does_not_wait_for_itself(llm: LLM, slow: threading.Event) -> None:
    with serving(llm, slots=4, max_ttft=2.0) as served, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, served, LONG)
        until(lambda: any(each.pieces for each in llm._opened.engine.sequences))
        assert post(served, SHORT | {"prompt": list(range(5, 105))}).status_code == 200  # 5 s at 50 ms a token
        slow.set()
        assert taken.result().status_code == 200


def test_refused_clients_are_told_to_come_back_one_by_one(llm: LLM, slow: threading.Event, monkeypatch: Any) -> None:
    """Each of three clients returns after the answers of the clients before it, which have 20 tokens of 100 ms."""
    now = time.monotonic()
    with serving(llm, slots=1, max_ttft=0.5) as served, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, served, LONG)
        until(lambda: bool(llm._opened.engine.sequences))
        monkeypatch.setattr(served.state.door, "_clock", lambda: now)
        seconds = [told(post(served, LONG | {"max_tokens": 20, "seed": seed})) for seed in range(3)]
        slow.set()
        assert taken.result().status_code == 200
    gaps = [later - earlier for earlier, later in pairwise(seconds)]
    assert all(0.8 < gap < 3.2 for gap in gaps), seconds
