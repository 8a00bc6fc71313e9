"""The extent of the tests: a test for each promise (`make test`), nearly all (`make test-all`), or whole matrices too.

INFER_TESTS has the extent: "promises", nothing, or "all"; "rest" is what "promises" leaves out. Marks of such tests:

    @pytest.mark.slow                     make test-all runs it
    @pytest.mark.slow(cases=2)            make test runs two of its cases, spread over all of them
    @pytest.mark.slow(cases=2, rest=9)    make test-all runs nine of the others, and INFER_TESTS=all each one

A file of which every test is left out begins with `pytestmark = pytest.mark.slow`, and is then not even imported. The
mark closest to a test counts, so a mark of a function overrides the file's.
"""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

EXTENT = os.environ.get("INFER_TESTS", "")
if EXTENT not in ("promises", "rest", "", "all"):
    raise ValueError(f"INFER_TESTS must be 'promises', 'rest', 'all' or nothing, got {EXTENT!r}")
IS_SHORT, IS_REST, IS_WHOLE = EXTENT == "promises", EXTENT == "rest", EXTENT == "all"


def usual_or_all(usual: int, whole: int) -> int:
    return whole if IS_WHOLE else usual


def slow_except(quick: Container[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """Return the values as parameters of a test. `make test` runs it with the quick ones only."""
    rows = ((value if isinstance(value, tuple) else (value,), value in quick) for value in values)
    return [pytest.param(*row, marks=[] if is_quick else pytest.mark.slow) for row, is_quick in rows]


def is_left_out(file: Path) -> bool:
    """Return True if no test of a file is run in this extent."""
    text = file.read_text(encoding="utf-8")
    return (IS_SHORT and has_only_slow_tests(text)) or (IS_REST and "mark.slow" not in text)


def has_only_slow_tests(text: str) -> bool:
    """Return True if a file marks all of its tests as slow, and has no mark that lets some of their cases run."""
    begins = re.search(r"^pytestmark = \[?pytest\.mark\.slow\b(?!\(cases)", text, re.MULTILINE)
    return begins is not None and "slow(cases=" not in text


def split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that `make test` runs, and those that it leaves out."""
    kept = set(_within(items, "cases", 0))
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def rest_of(left_out: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of those that `make test` leaves out that `make test-all` runs."""
    return left_out if IS_WHOLE else _within(left_out, "rest", sys.maxsize)


def _within(items: list[pytest.Item], limit: str, usual: int) -> list[pytest.Item]:
    """Return the items without those beyond the limits of their functions, which marks name, or else the usual one."""
    functions = defaultdict[tuple[Path, str, int], list[pytest.Item]](list)
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            functions[item.path, item.nodeid.partition("[")[0], mark.kwargs.get(limit, usual)].append(item)
    beyond = set[pytest.Item]()
    for (_, _, most), cases in functions.items():
        number = min(most, len(cases))
        kept = {cases[(2 * index + 1) * len(cases) // (2 * number)] for index in range(number)}
        beyond.update(item for item in cases if item not in kept)
    return [item for item in items if item not in beyond]
