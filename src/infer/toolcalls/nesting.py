"""Depth of plain values."""

from collections.abc import Mapping
from typing import Any


def is_deeper(value: Any, depth: int) -> bool:
    """Return True if objects and lists are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        holders = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not holders:
            return False
        level = [item for each in holders for item in (each.values() if isinstance(each, Mapping) else each)]
    return True
