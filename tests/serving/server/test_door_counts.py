"""The sequences of a request that the door counts: the cost of each, its end, and their limit."""

import pytest

from infer.serving.protocols.refusals import BodyError
from infer.serving.server.door import Arrival, Door
from infer.serving.server.server_settings import ServerSettings
from infer.serving.server.wait_forecast import Forecast, RemainingWork
from test_door import forecast_of, known_costs

TWO_PROMPTS = Arrival("a", num_prompts=2, num_choices=3, num_prompt_tokens=200, num_answer_tokens=10)


def idle() -> Forecast:
    return forecast_of([])


def test_each_prompt_of_a_request_is_read_once_before_and_after_the_engine_has_it() -> None:
    """The request has two prompts of 100 tokens, and six answers."""
    door = Door(ServerSettings(), clock=lambda: 0.0)
    entry = door.enter(TWO_PROMPTS, b"", idle)
    expected = forecast_of([RemainingWork("a", False, 100, 0, 10.0)] * 2 + [RemainingWork("a", False, 0, 0, 10.0)] * 4)
    for _ in range(8):  # two more than the request has
        found = door.forecast(idle)
        assert (found.count, found.num_waiting("a")) == (6, 6)
        assert found.seconds_ahead("b", 1000) == pytest.approx(expected.seconds_ahead("b", 1000))
        assert found.shared_seconds("b", 1e9) == pytest.approx(expected.shared_seconds("b", 1e9))
        entry.submit()
    entry.close()
    assert door.forecast(idle).count == 6, "the engine was not looked at since"


def test_sequences_that_the_engine_has_are_counted_as_the_engine_s_alone() -> None:
    now = [0.0]
    door = Door(ServerSettings(), clock=lambda: now[0])
    first = door.enter(TWO_PROMPTS, b"", idle)
    for _ in range(6):
        first.submit()
    now[0] = 1.0
    known = [RemainingWork("a", True, 0, 100, 5.0)] * 6
    assert door.forecast(lambda: forecast_of(known)).count == 6
    second = door.enter(Arrival("b"), b"", idle)
    second.submit()
    assert door.forecast(idle).count == 7, "it was looked at a moment ago"
    now[0] = 2.0
    assert door.forecast(lambda: forecast_of(known[:2])).count == 2
    for entry in (first, second):
        entry.close()
    assert door.forecast(idle).count == 2


@pytest.mark.parametrize(("limit", "expected"), [(None, 64.0), (4000, 64.0), (64, 64.0), (63, 63.0), (1, 1.0)])
def test_an_answer_is_as_long_as_answers_are_and_no_longer_than_it_may_be(limit: int | None, expected: float) -> None:
    door = Door(ServerSettings())
    door.lengths.mean = 64.0
    assert door.answer_tokens(Arrival("a", num_answer_tokens=limit)) == expected


def test_a_request_may_have_as_many_answers_as_there_are_slots_and_places() -> None:
    settings = ServerSettings(slots=2, max_queue=4)
    for num_prompts, num_choices, is_allowed in (
        (1, 6, True),
        (6, 1, True),
        (2, 3, True),
        (1, 7, False),
        (7, 1, False),
    ):
        door = Door(settings)
        if is_allowed:
            door.enter(Arrival("a", num_prompts, num_choices), b"", idle).close()
        else:
            with pytest.raises(BodyError, match="prompts times n must be at most 6 here") as refused:
                door.enter(Arrival("a", num_prompts, num_choices), b"", idle)
            assert refused.value.param == "n"


def test_sequences_too_long_for_the_pages_run_one_at_a_time() -> None:
    forecast = Forecast(known_costs(), 16, lambda num_tokens: 1000 // num_tokens)
    assert forecast.num_slots == 16
    for number in range(3):
        forecast.add(RemainingWork("a", number == 0, 2000, 0, 100.0))
    assert forecast.num_slots == 1
    assert 0 < forecast.seconds_to_slot("a") < 1e6
    assert 0 < forecast.service_seconds(10, 10.0) < 1e6
