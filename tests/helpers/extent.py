"""The extent of the tests: a test for each promise (`make test`), nearly all (`make test-all`), or whole matrices too.

INFER_TESTS has the extent: "promises", nothing, or "all"; "rest" is what "promises" leaves out. Marks of such tests:

    @pytest.mark.slow             make test-all runs it
    @pytest.mark.slow(cases=2)    make test runs two of its cases, spread over all of them

A file of which every test is left out begins with `pytestmark = pytest.mark.slow`, and is then not even imported. The
mark closest to a test counts, so a mark of a function overrides the file's.
"""

import os
import re
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
    begins = re.search(r"^pytestmark = \[?pytest\.mark\.slow\b(?!\()", text, re.MULTILINE)
    return begins is not None and "slow(cases=" not in text


def split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that `make test` runs, and those that it leaves out."""
    wanted = dict[pytest.Item, int]()
    functions = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            wanted[item] = mark.kwargs.get("cases", 0)
            functions[item.path, item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for cases in functions.values():
        some = [item for item in cases if wanted[item]]
        left_out.update(item for item in cases if not wanted[item])
        if some:
            number = min(wanted[some[0]], len(some))
            kept = {some[(2 * index + 1) * len(some) // (2 * number)] for index in range(number)}
            left_out.update(item for item in some if item not in kept)
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]
