"""The limits of the numbers, in tests/data/house.toml: a change that lowers a number lowers its limit.

Each section has a rule. `falls`: a number is at most its limit, and at most 2 % below. `rises`: the same the other way
round. `bounds`: at most the limit, which no command changes. `flow`: as `falls`, for the numbers of `--flow`, but at
most 4 % below: a machine so busy that a step takes 50 ms runs no multi-steps, so its requests call 2 % fewer functions.
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMITS = Path("tests", "data", "house.toml")  # below the root of the repository
RAISE = "Only the allowance of an issue loosens a limit: python scripts/count_house.py --set NAME"
TIGHTEN = "Lower the limits: python scripts/count_house.py --lower"


@dataclass(frozen=True)
class Limit:
    section: str
    limit: int
    goal: int | None = None

    def is_broken_by(self, number: int) -> bool:
        return number < self.limit if self.section == "rises" else number > self.limit

    def is_loose_for(self, number: int) -> bool:
        """Return True if the number is so much better than the limit that the limit should follow."""
        match self.section:
            case "falls":
                return number * 100 < self.limit * 98
            case "rises":
                return number * 100 > self.limit * 102
            case "flow":
                return number * 100 < self.limit * 96 and number < self.limit - 2
        return False

    def for_number(self, number: int) -> int:
        """Return the limit to write for a number. A flow gets 1 %, because threads that wait call a little more."""
        return -(-number * 101 // 100) if self.section == "flow" else number

    def tightened(self, number: int) -> int:
        """Return the limit for a number that became better, or the same limit."""
        if self.section == "bounds" or self.is_broken_by(number):
            return self.limit
        if self.section == "flow" and not self.is_loose_for(number):
            return self.limit
        return self.for_number(number)

    def problem(self, name: str, number: int) -> str | None:
        """Return what is wrong with a number, or None."""
        goal = "" if self.goal is None else f", goal {self.goal:,}"
        bound = f"limit {self.limit:,}{goal}"
        if self.is_broken_by(number):
            return f"{name}: {number:,} is {'below' if self.section == 'rises' else 'above'} its {bound}. {RAISE}"
        if self.is_loose_for(number):
            return f"{name}: {number:,} is much better than its {bound}. {TIGHTEN}"
        return None


def read_limits(text: str, *, flow: bool = False) -> dict[str, Limit]:
    """Return the limits of sizes, or those of the flow, by the name of the number."""
    sections = {section: rows for section, rows in tomllib.loads(text).items() if (section == "flow") == flow}
    return {name: Limit(section, **values) for section, rows in sections.items() for name, values in rows.items()}


def problems(numbers: Mapping[str, int], limits: Mapping[str, Limit]) -> dict[str, str]:
    """Return what is wrong with each number, also if it has no limit, or if a limit has no number."""
    messages = {name: f"{name}: {LIMITS} has no limit for this number" for name in numbers.keys() - limits.keys()}
    messages |= {
        name: f"{name}: {LIMITS} limits a number that is not counted" for name in limits.keys() - numbers.keys()
    }
    for name in limits:
        if name in numbers and (message := limits[name].problem(name, numbers[name])) is not None:
            messages[name] = message
    return messages


def with_tightened(text: str, numbers: Mapping[str, int]) -> str:
    """Return the text of the limits, each as tight as its number allows, and none looser than before."""
    return _with_new_limits(text, {name: limit.tightened(numbers[name]) for name, limit in _both(text, numbers)})


def with_set(text: str, numbers: Mapping[str, int], names: Collection[str]) -> str:
    """Return the text of the limits with those of the named numbers, or without names all, set to the numbers.

    Raises ValueError for a name without a number or a limit.
    """
    limits = {name: limit for name, limit in _both(text, numbers) if limit.section != "bounds"}
    if unknown := sorted(set(names) - limits.keys()):
        raise ValueError(f"no number with such a limit is named {unknown[0]!r}, only: {', '.join(limits)}")
    return _with_new_limits(text, {name: limits[name].for_number(numbers[name]) for name in names or limits})


def _both(text: str, numbers: Mapping[str, int]) -> list[tuple[str, Limit]]:
    """Return the limits that have a number, with their names."""
    limits = read_limits(text) | read_limits(text, flow=True)
    return [(name, limit) for name, limit in limits.items() if name in numbers]


def _with_new_limits(text: str, new: Mapping[str, int]) -> str:
    for name, limit in new.items():
        row = re.compile(f"^('{re.escape(name)}' = {{ limit = )[0-9]+", re.MULTILINE)
        text = row.sub(rf"\g<1>{limit}", text)
    return text
