"""Choose the models that are unloaded to make room for another one. No clock, no I/O."""

from collections.abc import Sequence
from typing import NamedTuple


class Resident(NamedTuple):
    """A model in memory. A busy model is unloaded after its last answer; a model that is kept is never chosen."""

    name: str
    num_bytes: int
    used_at: float  # end of its last answer
    is_busy: bool = False
    is_kept: bool = False


def models_to_unload(missing_bytes: int, residents: Sequence[Resident]) -> list[str] | None:
    """Return the names of models that together have at least the missing bytes of memory, or None if there are too few.

    Idle models are chosen before busy ones, and among these the least recently used first. All chosen models are
    needed: the memory of the others would not be enough.
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
    for each in reversed(list(chosen)):  # the most recently used ones stay if possible
        if freed - each.num_bytes >= missing_bytes:
            chosen.remove(each)
            freed -= each.num_bytes
    return [each.name for each in chosen]
