"""A slot that is kept between the answers of a session."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import final


@final
class Lease:
    """`token_ids` are those that the slot's cache holds; none while an answer uses it.

    The engine takes the slot away where others need it: then it is None, and nothing is held.
    """

    def __init__(self) -> None:
        self.slot: int | None = None
        self.token_ids: list[int] = []
        self.last_used = 0

    def lose(self) -> None:
        self.token_ids = []
        self.slot = None


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids both begin with."""
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))
