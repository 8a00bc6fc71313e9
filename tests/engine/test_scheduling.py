"""Scheduling in simulations: nothing starves, is lost or idles, tenants share, and short prompts pass long ones."""

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from demands import Demand, plan_of
from extent import IS_WHOLE, usual_or_all
from infer.compute.operands.limits import HOST_STEP
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step import fairness
from infer.engine.step import scheduler as scheduling
from infer.engine.step.fairness import Queue, Tenants, work_of
from infer.engine.step.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS, Scheduler
from infer.engine.step.step_costs import Costs, StepWork, context_of
from infer.outputs import percentile
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Way, World, check_ends, make_sequence
from simulation import Machine, Request, Simulation

MACHINES = {
    "2 cores": Machine(8, 400, (2e-3, 3e-4, 4.5e-4, 9e-4)),
    "16 cores": Machine(64, 3000, (2e-3, 1e-4, 8e-5, 1.5e-4)),
    "a GPU": Machine(256, 20_000, (4e-3, 1e-5, 5e-6, 2e-6), step_tokens=8192),
}
TRACES = usual_or_all(100, 10_000)


def random_life(seed: int) -> Simulation:
    """Return a simulation: short and long requests of several tenants, in bursts or a stream, on a small machine."""
    draw = random.Random(seed)
    is_crowded = seed % 5 == 0  # more sequences enter than have pages
    num_slots, num_pages = (8, 8) if is_crowded else (draw.choice((1, 2, 4, 8)), draw.choice((8, 20, 100)))
    machine = Machine(num_slots, num_pages, (2e-3, 3e-4, 4.5e-4, 9e-4), page_tokens=16)
    longest = machine.num_pages * machine.page_tokens // 2
    tenants = [f"tenant {index}" for index in range(draw.choice((1, 1, 2, 4)))]
    has_priorities, may_leave = draw.random() < 0.3, draw.random() < 0.3
    most_new = draw.choice((fairness.EXPECTED_ANSWER, fairness.EXPECTED_ANSWER, longest))
    now, requests = 0.0, list[Request]()
    for _ in range(draw.randint(3, 24)):
        now += draw.choice((0.0, 0.0, draw.expovariate(10), draw.expovariate(1)))
        num_prompt = draw.choice((1, draw.randint(1, 40), draw.randint(1, longest)))
        max_new = draw.choice((1, 16, draw.randint(1, min(longest, most_new))))
        request = Request(now, num_prompt, max_new if draw.random() < 0.5 else draw.randint(1, max_new), max_new)
        request.tenant, request.priority = draw.choice(tenants), draw.randint(-3, 3) if has_priorities else 0
        request.patience = draw.expovariate(2) if may_leave and draw.random() < 0.2 else float("inf")
        request.is_streamed = draw.random() < 0.7
        requests.append(request)
    return Simulation(machine, requests, 1 if is_crowded else fairness.EXPECTED_ANSWER)


def test_all_are_answered_within_the_wait_that_was_computed() -> None:
    num_bounded = num_preempted = 0
    for seed in range(TRACES):
        life = random_life(seed).run()
        assert life.free == life.machine.num_pages, seed
        assert not life.tenants._num_active, seed
        is_preempted = any(request.num_preemptions for request in life.requests)
        num_preempted += is_preempted
        plain = [each.priority == 0 and each.max_new <= life.expected_answer for each in life.requests]
        is_bounded = not is_preempted and all(plain)
        for request in life.requests:
            assert request.ended_at is not None, seed
            if request.patience == float("inf"):
                assert request.num_given == request.num_new, seed
            if is_bounded and request.entered_at is not None:
                assert request.entered_at - request.arrives_at <= request.bound, (seed, request)
                num_bounded += 1
    assert num_bounded > TRACES
    assert num_preempted


def test_a_request_that_is_passed_by_priorities_waits_no_longer_than_their_head_start_besides() -> None:
    """The request has priority 0. More requests of priority 2 arrive than the machine can answer."""
    machine = Machine(1, 100)
    stream = [Request(0.05 * index, 64, 16, 16, priority=2) for index in range(600)]
    last = Request(0.01, 64, 16, 16)
    Simulation(machine, [*stream, last]).run()
    passed = [each for each in stream if each.arrives_at > 0.01 and (each.entered_at or 0) < last.entered_at]
    assert len(passed) > 100
    assert max(each.arrives_at for each in passed) <= 0.01 + 2 * fairness.HEAD_START + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES if IS_WHOLE else ["2 cores"])
def test_a_tenant_that_sends_ten_times_as_much_gets_no_more(name: str) -> None:
    """While both wait, the same work is computed for each, by Jain's index (arXiv:cs/9809099)."""
    draw, machine = random.Random(1), MACHINES[name]
    count = max(40, machine.num_slots)
    requests = [  # all at once
        Request(0.0, draw.randint(20, 400), draw.randint(20, 200), 256, tenant=tenant)
        for tenant, number in (("loud", 10 * count), ("quiet", count))
        for _ in range(number)
    ]
    life, served = Simulation(machine, requests), list[int]()
    step = life.step

    def note() -> None:
        step()
        if any(each.tenant == "quiet" for each in life.waiting):
            served[:] = life.served.values()

    life.step = note  # type: ignore[method-assign]
    life.run()
    assert sum(served) ** 2 / (len(served) * sum(share**2 for share in served)) >= 0.95


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_short_prompt_passes_a_long_one_and_streams_go_on(machine: Machine, noise: float) -> None:
    """There are four streams, a prompt of 8,000 tokens, and a short one 0.2 s later, on an idle or a busy machine."""
    draw = random.Random(1)
    machine = replace(machine, slowness=lambda: draw.lognormvariate(0, noise))
    streams = [Request(0.0, 32, 4000, 4000) for _ in range(4)]
    long, short = Request(0.5, 8000, 8, 8), Request(0.7, 32, 1, 1)
    life = Simulation(machine, [*streams, long, short])
    gaps, step = list[float](), life.step

    def note() -> None:
        before = life.now
        step()
        if long in life.running and long.num_given == 0:
            gaps.append(life.now - before)

    life.step = note  # type: ignore[method-assign]
    life.run()
    alone = Request(0.0, 8000, 8, 8)
    Simulation(machine, [alone]).run()
    assert short.ended_at - short.arrives_at <= 0.15
    assert percentile(gaps, 99.0) <= (0.045 if noise else 0.04)
    assert long.ended_at - long.arrives_at <= 1.4 * alone.ended_at


def test_prompts_share_a_step_by_remaining_tokens_and_the_oldest_gets_a_quarter() -> None:
    scheduler = Scheduler(HOST_STEP)
    found = plan_of(scheduler, [Demand(8000, entry=1), Demand(600, entry=2), Demand(300, entry=3)], 512).num_tokens
    assert found == [128, 84, 300]


def learn(scheduler: Scheduler, machine: Machine, base: float = 0.0) -> None:
    for tokens, start in ((0, 0), (64, 0), (0, 2000), (64, 2000), (256, 100)) * 20:
        work = StepWork(4, 4 + tokens, 4 * start + context_of(tokens, start))
        scheduler.costs.learn(work, base + machine.seconds(work))


def test_a_step_with_prompts_beside_streams_takes_its_time_and_no_more() -> None:
    scheduler, machine = Scheduler(HOST_STEP), MACHINES["2 cores"]
    learn(scheduler, machine)
    streams = [Demand(1, is_streamed=True, entry=number) for number in range(3)]
    plan = plan_of(scheduler, [*streams, Demand(8000, entry=9)], 512)
    assert 0.5 * STREAM_SECONDS < machine.seconds(plan.work) < 1.2 * STREAM_SECONDS
    silent = [Demand(1, entry=number) for number in range(3)]
    assert sum(plan_of(scheduler, [*silent, Demand(8000, entry=9)], 512).num_tokens) == 512
    assert plan_of(scheduler, [*streams, Demand(8000, num_computed=10**6, entry=9)], 512).num_tokens[3] == 1
    scheduler.gap_seconds *= 2
    longer = plan_of(scheduler, [*streams, Demand(8000, entry=9)], 512)
    assert machine.seconds(longer.work) > 1.6 * machine.seconds(plan.work)
    scheduler.gap_seconds /= 2
    slow = Scheduler(HOST_STEP)
    learn(slow, machine, 0.05)
    assert plan_of(slow, [*streams, Demand(8000, entry=9)], 512).num_tokens[3] == LEAST_PROMPT_TOKENS


def test_a_short_prompt_is_read_at_its_own_cost_beside_one_that_is_far_on() -> None:
    scheduler, machine = Scheduler(HOST_STEP), MACHINES["2 cores"]
    learn(scheduler, machine)
    streams = [Demand(1, is_streamed=True, entry=number) for number in range(3)]
    plan = plan_of(scheduler, [*streams, Demand(1000, num_computed=7000, entry=8), Demand(32, entry=9)], 512)
    assert plan.num_tokens[4] == 32
    assert 0 < plan.num_tokens[3] < LEAST_PROMPT_TOKENS
    assert machine.seconds(plan.work) < 1.3 * STREAM_SECONDS


def test_a_prompt_whose_tokens_cost_their_positions_alone_keeps_to_the_time_too() -> None:
    """Late in a prompt all steps are alike, so their whole cost may be ascribed to the positions."""
    scheduler = Scheduler(HOST_STEP)
    scheduler.costs.learn(StepWork(1, 1, 0), 0.01)
    scheduler.costs.costs = Costs(0.01, 0.0, 0.0, 1e-3)
    streams = [Demand(1, is_streamed=True, entry=number) for number in range(3)]
    assert plan_of(scheduler, [*streams, Demand(500, num_computed=7500, entry=9)], 512).num_tokens[3] <= 8


def test_one_that_ends_soon_ends_no_steps_of_its_neighbours() -> None:
    scheduler = Scheduler(HOST_STEP, 64)
    few, many = Demand(1, 0, 1000, 3), Demand(1, 0, 1000, 60)
    assert [plan_of(scheduler, each, 512).num_steps for each in ([few], [few, many])] == [3, 3]
    assert plan_of(scheduler, [few, *[many] * 15], 512).num_steps > 3
    assert plan_of(scheduler, [Demand(1, 0, 2, 2), *[many] * 15], 512).num_steps == 2  # one sequence needs a return


def test_the_drafts_of_a_few_wait_for_the_steps_of_the_others() -> None:
    scheduler = Scheduler(HOST_STEP, 64)
    drafting, plain = Demand(1, 7, 1000, 60, steps_to_draft=1), Demand(1, 0, 1000, 60)
    assert plan_of(scheduler, [drafting], 512).num_drafts == [7]
    assert plan_of(scheduler, [drafting, plain], 512).num_drafts == [7, 0]
    for num_drafts, num_steps in (
        (7, 1),
        (0, scheduling.PLAIN_STEPS),
        (7, 1),
    ):  # after the plain steps it is the drafts' turn
        plan = plan_of(scheduler, [drafting, plain, plain], 512)
        assert (plan.num_drafts, plan.num_steps) == ([num_drafts, 0, 0], num_steps)
        scheduler.update(plan, num_steps, 0.01, None)


def running(
    number: int, num_given: int = 99, tenant: str = "", priority: int = 0, pages: int = 1, *, came_back: bool = False
) -> Request:
    """Return a request that runs. Its size is a tenth per page."""
    found = Request(0.0, 1, 999, 999, tenant, priority, number=number, num_given=num_given, pages=pages)
    found.num_preemptions = int(came_back)
    return found


def size(request: Request) -> float:
    return request.pages / 10


def loses(*requests: Request) -> Request | None:
    return Queue[Request]().victim_of(requests, size)


def test_the_victim_of_preemption() -> None:
    first, second, third = running(1, 0), running(2), running(3, 0)
    assert loses() is loses(first) is None
    assert loses(first, second, third) is third
    came_back = running(3, fairness.FEWEST_KEPT - 1, came_back=True)
    assert loses(first, second, came_back) is second
    assert loses(first, came_back) is came_back  # never the oldest one
    came_back.num_given += 1
    assert loses(first, second, came_back) is came_back


# The order of sequences that wait


def first_by_definition(queue: Queue[Request], waiting: list[Request], busy: set[str]) -> Request | None:
    accounts = queue.tenants.accounts
    able = [each for each in waiting if each.tenant not in busy]
    return min(able, default=None, key=lambda each: (
        each.paid is None, accounts[each.tenant], each.tenant,
        each.submitted_at - fairness.HEAD_START * each.priority, each.number,
    ))  # fmt: skip


@pytest.mark.parametrize("seed", range(usual_or_all(10, 200)))
def test_the_next_sequence_is_the_first_of_all_that_wait_whatever_happened_before(seed: int) -> None:
    """Sequences arrive, stop waiting, enter, return after a preemption, and leave, in any order."""
    draw, queue = random.Random(seed), Queue[Request]()
    waiting, entered = list[Request](), list[Request]()
    for now in range(300):
        kind = draw.randrange(6)
        if kind < 3:
            waiting.append(Request(0.0, draw.randint(1, 99), 9, 9, draw.choice("abc"), draw.choice((-1, 0, 0, 1))))
            queue.join(waiting[-1], float(now // 3))
            queue.wait(waiting[-1])
        elif kind == 3 and waiting:
            gone = waiting.pop(draw.randrange(len(waiting)))
            for _ in range(draw.choice((1, 2))):
                queue.stop_waiting(gone)
            queue.leave(gone, float(now))
        elif kind == 4 and entered:
            ended = entered.pop(draw.randrange(len(entered)))
            if draw.random() < 0.5:
                queue.leave(ended, float(now))
            else:
                waiting.append(ended)
                queue.wait(ended)
        elif (one := queue.next(entered)) is not None:
            waiting.remove(one)
            entered.append(one)
            queue.enter(one)
        busy = {each.tenant for each in entered}
        queue.wait(waiting[0]) if waiting else None  # it waits already
        assert queue.next(entered) is first_by_definition(queue, waiting, set())
        assert queue.next(entered, is_full=True) is first_by_definition(queue, waiting, busy)
        assert queue.has_waiting == bool(waiting)
        assert sorted(each.number for each in queue._in_order()) == sorted(each.number for each in waiting)


class Read(Request):
    """A request that counts how often it is read."""

    num_reads = 0

    def __getattribute__(self, name: str) -> Any:
        Read.num_reads += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("num_tenants", [1, 8])
def test_the_work_of_admission_grows_with_the_number_of_sequences_and_not_with_its_square(num_tenants: int) -> None:
    def num_reads(count: int) -> int:
        queue, running = Queue[Request](), list[Request]()
        Read.num_reads = 0
        for index in range(count):
            request = Read(0.0, 5, 1, 1, str(index % num_tenants))
            queue.join(request, 0.0)
            queue.wait(request)
        while (one := queue.next(running, is_full=len(running) == 4)) is not None or running:
            if one is not None:
                queue.enter(one)
                running.append(one)
            elif running:
                queue.leave(running.pop(0), 0.0)
        return Read.num_reads

    assert num_reads(1600) < 1.2 * 16 * num_reads(100)


def test_a_tenant_whose_account_was_kept_does_not_come_back_below_the_others() -> None:
    tenants = Tenants()
    for tenant, work in (("ahead", 2000), ("busy", 1000)):
        tenants.come(tenant)
        tenants.charge(tenant, work - round(tenants.accounts[tenant]))
    tenants.go("ahead")
    assert tenants.accounts["ahead"] == 2000
    tenants.charge("busy", 4000)
    tenants.come("ahead")
    assert tenants.accounts["ahead"] == tenants.accounts["busy"] == 5000


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue = Queue[Request]()
    tenants = queue.tenants
    tenants.come("busy")
    tenants.charge("busy", 1000)
    tenants.come("new")
    assert tenants.accounts["new"] == 1000
    tenants.charge("new", 10)
    for number, (tenant, submitted_at) in enumerate((("new", 0.0), ("busy", 9.0), ("busy", 8.0))):
        queue.wait(Request(0.0, 5, 5, 5, tenant, number=number, submitted_at=submitted_at))
    assert [each.number for each in queue._in_order()] == [2, 1, 0]
    tenants.go("new")
    assert tenants.accounts["new"] == 1010  # it has had more than the others, which is not forgotten
    tenants.come("new")
    assert tenants.accounts["new"] == 1010
    tenants.go("new")
    tenants.charge("busy", 1000)
    tenants.go("busy")
    assert not {"busy", "new"} - set(tenants.accounts)


QUIET = Request(0.5, 20, 400, 400, tenant="quiet")


def quiet_rate(machine: Machine, others: list[Request]) -> float:
    """Return the tokens per second of one stream while others run."""
    quiet, *crowd = deepcopy([QUIET, *others])
    Simulation(machine, [quiet, *crowd]).run()
    return quiet.num_new / (quiet.ended_at - quiet.first_token_at)


def test_a_stream_beside_the_crowd_of_another_tenant_has_half_its_speed() -> None:
    machine = Machine(8, 10_000, (2e-3, 1e-3, 4.5e-4, 9e-4))
    alone = quiet_rate(machine, [])
    flood = [Request(0.0, 10, 500, 500, tenant="loud", is_streamed=False) for _ in range(12)]
    readers = [Request(0.0, 3000, 4, 4, tenant="loud") for _ in range(24)]
    for crowd in (flood, readers):
        assert 0.5 * alone <= quiet_rate(machine, crowd) <= 0.7 * alone
        assert quiet_rate(machine, [replace(each, tenant="quiet") for each in crowd]) < 0.45 * alone


def test_every_step_is_for_all_where_that_gives_each_tenant_its_share() -> None:
    machine = Machine(8, 10_000)
    for tenants in ("abcdefgh", "aaaabbbb"):
        requests = [Request(0.0, 1, 500, 500, tenant=tenant) for tenant in tenants]
        alone = Simulation(machine, [replace(each, tenant="a") for each in requests]).run()
        shared = Simulation(machine, requests).run()
        assert (shared.num_steps, shared.now) == (alone.num_steps, pytest.approx(alone.now))


@pytest.mark.slow
def test_consecutive_questions_take_a_slot_from_long_answers_once() -> None:
    loud = [Request(0.0, 10, 3000, 3000, tenant="loud", is_streamed=False) for _ in range(20)]
    questions = [Request(20.0 + index, 10, 10, 10, tenant="quiet") for index in range(30)]
    Simulation(Machine(8, 10_000, (2e-3, 1e-3, 4.5e-4, 9e-4)), [*loud, *questions]).run()
    waits = [each.first_token_at - each.arrives_at for each in questions if each.first_token_at is not None]
    assert len(waits) == len(questions)
    assert max(waits[1:]) < 0.5
    assert sum(each.num_preemptions for each in loud) == 1


# Slots and pages


SERVER = Machine(16, 1024, (5e-3, 7e-4, 7e-4, 4e-4))


def first_tokens(requests: list[Request]) -> list[float]:
    return [(each.first_token_at or float("inf")) - each.arrives_at for each in requests]


# Slots


def test_a_tenant_that_has_nothing_running_gets_a_slot_of_one_that_has_all() -> None:
    flood = [Request(0.005 * index, 128, 200, 200, tenant="alice") for index in range(100)]
    quiet = [Request(2.0 + 3 * index, 32, 40, 40, tenant="bob") for index in range(10)]
    Simulation(SERVER, [*flood, *quiet]).run()
    assert max(first_tokens(quiet)) < 0.5
    assert all(each.num_given == 200 for each in flood)


@pytest.mark.slow
def test_slots_that_change_hands_waste_little() -> None:
    """One tenant sends three requests per second, and the answers of the other have 600 tokens."""
    flood = [Request(0.005 * index, 64, 600, 600, tenant="alice") for index in range(60)]
    quiet = [Request(2.0 + 0.3 * index, 32, 4, 4, tenant="bob") for index in range(150)]
    alone = Simulation(SERVER, [replace(each) for each in flood]).run()
    beside = Simulation(SERVER, [*flood, *quiet]).run()
    assert beside.now < 1.3 * alone.now
    assert sum(each.num_recomputed for each in flood) < 0.34 * sum(each.num_given for each in flood)
    assert not any(each.num_preemptions for each in quiet)


def test_a_tenant_that_gives_a_slot_keeps_as_much_as_the_other_takes() -> None:
    one, two = running(1, 9, "a", pages=5), running(2, 9, "a", pages=5)

    def gives(*requests: Request, pages: int = 5) -> Request | None:
        return Queue[Request]().giver_for(Request(0.0, 10, 1, 1, "b", number=3, pages=pages), requests, size)

    assert gives(one, two) is two
    assert gives(one, two, pages=6) is None
    assert gives(one) is None
    assert gives(one, two, running(4, 0, "b")) is None
    lower = replace(one, priority=-1)
    assert gives(lower, two) is lower
    came_back = replace(two, num_preemptions=1, num_given=15)
    assert gives(one, came_back) is one
    came_back.num_given = 16
    assert gives(one, came_back) is came_back


@pytest.mark.parametrize("start", [1000, 1_000_000])
def test_no_slot_is_taken_before_others_outweigh_the_last_loss_however_long_the_engine_ran(start: int) -> None:
    queue, requests = Queue[Request](), [running(1, 9, "a", pages=5), running(2, 9, "a", pages=5)]
    one, queue._num_ended_tokens = Request(0.0, 10, 1, 1, "b", number=3, pages=5), start
    queue.gave(running(4, 99, "a"), one)  # 100 tokens, with the prompt
    for num_more, expected in ((299, None), (300, requests[1])):
        queue._num_ended_tokens = start + num_more
        assert queue.giver_for(one, requests, size) is expected


def test_the_victim_of_short_pages() -> None:
    """No tenant below its share loses a slot. Then the lowest priority counts, the most pages, the youngest."""
    loud = [running(number, 99, "loud", 5, 2) for number in range(4)]
    quiet = running(9, 99, "quiet", 0, 1)
    assert loses(*loud, quiet) is loud[3]
    low = running(1, 99, "loud", -1, 2)
    assert loses(loud[0], low, loud[2], quiet) is low
    others = [running(number, 99, "other", 0, 4) for number in (5, 6)]
    assert loses(*(replace(each, priority=0) for each in loud[:2]), *others) is others[1]
    plain = running(1, 99, pages=5)
    assert loses(plain, running(2, 99, priority=9, pages=5)) is plain


@pytest.mark.slow
@pytest.mark.parametrize("has_priority", [True, False])
def test_neither_a_high_priority_nor_a_quiet_tenant_is_preempted_for_others_growth(has_priority: bool) -> None:
    growing = [Request(0.0, 64, 2000, 2000, tenant="" if has_priority else "loud") for _ in range(12)]
    tenant, priority = ("", 9) if has_priority else ("quiet", 0)
    few = [Request(1.0 + index, 64, 600, 600, tenant=tenant, priority=priority) for index in range(3)]
    Simulation(replace(SERVER, num_pages=128), [*growing, *few]).run()
    assert any(each.num_preemptions for each in growing)
    assert not any(each.num_preemptions for each in few)


# Lengths of answers


@pytest.mark.slow
def test_answers_longer_than_expected_are_computed_once_when_their_length_is_known() -> None:
    def recomputed(learns: bool) -> int:
        draw = random.Random(3)
        requests = [Request(draw.uniform(0, 60), 64, 1500, 2000) for _ in range(64)]
        Simulation(replace(SERVER, num_pages=64), requests, learns=learns).run()
        return sum(each.num_recomputed for each in requests)

    assert recomputed(learns=True) < 0.25 * recomputed(learns=False)


# Pages


@pytest.mark.slow
@pytest.mark.parametrize("num_long", [8, 12])
def test_short_prompts_pass_long_ones_that_have_no_pages(num_long: int) -> None:
    short = [Request(0.5 * index, 32, 32, 32) for index in range(200)]
    long = [Request(5.0, 8000, 300, 300) for _ in range(num_long)]
    Simulation(SERVER, [*short, *long]).run()
    assert percentile(first_tokens(short), 99.0) < 0.5


def test_a_long_prompt_is_passed_by_as_much_work_as_its_own_and_no_more() -> None:
    """There are ten short prompts per second, and two long ones, of which one has pages."""
    stream = [Request(0.1 * index, 32, 32, 32) for index in range(500)]
    first, second = Request(1.0, 8000, 32, 32), Request(1.1, 8000, 32, 32)
    Simulation(replace(SERVER, num_pages=140), [*stream, first, second]).run()
    assert first.entered_at < second.entered_at
    assert 0 < second.passed <= work_of(8000, 32)
    after = [each for each in stream if each.arrives_at > 1.1 and (each.entered_at or 0) < second.entered_at]
    assert 0 < len(after) <= work_of(8000, 32) / work_of(32, 32)


# An engine


def test_a_slot_that_is_given_to_another_tenant_changes_no_answer(world: World) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_new_tokens=40, ignore_eos=True)
    cases = [Case(str(index), tuple(b"abc ab" * (2 + index)), replace(params, seed=index)) for index in range(5)]
    engine = Engine(Runner(world.model, CONTEXT, num_slots=2, settings=world.settings), max_steps=1)
    alice = [make_sequence(world, case, Way(), tenant="alice") for case in cases[:4]]
    bob = make_sequence(world, cases[4], Way(), tenant="bob")
    for sequence in alice:
        engine.submit(sequence)
    for _ in range(5):
        engine.step()
    assert [each.has_slot for each in alice] == [True, True, False, False]
    engine.submit(bob)
    engine.step()
    assert [each.has_slot for each in (bob, *alice)] == [True, True, False, False, False]
    check_ends(world, engine, [*alice, bob], cases)
    assert [each.stats.preemptions for each in (*alice, bob)] == [0, 1, 0, 0, 0]
    assert engine.snapshot().expected_answer < 256  # five answers of 40 tokens
