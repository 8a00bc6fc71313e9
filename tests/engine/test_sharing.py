"""Tenants share slots and pages, and long prompts do not block short ones, in simulations and in an engine."""

import random
from dataclasses import replace

import pytest

from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.fair_queueing import Running, Tenants, Waiting, victim, work_of
from infer.outputs import percentile
from infer.sampling_params import SamplingParams
from path_cases import CONTEXT, Case, Way, World, check_ends, make_sequence
from simulation import Machine, Request, Simulation

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
    tenants = Tenants()
    for tenant in ("a", "a", "b"):
        tenants.come(tenant)
    one, two = Running(1, 9, False, "a", 0, 0.5), Running(2, 9, False, "a", 0, 0.5)
    waiting = Waiting(3, "b", 0.0, 10)
    assert tenants.giver(waiting, 0.5, [one, two]) == two
    assert tenants.giver(waiting, 0.6, [one, two]) is None
    assert tenants.giver(waiting, 0.5, [one]) is None
    assert tenants.giver(waiting, 0.5, [one, two, Running(4, 0, False, "b", 0, 0.1)]) is None
    assert tenants.giver(waiting, 0.5, [one._replace(priority=-1), two]) == one._replace(priority=-1)
    came_back = two._replace(was_preempted=True, num_given=15)
    assert tenants.giver(waiting, 0.5, [one, came_back]) == one
    assert tenants.giver(waiting, 0.5, [one, came_back._replace(num_given=16)]) == came_back._replace(num_given=16)
    for start in (1000, 1_000_000):  # the time for which the engine has run before does not matter
        tenants.gave(one._replace(num_tokens=100), start)
        assert tenants.giver(waiting, 0.5, [one, two], start + 299) is None
        assert tenants.giver(waiting, 0.5, [one, two], start + 300) == two


def test_the_victim_of_short_pages() -> None:
    """No tenant below its share loses a slot. Then the lowest priority counts, the most pages, the youngest."""
    loud = [Running(number, 99, False, "loud", 5, 0.2) for number in range(4)]
    quiet = Running(9, 99, False, "quiet", 0, 0.1)
    assert victim([*loud, quiet]) == loud[3]
    low = Running(1, 99, False, "loud", -1, 0.2)
    assert victim([loud[0], low, loud[2], quiet]) == low
    others = [Running(number, 99, False, "other", 0, 0.4) for number in (5, 6)]
    assert victim([loud[0]._replace(priority=0), loud[1]._replace(priority=0), *others]) == others[1]
    plain = Running(1, 99, False, "", 0, 0.5)
    assert victim([plain, Running(2, 99, False, "", 9, 0.5)]) == plain


@pytest.mark.parametrize("has_priority", [True, False])
def test_neither_a_high_priority_nor_a_quiet_tenant_is_preempted_for_others_growth(has_priority: bool) -> None:
    machine = replace(SERVER, num_pages=128)
    growing = [Request(0.0, 64, 2000, 2000, tenant="" if has_priority else "loud") for _ in range(12)]
    tenant, priority = ("", 9) if has_priority else ("quiet", 0)
    few = [Request(1.0 + index, 64, 600, 600, tenant=tenant, priority=priority) for index in range(3)]
    Simulation(machine, [*growing, *few]).run()
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
    machine = replace(SERVER, num_pages=140)
    stream = [Request(0.1 * index, 32, 32, 32) for index in range(500)]
    first, second = Request(1.0, 8000, 32, 32), Request(1.1, 8000, 32, 32)
    Simulation(machine, [*stream, first, second]).run()
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
