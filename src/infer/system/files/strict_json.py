"""Checks of JSON from others, for faults that Python's own reader accepts: constants, repeated keys and depth."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn


class RepeatedKeyError(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r:.60} appears twice: give it once")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `object_pairs_hook`. Raises RepeatedKeyError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RepeatedKeyError(next(name for name, count in counts.items() if count > 1))
    return found


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, for `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


def is_deeper(value: Any, depth: int) -> bool:
    """Return True if objects and lists are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        holders = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not holders:
            return False
        level = [item for each in holders for item in (each.values() if isinstance(each, Mapping) else each)]
    return True
