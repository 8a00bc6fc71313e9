"""No request passes more files and functions than its limit in tests/data/house.toml."""

import sys

import pytest

from count_house import LIMITS, ROOT
from house.flow import count_flow
from house.limits import problems, read_limits

pytestmark = pytest.mark.slow

HAS_ALL_FUNCTIONS = sys.version_info < (3, 12)  # later Pythons inline comprehensions, so requests call fewer functions


def test_every_request_keeps_the_limits_of_its_flow() -> None:
    numbers, limits = count_flow(), read_limits((ROOT / LIMITS).read_text(encoding="utf-8"), flow=True)
    messages = problems(numbers, limits)
    if not HAS_ALL_FUNCTIONS:
        messages = {name: line for name, line in messages.items() if not limits[name].is_loose_for(numbers[name])}
    assert not messages, "\n".join(messages.values())
