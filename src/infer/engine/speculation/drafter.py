"""`Drafter`: the interface of classes that guess the next tokens of sequences. Loads no torch."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, final, runtime_checkable


class Guess(NamedTuple):
    """The drafter's guess for a token that is now known. `confidence` is 0 if the drafter did not guess."""

    confidence: int
    is_right: bool


@final
class Priors:
    """Rates of right guesses by confidence, until rates are measured.

    There are three rates for each range of confidences. They apply if the share of right guesses among the last tokens
    is below the first of `shares`, below the second, or higher.
    """

    def __init__(self, shares: tuple[float, float], rates: Mapping[int, tuple[float, float, float]]) -> None:
        """Begin with `rates`, which are by the first confidence of each range, in increasing order."""
        starts = tuple(rates)
        self.shares = shares
        self.rates: tuple[tuple[float, ...], ...] = tuple(zip(*rates.values(), strict=True))  # by share, then by range
        self._range_by_confidence = tuple(max(0, bisect_right(starts, each) - 1) for each in range(starts[-1] + 1))

    def range_of(self, confidence: int) -> int:
        """Return the index of the range of a confidence."""
        return self._range_by_confidence[min(confidence, len(self._range_by_confidence) - 1)]


@runtime_checkable
class Drafter(Protocol):
    """Drafts for the sequences of one engine, which calls it on its own thread. A sequence is named by its slot.

    Before each step, the engine asks for the confidence of each sequence, and decides how many drafts pay off. Then it
    calls `propose` once for all sequences. So a drafter makes no token that is not verified, and can compute the drafts
    of all sequences in one batch.
    """

    @property
    def priors(self) -> Priors:
        """Expected rates of right guesses by this drafter's confidences."""

    def begin(self, slot: int, token_ids: list[int]) -> None:
        """Begin to draft for the sequence in a slot. `token_ids` is the sequence's own list, which grows."""

    def confidence(self, slot: int) -> int:
        """Return the confidence of the next guess, or 0 if there is none. For each further guess it is one higher."""

    def propose(self, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Return the drafts of each slot, at most `counts[slot]` tokens."""

    def observe(self, slot: int) -> list[Guess]:
        """Read the tokens that were appended to the sequence's ids, and return the guess for each."""

    def release(self, slot: int) -> None:
        """Free the state of a slot. A slot without a sequence is ignored."""
