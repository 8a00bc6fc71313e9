"""Random concurrent requests of every kind, with too few slots and pages: each answer is that of the request alone."""

import gc
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extent import usual_or_all
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.requests.stream import Stream
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence
from infer.sampling_params import SamplingParams
from infer.system.memory.available_memory import give_back_freed
from looping import loop_of, open_stream
from path_cases import CONTEXT, GRAMMARS, SAMPLERS, Case, Outcome, Way, World, make_sequence, make_world

NUM_REQUESTS = usual_or_all(100, 1000)  # with one thread, and again with two
LETTERS = b"abc "
WAY = Way("adaptive", chunk=64)
NUM_PREEMPTIONS = usual_or_all(100, 10_000)
SEEDED = [
    Case(f"seed {seed}", tuple(b"abc ab" * (seed + 1)), SamplingParams(seed=seed, max_new_tokens=80, ignore_eos=True))
    for seed in range(6)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world("llama", tmp_path_factory.mktemp("llama"))
    return replace(made, settings=CacheSettings(page_tokens=16, reuse_prefixes=True))


def random_case(draw: random.Random, number: int) -> Case:
    """Return a case. A third begin with the same page. A few are sent twice, with equal or different seeds (n > 1)."""
    prefix = b"abc abcab bca cb" * 2 if draw.random() < 0.3 else b""
    prompt = prefix + bytes(draw.choices(LETTERS, k=draw.choice((1, 5, 20, 70))))
    grammar = GRAMMARS[draw.choice(["free", "free", *GRAMMARS])]
    sampler: dict[str, Any] = dict(SAMPLERS[draw.choice(list(SAMPLERS))])
    if grammar:
        sampler.pop("allowed_token_ids", None)
    if draw.random() < 0.2:
        sampler["logprobs"] = draw.randint(0, 5)
    sampler |= {"max_new_tokens": draw.choice((6, 12, 24, 50)), "seed": draw.randint(0, 9)}
    return Case(f"number {number}", tuple(prompt), SamplingParams(**sampler, **grammar))


def alone(world: World, case: Case) -> Outcome:
    engine = Engine(Runner(world.model, CONTEXT, settings=world.settings))
    sequence = make_sequence(world, case, WAY)
    engine.submit(sequence)
    while engine.sequences:
        engine.step()
    engine.close()
    return Outcome.of(sequence.result())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_answer_under_load_is_the_one_that_it_has_alone(
    world: World, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.engine.step.queue.EXPECTED_ANSWER", 1)  # so more sequences enter than have pages
    monkeypatch.setattr("infer.engine.step.fair_queueing.LEARNT", 0.0)
    draw = random.Random(num_threads)
    cases = [random_case(draw, number) for number in range(NUM_REQUESTS)]
    runner = Runner(world.model, CONTEXT, num_slots=7, settings=world.settings, pool_pages=12)
    engine = Engine(runner, max_steps=4)
    step = engine.step

    def checked() -> list[Sequence]:
        found = step()
        runner.cache.check_integrity()
        return found

    monkeypatch.setattr(engine, "step", checked)
    loop, asked = loop_of(engine), list[Stream]()
    set_num_threads(num_threads)
    try:
        for case in cases:
            options = {
                "tenant": draw.choice("ab"),
                "priority": draw.randint(-2, 2),
                "cache_salt": draw.choice(("", "x")),
            }
            asked.append(open_stream(loop, make_sequence(world, case, WAY, **options)))
            asked[-1].answer.begin(only_end=draw.random() < 0.5)
            if draw.random() < 0.1:
                draw.choice(asked).cancel()
        for stream in asked:
            stream.answer.mailbox.wait_for_end()
        snapshot = loop.run(engine.snapshot)
    finally:
        set_num_threads(1)
        loop.close()
    assert snapshot.num_preemptions
    assert snapshot.reused_tokens
    assert all(pool.num_free == pool.num_pages for pool in snapshot.pools)
    num_compared = 0
    for case, stream in zip(cases, asked, strict=True):
        found, expected = Outcome.of(stream.sequence.result()), alone(world, case)
        if found.finish_reason == "abort":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)], case
        else:
            assert found == expected, case
            num_compared += 1
    assert num_compared > NUM_REQUESTS / 2


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: what a process holds is read from Linux's /proc")
def test_preempted_without_end_all_answer_and_nothing_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are pages for two or three of five sequences. Pages and threads are as before, and memory within 1 %."""
    monkeypatch.setattr("infer.engine.step.queue.EXPECTED_ANSWER", 1)
    monkeypatch.setattr("infer.engine.step.fair_queueing.LEARNT", 0.0)
    draw, cases = random.Random(3), list(SEEDED)
    expected = {case.name: alone(world, case) for case in cases}
    runner = Runner(world.model, CONTEXT, num_slots=5, settings=world.settings, pool_pages=12)
    engine, num_ended = Engine(runner), 0

    def state() -> tuple[int, int, int]:
        gc.collect()
        give_back_freed()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return sum(runner.free_pages), threading.active_count(), resident

    def run_until(num_preemptions: int) -> None:
        nonlocal num_ended
        asked = dict[Sequence, Case]()
        while (goes_on := engine.snapshot().num_preemptions < num_preemptions) or asked:
            while goes_on and len(asked) < 5:
                case = draw.choice(cases)
                sequence = make_sequence(world, case, WAY)
                asked[engine.submit(sequence)] = case
            engine.step()
            runner.cache.check_integrity()
            for sequence in [each for each in asked if each.has_ended]:
                assert Outcome.of(sequence.result()) == expected[asked.pop(sequence).name]
                num_ended += 1

    run_until(NUM_PREEMPTIONS // 4)
    before = state()
    run_until(NUM_PREEMPTIONS)
    after = state()
    assert before[:2] == after[:2]
    assert after[2] <= 1.01 * before[2]
    assert num_ended > 10
    engine.close()
