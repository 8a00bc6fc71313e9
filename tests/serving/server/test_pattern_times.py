"""No pattern that reads a client's text takes more than linear time, so that a long text cannot stop the server."""

import importlib
import pkgutil
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = (
    *("infer.serving.protocols", "infer.serving.server", "infer.serving.batch_file", "infer.serving.distributed"),
    *("infer.text.toolcalls", "infer.text.grammar", "infer.text.tokenizer", "infer.system"),
)
# These are only matched at one place of a text.
MATCHED = {
    "infer.text.grammar.lark._TOKEN",
    "infer.text.grammar.json_schema._LARK_PLACE",
    "infer.text.toolcalls.parser._NAME",
}
MOST_CHARACTERS = 100_000
_ENOUGH = 0.25  # seconds of processor time, after which the growth of a pattern is clear
_GROWTH = 3.0  # of the time for twice the text; a quadratic pattern has 4


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if ".ray_" in found.name or found.name.endswith("child"):  # another environment, and programs
                continue
            module = importlib.import_module(found.name)
            for owner in [module, *(each for each in vars(module).values() if isinstance(each, type))]:
                for attribute, value in vars(owner).items():
                    if isinstance(value, re.Pattern) and owner.__dict__.get("__module__", found.name) == found.name:
                        yield f"{found.name}.{attribute}", value


PATTERNS = dict(patterns())
_MATCHED = {PATTERNS[name] for name in MATCHED}


def worst_units(pattern: re.Pattern[Any]) -> list[str]:
    """Return short texts that a pattern may read again and again: its own characters, alone and in pairs."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    own = [each for each in dict.fromkeys(source) if each.isprintable()]
    characters = list(dict.fromkeys([*own[:24], *"a1 \n\t\\\"'<{[.,"]))
    pairs = [a + b for a in characters for b in characters if a != b]
    words = re.findall(r"[^\\()\[\]?*+|^$]{2,}", source)
    return [*characters, *random.Random(0).sample(pairs, min(len(pairs), 40)), *words[:10]]


def seconds_of(pattern: re.Pattern[Any], text: str) -> float:
    """Return the processor time of all uses of a pattern on a text."""
    given = text.encode() if isinstance(pattern.pattern, bytes) else text
    start = time.thread_time()
    if pattern not in _MATCHED:
        pattern.findall(given)
    pattern.fullmatch(given)
    return time.thread_time() - start


def growth_of(pattern: re.Pattern[Any], unit: str) -> float:
    """Return the growth of the time for twice the text: 1 if 100,000 characters take little time."""
    before, length = 0.0, 500
    while length <= MOST_CHARACTERS:
        seconds = seconds_of(pattern, unit * (length // len(unit)))
        if seconds > _ENOUGH:
            return seconds / max(before, 1e-9)
        before, length = seconds, 2 * length
    return 1.0


@pytest.mark.slow(cases=2, rest=12)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_linear_time_for_its_own_worst_text(name: str) -> None:
    """A busy machine may double one time, so that a growth that is too large is measured again."""
    pattern = PATTERNS[name]
    slow = [unit for unit in worst_units(pattern) if all(growth_of(pattern, unit) > _GROWTH for _ in range(3))]
    assert slow == []


@pytest.mark.slow
def test_a_quadratic_pattern_would_be_seen() -> None:
    pattern = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
    assert "1" in worst_units(pattern)
    assert any(growth_of(pattern, "1") > _GROWTH for _ in range(5))  # one measurement may meet a busy machine
