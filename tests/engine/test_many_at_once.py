"""Many concurrent requests of tasks and threads: each answer is that of the request alone, with any neighbours.

Thousands of cancelled requests leave nothing behind.
"""

import asyncio
import math
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from extent import usual_or_all
from infer import LLM, AsyncLLM, GenerationResult, SamplingParams
from infer.engine.requests.answer import once
from infer.system import child_process
from looping import in_threads, until_idle
from refusals import check_refused
from watched import python_command

POISON = 200
LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True, logit_bias={POISON: -math.inf})
VALUES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.02, "stop": ["ab", "  "]},
    {"temperature": 0.6, "logprobs": 2},
    {"regex": "[a-f ]{12,30}"},
    {"choice": ["abc abc", "abc", "hello"]},
]
SHARED = list(b"once upon a time there was a model of language ")


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]


def draw_request(draw: random.Random) -> Asked:
    letters = [draw.choice(b"abc ") for _ in range(draw.choice((1, 9, 40)))]
    values = draw.choice(VALUES) | {"seed": draw.randrange(99), "max_new_tokens": draw.randint(1, 40)}
    options: dict[str, Any] = {"speculation": "ngram"} if draw.random() < 0.3 else {}
    options |= {"tenant": draw.choice("ab"), "priority": draw.randint(-2, 2), "cache_salt": draw.choice(("", "x"))}
    return Asked((SHARED * 3 if draw.random() < 0.4 else []) + letters, SamplingParams(**values), options)


def key(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.stop_reason, result.logprobs


def watch_steps(llm: LLM) -> None:
    """Check the cache after each step."""
    host, step = llm.host, llm.host.engine.step

    def watched_step() -> Any:
        outputs = step()
        host.runner.cache.check_integrity()
        return outputs

    host.engine.step = watched_step  # type: ignore[method-assign]


async def answer_together(llm: AsyncLLM) -> None:
    """Answer six requests that arrive before the first step: with eight pages some of them are preempted."""
    have_come = threading.Event()
    llm.llm.host.loop.call(once(have_come.wait, 30))
    prompts = [(SHARED * 2)[:number] for number in range(56, 62)]
    streams = [await llm.stream(prompt, LONG).begin() for prompt in prompts]
    have_come.set()
    results = [await stream.result() for stream in streams]
    assert [each.token_ids for each in results] == [(await llm.generate(each, LONG)).token_ids for each in prompts]


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("settings", [{}, {"pool_pages": 8, "threads": 2}, {"reuse_prefixes": True}], ids=str)
def test_every_answer_under_load_is_as_alone(
    folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of an event loop stream, wait or are cancelled early, while threads call the same model."""
    monkeypatch.setattr("infer.engine.step.fairness.EXPECTED_ANSWER", 1)  # so more sequences enter than have pages
    monkeypatch.setattr("infer.engine.step.fairness.LEARNT", 0.0)
    draw, alone, llm = random.Random(len(settings)), LLM(folder), LLM(folder, **settings)
    asked = [draw_request(draw) for _ in range(usual_or_all(40, 666))]
    expected = [key(alone.generate(prompt, params)) for prompt, params, _ in asked]
    watch_steps(llm)
    same = AsyncLLM(llm)
    kinds = [draw.choice(("whole", "stream", "cut", "cancelled")) for _ in asked]

    async def answer(index: int) -> None:
        prompt, params, options = asked[index]
        if kinds[index] == "whole":
            assert key(await same.generate(prompt, params, **options)) == expected[index]
            return
        stream = same.stream(prompt, params, **options)
        if kinds[index] == "cancelled":
            task = asyncio.ensure_future(stream.result())
            await asyncio.sleep(draw.random() / 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        token_ids = list[int]()
        async for piece in stream:
            token_ids.append(piece.token_id)
            if kinds[index] == "cut" and len(token_ids) == 5:
                break
        assert token_ids == expected[index][0][: len(token_ids)]
        if kinds[index] == "stream":
            assert key(await stream.result()) == expected[index]

    async def answer_all(indices: list[int]) -> None:
        await asyncio.gather(*map(answer, indices))

    def in_thread(number: int) -> None:
        if number < 2:
            asyncio.run(answer_all(list(range(number, len(asked), 3))))
            return
        for (prompt, params, options), wanted in zip(asked[2::3], expected[2::3], strict=True):
            assert key(llm.generate(prompt, params, **options)) == wanted

    in_threads(partial(in_thread, index) for index in range(3))
    num_before = llm.host.engine.snapshot().num_preemptions
    asyncio.run(answer_together(same))
    until_idle(llm.host.loop)
    assert llm.host.engine.snapshot().num_preemptions > num_before or "pool_pages" not in settings
    assert not llm.host.engine.sequences
    llm.trim()
    cache = llm.host.runner.cache
    assert cache.free_pages == cache.pool_pages or "reuse_prefixes" in settings
    llm.close()


# Faults of one of the requests


def test_a_grammar_whose_process_is_killed_is_tried_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, killed, write = LLM(folder), list[bytes](), child_process._write

    def kill_before(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> None:
        if b"{7}" in line or (b"{8}" in line and line not in killed):
            killed.append(line)
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        write(process, line, deadline)

    monkeypatch.setattr(child_process, "_write", kill_before)
    check_refused(lambda: llm.generate("a", regex="[a-f]{7}"), "too large or too deep")
    assert (len(llm.generate("a", regex="[a-f]{8}").text), len(killed)) == (8, 3)


CHURN = """
import asyncio, gc, os, random, sys, threading
from pathlib import Path
from infer import AsyncLLM, SamplingParams
from infer.system.available_memory import give_back_freed
llm, total = AsyncLLM(sys.argv[1], threads=1, pool_pages=8), int(sys.argv[2])  # so many are preempted
host, draw = llm.llm.host, random.Random(1)
forms = [{}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"regex": "[a-f]{40}"}]

async def ask():
    prompt, params = [draw.choice(b"abc ") for _ in range(draw.choice((3, 150)))], SamplingParams(
        seed=1, max_new_tokens=60, **draw.choice(forms))
    if draw.random() < 0.5:
        task = asyncio.ensure_future(llm.generate(prompt, params))
        await asyncio.sleep(draw.random() / 50)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        num_read, stream = draw.randrange(4), llm.stream(prompt, params)
        async for _ in stream:
            num_read -= 1
            if num_read < 0:
                break
        how = draw.choice(("close", "cancel", "drop"))
        if how == "cancel":
            stream.cancel()
        await (stream.close() if how == "close" else asyncio.sleep(0))

async def ask_many(count):
    async def some():
        for _ in range(count // 20):
            await ask()
    await asyncio.gather(*(some() for _ in range(20)))
    while host.loop.thread.answers:
        await asyncio.sleep(0.001)

def state():
    gc.collect()
    llm.llm.trim()
    give_back_freed()  # what the C library keeps for later
    cache = host.runner.cache
    cache.check_integrity()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return cache.free_pages, threading.active_count(), len(os.listdir("/proc/self/fd")), resident

async def main():
    await ask_many(max(400, total // 2))  # what is kept for all grows until then
    before = state()
    await ask_many(total)
    after = state()
    assert before[:3] == after[:3], (before, after)
    assert not host.engine.sequences and not host.loop.thread.answers
    assert after[3] <= 1.01 * before[3], (before, after)
    assert host.engine.snapshot().num_preemptions > 20

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hardware: what a process holds is read from Linux's /proc")
def test_thousands_of_cancelled_requests_leave_nothing_behind(folder: Path) -> None:
    """There are as many pages, threads and file descriptors as before, and resident memory differs by at most 1 %."""
    command = python_command(CHURN, folder, usual_or_all(600, 10_000), seconds=usual_or_all(150, 900))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
