"""The rules of admission and of steps at their exact limits, plans of every kind, and the costs that steps teach."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from demands import Demand, plan_of
from infer.compute.operands.limits import HOST_STEP
from infer.engine.step.fairness import KEPT_SECONDS, KeptSlots, MeanLengths, Queue, Tenants
from infer.engine.step.scheduler import FIRST_STEPS, MAX_STEPS, MOST_OWED, Plan, Scheduler, StepPart, StepShares
from infer.engine.step.step_costs import Costs, StepCosts, StepWork, context_of
from simulation import Request

# Tenants


def test_a_mean_length_moves_a_tenth_of_the_way_to_each_answer() -> None:
    lengths = MeanLengths(200)
    lengths.learn("a", 100)
    assert (lengths.mean, lengths.expected("a"), lengths.expected("new")) == pytest.approx((190, 190, 190))
    lengths.learn("a", 0)
    assert (lengths.mean, lengths.expected("a")) == pytest.approx((171, 171))
    lengths.learn("b", 371)  # its mean begins at the mean of all
    assert (lengths.mean, lengths.expected("b"), lengths.expected("a")) == pytest.approx((191, 191, 171))
    assert lengths.expected("b", 100) == pytest.approx(91)
    assert lengths.expected("b", 180) == pytest.approx(191 / 4)


def test_a_tenant_that_has_had_as_much_work_as_another_is_owed_and_one_with_more_is_not() -> None:
    tenants = Tenants()
    for tenant in ("a", "b", "other"):
        tenants.come(tenant)
    found = list[tuple[bool, ...]]()
    for tenant, work in (("a", 0), ("a", 10), ("b", 10), ("other", 10)):
        tenants.charge(tenant, work)
        found.append(tuple(tenants.is_owed(one, others) for one, others in (("a", "b"), ("b", "a"))))
        found[-1] += (tenants.is_owed("a", ["b", "other"]),)
    assert found == [(True, True, True), (False, True, False), (True, True, False), (True, True, True)]


def test_a_slot_that_changed_hands_is_kept_for_some_seconds_until_its_tenant_runs_again() -> None:
    kept = KeptSlots()
    kept.got(1)
    assert kept.count([], 100.0, 8) == 0, "its sequence runs"
    kept.left("a", 1, 100.0)
    kept.left("b", 2, 100.0)  # it had its own slot
    assert (kept.count([], 100.0, 8), kept.count(["b"], 100.0, 8)) == (1, 1)
    assert kept.count(["b", "a"], 100.0, 8) == 0, "a tenant that runs needs no slot to be kept"
    assert kept.count([], 100.0, 7) == 0, "one of eight slots"
    assert (kept.count([], 100.0 + KEPT_SECONDS - 0.01, 8), kept.count([], 100.0 + KEPT_SECONDS, 8)) == (1, 0)
    assert kept.count([], 100.0, 8) == 0, "forgotten"


def test_the_next_request_in_a_kept_slot_keeps_it_for_the_one_after() -> None:
    kept = KeptSlots()
    kept.got(1)
    kept.left("a", 1, 0.0)
    kept.entered("a", 2)
    kept.entered("a", 3)  # there was one slot
    assert kept.count([], 1.0, 16) == 0
    kept.left("a", 3, 2.0)
    assert kept.count([], 2.0, 16) == 0
    kept.left("a", 2, 3.0)
    assert kept.count([], 3.0 + KEPT_SECONDS - 0.01, 16) == 1


def test_at_most_one_of_eight_slots_is_kept() -> None:
    kept = KeptSlots()
    for number in range(5):
        kept.got(number)
        kept.left(f"tenant {number}", number, 0.0)
    assert [kept.count([], 0.0, num_slots) for num_slots in (7, 8, 15, 16, 40, 64)] == [0, 1, 1, 2, 5, 5]


def test_a_sequence_passes_others_until_they_were_passed_by_their_own_work() -> None:
    def request(num_tokens: int, work: int, passed: int = 0) -> Request:
        """Return a request with this work, and as many tokens. Some of these may be generated."""
        num_given = (num_tokens + work) % 2
        room = (work - num_tokens + num_given) // 2
        return Request(0.0, num_tokens - num_given, 0, room + num_given, num_given=num_given, passed=passed)

    def may_pass(one: Request, *blocked: Request) -> bool:
        queue = Queue[Request]()
        queue.lengths = MeanLengths(10_000)
        queue.join(one, 0.0)
        queue.wait(one)
        return queue.next([one], blocked) is one

    blocked = request(400, 1000, passed=900)
    found = [may_pass(request(*each), blocked) for each in ((100, 100), (100, 102), (100, 101), (101, 101))]
    assert found == [True, False, False, False]
    for other in (replace(blocked, passed=901), request(399, 1000, passed=900)):
        assert not may_pass(request(100, 100), blocked, other)
        assert not may_pass(request(100, 100), other, blocked)
    assert may_pass(request(401, 2000))


# Steps


def test_a_prompt_gets_a_token_of_a_step_that_others_fill() -> None:
    scheduler = Scheduler(HOST_STEP)
    for step_tokens in (1, 4, 5):
        plan = plan_of(scheduler, [*[Demand(1, 3)] * 4, Demand(100, entry=9)], step_tokens)
        assert (plan.num_tokens, plan.num_drafts) == ([1, 1, 1, 1, 1], [0] * 5)
    plan = plan_of(scheduler, [*[Demand(1, 3)] * 4, Demand(100, entry=9)], 7)
    assert (plan.num_tokens, plan.num_drafts) == ([1, 1, 1, 1, 1], [2, 0, 0, 0, 0])


def test_a_prompt_that_ends_in_a_step_is_followed_by_as_many_drafts_as_the_step_holds() -> None:
    scheduler = Scheduler(HOST_STEP)
    for room, expected in ((0, 0), (1, 1), (3, 3), (9, 3)):
        plan = plan_of(scheduler, [Demand(5, 3, entry=1)], 5 + room)
        assert (plan.num_tokens, plan.num_drafts) == ([5], [expected])
    both = plan_of(scheduler, [Demand(1, 2, entry=1), Demand(5, 3, entry=2)], 1 + 2 + 5 + 1)
    assert (both.num_tokens, both.num_drafts) == ([1, 5], [2, 1])
    assert plan_of(scheduler, [Demand(6, 3, entry=1)], 5).num_drafts == [0]


def test_a_step_that_was_taken_counts_the_tokens_of_all_its_steps() -> None:
    scheduler = Scheduler(HOST_STEP)
    decoding, prompt = Demand(1, max_steps=8), Demand(20, entry=9)
    for demands, num_steps in (([decoding] * 3, 4), ([decoding] * 2, 1), ([decoding, prompt], 1), ([prompt], 1)):
        scheduler.update(plan_of(scheduler, demands, 512), num_steps, 0.5, None)
    found = [(taken.kind, taken.num_sequences, taken.num_tokens, taken.seconds) for taken in scheduler.taken]
    assert found == [("chain", 3, 12, 0.5), ("decode", 2, 2, 0.5), ("mixed", 2, 21, 0.5), ("prompt", 1, 20, 0.5)]


def test_the_time_of_a_step_with_prompts_is_that_which_was_set_last() -> None:
    """A token of a prompt takes a millisecond, and so does a sequence, and a step."""
    scheduler, prompt = Scheduler(HOST_STEP), Demand(8000, entry=1)
    scheduler.costs.learn(StepWork(1, 1, 0), 2e-3)
    scheduler.costs.costs = Costs(1e-3, 1e-3, 1e-3, 0.0)
    assert plan_of(scheduler, [prompt], 512).num_tokens == [512]
    found = list[int]()
    for seconds in (0.05, 0.1, 0.2, inf):
        scheduler.limit_prompts(seconds)
        found += plan_of(scheduler, [prompt], 512).num_tokens
    assert found == pytest.approx([50, 100, 200, 512], abs=3)


def test_the_pace_goes_a_part_of_the_way_at_each_step_and_comes_back() -> None:
    costs, work = StepCosts(), StepWork(2, 2, 100)
    predictions = list[float]()
    for seconds in (*[0.010] * 400, *[0.011] * 4):
        costs.learn(work, seconds)
        predictions.append(costs.predict(work))
    before, *after = predictions[-5:]
    assert before == pytest.approx(0.010, rel=1e-3)
    assert after == sorted(after)
    assert 0.0101 < after[0] < 0.0104 < after[3] < 0.011


# Shares of steps


LOUD, QUIET = StepPart("loud", 1, 0), StepPart("quiet", 1, 0)
ALL = [LOUD, LOUD, LOUD, QUIET]


def make_shares() -> StepShares:
    """Return shares. A step takes 1 ms, and 1 ms per sequence: 5 ms for all four, 2 ms for only the quiet tenant."""
    costs = StepCosts()
    costs.costs = Costs(1e-3, 1e-3, 0.0, 0.0)
    return StepShares(costs)


def steps_alone(owed: float) -> int:
    """Return the number of steps for only the quiet tenant, one by one, if it is owed `owed` steps.

    Each step costs the tenant one, and earns it its share of the step's time.
    """
    count = 0
    while owed >= 1:
        owed, count = owed - 1 + 0.575, count + 1
    return count


@pytest.mark.parametrize("num_steps", [1, 10, 40])
def test_a_tenant_is_owed_as_many_steps_as_its_time_is_worth_one_by_one(num_steps: int) -> None:
    """The tenant has a half and 15 % of a step of 5 ms, and was paid 2 ms. So 0.875 ms are left; its own step takes
    2 ms.
    """
    shares = make_shares()
    assert set(shares.choose(ALL)) == {"loud", "quiet"}
    assert shares.most_steps is None
    shares.computed(ALL, num_steps, num_steps * 5e-3)
    chosen, num_owed = set(shares.choose(ALL)), steps_alone(num_steps * 0.875 / 2)
    assert (chosen, shares.most_steps) == (({"quiet"}, num_owed) if num_owed else ({"loud", "quiet"}, None))


def test_a_tenant_pays_for_its_grammar_besides_what_it_computes() -> None:
    """10 steps take 50 ms and 20 ms of waiting for the quiet tenant's grammar, so it owes 20 + 20 ms; its share of 70
    ms is 40.25: 0.25 ms are left, not a step. Without that debt it would be owed steps."""
    slow_quiet, slow_loud = (each._replace(delay=20e-3) for each in (QUIET, LOUD))
    for parts, chosen, most_steps in (
        ([LOUD, LOUD, LOUD, slow_quiet], {"loud", "quiet"}, None),
        ([LOUD, LOUD, slow_loud, QUIET], {"quiet"}, steps_alone(10.125)),  # its share is 40.25, and 20 of it were paid
    ):
        shares = make_shares()
        shares.choose(ALL)
        shares.computed(parts, 10, 50e-3)
        assert (set(shares.choose(ALL)), shares.most_steps) == (chosen, most_steps)


def test_a_tenant_that_sat_out_for_long_is_owed_a_second_at_most() -> None:
    shares, num_alone = make_shares(), 0
    shares.choose(ALL)
    shares.computed([LOUD] * 3, 1, 600.0)  # the machine was suspended
    shares.choose(ALL)
    assert shares.most_steps == steps_alone(MOST_OWED / 2e-3)
    while set(shares.choose(ALL)) == {"quiet"}:
        shares.computed([QUIET], 1, 2e-3)
        num_alone += 1
    assert MOST_OWED / 2e-3 <= num_alone <= 2.5 * MOST_OWED / 2e-3


def test_a_prompt_s_step_ends_at_a_checkpoint_whose_state_it_would_not_keep() -> None:
    """A step keeps the states of its last two page borders, and of the end of its last page."""
    scheduler, end = Scheduler(HOST_STEP), 600
    expected_by_checkpoints = {(): end, (63,): end, (300,): 256, (200, 400): 192, (300, 400): 384, (450, 595): 448}
    expected_by_checkpoints |= {(512, 599): end, (511,): 448}
    cases = [(0, *each) for each in expected_by_checkpoints.items()]
    for num_computed, checkpoints, expected in [*cases, (256, (300, 400), 384), (384, (300, 400), end)]:
        demand = Demand(end - num_computed, 3, num_computed=num_computed, checkpoints=checkpoints)
        plan = plan_of(scheduler, [demand], end)
        assert plan.num_tokens == [expected - num_computed], checkpoints
        assert plan.work.num_tokens == plan.num_tokens[0] + plan.num_drafts[0]
    assert Scheduler(HOST_STEP, page_tokens=16).plan([Demand(end, checkpoints=(300,))], end).num_tokens == [288]


# Plans of every kind


class Row(NamedTuple):
    pending: int
    num_drafts: int
    max_steps: int


ROWS = st.builds(
    Row,
    pending=st.one_of(st.just(1), st.integers(2, 40), st.integers(100, 5000)),
    num_drafts=st.sampled_from([0, 0, 1, 8, 15]),
    max_steps=st.sampled_from([1, 3, 20, 1000]),
)


def plan(rows: Sequence[Row], step_tokens: int) -> Plan:
    scheduler = Scheduler(HOST_STEP, 64)
    most, demands = scheduler.max_drafts(len(rows)), list[Demand]()
    for pending, num_drafts, max_steps in rows:
        demands.append(Demand(pending, min(num_drafts, most), max_steps, entry=len(demands)))
    return plan_of(scheduler, demands, step_tokens)


@settings(max_examples=300, deadline=None)
@example(rows=[Row(5, 15, 1), Row(4000, 0, 1)], chunk=16)  # drafts after forced tokens, beside a prompt
@given(rows=st.lists(ROWS, min_size=1, max_size=8), chunk=st.sampled_from([1, 2, 7, 16, 64, 512]))
def test_no_step_is_longer_than_its_chunk_and_every_sequence_gets_on(rows: list[Row], chunk: int) -> None:
    num_tokens, num_drafts, num_steps, work = plan(rows, chunk)
    assert work.num_tokens == sum(num_tokens) + sum(num_drafts)
    decoding = [row.pending == 1 for row in rows]
    assert sum(num_tokens) + sum(num_drafts) <= max(chunk, sum(decoding) + (not all(decoding)))
    has_logits = [count == row.pending for count, row in zip(num_tokens, rows, strict=True)]
    assert sum(1 + count for count, has in zip(num_drafts, has_logits, strict=True) if has) <= HOST_STEP.logits
    assert all(count >= 1 for count, decodes in zip(num_tokens, decoding, strict=True) if decodes)
    reading = [index for index, decodes in enumerate(decoding) if not decodes]
    assert not reading or any(num_tokens[index] for index in reading)
    rest = chunk - sum(decoding) - sum(num_drafts)
    if reading and rest >= 4:
        oldest, shortest = reading[0], min(reading, key=lambda index: rows[index].pending)
        assert num_tokens[oldest] >= 1  # although shorter ones arrive after it
        assert num_tokens[shortest] >= min(rows[shortest].pending, rest - rest // 4)
    for row, tokens, drafts, has in zip(rows, num_tokens, num_drafts, has_logits, strict=True):
        assert 0 <= tokens <= row.pending
        assert 0 <= drafts <= row.num_drafts
        assert has or not drafts
    is_plain = all(decoding) and not any(num_drafts)
    assert num_steps == (min(64, *(row.max_steps for row in rows)) if is_plain else 1)


def test_the_scheduler_learns_how_many_steps_take_a_tenth_of_a_second() -> None:
    scheduler, demands = Scheduler(HOST_STEP), [Demand(1, 0, 1000, 1000)] * 2
    first = plan_of(scheduler, demands, 512)
    assert first.num_steps == FIRST_STEPS
    scheduler.update(first, first.num_steps, first.num_steps * 0.004, None)
    assert plan_of(scheduler, demands, 512).num_steps == 25
    scheduler.update(first, 1, 5.0, None)  # a delayed step is not believed at first
    assert plan_of(scheduler, demands, 512).num_steps == 25
    scheduler.update(first, 1, 5.0, None)
    assert plan_of(scheduler, demands, 512).num_steps < 25
    for seconds, longest in ((1e-6, MAX_STEPS), (1.0, 1)):
        other = Scheduler(HOST_STEP)
        other.update(first, first.num_steps, first.num_steps * seconds, None)
        assert plan_of(other, demands, 512).num_steps == longest


# Costs


TRUE = (2e-3, 3e-4, 4e-4, 1e-5)


def seconds_of(work: StepWork) -> float:
    return sum(cost * feature for cost, feature in zip(TRUE, work.features, strict=True))


def steps(draw: random.Random, count: int) -> Iterator[StepWork]:
    """Yield steps of 1 to 8 sequences after 10 to 4,000 positions, some with a chunk of a prompt."""
    for _ in range(count):
        num = draw.randint(1, 8)
        context = sum(draw.randint(10, 4000) for _ in range(num))
        tokens = draw.choice([0, 0, 0, 16, 64, 200])
        yield StepWork(num + (tokens > 0), num + tokens, context + context_of(tokens, draw.randint(0, 4000)))


def test_the_context_of_a_chunk_is_the_sum_of_its_positions() -> None:
    for count, start in ((1, 0), (1, 7), (5, 0), (16, 100)):
        assert context_of(count, start) == sum(range(start, start + count))


@pytest.mark.parametrize("seed", range(8))
def test_costs_are_found_despite_noise_and_delayed_steps(seed: int) -> None:
    draw, costs = random.Random(seed), StepCosts()
    for work in steps(draw, 300):
        held_up = 10 if draw.random() < 0.05 else 1
        costs.learn(work, seconds_of(work) * draw.lognormvariate(0, 0.05) * held_up)
    errors = [costs.predict(work) / seconds_of(work) for work in steps(draw, 100)]
    assert sorted(errors)[5] > 0.8
    assert sorted(errors)[-5] < 1.25
    assert sorted(costs.ratios)[len(costs.ratios) // 2] == pytest.approx(1, abs=0.1)


def test_a_machine_that_becomes_slower_is_followed_within_some_steps() -> None:
    draw, costs = random.Random(1), StepCosts()
    for work in steps(draw, 100):
        costs.learn(work, seconds_of(work))
    for work in steps(draw, 30):
        costs.learn(work, 2 * seconds_of(work))
    errors = [costs.predict(work) / seconds_of(work) for work in steps(draw, 50)]
    assert 1.5 < sorted(errors)[25] < 2.3


@pytest.mark.parametrize("seed", range(4))
def test_many_equal_steps_do_not_change_the_cost_of_a_sequence(seed: int) -> None:
    """A prompt of 8,000 tokens is read beside four streams. A token in small chunks costs more than in large ones."""
    draw, costs, single = random.Random(seed), StepCosts(), StepWork(4, 4, 2000)
    for work in steps(draw, 100):
        costs.learn(work, seconds_of(work) * draw.lognormvariate(0, 0.05))
    for start in range(0, 8000, 10):
        work = StepWork(5, 5 + 10, 2000 + context_of(11, start))
        costs.learn(work, draw.choice([1.5, 1.8]) * seconds_of(work))
    assert costs.predict(single) == pytest.approx(seconds_of(single), rel=0.2)


def test_tokens_in_is_the_inverse_of_predict() -> None:
    draw, costs = random.Random(2), StepCosts()
    assert costs.tokens_in(1.0, 0) == 0
    for work in steps(draw, 300):
        costs.learn(work, seconds_of(work))
    for seconds, start in product((0.01, 0.03, 0.1), (0, 1000, 7000)):
        count = costs.tokens_in(seconds, start)
        spent = costs.predict(StepWork(1, 1 + count, context_of(count, start))) - costs.predict(StepWork(1, 1, 0))
        assert spent == pytest.approx(seconds, rel=0.1)


def test_invalid_times_are_not_learnt() -> None:
    costs = StepCosts()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        costs.learn(StepWork(1, 1, 0), seconds)
    assert (costs.num_steps, costs.predict(StepWork(1, 1, 0))) == (0, 0)


@pytest.fixture
def shares() -> StepShares:
    return make_shares()


def step_seconds(num_sequences: int) -> float:
    return 1e-3 * (1 + num_sequences)


def owed_after(shares: StepShares, parts: list[StepPart], num_steps: int, seconds: float) -> float:
    """Return the seconds that the quiet tenant is owed."""
    shares.choose([QUIET, LOUD])
    shares.computed(parts, num_steps, seconds)
    return shares._owed["quiet"]


def test_a_step_that_a_grammar_s_masks_slow_down_is_paid_by_its_tenant(shares: StepShares) -> None:
    """A thread that fills masks takes memory bandwidth and a core from the step, not only the time of the wait."""
    waiting = LOUD._replace(delay=10e-3)
    before = owed_after(shares, [QUIET, waiting], 1, step_seconds(2))
    shares.choose([])
    assert owed_after(shares, [QUIET, waiting], 1, step_seconds(2) + 4e-3) > before + 1e-3


def test_all_tenants_pay_for_a_slow_step_without_a_grammar(shares: StepShares) -> None:
    plain = owed_after(shares, [QUIET, LOUD], 1, 2 * step_seconds(2))
    shares.choose([])
    quick = owed_after(shares, [QUIET, LOUD._replace(delay=1e-6)], 1, 2 * step_seconds(2))
    assert quick == pytest.approx(plain, abs=3e-6)


def test_a_tenant_sits_out_until_all_delays_of_its_grammar_are_paid(shares: StepShares) -> None:
    """All steps of a multi-step may be slow, although the tenant had time for only one of them."""
    num_steps, delay, num_alone, num_shared, seconds = 5, 0.25, 0, 0, 0.0
    while num_shared < 40:
        if len(shares.choose([QUIET, LOUD])) == 2:
            shares.computed([QUIET, LOUD._replace(delay=delay)], num_steps, num_steps * step_seconds(2))
            num_shared, seconds = num_shared + 1, seconds + num_steps * step_seconds(2) + delay
        else:
            assert shares.choose([QUIET, LOUD]) == {"quiet"}
            shares.computed([QUIET], 1, step_seconds(1))
            num_alone, seconds = num_alone + 1, seconds + step_seconds(1)
    assert num_alone * step_seconds(1) > 0.5 * seconds


def test_a_tenant_is_chosen_again_after_fewer_steps_in_one_go_than_it_may_run(shares: StepShares) -> None:
    """For its next step, a tenant must be owed the time of one of its last steps, not of all."""
    parts = [QUIET, *[LOUD] * 9]
    shares.choose(parts)
    shares.computed(parts[1:], 1, 13 * step_seconds(1))
    assert shares.choose(parts) == {"quiet"}
    promised = shares.most_steps
    assert promised > 4
    shares.computed([QUIET], promised - 1, (promised - 1) * step_seconds(1))
    assert shares.choose(parts) == {"quiet"}
