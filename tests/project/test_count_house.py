"""A limit only follows its number downwards. The limits, which `make lint` compares, pin the numbers themselves."""

from typing import Any

from cases import cases
from house.limits import Limit, problems, read_limits, with_set, with_tightened
from house.source import Source

SOURCE = '''"""The docstring of a module,

of two lines."""

# A comment.
import os


class A:  # a comment
    """One line."""

    text = """
# This line is text.

"""
'''
LIMITS = """# A comment.
[falls]
'lines' = { limit = 1000, goal = 500 }
'lines of C++' = { limit = 10 }

[rises]
'faults' = { limit = 200 }

[bounds]
'median' = { limit = 150 }

[flow]
'chat: functions' = { limit = 800, goal = 480 }
"""


def test_a_line_of_code_has_a_token_that_is_no_comment_and_no_docstring() -> None:
    assert Source("src/infer/cli/a.py", SOURCE).num_code_lines == 6
    assert Source("src/infer/cli/a.py", "# Only a comment.\n\n").num_code_lines == 0


@cases(
    "section limit kept broken loose",
    ("falls", 1000, [1000, 980], [1001], [979]),
    ("falls", 10, [10], [11], [9]),
    ("rises", 200, [200, 204], [199], [205]),
    ("bounds", 150, [150, 1], [151], []),
    ("flow", 800, [800, 768], [801], [767]),
    ("flow", 45, [45, 43], [46], [42]),
)
def test_a_limit_is_kept_within_a_few_per_cent(section: str, limit: int, kept: Any, broken: Any, loose: Any) -> None:
    messages = {number: Limit(section, limit).problem("x", number) for number in [*kept, *broken, *loose]}
    assert [number for number, message in messages.items() if message is None] == kept
    assert [number for number, message in messages.items() if message and "--set" in message] == broken
    assert [number for number, message in messages.items() if message and "--lower" in message] == loose


def test_a_number_without_a_limit_and_a_limit_without_a_number_are_problems() -> None:
    limits = read_limits(LIMITS)
    numbers = {"lines": 1000, "lines of C++": 10, "faults": 200, "median": 100}
    assert problems(numbers, limits) == {}
    assert list(problems({**numbers, "lines of .lark files": 1}, limits)) == ["lines of .lark files"]
    del numbers["faults"]
    assert list(problems(numbers, limits)) == ["faults"]


def limits_in(text: str) -> dict[str, int]:
    return {name: limit.limit for name, limit in (read_limits(text) | read_limits(text, flow=True)).items()}


def test_lowering_loosens_no_limit() -> None:
    better = {"lines": 999, "lines of C++": 7, "faults": 201, "median": 100, "chat: functions": 700}
    lowered = with_tightened(LIMITS, better)
    assert limits_in(lowered) == {**better, "median": 150, "chat: functions": 707}
    assert lowered.startswith("# A comment.\n[falls]\n'lines' = { limit = 999, goal = 500 }\n")
    worse = {"lines": 1001, "lines of C++": 11, "faults": 199, "median": 151, "chat: functions": 801}
    assert with_tightened(LIMITS, worse) == LIMITS
    assert limits_in(with_set(LIMITS, worse, ["faults"])) == limits_in(LIMITS) | {"faults": 199}
    assert with_tightened(LIMITS, {"chat: functions": 770}) == LIMITS, "within 4 % it may be noise"
