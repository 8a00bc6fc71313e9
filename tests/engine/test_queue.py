"""The queue without its engine: its counts of sequences that enter, return, pass others and end."""

from collections.abc import Iterator

import pytest

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.fair_queueing import FEWEST_KEPT, work_of
from infer.engine.step.queue import Queue
from infer.engine.step.sequence import Sequence
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Way, World, check_ends, make_sequence


def ask(world: World, queue: Queue, num_prompt: int, max_new: int, **options: object) -> Sequence:
    params = SamplingParams(temperature=0, max_new_tokens=max_new, ignore_eos=True)
    sequence = make_sequence(world, Case("", tuple(b"a" * num_prompt), params), Way(), **options)
    queue.join(sequence, None)
    return sequence


def give(sequence: Sequence, count: int) -> None:
    for _ in range(count):
        sequence.accept(ord("b"))


def preempt(sequence: Sequence) -> None:
    sequence.stats.preemptions += 1


def size(sequence: Sequence) -> float:
    return 0.25


def test_a_sequence_that_was_preempted_is_paid_for_once(world: World) -> None:
    queue = Queue()
    one, other = (ask(world, queue, 10, 20, tenant=tenant) for tenant in ("one", "other"))
    queue.entered(other)
    for _ in range(3):
        queue.entered(one)
        assert queue.tenants.accounts["one"] == queue.tenants.accounts["other"] == work_of(10, 20)
        give(one, 2)
        preempt(one)
    queue.leave(one)
    assert queue.tenants.accounts["other"] == work_of(10, 20)
    queue.tenants.come("one")  # its tenant's next sequence does not begin below the others
    queue.leave(other)
    assert queue.tenants.accounts["one"] == work_of(10, 20)


def test_a_tenant_gets_back_what_an_answer_did_not_use_though_it_was_preempted(world: World) -> None:
    queue = Queue()
    one, rest = (ask(world, queue, 10, 20, tenant="one") for _ in range(2))
    for _ in range(2):
        queue.entered(one)
        give(one, 3)
        preempt(one)
    queue.leave(one)
    assert queue.tenants.accounts["one"] == work_of(10, 6)
    queue.entered(rest)
    assert queue.tenants.accounts["one"] == work_of(10, 6) + work_of(10, 20)


def test_one_that_came_back_is_spared_by_the_tokens_that_it_gave_since(world: World) -> None:
    queue = Queue()
    first, second, third = (ask(world, queue, 10, 100) for _ in range(3))
    for sequence in (first, second, third):
        queue.entered(sequence)
        give(sequence, FEWEST_KEPT + 4)
    assert queue.victim_of([first, second, third], size) is third
    preempt(third)
    queue.entered(third)
    assert queue.victim_of([first, second, third], size) is second
    give(third, FEWEST_KEPT - 1)
    assert queue.victim_of([first, second, third], size) is second
    give(third, 1)
    assert queue.victim_of([first, second, third], size) is third


def test_preemptions_and_reused_tokens_of_all_that_ended_are_counted(world: World) -> None:
    queue = Queue()
    for num_preemptions, num_reused in ((2, 16), (1, 0), (0, 32)):
        sequence = ask(world, queue, 40, 5)
        queue.entered(sequence)
        sequence.num_reused, sequence.stats.preemptions = num_reused, num_preemptions
        queue.leave(sequence)
    assert (queue.num_preemptions, queue.reused_tokens) == (3, 48)


def test_sequences_that_pass_a_long_prompt_count_together(world: World) -> None:
    queue = Queue()
    running, long, *short = (ask(world, queue, num_prompt, 4) for num_prompt in (5, 92, *[17] * 6))
    assert (work_of(92, 4), work_of(17, 4)) == (100, 25)
    waiting = [long, *short]
    for number in range(4):
        assert queue.passing(waiting, [running], [long]) == short[number:], "four times 25 are its own work of 100"
        queue.pass_by(short[number], [long])
        queue.entered(short[number])
        waiting.remove(short[number])
    assert queue.passing(waiting, [running], [long]) == []
    queue.leave(long)
    again = ask(world, queue, 92, 4)
    assert queue.passing([again, *short[4:]], [running], [again]) == short[4:], "another is passed by as much again"


def test_a_sequence_of_an_idle_tenant_passes_one_that_waits_for_pages(world: World) -> None:
    queue = Queue()
    long, other = (ask(world, queue, 92, 4, tenant=tenant) for tenant in ("one", "other"))
    assert queue.passing([long, other], [], [long]) == [other]
    assert queue.passing([long, other], [other], [long]) == []
    queue.tenants.charge("other", 1)
    assert queue.passing([long, other], [], [long]) == []


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    settings = CacheSettings(page_tokens=16)
    runner = Runner(world.model, CONTEXT, num_slots=8, settings=settings, pool_pages=2 * CONTEXT // 16)
    engine = Engine(runner, max_steps=1)
    yield engine
    engine.close()


def submit(engine: Engine, sequence: Sequence) -> Sequence:
    sequence.runs_ahead = True
    return engine.submit(sequence)


def test_a_tenant_with_one_long_text_has_more_than_one_with_two_short_ones(world: World, engine: Engine) -> None:
    """The long text has 8 of 20 pages, and each short one counts as one slot: an eighth."""
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    texts = (b"abc", "short"), (b"abc ab c" * 14, "long"), (b"cab", "short"), (b"bac", "short")
    cases = [Case(tenant, tuple(text), params) for text, tenant in texts]
    asked = [submit(engine, make_sequence(world, case, Way(), tenant=case.name)) for case in cases]
    while not all(sequence.has_slot for sequence in asked):
        engine.step()
    assert engine._slots.preempt_one()
    assert [sequence.has_slot for sequence in asked] == [True, False, True, True]
    check_ends(world, engine, asked, cases)
    assert engine.snapshot().num_preemptions == 1


def test_an_engine_counts_the_preemptions_of_all_its_answers(world: World, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    cases = [Case(str(index), tuple(b"abc" * (index + 1)), params) for index in range(3)]
    asked = [submit(engine, make_sequence(world, case, Way())) for case in cases]
    for _ in range(4):
        engine.step()
        assert engine._slots.preempt_one()
    check_ends(world, engine, asked, cases)
    assert engine.snapshot().num_preemptions == sum(each.stats.preemptions for each in asked) == 4


def test_tokens_of_answers_that_have_ended_count_until_a_slot_changes_hands_again(world: World) -> None:
    queue = Queue()
    asked = [ask(world, queue, 10, 20, tenant="one") for _ in range(5)]
    for each in asked:
        queue.entered(each)
        give(each, 2)
    other = ask(world, queue, 10, 20, tenant="other")
    giver = queue.giver_for(other, asked, size)
    queue.gave(giver, other)
    running = [each for each in asked if each is not giver]
    assert queue.giver_for(other, running, size) is None, "what the change wasted was not given yet"
    for each in running[:2]:
        give(each, 18)
    assert queue.giver_for(other, running, size) is not None, "3 times 12 tokens were given"
    for ended in running[:2]:
        queue.leave(ended)
    assert queue.giver_for(other, running[2:], size) is not None, "they still count"
