"""Find prompts that differ from an earlier one near their beginning and are equal to it afterwards.

The cause is often a date, a counter or a checksum that changes in each request of a program. All tokens after it are
read again, although they are known. A log line names the place, so that the program can move it to the prompt's end.
"""

import logging
from collections import deque
from operator import attrgetter
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from infer.engine.step.sequence import Sequence

LEAST_TOKENS = 256  # shortest prompt that is examined; at least half as many tokens must be read again
_NUM_PROMPTS = 32  # earlier prompts with which a prompt is compared
_SKIPPED, _COMPARED = 32, 16  # after the difference: tokens that may differ, then tokens that must be found
_MOST_SHIFTED = 256  # tokens that may be missing or added at the difference
_MOST_SHIFTS = 4  # shifts that are tried; a text that repeats itself has hundreds
_MOST_TOLD = 16  # places that are logged

log = logging.getLogger("infer.server")
_Ids = npt.NDArray[np.int32]


class PrefixEnd(NamedTuple):
    """A prompt differs from an earlier one at `position`; `num_again` equal tokens follow that are read again."""

    position: int
    num_again: int


@final
class PrefixEnds:
    """The last prompts of an engine, and the places that were logged."""

    def __init__(self) -> None:
        self._prompts = deque[tuple[bytes, _Ids]](maxlen=_NUM_PROMPTS)  # salts and ids
        self._told = set[int]()

    def look(self, sequence: Sequence) -> None:
        """Compare a sequence's prompt with the last ones, and log each new place where it differs.

        The prompt has at least `LEAST_TOKENS` tokens.
        """
        if len(self._told) == _MOST_TOLD:
            return
        ids = np.array(sequence.request.prompt_token_ids, np.int32)
        earlier = [other for salt, other in self._prompts if salt == sequence.request.salt]
        self._prompts.append((sequence.request.salt, ids))
        ends = [end for other in earlier if (end := prefix_end(other, ids)) is not None]
        end = max(ends, key=attrgetter("num_again"), default=None)
        if end is None or end.position in self._told or sequence.num_reused > end.position:
            return
        self._told.add(end.position)
        log.warning(
            "a prompt of %d tokens differs from an earlier one at token %d, and is equal again afterwards: "
            "%d known tokens are read again", len(ids), end.position, end.num_again,
        )  # fmt: skip
        if log.isEnabledFor(logging.DEBUG):
            around = sequence.token_ids[max(0, end.position - _COMPARED) : end.position + _SKIPPED]
            log.debug("the prompt around that token: %r", sequence.request.tokenizer.decode(around))


def prefix_end(earlier: _Ids, prompt: _Ids) -> PrefixEnd | None:
    """Return where a prompt begins to differ from an earlier one whose rest it contains, or None."""
    position = _common(earlier, prompt)
    rest = earlier[position + _SKIPPED :]
    places = prompt[position : position + _SKIPPED + _MOST_SHIFTED]
    if min(len(rest), len(places)) < _COMPARED:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(places, _COMPARED)
    equal = np.flatnonzero((windows == rest[:_COMPARED]).all(axis=1))[:_MOST_SHIFTS]
    num_again = max((_common(rest, prompt[position + int(shift) :]) for shift in equal), default=0)
    return PrefixEnd(position, num_again) if num_again >= LEAST_TOKENS // 2 else None


def _common(left: _Ids, right: _Ids) -> int:
    """Return the length of the common prefix."""
    count = min(len(left), len(right))
    unequal = np.flatnonzero(left[:count] != right[:count])
    return int(unequal[0]) if len(unequal) else count
