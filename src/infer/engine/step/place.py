"""The place of a sequence among the others of its engine, and a slot that a session keeps between its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import final


@final
class Lease:
    """A slot that a session keeps. `token_ids` are the ids in the slot; there are none while an answer uses it.

    If others need the slot, the engine takes it away. Then `slot` is None, and no tokens are stored.
    """

    def __init__(self) -> None:
        self.slot: int | None = None
        self.token_ids: list[int] = []
        self.last_used = 0

    def lose(self) -> None:
        self.token_ids = []
        self.slot = None


@final
@dataclass(slots=True)
class Place:
    """The values that an engine's queue keeps of one sequence."""

    number: int = 0  # in the order of submission
    submitted_at: float = 0.0  # by time.perf_counter
    lease: Lease | None = None  # the slot that the sequence passes on to the next one of its session
    entry: int = 0  # in the order in which sequences first got a slot
    paid: int | None = None  # work that its tenant paid; None before it has entered
    num_given: int = 0  # tokens that it had generated when it last got a slot
    passed: int = 0  # work of the sequences that passed it while it waited for pages


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))
