"""Choose the models that are unloaded to make room for another one. No clock, no I/O."""

from collections.abc import Sequence
from typing import NamedTuple


class Resident(NamedTuple):
    """A model in memory. A busy one is unloaded after its last answer; one that is kept is never chosen."""

    name: str
    num_bytes: int
    used_at: float  # when its last answer ended
    is_busy: bool = False
    is_kept: bool = False


def models_to_unload(missing_bytes: int, residents: Sequence[Resident]) -> list[str] | None:
    """Return the names of the models whose memory is at least the missing bytes; None if there are too few.

    Idle models are chosen before busy ones, and among these the least recently used first. None of the chosen models
    could stay: the memory of the others would not do.
    """
    candidates = [each for each in residents if not each.is_kept]
    candidates.sort(key=lambda each: (each.is_busy, each.used_at))
    chosen, freed = list[Resident](), 0
    for each in candidates:
        if freed >= missing_bytes:
            break
        chosen.append(each)
        freed += each.num_bytes
    if freed < missing_bytes:
        return None
    for each in reversed(list(chosen)):  # the most recently used ones stay if they can
        if freed - each.num_bytes >= missing_bytes:
            chosen.remove(each)
            freed -= each.num_bytes
    return [each.name for each in chosen]
