"""Guesses of what comes next, from what was there before: n-gram lookup over prompt and output. Loads no torch.

A guess costs a look at a dictionary; whether it is worth verifying is `DraftPolicy`'s to say, from what it measured.
What each guess would have been worth is seen when its token is there, whether it was verified or not.
"""

from typing import NamedTuple, final

NUM_DRAFT_TOKENS = 15  # in one step, unless asked otherwise
MAX_DRAFT_TOKENS = 32
MAX_NGRAM = 4
MIN_NGRAM = 2
MAX_MATCH = 32
_MAX_SKIPPED = 3  # tokens of what is followed
_MAX_MISSES = 2  # from one that is followed well to the next
_BEHIND_A_MISS = 3  # as many equal tokens is one worth that follows a miss


class _Guess(NamedTuple):
    """The next token is that at `start`, which is −1 where nothing is guessed."""

    start: int
    match: int
    misses: int = 0


_NONE = _Guess(-1, 0)


@final
class NgramDraft:
    """Proposes what followed the most recent earlier place that ends as the text does now.

    The longest ending of 4, 3, then 2 tokens that was there before wins. Where none was, a copy that has just gone
    wrong goes on: after the token that was another, or where that token stands among the next ones of its source. The
    index holds, for every n-gram, where it last ended before a token that is known: appending a token is O(1).
    """

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` are the caller's own list: it appends to it, then calls `follow`."""
        self._ids = ids = token_ids
        self._end_by_ngram: dict[tuple[int, ...], int] = {}  # the place after its last occurrence
        for size in range(MIN_NGRAM, MAX_NGRAM + 1):
            ngrams = zip(*(ids[start:] for start in range(size)), strict=False)
            self._end_by_ngram.update(zip(ngrams, range(size, len(ids)), strict=False))
        self._endings = self._make_endings()
        self._guess = self._guessed(_NONE)

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return len(self._ids)

    def follow(self, token_id: int) -> tuple[int, bool]:
        """A token was appended to the ids: what `match` was before it, and whether `propose` would have begun so."""
        ids, guess = self._ids, self._guess
        is_right = guess.match > 0 and ids[guess.start] == token_id
        for ngram in self._endings:
            self._end_by_ngram[ngram] = len(ids) - 1
        self._endings = self._make_endings()
        self._guess = self._guessed(self._continued(guess, is_right=is_right))
        return guess.match, is_right

    def propose(self, max_tokens: int) -> list[int]:
        """At most that many tokens; none where the ending is new.

        A copy that reaches the end of the text goes on with itself: what repeats is guessed to repeat.
        """
        if not self._guess.match:
            return []
        ids, start = self._ids, self._guess.start
        period = len(ids) - start
        return ids[start : start + max_tokens] + [ids[start + i % period] for i in range(period, max_tokens)]

    def match(self) -> int:
        """How many tokens agree before what `propose` would give, up to MAX_MATCH: the more, the likelier it is right.

        1 where the token before was not as guessed, 0 where nothing would be proposed.
        """
        return self._guess.match

    def _make_endings(self) -> tuple[tuple[int, ...], ...]:
        """The longest first."""
        ending = tuple(self._ids[-MAX_NGRAM:])
        return tuple(ending[-size:] for size in range(len(ending), MIN_NGRAM - 1, -1))

    def _continued(self, guess: _Guess, *, is_right: bool) -> _Guess:
        """What is guessed after a guess and the token that came."""
        start, match, misses = guess
        if not match:
            return _NONE
        if is_right:
            return _Guess(start + 1, min(max(match + 1, _BEHIND_A_MISS), MAX_MATCH), misses if match < MAX_NGRAM else 0)
        if misses == _MAX_MISSES:
            return _NONE
        ids = self._ids
        skipped = ids[start + 1 : min(start + 1 + _MAX_SKIPPED, len(ids) - 1)]
        if ids[-1] in skipped:
            start += 1 + skipped.index(ids[-1])
        return _Guess(start + 1, 1, misses + 1)

    def _guessed(self, continued: _Guess) -> _Guess:
        """The place of the longest ending, or `continued` where that agrees with more."""
        for ngram in self._endings:
            start = self._end_by_ngram.get(ngram)
            if start is None:
                continue
            size = len(ngram)
            if start == continued.start or size < min(continued.match, MAX_NGRAM):
                break
            return _Guess(start, self._count(start, size))
        return continued

    def _count(self, start: int, known: int) -> int:
        """How many tokens before `start` agree with the last ones; the first `known` do."""
        ids, most = self._ids, min(MAX_MATCH, start)
        while known < most and ids[start - 1 - known] == ids[-1 - known]:
            known += 1
        return known
