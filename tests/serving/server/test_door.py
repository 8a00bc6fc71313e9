"""The door: which requests are refused before any work is done, and when their clients may return."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from door_simulation import DoorSimulation
from infer.engine.step.step_costs import Costs, StepCosts
from infer.outputs import percentile
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.fields import BodyError
from infer.serving.server.door import Arrival, Door, Load, RemainingWork, WaitingLine, retry_headers
from infer.serving.server.endpoint import text_tokens
from infer.serving.server_settings import ServerSettings
from simulation import Machine, Request

SERVER = Machine(16, 1024, (5e-3, 7e-4, 7e-4, 4e-4))  # answers 6.07 requests per second with 128 tokens in and 64 out
CAPACITY = 6.07
works = st.lists(
    st.builds(
        RemainingWork,
        *(st.sampled_from("abc"), st.booleans()),
        *(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 4000)),
    ),
    max_size=60,
)


def known_costs(pace: float = 0.0) -> StepCosts:
    costs = StepCosts()
    costs.costs, costs._pace = Costs(0.001, 0.002, 0.0005, 0.0001), pace
    return costs


def load_of(found: list[RemainingWork], num_slots: int = 16, pace: float = 0.0, slots_of: Any = None) -> Load:
    return Load(found, known_costs(pace), num_slots, slots_of)


def busy(tenant: str, count: int = 100, num_slots: int = 16) -> list[RemainingWork]:
    running, waiting = (RemainingWork(tenant, *state, 100, 256.0) for state in ((True, 0), (False, 100)))
    return [running] * min(count, num_slots) + [waiting] * max(0, count - num_slots)


def enter(door: Door, look: Callable[[], Load], body: bytes = b"", **arrival: int | str) -> float | None:
    """Return the wait in seconds that a refused client is told, or None if the request is accepted."""
    try:
        door.leave(door.enter(Arrival(**{"tenant": "a", "num_answer_tokens": 100, **arrival}), body, look))  # type: ignore[arg-type]
    except ApiError as refused:
        return int(refused.headers["retry-after-ms"]) / 1000
    return None


def test_the_own_prompt_is_not_part_of_the_wait() -> None:
    assert load_of([]).seconds_ahead("a", 10_000) == 0.0


def test_a_full_engine_is_waited_for() -> None:
    """About 60 s of work are ahead. The last 16 answers of it run together with the one that enters."""
    assert 40 < load_of(busy("a")).seconds_ahead("a", 10) < 60


def test_a_wait_has_the_pace_and_the_positions_of_the_engine() -> None:
    usual, slow = (load_of(busy("a"), pace=pace).seconds_ahead("a", 10) for pace in (0.0, 1.0))
    assert slow == pytest.approx(usual * 2.718, rel=0.01)
    far = [work._replace(num_computed=30_000) for work in busy("a")]
    assert load_of(far).seconds_ahead("a", 10) > 1.5 * usual


def test_a_flood_delays_its_own_tenant_and_no_other() -> None:
    flood = load_of(busy("a", 1000))
    assert flood.seconds_ahead("a", 100) > 300
    assert flood.seconds_ahead("b", 100) == 0.0
    assert load_of(busy("a", 1000, 1)).seconds_ahead("b", 10) == 0.0, "before the step that fills the slots"
    beside = load_of([*busy("a", 1000), *busy("b", 10, 8)])
    alone = load_of([*busy("b", 10, 8)], num_slots=8)
    assert beside.seconds_ahead("b", 100) <= 2.01 * alone.seconds_ahead("b", 100)


def test_short_prompts_wait_for_shorter_ones() -> None:
    reading = load_of([RemainingWork("a", True, 4000, 0, 10.0), RemainingWork("a", True, 50, 0, 10.0)])
    assert reading.seconds_ahead("a", 100) < 0.1
    assert reading.seconds_ahead("a", 5000) > 2


def test_prompts_that_are_being_read_are_counted_once() -> None:
    """By hand: a prompt takes 0.5 ms a token and 0.1 ms for each 1,024 positions before one."""
    read = RemainingWork("a", True, 100, 0, 0.0)
    reading = 100 * 0.0005 + 99 * 100 / 2 * 0.0001 / 1024
    ahead = load_of([read, read]).seconds_ahead("b", 100)
    assert ahead == pytest.approx(2 * reading)
    together = load_of([])
    together.add(read, 2)
    assert together.seconds_ahead("b", 100) == ahead


@given(works, st.integers(1, 64), st.integers(0, 10_000))
def test_no_wait_is_negative_and_others_are_waited_for_once(found: Any, num_slots: int, num_tokens: int) -> None:
    load = load_of(found, num_slots)
    assert load.seconds_ahead("a", num_tokens) >= 0
    own = load.service_seconds(num_tokens, 10.0)
    num_others = len({work.tenant for work in found} - {"a"})
    assert own <= load.shared_seconds("a", own) <= (1 + num_others) * own + 1e-9


@given(st.floats(0, 1e6))
def test_clients_are_told_whole_seconds_within_a_minute_and_milliseconds(seconds: float) -> None:
    told = retry_headers(seconds)
    assert 1 <= int(told["Retry-After"]) <= 60
    assert int(told["retry-after-ms"]) <= 1000 * int(told["Retry-After"])
    assert min(max(seconds, 0.5), 60) - 0.001 <= int(told["retry-after-ms"]) / 1000
    assert told["x-should-retry"] == "true"


@cases("found limits is_refused",
    ([], {}, False), (busy("a"), {}, True), (busy("a"), {"max_ttft": 100.0}, False),
    (busy("a"), {"max_ttft": 100.0, "max_queue": 84}, True), (busy("a"), {"max_ttft": 100.0, "max_queue": 85}, False),
    (busy("b", 1000), {"max_queue": 84}, False),
)  # fmt: skip
def test_the_door_refuses_requests_that_would_wait_too_long(found: Any, limits: Any, is_refused: bool) -> None:
    door = Door(ServerSettings(**limits))  # type: ignore[arg-type]
    assert (enter(door, lambda: load_of(found)) is not None) is is_refused
    if is_refused:
        with pytest.raises(ApiError) as error:
            door.enter(Arrival("a"), b"", lambda: load_of(found))
        found = (error.value.status, error.value.type, error.value.code)
        assert found == (429, "rate_limit_error", "rate_limit_exceeded")


def test_a_request_in_preparation_counts_until_the_engine_has_it() -> None:
    now = [0.0]
    door = Door(ServerSettings(slots=1, max_queue=3), clock=lambda: now[0])
    entry = door.enter(Arrival("a", num_prompts=1, num_choices=4), b"", lambda: load_of([], 1))
    for num_left in (4, 3):
        assert door.load(lambda: load_of([], 1)).num_waiting("a") == num_left
        assert enter(door, lambda: load_of([], 1)) is not None
        entry.num_submitted += 1
        now[0] += 1.0
    entry.door.leave(entry)
    assert door.load(lambda: load_of([], 1)).count == 0


def test_each_refused_client_is_promised_a_place_after_those_before_it() -> None:
    now = [0.0]
    door = Door(ServerSettings(max_ttft=40.0, slots=16), clock=lambda: now[0])

    def full() -> Load:
        return load_of(busy("a"))

    told = [enter(door, full, b"%d" % index, num_choices=8) or 0.0 for index in range(8)]
    assert all(later > earlier for earlier, later in zip(told, told[2:], strict=False)), told
    assert told[7] - told[0] > 6
    now[0] = told[0]
    with pytest.raises(ApiError, match="clients of this key that were refused earlier come first"):
        door.enter(Arrival("a", num_answer_tokens=100), b"new", lambda: load_of(busy("a", 75)))
    assert enter(door, lambda: load_of(busy("a", 85)), b"0") is None  # 38 s are ahead, less than the limit
    now[0] = 58.0
    assert enter(door, lambda: load_of(busy("a", 40)), b"another") is None  # no refused client has returned


def test_a_client_that_waits_longer_than_a_minute_keeps_its_place() -> None:
    """About 160 s of work are ahead of the first of two clients, so both are told to wait a minute twice."""
    now, ahead = [0.0], [300]
    door = Door(ServerSettings(max_ttft=40.0, slots=16), clock=lambda: now[0])

    def ask(body: bytes) -> float | None:
        return enter(door, lambda: load_of(busy("a", ahead[0])), body, num_choices=8)

    for num_ahead in (300, 200):
        ahead[0] = num_ahead
        for body in (b"first", b"second"):
            assert 57 <= (ask(body) or 0.0) <= 60
            now[0] += 1.0
        now[0] += 59.0
    ahead[0] = 80  # 37 s
    refused = [ask(body) is not None for body in (b"third", b"second", b"first", b"fourth")]
    assert refused == [True, False, False, True]


def test_predictions_are_corrected_by_the_waits_of_accepted_requests() -> None:
    now = [0.0]
    door = Door(ServerSettings(max_ttft=60.0), clock=lambda: now[0])
    entry = door.enter(Arrival("a"), b"", lambda: load_of(busy("a")))  # after about 50 s
    entry.door.leave(entry)
    for _ in range(60):
        door.learn(entry.predicted, 72.0)
    assert 1.3 < door.wait_ratio < 1.6
    assert enter(door, lambda: load_of(busy("a")), b"new") is not None
    now[0] = 1.0
    assert enter(door, lambda: load_of(busy("a", 30)), b"other") is None


def test_only_texts_are_counted() -> None:
    assert text_tokens(list(range(1000))) == 1000
    assert text_tokens([{"role": "user", "content": "x" * 300}]) < 110
    assert text_tokens([{"role": "user", "content": None}, 3.5, True]) < 20


# Clients of a simulated server


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("max_ttft", [5.0, 30.0])
def test_a_burst_is_answered_to_the_last_by_clients_that_ask_three_times(max_ttft: float) -> None:
    """The burst has 300 requests within a second, 49 s of work. Without promises, 56 of them were answered."""
    burst = [Request(index / 300, 128, 64, 64) for index in range(300)]
    life = DoorSimulation(SERVER, burst, max_ttft=max_ttft)
    life.run()
    assert len(life.answered) >= 295
    assert sum(map(len, life.told.values())) <= 300
    assert max(each.ended_at or 0 for each in burst) <= 1.1 * 300 / CAPACITY
    assert percentile(life.waits(), 99.0) <= 1.4 * max_ttft


SLOW = Machine(16, 1024, (2e-2, 2.8e-3, 2.8e-3, 1.6e-3))  # prompts are read 5 tokens a step beside streams
SLOW_CAPACITY = 0.94


def arriving(rate: float, seconds: float) -> list[Request]:
    """Return clients that arrive at random, `rate` per second."""
    draw, now, requests = random.Random(4), 0.0, list[Request]()
    while now < seconds:
        now += draw.expovariate(rate)
        requests.append(Request(now, 128, 64, 64))
    return requests


def test_at_twice_the_capacity_promises_are_kept_and_nothing_idles() -> None:
    requests = arriving(2 * CAPACITY, 60.0)
    life = DoorSimulation(SERVER, requests, max_ttft=5.0)
    life.run()
    in_time = [each for each in life.answered if (each.ended_at or 0) <= 60]
    assert len(in_time) >= 0.95 * 60 * CAPACITY
    assert len(life.answered) >= 0.97 * len(requests)
    promised = [each for each in life.answered if life.told[each] and life.told[each][0] < 55]
    waited = [(life.taken_at[each] - life.first_asked[each]) / life.told[each][0] for each in promised]
    assert len(promised) > 100
    assert percentile(waited, 95.0) <= 1.2
    assert percentile(life.waits(), 99.0) <= 1.4 * 5


@pytest.mark.slow
@pytest.mark.parametrize(("between", "max_queue"), [(0.0, 512), (0.01, 512), (0.0, 10)])
def test_patient_clients_are_accepted_in_turn_and_at_the_promised_time(between: float, max_queue: int) -> None:
    """The load is twice the capacity. A pause between two steps makes all waits longer than the costs predict."""
    machine, requests = replace(SLOW, between=between), arriving(2 * SLOW_CAPACITY, 120.0)
    life = DoorSimulation(machine, requests, num_retries=50, max_queue=max_queue)
    life.run()
    assert len(life.answered) == len(requests)
    promises = [sum(told < 55 for told in life.told[each]) for each in requests]
    kept = [wait <= 1.2 * 30 and count <= 1 for wait, count in zip(life.waits(), promises, strict=True)]
    assert sum(kept) >= 0.95 * len(kept)
    in_turn = sorted(life.taken_at[each] for each in requests)
    assert max(life.taken_at[each] - turn for each, turn in zip(requests, in_turn, strict=True)) < 60
    waited = sum(life.taken_at[each] - life.first_asked[each] for each in requests)
    assert sum(map(len, life.told.values())) <= waited / 60 + len(requests), "they are told a minute each time"


def test_one_tenants_flood_refuses_no_other() -> None:
    flood = [Request(0.01 * index, 128, 200, 200, tenant="loud") for index in range(400)]
    quiet = [Request(1.0 + 3.0 * index, 32, 16, 16, tenant="quiet") for index in range(15)]
    life = DoorSimulation(SERVER, [*flood, *quiet], max_ttft=5.0, num_retries=0)
    life.run()
    assert not any(life.told[each] for each in quiet)
    assert any(life.told[each] for each in flood)


# The sequences of a request that the door counts

TWO_PROMPTS = Arrival("a", num_prompts=2, num_choices=3, num_prompt_tokens=200, num_answer_tokens=10)


def idle() -> Load:
    return load_of([])


def test_each_prompt_of_a_request_is_read_once_before_and_after_the_engine_has_it() -> None:
    """The request has two prompts of 100 tokens, and six answers."""
    now = [0.0]
    door = Door(ServerSettings(), clock=lambda: now[0])
    entry = door.enter(TWO_PROMPTS, b"", idle)
    unread = [RemainingWork("a", False, 100, 0, 10.0)] * 2 + [RemainingWork("a", False, 0, 0, 10.0)] * 4
    for number in range(8):  # two more than the request has
        found, expected = door.load(idle), load_of(unread[number:])
        assert found.count == found.num_waiting("a") == expected.count
        assert found.seconds_ahead("b", 1000) == pytest.approx(expected.seconds_ahead("b", 1000))
        assert found.shared_seconds("b", 1e9) == pytest.approx(expected.shared_seconds("b", 1e9))
        entry.num_submitted += 1
        now[0] += 1.0


def test_sequences_that_the_engine_has_are_counted_as_the_engine_s_alone() -> None:
    now = [0.0]
    door = Door(ServerSettings(), clock=lambda: now[0])
    first = door.enter(TWO_PROMPTS, b"", idle)
    for _ in range(6):
        first.num_submitted += 1
    assert door.load(idle).count == 6, "the engine was not looked at since"
    now[0] = 1.0
    known = [RemainingWork("a", True, 0, 100, 5.0)] * 6
    assert door.load(lambda: load_of(known)).count == 6
    second = door.enter(Arrival("b"), b"", idle)
    second.num_submitted += 1
    assert door.load(idle).count == 7, "it was looked at a moment ago"
    now[0] = 2.0
    assert door.load(lambda: load_of(known[:2])).count == 2


@pytest.mark.parametrize(("limit", "expected"), [(None, 64.0), (4000, 64.0), (64, 64.0), (63, 63.0), (1, 1.0)])
def test_an_answer_is_as_long_as_answers_are_and_no_longer_than_it_may_be(limit: int | None, expected: float) -> None:
    door = Door(ServerSettings())
    door.lengths.mean = 64.0
    assert door.answer_tokens(Arrival("a", num_answer_tokens=limit)) == expected


def test_a_request_may_have_as_many_answers_as_there_are_slots_and_places() -> None:
    for num_prompts, num_choices in ((1, 6), (6, 1), (2, 3), (1, 7), (7, 1)):
        door, is_refused = Door(ServerSettings(slots=2, max_queue=4)), num_prompts * num_choices > 6
        refusal = pytest.raises(BodyError, match="times n must be at most 6 here", check=lambda x: x.param == "n")
        with refusal if is_refused else nullcontext():
            door.leave(door.enter(Arrival("a", num_prompts, num_choices), b"", idle))


def test_sequences_too_long_for_the_pages_run_one_at_a_time() -> None:
    long = [RemainingWork("a", number == 0, 2000, 0, 100.0) for number in range(3)]
    none, load = (load_of(found, slots_of=lambda num_tokens: 1000 // num_tokens) for found in ([], long))
    assert (none.num_slots, load.num_slots) == (16, 1)
    assert 0 < load.seconds_ahead("a", 10) < 1e6
    assert 0 < load.service_seconds(10, 10.0) < 1e6


# The line of refused clients, and the learning of their waits


def line_of(*bodies: bytes, due: float = 10.0) -> WaitingLine:
    """Return a line of clients whose requests take a second each."""
    line = WaitingLine()
    for body in bodies:
        line.append(body, 1.0, due)
    return line


def test_a_client_is_found_at_its_time_and_not_before() -> None:
    line = line_of(b"a", b"b")
    assert (line.find(b"b", 9.8), line.find(b"c", 10.0)) == (None, None)
    assert [line.seconds_before(place) for place in (line.find(b"b", 9.95), None)] == [1.0, 2.0]


def test_a_place_is_kept_for_as_long_as_its_client_comes_back_when_it_is_told() -> None:
    line, now = line_of(b"a", b"b", b"c"), 10.0
    for _ in range(20):
        places = [line.find(body, now) for body in (b"a", b"b", b"c")]
        assert line.seconds_before(places[1]) == 1.0
        now += 60.0  # the longest time that a client is told
        for place in places:
            place.due = now


def test_a_client_that_does_not_return_is_forgotten() -> None:
    line = line_of(b"a", b"b")
    line.append(b"c", 1.0, 60.0)
    assert line.find(b"c", 20.1) is None  # it is too early, and the others are too late
    assert (len(line), line.seconds_before(None)) == (1, 1.0)
    assert line.find(b"a", 21.5) is None


def test_clients_with_the_same_body_have_a_place_each() -> None:
    line = line_of(b"a", b"a", b"a")
    for left in (2, 1, 0):
        place = line.find(b"a", 10.0)
        assert line.seconds_before(place) == 0.0
        line.remove(place)
        assert (len(line), line.seconds_before(None)) == (left, left)
    assert line.find(b"a", 10.0) is None


def test_a_line_has_a_greatest_length() -> None:
    line = line_of(*(b"%d" % index for index in range(5000)))
    assert len(line) == 4096
    assert line.find(b"4095", 10.0) is not None
    assert line.find(b"4096", 10.0) is None


def test_the_ratio_of_waits_is_the_median_of_the_last_requests() -> None:
    draw, door = random.Random(3), Door(ServerSettings())
    found = [1.5 * draw.lognormvariate(0, 0.2) * (10 if draw.random() < 0.05 else 1) for _ in range(2000)]
    for each in found:
        door.learn(20.0, 20.0 * each)
    assert door.wait_ratio == pytest.approx(median(found), rel=0.15)
    for _ in range(200):
        door.learn(20.0, 20.0)
    assert door.wait_ratio == pytest.approx(1.0, rel=0.06)


def test_the_ratio_of_waits_has_bounds_and_short_waits_teach_nothing() -> None:
    door = Door(ServerSettings())
    for predicted, waited, expected in ((0.9, 30.0, 1.0), (1.0, 30.0, 4.0), (30.0, 1.0, 0.5)):
        for _ in range(1000):
            door.learn(predicted, waited)
        assert door.wait_ratio == expected
