"""`AsyncLLM`: the answers of `LLM` for event loops. Event loops never wait for the engine, nor the engine for them."""

import asyncio
import copy
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from idle import in_event_loop
from infer import LLM, AsyncLLM, AsyncStream, InvalidRequestError, SamplingParams
from infer.engine.requests.answer import Relay
from infer.engine.requests.loop import NUM_PREPARING
from infer.engine.requests.request_maker import RequestMaker
from infer.errors import ClosedError
from infer.outputs import GenerationResult, Piece
from refusals import check_refused
from served import SECONDS

LONG = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)
SHORT = replace(LONG, max_new_tokens=5)
SAMPLED = SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=3, max_new_tokens=30)
BOUND = SamplingParams(regex="[a-f ]{20}", seed=4)
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPTS = ["hello", "abc abc abc", "go on", "b", "once upon a time"]


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator["Steps"]:
    made = Steps(llm, monkeypatch)
    yield made
    made.may_run.set()
    until_idle(llm)
    assert not llm.host.engine.sequences
    cache = llm.host.runner.cache
    llm.trim()
    assert cache.free_pages == cache.pool_pages


def until_idle(llm: LLM) -> None:
    loop = llm.host.loop
    loop.run(bool)  # the thread has read all earlier messages
    while loop.thread.answers:
        time.sleep(0.001)


class Steps:
    """The steps of a model. A test can stop them, and the cache is checked after each."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_of_step = list[int]()
        self.may_run = threading.Event()
        self.may_run.set()
        self.holds_after: Callable[[], object] = lambda: False
        host = llm.host
        step = host.engine.step

        def watched_step() -> Any:
            self.may_run.wait()
            outputs = step()
            host.runner.cache.check_integrity()
            self.num_of_step.append(len(host.engine.sequences))
            if self.holds_after():
                self.may_run.clear()
            return outputs

        monkeypatch.setattr(host.engine, "step", watched_step)


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(call(), SECONDS))


async def read(stream: AsyncIterator[Piece]) -> list[int]:
    return [piece.token_id async for piece in stream]


def token_ids(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


# Answers


@pytest.mark.parametrize("params", [SHORT, SAMPLED, BOUND], ids=["greedy", "sampled", "bound"])
@in_event_loop
async def test_every_call_answers_as_that_of_the_llm(llm: LLM, params: SamplingParams) -> None:
    same = AsyncLLM(llm)
    expected, chatted = llm.generate(PROMPTS, params), llm.chat(MESSAGES, params)
    assert token_ids(await same.generate(PROMPTS, params)) == token_ids(expected)
    assert token_ids(await same.generate_all(PROMPTS, [params] * 5, batch_size=2)) == token_ids(expected)
    assert (await same.generate("hello", params, speculation="ngram")).text == expected[0].text
    assert (await same.chat(MESSAGES, params)).token_ids == chatted.token_ids
    assert await same.prompt_logprobs("abc abc", num=2) == llm.prompt_logprobs("abc abc", num=2)
    streams = {same.stream("hello", params): expected[0], same.stream_chat(MESSAGES, params): chatted}
    for stream, result in streams.items():
        pieces = [piece async for piece in stream]
        found = await stream.result()
        assert [piece.token_id for piece in pieces] == found.token_ids == result.token_ids
        assert "".join(piece.text for piece in pieces) == found.text == result.text
        assert (found.finish_reason, found.stop_reason) == (result.finish_reason, result.stop_reason)
        assert pieces[-1].finish_reason == result.finish_reason


def test_the_calls_take_the_arguments_of_the_llms() -> None:
    for name in ("generate", "stream", "chat", "stream_chat", "generate_all"):
        own, others = (signature(getattr(each, name)).parameters for each in (AsyncLLM, LLM))
        assert [*own] == [each for each in others if each not in ("on_token", "on_prefill")], name


@in_event_loop
async def test_it_is_made_of_the_arguments_of_an_llm_and_closed(folder: Path) -> None:
    async with AsyncLLM(folder, capture=False) as llm:
        stream, unread = llm.stream("hello", LONG), llm.stream("hello", LONG)
        await anext(stream)
        assert repr(llm).startswith("AsyncLLM(")
    assert repr(llm).endswith(", closed)")
    assert (await stream.result()).finish_reason == "abort"
    with pytest.raises(ClosedError, match="the model is closed"):
        await llm.generate("hello")
    with pytest.raises(ClosedError, match="the model is closed"):
        await anext(unread)


def test_results_come_as_they_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, progress = dict[int, list[int]](), list[tuple[int, int]]()
    engine, step = llm.host.engine, llm.host.engine.step

    def step_of_two() -> object:
        while len(engine.sequences) < 2 and not ended:
            time.sleep(1e-3)
        return step()

    def on_result(number: int, result: GenerationResult) -> None:
        ended[number] = result.token_ids

    monkeypatch.setattr(engine, "step", step_of_two)
    options: dict[str, Any] = {"on_result": on_result, "on_progress": lambda *found: progress.append(found)}
    results = run(lambda: AsyncLLM(llm).generate_all(PROMPTS, [LONG, *[SHORT] * 4], batch_size=2, **options))
    assert (next(iter(ended)), [ended[number] for number in range(5)]) == (1, token_ids(results))
    assert progress == [(done, 5) for done in range(1, 6)]


def test_a_refusal_is_raised_by_await(llm: LLM) -> None:
    same = AsyncLLM(llm)

    async def ask() -> None:
        for asked, message in (
            (same.generate("hello", temperature=-1), "temperature"),
            (same.generate_all(["a", [10**6]]), "prompt 1: "),
            (same.stream("hello", regex="a[c").begin(), "unclosed character class"),
            (same.generate_all(["a"], batch_size=65), "batch_size must be"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await asked
        check_refused(lambda: same.stream("hello", num_draft_tokens=0), "num_draft_tokens must be")

    run(ask)
    assert not llm.host.engine.sequences


# The loop


def test_nothing_is_prepared_on_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[str]()

    def noted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return real(*arguments, **options)

        return call

    for name in ("make", "_read"):
        monkeypatch.setattr(RequestMaker, name, noted(getattr(RequestMaker, name)))
    same = AsyncLLM(llm)

    run(lambda: same.generate(PROMPTS, SHORT))
    run(lambda: same.chat(MESSAGES, SHORT))
    run(lambda: read(same.stream("hello", SHORT)))
    run(lambda: read(llm.astream("hello", SHORT)))
    assert threads == {"infer-prepare"}
    assert len(llm.host.loop._preparing._threads) <= 4


@pytest.mark.parametrize("was_called", [False, True])
def test_a_closed_event_loop_affects_no_other(llm: LLM, steps: Steps, was_called: bool) -> None:
    """The event loop may have been called, and closed before it woke its tasks. Its own answers end."""
    same, streams = AsyncLLM(llm), list[AsyncStream]()

    async def leave() -> None:
        steps.may_run.clear()
        for _ in range(3):
            streams.append(await same.stream("hello", LONG).begin())
        if was_called:
            steps.holds_after = lambda: len(steps.num_of_step) == 1
            steps.may_run.set()
            while not steps.num_of_step or steps.may_run.is_set():
                pass

    run(leave)
    steps.may_run.set()
    assert run(lambda: same.generate("hello", LONG)).token_ids == llm.generate("hello", LONG).token_ids
    until_idle(llm)
    assert [stream.sequence.finish_reason for stream in streams] == ["abort"] * 3


# Ends


async def leave_the_loop(stream: AsyncStream) -> None:
    async for _ in stream:
        break


async def cancel_the_reader(stream: AsyncStream) -> None:
    begun = asyncio.Event()

    async def read_on() -> None:
        async for _ in stream:
            begun.set()

    task = asyncio.create_task(read_on())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_it(stream: AsyncStream) -> None:
    async with stream:
        await anext(stream)
    assert not stream.sequence.has_slot


@pytest.mark.parametrize("leave", [leave_the_loop, cancel_the_reader, close_it])
@in_event_loop
async def test_a_stream_that_is_left_frees_its_slot_when_the_step_has_ended(
    llm: LLM, steps: Steps, leave: Callable[[AsyncStream], Coroutine[Any, Any, None]]
) -> None:
    other = AsyncLLM(llm).stream("go on", LONG)
    await anext(other)
    stream = AsyncLLM(llm).stream("hello", LONG)
    await leave(stream)
    stream.cancel() if leave is cancel_the_reader else None
    del stream
    gc.collect()
    num_steps = len(steps.num_of_step)
    while len(llm.host.loop.thread.answers) > 1:
        await asyncio.sleep(0)
    assert sum(number > 1 for number in steps.num_of_step[num_steps:]) <= 3
    assert len(await read(other)) == 119


@in_event_loop
async def test_closing_or_cancelling_leaves_what_was_read(llm: LLM, steps: Steps) -> None:
    expected = llm.generate("hello", LONG)
    for end in (AsyncStream.close, AsyncStream.cancel):
        stream = AsyncLLM(llm).stream("hello", LONG)
        pieces = [await anext(stream) for _ in range(9)]
        ending = end(stream)
        if ending is not None:
            await ending
        assert await read(stream) == []
        result = await stream.result()
        assert result.token_ids == expected.token_ids[:9]
        assert result.text == "".join(piece.text for piece in pieces)
        assert (result.finish_reason, result.stop_reason) == ("abort", "cancelled")
        assert repr(stream) == "AsyncStream(9 tokens)"


@pytest.mark.parametrize("cancels_reader", [False, True])
@in_event_loop
async def test_closing_a_stream_from_another_task_ends_its_reader(llm: LLM, steps: Steps, cancels_reader: bool) -> None:
    """If the reader is cancelled meanwhile, it raises CancelledError."""
    steps.holds_after = lambda: len(steps.num_of_step) == 1  # later ones might have all tokens of the answer
    stream = AsyncLLM(llm).stream("hello", LONG)
    await anext(stream)
    reader = asyncio.create_task(read(stream))
    while not stream.answer._waiters._tasks:
        await asyncio.sleep(0)
    closing = [asyncio.create_task(stream.close()) for _ in range(2)]
    await asyncio.sleep(0)
    if cancels_reader:
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    steps.may_run.set()
    await asyncio.gather(*closing)
    assert cancels_reader or len(await reader) < 119
    assert stream.sequence.has_ended


@in_event_loop
async def test_slow_schemas_do_not_delay_a_plain_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile, constrained = threading.Event(), RequestMaker._constrained

    def wait_for_schema(maker: RequestMaker, grammar: object, form: object) -> object:
        assert grammar is None or may_compile.wait(60)
        return constrained(maker, grammar, form)

    monkeypatch.setattr(RequestMaker, "_constrained", wait_for_schema)
    model = AsyncLLM(llm)
    slow = [
        asyncio.create_task(model.generate("hello", replace(SHORT, regex="[ab]*"))) for _ in range(2 * NUM_PREPARING)
    ]
    await asyncio.sleep(0)
    await model.generate("hello", SHORT)
    may_compile.set()
    await asyncio.gather(*slow)


@in_event_loop
async def test_a_stream_that_two_tasks_begin_has_one_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = llm.host.loop
    monkeypatch.setattr(loop, "submit", submit := Mock(wraps=loop.submit))
    stream = AsyncLLM(llm).stream("hello", LONG)
    await asyncio.gather(stream.begin(), stream.begin())
    assert (await stream.result()).token_ids == llm.generate("hello", LONG).token_ids
    assert submit.call_count == 2  # one is that of the LLM


@in_event_loop
async def test_an_event_of_the_request_ends_it(llm: LLM, steps: Steps) -> None:
    cancel = threading.Event()
    cancel.set()
    for ask in (AsyncLLM(llm).generate, lambda *given, **options: AsyncLLM(llm).stream(*given, **options).result()):
        result = await ask("hello", LONG, cancel=cancel)
        assert (result.finish_reason, result.token_ids) == ("abort", [])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_before", [4, 0], ids=["in the pool's queue", "being prepared"])
def test_a_task_that_is_cancelled_before_its_request_is_ready_computes_nothing(
    llm: LLM, steps: Steps, num_before: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads prepare requests, so a fifth request waits in their queue."""
    may_prepare, read, following = threading.Event(), RequestMaker._read, Mock(wraps=RequestMaker._constrained)
    preparing = list[None]()

    def held_read(*arguments: Any) -> Any:
        preparing.append(None)
        may_prepare.wait()
        return read(*arguments)

    monkeypatch.setattr(RequestMaker, "_read", held_read)
    monkeypatch.setattr(RequestMaker, "_constrained", following)

    async def ask() -> None:
        same = AsyncLLM(llm)
        before = [asyncio.create_task(same.generate("a", LONG)) for _ in range(num_before)]
        while len(preparing) < num_before:
            await asyncio.sleep(0.001)
        asked = same.stream("hello", LONG).result() if is_streamed else same.generate("hello", LONG)
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0.01)
        while not preparing:
            await asyncio.sleep(0.001)
        for each in (task, *before):
            each.cancel()
        await asyncio.gather(task, *before, return_exceptions=True)
        assert task.cancelled()
        may_prepare.set()
        await asyncio.to_thread(until_idle, llm)

    run(ask)
    llm.host.loop._preparing.shutdown()  # all preparing threads have ended
    llm.host.loop._preparing = ThreadPoolExecutor(4)
    assert len(preparing) == max(1, num_before), "what waits in the queue is not begun"
    assert not following.called, "and the next stage is left out"
    assert steps.num_of_step == []


@in_event_loop
async def test_one_task_reads_at_a_time(llm: LLM, steps: Steps) -> None:
    steps.may_run.clear()
    stream = await AsyncLLM(llm).stream("hello", SHORT).begin()
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="another task is reading the stream"):
        await anext(stream)
    steps.may_run.set()
    assert await reading == llm.generate("hello", SHORT).token_ids
    with pytest.raises(TypeError, match="a running answer"):
        copy.copy(stream)


# Several answers to a prompt


def test_choices_of_a_prompt_are_the_answers_that_each_of_their_parameters_gives_alone(llm: LLM) -> None:
    same, params = AsyncLLM(llm), [SAMPLED, replace(SAMPLED, seed=4), BOUND]
    conversation = [{"role": "system", "content": "be brief"}, *MESSAGES]

    async def ask(prompt: Any, **variables: Any) -> list[GenerationResult]:
        streams = await same.choices(prompt, params, **variables)
        return list(await asyncio.gather(*(stream.result() for stream in streams)))

    assert token_ids(run(lambda: ask("hello"))) == token_ids([llm.generate("hello", each) for each in params])
    expected = [llm.chat(conversation, each, add_generation_prompt=False) for each in params]
    assert token_ids(run(lambda: ask(conversation, add_generation_prompt=False))) == token_ids(expected)


def test_choices_are_refused_before_any_begins(llm: LLM, steps: Steps) -> None:
    params = [SHORT, replace(SHORT, stop_token_ids=[10**6])]
    check_refused(lambda: run(lambda: AsyncLLM(llm).choices("hello", params)), "stop_token_ids")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        run(lambda: AsyncLLM(llm).choices(MESSAGES, [SHORT], add_generation_promt=True))
    assert steps.num_of_step == []


@in_event_loop
async def test_a_stream_gives_all_that_has_come_at_once(llm: LLM, steps: Steps) -> None:
    expected = llm.generate("hello", SHORT)
    stream = await AsyncLLM(llm).stream("hello", SHORT).begin()
    while not stream.sequence.has_ended:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(llm.host.loop.run, bool)  # the thread has done all that belongs to the last step
    pieces = await stream.take()
    assert [piece.token_id for piece in pieces] == expected.token_ids
    assert await stream.take() == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_task_that_awaits_results_is_woken_once(llm: LLM, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    woken, wake = list[None](), Relay._wake
    monkeypatch.setattr(Relay, "_wake", lambda loop: (woken.append(None), wake(loop)))
    same = AsyncLLM(llm)
    result = run(same.stream("hello", LONG).result if is_streamed else lambda: same.generate("hello", LONG))
    assert (len(woken), result.token_ids) == (1, llm.generate("hello", LONG).token_ids)
