"""A limit only follows its number downwards. The limits, which `make lint` compares, pin the numbers themselves."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import count_house
from cases import cases
from house.limits import Limit, problems, read_limits, with_tightened
from house.sizes import count, totals
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return the folder of a made-up repository, with all that is counted."""
    files = {
        "src/infer/families.py": 'FAMILIES: dict[str, int] = {"llama": 1, "qwen3": 2}\n',
        "src/infer/cli/long.py": "def f():\n" + "    x = 1\n" * 400,
        "tests/data/cases.json": "[\n1,\n2\n]\n",
        "tests/data/planted-faults.toml": '[[fault]]\nid = "A"\n',
        "docs/models.md": "<!-- what loads: x -->\n| Llama | a, b, c |\n<!-- end of what loads -->\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


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
    assert with_tightened(LIMITS, {"chat: functions": 770}) == LIMITS, "within 4 % it may be noise"


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["count_house.py", *arguments])
    return count_house.main()


def test_the_command_checks_lowers_and_sets(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = totals(count(repository))
    rows = [f"'{name}' = {{ limit = {number} }}\n" for name, number in numbers.items()]
    limits = repository / count_house.LIMITS
    limits.write_text("[falls]\n" + "".join(rows))
    numbers = totals(count(repository))  # the limits are lines of data, too
    monkeypatch.setattr(count_house, "ROOT", repository)
    monkeypatch.setattr(count_house, "counts_at_last_limits", dict)
    assert run(["--check"], monkeypatch) == 1
    assert "lines of new test data" in capsys.readouterr().out
    named = ("--set", "lines of new test data")
    commands = (("--lower",), ("--check",), named, ("--check",))
    assert [run(list(command), monkeypatch) for command in commands] == [0, 1, 0, 0]
    capsys.readouterr()
    assert run(["--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    assert run([], monkeypatch) == 0
    assert any(line.split() == ["lines", "of", "cli", "401", "401"] for line in capsys.readouterr().out.splitlines())
