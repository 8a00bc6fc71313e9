"""The line of refused clients, and the learning of their waits."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.serving.server.wait_forecast import WaitRatio
from infer.serving.server.waiting_line import MAX_RETRY_SECONDS, WaitingLine


def line_of(*bodies: bytes, due: float = 10.0) -> WaitingLine:
    """Return a line of clients whose requests take a second each."""
    line = WaitingLine()
    for body in bodies:
        line.append(body, 1.0, due)
    return line


def test_a_client_is_found_at_its_time_and_not_before() -> None:
    line = line_of(b"a", b"b")
    assert line.find(b"b", 9.8) is None
    place = line.find(b"b", 9.95)
    assert place is not None
    assert line.seconds_before(place) == 1.0
    assert line.find(b"c", 10.0) is None
    assert line.seconds_before(None) == 2.0


def test_a_place_is_kept_for_as_long_as_its_client_comes_back_when_it_is_told() -> None:
    line, now = line_of(b"a", b"b", b"c"), 10.0
    for _ in range(20):
        place = line.find(b"b", now)
        assert place is not None
        assert line.seconds_before(place) == 1.0
        now += MAX_RETRY_SECONDS
        for each in (b"a", b"b", b"c"):
            waiting = line.find(each, now - MAX_RETRY_SECONDS)
            assert waiting is not None
            waiting.due = now


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
        assert place is not None
        assert line.seconds_before(place) == 0.0
        line.remove(place)
        assert (len(line), line.seconds_before(None)) == (left, left)
    assert line.find(b"a", 10.0) is None


def test_a_line_has_a_greatest_length() -> None:
    line = line_of(*(b"%d" % index for index in range(5000)))
    assert len(line) == 4096
    assert line.find(b"4095", 10.0) is not None
    assert line.find(b"4096", 10.0) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 100)), max_size=60))
def test_the_work_in_a_line_is_that_of_its_places(asked: list[tuple[int, float]]) -> None:
    line, now, services = WaitingLine(), 0.0, dict[int, list[float]]()
    for body, seconds in asked:
        now += 0.05
        place = line.find(b"%d" % body, now)
        if place is not None:
            services[body].remove(place.service)
            line.remove(place)
        else:
            line.append(b"%d" % body, seconds, now + 1.0)
            services.setdefault(body, []).append(seconds)
        assert line.seconds_before(None) == pytest.approx(sum(map(sum, services.values())), abs=1e-6)
        assert len(line) == sum(map(len, services.values()))


def test_the_ratio_of_waits_is_the_median_of_the_last_requests() -> None:
    draw, ratio = random.Random(3), WaitRatio()
    found = [1.5 * draw.lognormvariate(0, 0.2) * (10 if draw.random() < 0.05 else 1) for _ in range(2000)]
    for each in found:
        ratio.learn(20.0, 20.0 * each)
    assert ratio.value == pytest.approx(median(found), rel=0.1)
    for _ in range(200):
        ratio.learn(20.0, 20.0)
    assert ratio.value == pytest.approx(1.0, rel=0.02)


def test_the_ratio_of_waits_has_bounds_and_short_waits_teach_nothing() -> None:
    ratio = WaitRatio()
    for _ in range(1000):
        ratio.learn(0.9, 30.0)
    assert ratio.value == 1.0
    for _ in range(1000):
        ratio.learn(1.0, 30.0)
    assert ratio.value == 3.0
    for _ in range(1000):
        ratio.learn(30.0, 1.0)
    assert ratio.value == 0.5
