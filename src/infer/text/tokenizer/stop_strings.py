"""Find stop strings in streamed text, however the text is divided into pieces.

Invariant: the longest end of the text that is a proper prefix of a stop string is held back. So the shown text never
contains a part of a stop string. Time is linear in the text, for any number of stop strings. They form one automaton
(Aho, Corasick 1975), of which only the states that a text reaches are created.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from infer.errors import InvalidRequestError


class StopResult(NamedTuple):
    text: str
    """Text that may be shown now."""
    matched: str | None
    """The stop string that ended the text, or None."""


class StopStrings:
    """Finder of the stop string that completes first in the text. If several do, it is the longest.

    After a match, later text is dropped. With `include` the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        stops = [stops] if isinstance(stops, str) else stops
        if not all(stops):
            raise InvalidRequestError("stop must have strings that are not empty, got '': remove it")
        self._automaton = _Automaton(stops)
        self._state = self._automaton.root
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        if self.matched is not None:
            return StopResult("", self.matched)
        num_held = len(self._held)
        text = self._held + text
        for end in range(num_held + 1, len(text) + 1):
            self._state = self._automaton.after(self._state, text[end - 1])
            if (matched := self._state.match) is not None:
                self.matched = matched
                self._held = ""
                return StopResult(text[: end if self._include else end - len(matched)], matched)
        num_shown = len(text) - self._state.depth
        self._held = text[num_shown:]
        return StopResult(text[:num_shown], None)

    def flush(self) -> str:
        """Return the held text at the end of the stream."""
        held, self._held = self._held, ""
        self._state = self._automaton.root
        return held


class _State:
    """A text of `depth` characters, with which the stop strings [low, high) begin.

    `shorter` is the state of the longest proper suffix that is a state, `match` the longest stop string at the text's
    end.
    """

    __slots__ = ("after", "depth", "high", "low", "match", "shorter")

    def __init__(self, low: int, high: int, depth: int) -> None:
        self.low, self.high, self.depth = low, high, depth
        self.after: dict[str, _State | None] = {}  # by the next character, for the characters seen so far
        self.shorter: _State = self
        self.match: str | None = None


class _Automaton:
    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted(set(stops))
        self.root = _State(0, len(self.stops), 0)

    def after(self, state: _State, character: str) -> _State:
        """Return the state of the longest suffix of the state's text plus the character."""
        made: list[_State] = []  # new states whose `shorter` is not known yet, the longest first
        while True:
            if character in state.after:
                longer = state.after[character]
                if longer is not None:
                    break
            elif (longer := self._longer(state, character)) is not None:
                made.append(longer)
            if state is self.root:
                longer = self.root
                break
            state = state.shorter
        for each in reversed(made):
            each.shorter = longer
            each.match = each.match or longer.match
            longer = each
        return longer

    def _longer(self, state: _State, character: str) -> _State | None:
        depth = state.depth

        def next_character(stop: str) -> str:
            return stop[depth : depth + 1]

        low = bisect_left(self.stops, character, state.low, state.high, key=next_character)
        high = bisect_right(self.stops, character, low, state.high, key=next_character)
        longer = None
        if low < high:
            longer = _State(low, high, depth + 1)
            if len(self.stops[low]) == depth + 1:
                longer.match = self.stops[low]
        state.after[character] = longer
        return longer
