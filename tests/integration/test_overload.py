"""The figures of `check_overload`: served clients, and kept promises."""

import sys
from pathlib import Path

import pytest

from cases import cases

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from check_overload import Client, figures, is_good

pytestmark = pytest.mark.slow

GOOD = Client(0.0, [], 0.0, 10.0, 11.0)
LATER = Client(0.0, [59.0, 20.0], 80.0, 105.0, 106.0)
BOUNDS = {"served": 0.97, "kept": 0.96, "refusals": 2.0, "waited": 60.0, "errors": 0.0, "refusals_after": 0.0}


@cases(
    "broken",
    Client(0.0, [20.0, 5.0], 26.0, 30.0, 31.0),  # told to wait twice
    Client(0.0, [], 0.0, 37.0, 38.0),  # late
    Client(0.0, error="cut"),
)
def test_a_promise_that_was_broken_is_counted(broken: Client) -> None:
    assert figures([GOOD, LATER], GOOD)["kept"] == 1.0
    found = figures([GOOD, LATER, broken, GOOD], GOOD)
    assert found["kept"] == 0.75
    assert found["errors"] == bool(broken.error)


@pytest.mark.parametrize("name", BOUNDS)
def test_each_bound_is_one(name: str) -> None:
    assert is_good(BOUNDS)
    worse = {"served": 0.94, "kept": 0.94, "refusals": 2.3, "waited": 45.0, "errors": 1.0, "refusals_after": 1.0}
    assert not is_good(BOUNDS | {name: worse[name]})
