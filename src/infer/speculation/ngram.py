"""N-gram lookup over prompt and output, which guesses the next tokens. Loads no torch.

A guess costs one dictionary lookup. `DraftPolicy` decides from its measurements whether verifying the guess pays off.
Every guess is compared with the actual token, whether it was verified or not.
"""

from typing import NamedTuple, final

MAX_NGRAM = 4
MIN_NGRAM = 2
MAX_MATCH = 32
_MAX_SKIPPED = 3  # tokens of what is followed
_MAX_MISSES = 2  # from one that is followed well to the next
_BEHIND_A_MISS = 3  # as many equal tokens is one worth that follows a miss


class _Guess(NamedTuple):
    """A guess: the next token is the token at `start`. `start` is −1 if nothing is guessed."""

    start: int
    match: int
    misses: int = 0


_NONE = _Guess(-1, 0)


@final
class NgramDraft:
    """Propose the tokens that followed the most recent earlier place with the same ending as the text.

    The longest ending of 4, 3, then 2 tokens that occurred before wins. If none occurred, a copy that has just guessed
    wrong continues. If the actual token is among the next tokens of its source, the copy continues after that token.
    Otherwise it skips the wrong token. The index stores, for every n-gram, the place after its last occurrence before a
    known token. Appending a token is O(1).
    """

    def __init__(self, token_ids: list[int]) -> None:
        """Index the ids. `token_ids` is the caller's own list: the caller appends to it, then calls `follow`."""
        self._ids = ids = token_ids
        self._end_by_ngram: dict[tuple[int, ...], int] = {}  # the place after its last occurrence
        for size in range(MIN_NGRAM, MAX_NGRAM + 1):
            ngrams = zip(*(ids[start:] for start in range(size)), strict=False)
            self._end_by_ngram.update(zip(ngrams, range(size, len(ids)), strict=False))
        self._endings = self._make_endings()
        self._guess = self._guessed(_NONE)

    def __len__(self) -> int:
        """Return the number of tokens in prompt and output."""
        return len(self._ids)

    def follow(self, token_id: int) -> tuple[int, bool]:
        """Update the draft after a token was appended to the ids.

        Returns the value of `match` before the token, and whether `propose` would have begun with the token.
        """
        ids, guess = self._ids, self._guess
        is_right = guess.match > 0 and ids[guess.start] == token_id
        for ngram in self._endings:
            self._end_by_ngram[ngram] = len(ids) - 1
        self._endings = self._make_endings()
        self._guess = self._guessed(self._continued(guess, is_right=is_right))
        return guess.match, is_right

    def propose(self, max_tokens: int) -> list[int]:
        """Return `max_tokens` guessed tokens, or none if the ending is new.

        A copy that reaches the end of the text continues with its own tokens, so a repetition is guessed to repeat.
        """
        if not self._guess.match:
            return []
        ids, start = self._ids, self._guess.start
        period = len(ids) - start
        return ids[start : start + max_tokens] + [ids[start + i % period] for i in range(period, max_tokens)]

    def match(self) -> int:
        """Return the number of equal tokens before the guess of `propose`, up to MAX_MATCH. A longer match is more
        often right.

        Returns 1 if the previous token was not as guessed, and 0 if nothing would be proposed.
        """
        return self._guess.match

    def _make_endings(self) -> tuple[tuple[int, ...], ...]:
        """Return the endings of the text, the longest first."""
        ending = tuple(self._ids[-MAX_NGRAM:])
        return tuple(ending[-size:] for size in range(len(ending), MIN_NGRAM - 1, -1))

    def _continued(self, guess: _Guess, *, is_right: bool) -> _Guess:
        """Return the guess that follows a guess, given the actual token."""
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
        """Return a guess at the place of the longest ending, or `continued` if it agrees with more tokens."""
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
        """Return how many tokens before `start` agree with the last tokens. The first `known` are known to agree."""
        ids, most = self._ids, min(MAX_MATCH, start)
        while known < most and ids[start - 1 - known] == ids[-1 - known]:
            known += 1
        return known
