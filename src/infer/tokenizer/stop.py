"""Stop strings found in streamed text, wherever the pieces are cut.

Invariant: what is held back is the longest end of the text that is a proper prefix of some stop string; so the text
shown never holds a part of a stop string that is cut from it. Time is linear: one Knuth-Morris-Pratt state per stop.
"""

from collections.abc import Sequence
from typing import NamedTuple

from infer.errors import InvalidRequestError


class StopResult(NamedTuple):
    text: str
    """What may be shown now."""
    matched: str | None
    """The stop string that ended the text, if one did."""


class StopStrings:
    """Finds the stop string that completes first in the text; of those that complete there, the longest.

    Once one has matched, the text is over: later text is dropped. `include` shows the stop string itself.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if isinstance(stops, str):
            stops = [stops]
        if not all(stops):
            raise InvalidRequestError("stop must hold non-empty strings, got ''; remove it")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._num_matching = [0] * len(self._stops)  # the longest prefix of each stop that ends the text so far
        self._include = include
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        return self._matched

    def push(self, text: str) -> StopResult:
        if self._matched is not None or not self._stops:
            return StopResult("" if self._stops else text, self._matched)
        num_held = len(self._held)
        text = self._held + text
        for end in range(num_held + 1, len(text) + 1):
            self._matched = self._advance(text[end - 1])
            if self._matched is not None:
                self._held = ""
                return StopResult(text[: end if self._include else end - len(self._matched)], self._matched)
        num_shown = len(text) - max(self._num_matching)
        self._held = text[num_shown:]
        return StopResult(text[:num_shown], None)

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        self._num_matching = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; the longest stop string that it completes."""
        for index, stop in enumerate(self._stops):
            length = self._num_matching[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            length += stop[length] == character
            if length == len(stop):
                return stop
            self._num_matching[index] = length
        return None


def _borders(text: str) -> list[int]:
    """Of each prefix, the length of its longest proper prefix that also ends it (Knuth, Morris, Pratt 1977)."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = borders[length - 1]
        length += text[length] == text[index]
        borders[index] = length
    return borders
