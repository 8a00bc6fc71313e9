"""Ctrl-C at any moment ends only the caller's wait and answer. The process lives, and the next answer is right."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from extent import usual_or_all
from programs import Programs
from watched import LIMIT_SECONDS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only"),
    pytest.mark.usefixtures("llm"),  # it compiles the kernels first, so that no message about that is on stderr
]

PRELUDE = """
import os, random, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from infer import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)
LONG, SHORT = (SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True) for count in (200, 8))
LETTERS = replace(SHORT, allowed_token_ids=list(b"abcdefgh"))
llm = LLM(sys.argv[1], threads=2)
host = llm.host
expected = {params: llm.generate("abc", params).token_ids for params in (LONG, SHORT)}

def interrupts(call):
    # Whether Ctrl-C came while it ran.
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False

def interrupt_in_step(number):
    # From the loop's thread, at the beginning of a step.
    launch, left = host.engine.launch, [number]
    def interrupting_launch():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
            host.engine.launch = launch
        return launch()
    host.engine.launch = interrupting_launch

def check():
    assert llm.generate("abc", SHORT).token_ids == expected[SHORT]
    assert not host.engine.sequences and host.loop.thread.failure is None
"""


@pytest.fixture
def run(programs: Programs, folder: Path) -> Callable[..., None]:
    def run(code: str, *arguments: object, seconds: float = LIMIT_SECONDS) -> None:
        done = programs.run(PRELUDE + code, folder, *arguments, seconds=seconds)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr

    return run


@pytest.mark.slow
def test_after_ctrl_c_at_any_moment_of_an_answer_the_next_one_is_right(run: Callable[..., None]) -> None:
    code = """
draw, session, num_signals = random.Random(5), llm.session(), int(sys.argv[2])
session.append("abc")
begun = len(session.token_ids)
for call in (
    lambda: llm.generate("abc", LONG),
    lambda: list(llm.stream("abc", LONG)),
    lambda: session.generate(SHORT),
    lambda: llm.generate_all(["abc"] * 5, LONG, batch_size=3),
):
    num_stopped, started = 0, time.monotonic()
    call()
    usual = time.monotonic() - started
    session.rewind(len(session.token_ids) - begun)
    for _ in range(num_signals):
        timer = threading.Timer(draw.uniform(0, usual), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                call()
                session.rewind(len(session.token_ids) - begun)
        except KeyboardInterrupt:
            num_stopped += 1
        timer.join()
        said = session.token_ids
        assert said[begun:] == llm.generate("abc", LONG).token_ids[: len(said) - begun]
        session.rewind(len(said) - begun)
        check()
    assert num_stopped == num_signals
"""
    run(code, usual_or_all(6, 125), seconds=600)


def test_ctrl_c_ends_only_the_caller_that_waits(run: Callable[..., None]) -> None:
    code = """
for number in (1, 2, 5):
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(llm.generate, "abc", LONG) for _ in range(3)]
        stream = llm.stream("abc", LONG)
        interrupt_in_step(number)
        assert interrupts(lambda: list(stream))
        assert stream.sequence.has_ended and stream.result.finish_reason == "abort"
    assert [each.result().token_ids for each in asked] == [expected[LONG]] * 3
    check()
"""
    run(code)


@pytest.mark.slow
def test_ctrl_c_in_generate_all_ends_all_its_answers(run: Callable[..., None]) -> None:
    code = """
for number in (1, 2, 7):
    interrupt_in_step(number)
    assert interrupts(lambda: llm.generate_all(["abc"] * 20, LONG, batch_size=3))
    assert not host.engine.sequences
    check()
found = llm.generate_all(["abc"] * 5, LONG, batch_size=3)
assert [each.token_ids for each in found] == [expected[LONG]] * 5
"""
    run(code)


def test_a_session_keeps_its_answer_after_ctrl_c_and_continues(run: Callable[..., None]) -> None:
    code = """
for number in (1, 2, 5):
    session = llm.session()
    session.send("hello", LETTERS)  # bytes that are no text have another spelling later
    before = session.token_ids
    interrupt_in_step(number)
    assert interrupts(lambda: session.send("go on", LONG))
    assert session.token_ids[: len(before)] == before
    result = session.send("and now", SHORT)
    assert result.token_ids == llm.generate(session.token_ids[: -len(result.token_ids)], SHORT).token_ids
    for call in (lambda: session.append("abc " * 50), lambda: session.fork(), lambda: llm.prompt_logprobs("abc " * 60)):
        timer = threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT))
        assert interrupts(lambda: (timer.start(), call(), timer.join(), time.sleep(10)))
    result = session.generate(SHORT) if session._transcript.num_raw_tokens else session.send("more", SHORT)
    assert result.token_ids == llm.generate(session.token_ids[: -len(result.token_ids)], SHORT).token_ids
    check()
"""
    run(code)


@pytest.mark.slow
def test_a_second_ctrl_c_while_the_first_one_waits_for_the_step(run: Callable[..., None]) -> None:
    code = """
draw = random.Random(2)
for _ in range(10):
    may_send, delays = threading.Event(), [draw.uniform(0, 0.03) for _ in range(2)]
    def send():
        may_send.wait()
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
    sender = threading.Thread(target=send)
    sender.start()
    def ask():
        try:
            may_send.set()
            while True:
                llm.generate("abc", LONG)
        finally:
            sender.join()
            time.sleep(0)
    assert interrupts(ask)
    check()
"""
    run(code)
