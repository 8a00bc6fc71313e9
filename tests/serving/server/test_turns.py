"""Requests of several keys: texts wait only for those of the same key, and a flood of one key refuses no other."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from idle import in_event_loop, until
from infer import LLM
from infer.engine.step.step_costs import Costs
from infer.engine.texts import token_trace
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.server_state import Turns
from looping import beside
from served import Served, serving

LOUD, QUIET = ({"Authorization": f"Bearer sk-{name}"} for name in ("loud", "quiet"))


@pytest.fixture
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm, api_keys={"sk-loud": "loud", "sk-quiet": "quiet"}) as served:
        yield served


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@in_event_loop
async def test_one_piece_of_work_of_a_tenant_runs_at_a_time_and_another_s_beside_it() -> None:
    turns, gate, running = Turns(), threading.Event(), list[str]()

    def held(name: str) -> str:
        running.append(name)
        gate.wait()
        return name

    names = [f"loud {number}" for number in range(3)]
    loud = [asyncio.create_task(turns.run("loud", lambda name=name: held(name))) for name in names]
    await until_true(lambda: running == ["loud 0"])
    quiet = asyncio.create_task(turns.run("quiet", lambda: held("quiet")))
    await until_true(lambda: len(running) == 2)
    third = asyncio.create_task(turns.run("third", lambda: held("third")))
    await asyncio.sleep(0.02)
    assert running == ["loud 0", "quiet"]
    gate.set()
    assert await asyncio.gather(*loud, quiet, third) == ["loud 0", "loud 1", "loud 2", "quiet", "third"]


@in_event_loop
async def test_a_tenant_of_whom_too_much_waits_is_refused_and_the_others_are_not() -> None:
    turns, gate = Turns(most_running=1, most_waiting=2), threading.Event()
    tasks = [asyncio.create_task(turns.run("loud", gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="2 of your texts already wait") as error:
        await turns.run("loud", gate.wait)
    assert (error.value.status, error.value.headers["Retry-After"]) == (429, "1")
    tasks.append(asyncio.create_task(turns.run("quiet", gate.wait)))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*tasks) == [True] * 4


@in_event_loop
async def test_the_turn_of_a_cancelled_task_ends_with_its_work() -> None:
    turns, gate, begun = Turns(most_running=1), threading.Event(), threading.Event()
    gone = asyncio.create_task(turns.run("a", lambda: (begun.set(), gate.wait())))
    await until_true(begun.is_set)
    waiting = [asyncio.create_task(turns.run("b", lambda: "b")) for _ in range(2)]
    await asyncio.sleep(0)
    gone.cancel()
    waiting[0].cancel()
    await asyncio.sleep(0.02)
    assert not waiting[1].done(), "two pieces of work ran at once"
    gate.set()
    assert await asyncio.wait_for(waiting[1], 10) == "b"


@in_event_loop
async def test_failures_are_those_of_the_work() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    turns = Turns(most_running=1)
    with pytest.raises(ZeroDivisionError):
        await turns.run("a", fail)
    assert await turns.run("a", lambda: 1) == 1


def test_texts_of_one_key_do_not_keep_another_s_request_waiting(served: Served, llm: LLM, monkeypatch: Any) -> None:
    """There are more texts than threads that prepare requests."""
    gate, statuses, encode = threading.Event(), list[int](), llm.tokenizer.encode

    def held(text: str, *given: Any, **named: Any) -> list[int]:
        if text == "held":
            gate.wait()
        return encode(text, *given, **named)

    def tokenize() -> None:
        statuses.append(served.client.post("/tokenize", json={"content": "held"}, headers=LOUD).status_code)

    monkeypatch.setattr(llm.tokenizer, "encode", held)
    with beside([tokenize] * 8):
        for path, body in (("/v1/completions", {"prompt": "ab", "max_tokens": 2}), ("/tokenize", {"content": "ab"})):
            assert served.client.post(path, json=body, headers=QUIET).status_code == 200
        assert statuses == []
        gate.set()
    assert statuses == [200] * 8


def test_many_listeners_look_at_the_engine_once(served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, count = llm._host.engine, list[int]()
    snapshot, gate = engine.snapshot, threading.Event()

    def held() -> Any:
        count.append(1)
        gate.wait()
        return snapshot()

    def listen() -> None:
        with served.client.stream("GET", "/v1/engine/events", headers=QUIET) as answer:
            next(answer.iter_lines())

    monkeypatch.setattr(engine, "snapshot", held)
    with beside([listen] * 12):
        while len(served.state.calls) < 12:
            threading.Event().wait(0.01)
        assert len(count) == 1
        gate.set()


@pytest.mark.parametrize("num_answered", [0, 1])
def test_scores_take_no_more_time_than_answers(served: Served, llm: LLM, monkeypatch: Any, num_answered: int) -> None:
    """Each part of the scores takes as long as many steps, so there are fewer parts than steps."""
    num_parts, num_tokens, is_over = 0, 60, threading.Event()
    log_probabilities = token_trace.log_probabilities

    def slow(*given: Any) -> Any:
        nonlocal num_parts
        num_parts += 1
        time.sleep(0.2)
        return log_probabilities(*given)

    def score() -> None:
        body = {"prompt": [5] * 100, "max_tokens": num_answered, "echo": not num_answered, "logprobs": 1}
        body |= {"prompt_logprobs": 1} if num_answered else {}
        while not is_over.is_set():
            assert served.client.post("/v1/completions", json=body, headers=LOUD).status_code == 200

    monkeypatch.setattr(token_trace, "log_probabilities", slow)
    monkeypatch.setattr(llm._host.engine.scheduler, "_max_steps", 1)
    with beside([score] * 2):
        while not num_parts:
            time.sleep(0.001)
        body = {"prompt": [5], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body, headers=QUIET) as answer:
            lines = answer.iter_lines()
            next(lines)
            first = num_parts
            for _ in lines:
                pass
        num_beside = num_parts - first
        is_over.set()
    assert num_beside < num_tokens / 2


# The door


KEYS = {"secret-of-alice": "alice", "secret-of-bob": "bob"}
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)
LONG_BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": [7, 8], "max_tokens": 1}


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let each step take 20 ms until the event is set. The door predicts more."""
    engine, ended = llm.host.engine, threading.Event()
    step = engine.step

    def slow_step() -> Any:
        ended.wait(0.02)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", slow_step)
        patched.setattr(engine.scheduler, "_max_steps", 1)
        patched.setattr(engine.scheduler.costs, "costs", Costs(0.05, 0.05, 0.05, 0.0))
        patched.setattr(engine.scheduler.costs, "_pace", 0.0)
        patched.setattr(engine.scheduler.costs, "learn", lambda work, seconds: None)
        yield ended


def post(served: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    return served.client.post("/v1/completions", json=body, headers=headers)


def told(answer: httpx.Response) -> float:
    assert answer.status_code == 429, answer.text
    return int(answer.headers["retry-after-ms"]) / 1000


@pytest.mark.parametrize("limits", [{"max_queue": 4}, {"max_ttft": 1.0}], ids=["queue", "wait"])
def test_a_key_that_floods_the_server_refuses_no_other_key(llm: LLM, slow: threading.Event, limits: Any) -> None:
    with serving(llm, api_keys=KEYS, slots=2, **limits) as served, ThreadPoolExecutor(10) as pool:
        flood = [pool.submit(post, served, LONG_BODY | {"seed": index}, ALICE) for index in range(10)]
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
        taken = pool.submit(post, served, LONG_BODY | {"n": 6})
        until(lambda: bool(llm.host.engine.sequences))
        told(post(served, SHORT))
        slow.set()
        assert (taken.result().status_code, post(served, SHORT | {"n": 6}).status_code) == (200, 200)


def test_other_fields_than_the_prompt_are_not_counted(llm: LLM, slow: threading.Event) -> None:
    """While an answer is computed, a body of 60 kB has a prompt of two tokens."""
    with serving(llm, slots=4, max_ttft=5.0) as served, ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(post, served, LONG_BODY | {"stop_token_ids": [9] * 20_000}) for _ in range(2)]
        until(lambda: bool(llm.host.engine.sequences))
        assert post(served, SHORT | {"stop_token_ids": [9] * 20_000}).status_code == 200
        slow.set()
        assert [each.result().status_code for each in taken] == [200, 200]


def test_a_prompt_does_not_wait_for_itself(llm: LLM, slow: threading.Event) -> None:
    with serving(llm, slots=4, max_ttft=2.0) as served, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, served, LONG_BODY)
        until(lambda: any(each.pieces for each in llm.host.engine.sequences))
        assert post(served, SHORT | {"prompt": list(range(5, 105))}).status_code == 200  # 5 s at 50 ms a token
        slow.set()
        assert taken.result().status_code == 200


def test_refused_clients_are_told_to_come_back_one_by_one(llm: LLM, slow: threading.Event, monkeypatch: Any) -> None:
    """Each of three clients returns after the answers of the clients before it, which have 20 tokens of 100 ms."""
    now = time.monotonic()
    with serving(llm, slots=1, max_ttft=0.5) as served, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(post, served, LONG_BODY)
        until(lambda: bool(llm.host.engine.sequences))
        monkeypatch.setattr(served.state.door, "_clock", lambda: now)
        seconds = [told(post(served, LONG_BODY | {"max_tokens": 20, "seed": seed})) for seed in range(3)]
        slow.set()
        assert taken.result().status_code == 200
    assert all(0.8 < later - earlier < 3.2 for earlier, later in pairwise(seconds)), seconds
