"""Sequences of several tenants in one engine, and its queue: their order, timeouts, shares, counts and snapshots."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from infer import LLM
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer
from infer.engine.requests.loop import Loop
from infer.engine.runner.runner import Runner
from infer.engine.step.fairness import FEWEST_KEPT, Queue, work_of
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.scheduler import Plan, StepShares
from infer.engine.step.sequence import Sequence
from infer.engine.step.step_costs import StepCosts
from infer.sampling_params import SamplingParams
from looping import in_threads, loop_of, open_stream
from path_cases import CONTEXT, Case, Outcome, Way, World, by_definition, check_ends, make_sequence
from refusals import check_refused

LONG = Case("long", tuple(b"abc abc"), SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True))
SHORT = Case("short", tuple(b"cab"), SamplingParams(temperature=0.8, seed=3, max_new_tokens=4, ignore_eos=True))


SETTINGS = CacheSettings(page_tokens=16, reuse_prefixes=True)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    engine = Engine(Runner(world.model, CONTEXT, num_slots=4, settings=SETTINGS), max_steps=4)
    yield engine
    engine.close()


@pytest.fixture
def loop(engine: Engine) -> Iterator[Loop]:
    loop = loop_of(engine)
    yield loop
    loop.close()


def submit(world: World, engine: Engine, case: Case, **options: object) -> Sequence:
    return engine.submit(make_sequence(world, case, Way(), **options))


def run(engine: Engine) -> list[Sequence]:
    """Run all sequences to their ends. Return them in the order in which they entered."""
    entered = list[Sequence]()
    while engine.sequences:
        engine.step()
        entered += [each for each in engine.sequences if each.has_slot and each not in entered]
    return entered


def test_waiting_sequences_enter_by_priority_and_keep_their_answers(world: World, engine: Engine) -> None:
    engine.max_running = 1
    asked = [submit(world, engine, LONG, priority=priority) for priority in (0, -2, 5, 0)]
    assert run(engine) == [asked[2], asked[0], asked[3], asked[1]]
    check_ends(world, engine, asked, [LONG] * 4)


def test_all_that_are_submitted_while_a_step_runs_take_part_in_the_next(
    world: World, engine: Engine, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [make_sequence(world, LONG, Way()) for _ in range(4)]
    step, steps, is_within, may_go_on = engine.step, list[list[Sequence]](), threading.Event(), threading.Event()

    def held_step() -> list[Sequence]:
        is_within.set()
        may_go_on.wait()
        steps.append(step())
        return steps[-1]

    monkeypatch.setattr(engine, "step", held_step)
    streams = [open_stream(loop, sequence) for sequence in asked]
    streams[0].answer.begin()
    is_within.wait()
    for stream in streams[1:]:
        stream.answer.begin()
    may_go_on.set()
    assert [Outcome.of(stream.run()) for stream in streams] == [by_definition(world, LONG)] * 4
    assert steps[:2] == [asked[:1], asked]


def test_tenants_take_turns_however_many_one_sends(world: World, engine: Engine) -> None:
    engine.max_running = 1
    loud = [submit(world, engine, LONG, tenant="loud") for _ in range(6)]
    quiet = [submit(world, engine, LONG, tenant="quiet") for _ in range(3)]
    assert run(engine) == [each for pair in zip(loud, quiet, strict=False) for each in pair] + loud[3:]


def test_steps_owed_to_a_tenant_are_for_it_alone(world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the clock of this test, each sequence takes as long as the step itself."""
    monkeypatch.setattr(StepCosts, "predict", lambda self, work: 1e-3 * (1 + work.num_sequences))
    computed, counts, alone = StepShares.computed, list[int](), 0
    monkeypatch.setattr(
        StepShares, "computed", lambda self, parts, num, _: computed(self, parts, num, 1e-3 * (1 + counts[-1]))
    )
    plan = engine.scheduler.plan

    def counted(*arguments: Any, **options: Any) -> Plan:
        found = plan(*arguments, **options)
        counts.append(found.work.num_sequences)
        return found._replace(num_steps=1)

    monkeypatch.setattr(engine.scheduler, "plan", counted)
    *_, quiet = [submit(world, engine, LONG, tenant=tenant) for tenant in ("loud", "loud", "loud", "quiet")]
    while not quiet.has_ended:
        tenants = sorted(each.tenant for each in engine.step())
        alone += tenants == ["quiet"]
        assert tenants in (["quiet"], ["loud", "loud", "loud", "quiet"])
    assert 10 <= alone <= 40
    assert Outcome.of(quiet.result()) == by_definition(world, LONG)


@pytest.mark.parametrize("salt", ["", "another"])
def test_a_shared_prompt_is_read_once(world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    monkeypatch.setattr("infer.engine.step.slots._SHARED_TOKENS", 32)
    beginning, params = tuple(b"abc cab " * 15), SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    cases = [Case("", (*beginning[:count], *end), params) for count, end in ((120, b"ab"), (120, b"ca"), (30, b"b"))]
    options = [{"cache_salt": each, "prefill_chunk": 16} for each in ("", salt, "")]
    asked = [submit(world, engine, case, **each) for case, each in zip(cases, options, strict=True)]
    engine.step()
    assert [each.has_slot for each in asked] == [True, bool(salt), True]
    check_ends(world, engine, asked, cases)
    assert asked[1].num_reused == 0 if salt else asked[1].num_reused >= 120 - 32 - 16


def test_prompts_are_read_in_the_order_in_which_their_sequences_entered(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants enter in turns. A turn would be lost if its first token came after the other tenant's prompts."""
    computed = StepShares.computed  # on a clock of this test: for a slow step, a tenant pays with steps of its own
    monkeypatch.setattr(StepShares, "computed", lambda self, parts, num, _: computed(self, parts, num, num * 1e-3))
    tenants, begun = ("loud", "loud", "quiet"), list[Sequence]()
    asked = [submit(world, engine, LONG, tenant=tenant, prefill_chunk=4) for tenant in tenants]
    while len(begun) < len(asked):
        engine.step()
        begun += [each for each in asked if each.pieces and each not in begun]
    assert begun == [asked[0], asked[2], asked[1]]


def test_a_timeout_ends_answers_as_they_are(world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("infer.engine.engine.time.perf_counter", lambda: now)
    monkeypatch.setattr("infer.engine.step.slots.time.perf_counter", lambda: now)
    engine.max_running = 2
    running, patient = submit(world, engine, LONG, timeout=5.0), submit(world, engine, LONG)
    waiting = submit(world, engine, LONG, timeout=5.0)
    engine.step()
    engine.step()
    now = 105.0
    check_ends(world, engine, [patient], [LONG])
    for sequence in (running, waiting):
        assert (sequence.result().finish_reason, sequence.result().stop_reason) == ("abort", "timeout")
    given = running.result().token_ids
    assert given == by_definition(world, LONG).token_ids[: len(given)] != waiting.result().token_ids == []


def test_prefixes_are_shared_only_with_the_same_salt(world: World, engine: Engine) -> None:
    case = replace(SHORT, name="a page", prompt=tuple(b"abc " * 10))
    for salt, num_reused in (("", 0), ("", 32), ("one", 0), ("one", 32), ("two", 0)):
        sequence = submit(world, engine, case, cache_salt=salt)
        check_ends(world, engine, [sequence], [case])
        assert sequence.num_reused == num_reused
    assert engine.snapshot().reused_tokens == 64


def test_a_tenant_does_not_pay_for_tokens_of_a_prompt_that_were_not_computed(world: World, engine: Engine) -> None:
    """The same is true of a part of an answer that was not generated."""
    case = replace(SHORT, name="a page", prompt=tuple(b"abc " * 10))
    accounts = [0.0]
    for expected in (0, 32, 32):
        sequence = submit(world, engine, case, tenant="one")
        run(engine)
        assert sequence.num_reused == expected
        accounts.append(engine.snapshot().work_by_tenant["one"])
    whole, less = work_of(40, 4), work_of(40, 4) - work_of(32, 0)
    assert [after - before for before, after in pairwise(accounts)] == [whole, less, less]
    cancelled = submit(world, engine, replace(LONG, prompt=tuple(b"xyz")), tenant="one")
    while len(cancelled.pieces) < 3:
        engine.step()
    engine.cancel(cancelled)
    run(engine)
    assert engine.snapshot().work_by_tenant["one"] - accounts[-1] == work_of(3, len(cancelled.pieces))


def test_only_progress_wakes_readers(world: World, engine: Engine, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.max_running, told, waits, step, wait = 1, list[tuple[int, int]](), list[int](), engine.step, Answer.wait
    sequence = make_sequence(world, LONG, Way(), prefill_chunk=3)

    def step_when_told() -> list[Sequence]:
        while 0 < sequence.num_computed < 7 and waits.count(sequence.num_computed) < 2:
            time.sleep(0)
        return step()

    def wake_once_for_nothing(answer: Answer, num_shown: int = 0) -> None:
        waits.append(num_shown)
        if waits.count(num_shown) > 1:
            wait(answer, num_shown)

    monkeypatch.setattr(engine, "step", step_when_told)
    monkeypatch.setattr(Answer, "wait", wake_once_for_nothing)
    before = open_stream(loop, make_sequence(world, SHORT, Way()))
    before.answer.begin()
    pieces = list(open_stream(loop, sequence, on_prefill=lambda *found: told.append(found)))
    assert (told, len(pieces)) == ([(3, 7), (6, 7)], LONG.params.max_new_tokens)
    assert Outcome.of(before.run()) == by_definition(world, SHORT)


def test_a_preempted_sequence_returns_when_one_of_two_others_ends(world: World, engine: Engine) -> None:
    running, ending, preempted = (submit(world, engine, case) for case in (LONG, SHORT, LONG))
    engine.step()
    assert engine._slots.preempt_one()
    assert not preempted.has_slot
    while not ending.has_ended:
        engine.step()
        assert ending.has_ended or not preempted.has_slot, "the pages that it gave up are not yet free"
    while not preempted.has_slot:
        engine.step()
        assert not running.has_ended
    check_ends(world, engine, [running, preempted], [LONG, LONG])


def test_all_that_wait_enter_although_paused_sequences_have_all_slots(world: World, engine: Engine) -> None:
    paused = [submit(world, engine, LONG) for _ in range(engine.runner.num_slots)]
    engine.step()
    for each in paused:
        engine.pause(each)
    waiting = [submit(world, engine, SHORT) for _ in paused]
    engine.step()
    assert all(each.has_slot for each in waiting)


def test_an_engine_that_recovers_does_not_remember_that_pages_were_short(world: World, engine: Engine) -> None:
    asked = [submit(world, engine, LONG) for _ in range(3)]
    engine.step()
    assert engine._slots.preempt_one()
    engine.recover()
    engine.step()
    assert all(each.has_slot for each in asked)


def test_a_first_end_stays(world: World, crowded: Engine) -> None:
    """A lack of pages does not fail what has ended, and an answer that is cut keeps the reason of its end."""
    sequence = submit(world, crowded, LONG)
    while len(sequence.pieces) < 2:
        crowded.step()
    sequence.abort("timeout")
    assert not crowded._slots.make_room(sequence, lambda: "pages")
    sequence.keep(1)
    assert (len(sequence.pieces), sequence.result().stop_reason, sequence.error) == (1, "timeout", None)


def test_one_prompt_is_remembered_for_at_most_half_of_the_pool(world: World) -> None:
    runner = Runner(world.model, CONTEXT, num_slots=2, settings=SETTINGS, pool_pages=CONTEXT // 16)
    engine = Engine(runner)
    case = replace(SHORT, name="long prompt", prompt=tuple(b"abc " * 35))
    for expected in (0, 80):
        sequence = submit(world, engine, case)
        run(engine)
        assert (sequence.num_reused, Outcome.of(sequence.result())) == (expected, by_definition(world, case))
        runner.cache.check_integrity()


def test_a_snapshot_has_running_and_waiting_sequences_and_costs(world: World, engine: Engine) -> None:
    engine.max_running = 1
    submit(world, engine, LONG, tenant="one", priority=3)
    submit(world, engine, LONG, tenant="two")
    empty = engine.snapshot()
    assert (len(empty.running), len(empty.waiting)) == (0, 2)
    for _ in range(4):
        engine.step()
    busy = engine.snapshot()
    assert [[each.tenant for each in part] for part in (busy.running, busy.waiting)] == [["one"], ["two"]]
    assert busy.running[0].num_computed > len(LONG.prompt)
    assert busy.pools[0].num_free < busy.pools[0].num_pages
    assert busy.num_steps >= 2  # a step that the machine delayed does not count
    assert busy.predicted_over_measured is not None
    assert busy.work_by_tenant["one"] > busy.work_by_tenant["two"]
    run(engine)
    done = engine.snapshot()
    assert not done.sequences
    assert done.pools[0].num_free == done.pools[0].num_pages
    costs = json.loads(json.dumps(done.to_json()))["costs"]
    assert costs.keys() == {"base", "per_sequence", "per_token", "per_context"}


INVALID = [*(("priority", value, r"a whole number in \[-9, 9\]") for value in (10, 1.5))]
INVALID += [("timeout", value, "a number of seconds above 0 or None") for value in (0, float("nan"), "5")]
INVALID += [("tenant", None, "a string"), ("cache_salt", b"x", "a string")]


@pytest.mark.parametrize(("name", "value", "rule"), INVALID)
def test_an_option_that_is_no_value_is_refused(name: str, value: Any, rule: str) -> None:
    check_refused(lambda: RequestOptions(**{name: value}), f"{name} must be {rule}, got {value!r}")


def test_a_call_has_these_options(llm: LLM) -> None:
    asked = {"temperature": 0, "max_new_tokens": 8}
    plain = llm.generate("hello", **asked)
    found = llm.generate("hello", **asked, tenant="me", priority=2, timeout=6000.0, cache_salt="mine")
    assert found.token_ids == plain.token_ids
    assert llm.generate("hello", temperature=0, timeout=1e-9).stop_reason == "timeout"


@pytest.mark.parametrize(("max_running", "num_tokens"), [(2, 1), (1, 32)])
def test_a_sequence_that_arrives_while_a_slot_is_free_waits_for_one_step(
    max_running: int, num_tokens: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(Runner(world.model, CONTEXT, num_slots=2), max_steps=32)
    engine.max_running, loop = max_running, loop_of(engine)
    first, coming = (open_stream(loop, make_sequence(world, case, Way())) for case in (LONG, SHORT))
    multi_step, counts = engine.runner.multi_step, list[int]()

    def meanwhile(*arguments: Any) -> Any:
        if not counts:
            in_threads([coming.answer.begin])
        found = multi_step(*arguments)
        counts.append(len(found[1]))
        return found

    monkeypatch.setattr(engine.runner, "multi_step", meanwhile)
    assert Outcome.of(first.run()) == by_definition(world, LONG)
    assert (Outcome.of(coming.run()), counts[0]) == (by_definition(world, SHORT), num_tokens)
    loop.close()


def test_the_own_tokens_of_a_preempted_sequence_do_not_count_as_reused(world: World, engine: Engine) -> None:
    """Otherwise its tenant would get a refund for computed work."""
    sequence = submit(world, engine, LONG)
    while len(sequence.pieces) < 40:
        engine.step()
    engine._slots.preempt(sequence)
    engine.step()
    assert sequence.num_computed > 32, "two pages of its own were found"
    run(engine)
    assert (sequence.result().reused_tokens, Outcome.of(sequence.result())) == (0, by_definition(world, LONG))


# The queue without its engine


def ask(world: World, queue: Queue[Sequence], num_prompt: int, max_new: int, **options: object) -> Sequence:
    params = SamplingParams(temperature=0, max_new_tokens=max_new, ignore_eos=True)
    sequence = make_sequence(world, Case("", tuple(b"a" * num_prompt), params), Way(), **options)
    queue.join(sequence, 0.0)
    return sequence


def generate(sequence: Sequence, count: int) -> None:
    for _ in range(count):
        sequence.accept(ord("b"))


def preempt(sequence: Sequence) -> None:
    sequence.stats.preemptions += 1


def size(sequence: Sequence) -> float:
    return 0.25


def test_a_sequence_that_was_preempted_is_paid_for_once(world: World) -> None:
    queue = Queue[Sequence]()
    one, other = (ask(world, queue, 10, 20, tenant=tenant) for tenant in ("one", "other"))
    queue.enter(other)
    for _ in range(3):
        queue.enter(one)
        assert queue.tenants.accounts["one"] == queue.tenants.accounts["other"] == work_of(10, 20)
        generate(one, 2)
        preempt(one)
    queue.leave(one, 0.0)
    assert queue.tenants.accounts["other"] == work_of(10, 20)
    queue.tenants.come("one")  # its tenant's next sequence does not begin below the others
    queue.leave(other, 0.0)
    assert queue.tenants.accounts["one"] == work_of(10, 20)


def test_a_tenant_gets_back_what_an_answer_did_not_use_though_it_was_preempted(world: World) -> None:
    queue = Queue[Sequence]()
    one, rest = (ask(world, queue, 10, 20, tenant="one") for _ in range(2))
    for _ in range(2):
        queue.enter(one)
        generate(one, 3)
        preempt(one)
    queue.leave(one, 0.0)
    assert queue.tenants.accounts["one"] == work_of(10, 6)
    queue.enter(rest)
    assert queue.tenants.accounts["one"] == work_of(10, 6) + work_of(10, 20)


def test_one_that_came_back_is_spared_by_the_tokens_that_it_gave_since(world: World) -> None:
    queue = Queue[Sequence]()
    first, second, third = (ask(world, queue, 10, 100) for _ in range(3))
    for sequence in (first, second, third):
        queue.enter(sequence)
        generate(sequence, FEWEST_KEPT + 4)
    assert queue.victim_of([first, second, third], size) is third
    preempt(third)
    queue.enter(third)
    assert queue.victim_of([first, second, third], size) is second
    generate(third, FEWEST_KEPT - 1)
    assert queue.victim_of([first, second, third], size) is second
    generate(third, 1)
    assert queue.victim_of([first, second, third], size) is third


def test_sequences_that_pass_a_long_prompt_count_together(world: World) -> None:
    queue = Queue[Sequence]()
    running, long, *short = (ask(world, queue, num_prompt, 4) for num_prompt in (5, 92, *[17] * 6))
    assert (work_of(92, 4), work_of(17, 4)) == (100, 25)
    for each in (long, *short):
        queue.wait(each)
    for number in range(4):
        assert queue.next([running], [long]) is short[number], "four times 25 are its own work of 100"
        queue.pass_by(short[number], [long])
        queue.enter(short[number])
    assert queue.next([running], [long]) is None
    queue.leave(long, 0.0)
    again = ask(world, queue, 92, 4)
    queue.wait(again)
    assert queue.next([running], [again]) is short[4], "another is passed by as much again"


def test_a_sequence_of_an_idle_tenant_passes_one_that_waits_for_pages(world: World) -> None:
    queue = Queue[Sequence]()
    long, other = (ask(world, queue, 92, 4, tenant=tenant) for tenant in ("one", "other"))
    for each in (long, other):
        queue.wait(each)
    assert queue.next([], [long]) is other
    assert queue.next([other], [long]) is None
    assert queue.next([], [long], [other]) is None
    queue.tenants.charge("other", 1)
    assert queue.next([], [long]) is None


@pytest.fixture
def crowded(world: World) -> Iterator[Engine]:
    settings = CacheSettings(page_tokens=16)
    runner = Runner(world.model, CONTEXT, num_slots=8, settings=settings, pool_pages=2 * CONTEXT // 16)
    crowded = Engine(runner, max_steps=1)
    yield crowded
    crowded.close()


def test_a_tenant_with_one_long_text_has_more_than_one_with_two_short_ones(world: World, crowded: Engine) -> None:
    """The long text has 8 of 20 pages, and each short one counts as one slot: an eighth."""
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    texts = (b"abc", "short"), (b"abc ab c" * 14, "long"), (b"cab", "short"), (b"bac", "short")
    cases = [Case(tenant, tuple(text), params) for text, tenant in texts]
    asked = [crowded.submit(make_sequence(world, case, Way(), tenant=case.name)) for case in cases]
    while not all(sequence.has_slot for sequence in asked):
        crowded.step()
    assert crowded._slots.preempt_one()
    assert [sequence.has_slot for sequence in asked] == [True, False, True, True]
    check_ends(world, crowded, asked, cases)
    assert crowded.snapshot().num_preemptions == 1


def test_an_engine_counts_the_preemptions_of_all_its_answers(world: World, crowded: Engine) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    cases = [Case(str(index), tuple(b"abc" * (index + 1)), params) for index in range(3)]
    asked = [crowded.submit(make_sequence(world, case, Way())) for case in cases]
    for _ in range(4):
        crowded.step()
        assert crowded._slots.preempt_one()
    check_ends(world, crowded, asked, cases)
    assert crowded.snapshot().num_preemptions == sum(each.stats.preemptions for each in asked) == 4


def test_tokens_of_answers_that_have_ended_count_until_a_slot_changes_hands_again(world: World) -> None:
    queue = Queue[Sequence]()
    asked = [ask(world, queue, 10, 20, tenant="one") for _ in range(5)]
    for each in asked:
        queue.enter(each)
        generate(each, 2)
    other = ask(world, queue, 10, 20, tenant="other")
    giver = queue.giver_for(other, asked, size)
    queue.gave(giver, other)
    running = [each for each in asked if each is not giver]
    assert queue.giver_for(other, running, size) is None, "what the change wasted was not given yet"
    for each in running[:2]:
        generate(each, 18)
    assert queue.giver_for(other, running, size) is not None, "3 times 12 tokens were given"
    for ended in running[:2]:
        queue.leave(ended, 0.0)
    assert queue.giver_for(other, running[2:], size) is not None, "they still count"
