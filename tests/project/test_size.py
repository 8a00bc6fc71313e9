"""No number of the project's size is beyond its limit in tests/data/house.toml. `make lint` checks the same."""

import pytest

from count_house import LIMITS, ROOT, report
from house.limits import read_limits
from house.sizes import ROOMS, Counts, count, totals

pytestmark = pytest.mark.slow  # parses every source: `make quick` leaves it to `make lint`


@pytest.fixture(scope="module")
def counts() -> Counts:
    return count(ROOT)


def test_every_number_keeps_its_limit(counts: Counts) -> None:
    lines = report(totals(counts), read_limits((ROOT / LIMITS).read_text(encoding="utf-8")), counts)
    assert not lines, "\n".join(lines)


def test_the_lines_of_the_rooms_add_up(counts: Counts) -> None:
    numbers = totals(counts)
    assert sum(numbers[f"lines of {room}"] for room in ROOMS) == numbers["lines of src/infer"]
    assert min(numbers[f"lines of {room}"] for room in ROOMS) > 0
