"""The door: who is refused before any work is done, and when it may come back."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.engine.step_costs import Costs
from infer.server.door import Ahead, Door, retry_headers, seconds_to_first_token, seconds_to_slot
from infer.server.errors import ApiError
from infer.server.settings import ServerSettings

COSTS = Costs(base=0.001, per_sequence=0.002, per_token=0.0005, per_context=0.0)
NOBODY = Ahead(0, 0, 0, 0.0)
BUSY = Ahead(num_requests=100, num_waiting=84, prompt_tokens=8400, answer_tokens=25_600.0)
aheads = st.builds(
    Ahead, st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 10**6), st.floats(0, 1e6, allow_nan=False)
)


def test_who_comes_alone_waits_for_its_own_prompt() -> None:
    assert seconds_to_slot(NOBODY, COSTS, 16) == 0.0
    assert seconds_to_first_token(NOBODY, COSTS, 16, 1000) == pytest.approx(0.501)


def test_a_full_engine_is_waited_for() -> None:
    """All that is ahead is some 56 s of work, of which the last 16 answers run beside the one that enters."""
    assert 40 < seconds_to_slot(BUSY, COSTS, 16) < 60


@given(aheads, st.integers(1, 64), st.integers(0, 10_000))
def test_no_prediction_is_negative_and_more_ahead_is_never_sooner(ahead: Ahead, slots: int, num_tokens: int) -> None:
    wait = seconds_to_first_token(ahead, COSTS, slots, num_tokens)
    longer = ahead._replace(answer_tokens=ahead.answer_tokens + 100.0)
    assert 0 <= seconds_to_slot(ahead, COSTS, slots) <= wait < math.inf
    assert seconds_to_slot(longer, COSTS, slots) >= seconds_to_slot(ahead, COSTS, slots)


@given(st.floats(0, 1e6), st.floats(-1, 1))
def test_clients_are_told_whole_seconds_within_a_minute_and_milliseconds(seconds: float, jitter: float) -> None:
    told = retry_headers(seconds, jitter)
    assert 1 <= int(told["Retry-After"]) <= 60
    assert int(told["retry-after-ms"]) <= 1000 * int(told["Retry-After"])
    assert 0.8 * min(max(seconds, 0.5), 50) - 0.001 <= int(told["retry-after-ms"]) / 1000
    assert told["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("ahead", "settings", "is_refused"),
    [(NOBODY, {}, False), (BUSY, {}, True), (BUSY, {"max_ttft": 100.0}, False),
     (BUSY, {"max_ttft": 100.0, "max_queue": 84}, True), (BUSY, {"max_ttft": 100.0, "max_queue": 85}, False)],
)  # fmt: skip
def test_it_refuses_who_would_wait_too_long(ahead: Ahead, settings: dict[str, Any], is_refused: bool) -> None:
    door = Door(ServerSettings(**settings))
    if not is_refused:
        door.check(ahead, COSTS, 100)
        return
    with pytest.raises(ApiError) as refused:
        door.check(ahead, COSTS, 100)
    assert (refused.value.status, refused.value.type, refused.value.code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert int(refused.value.headers["Retry-After"]) >= 1


def test_who_is_being_prepared_counts_until_the_engine_knows_of_it() -> None:
    door = Door(ServerSettings(max_queue=1))
    with door.preparing(50):
        ahead = door.ahead(list)
        assert (ahead.num_requests, ahead.num_waiting, ahead.prompt_tokens) == (1, 1, 50)
        assert door.is_full(ahead)
    assert door.ahead(list) == NOBODY
    assert not door.is_full(NOBODY)
