"""N-gram lookup in prompt and output, which guesses the next tokens. Loads no torch.

A guess costs one dictionary lookup. `DraftPolicy` decides from its measurements whether verifying the guess pays off.
Every guess is compared with the actual token, whether it was verified or not.
"""

from collections.abc import Mapping
from typing import NamedTuple, final

from infer.engine.speculation.policy import Drafter, Guess, Priors
from infer.sampling_params import SamplingParams

MAX_NGRAM = 4
MIN_NGRAM = 2
MAX_MATCH = 32
_MAX_SKIPPED = 3  # tokens of the source that may be skipped
_MAX_MISSES = 2  # misses between two good matches
_BEHIND_A_MISS = 3  # one equal token after a miss counts as this many equal tokens

# Measured with SmolLM2 in chat, copying, code and JSON.
PRIORS = Priors(
    (0.2, 0.5),
    {
        1: (0.12, 0.12, 0.4),
        2: (0.33, 0.42, 0.6),
        3: (0.45, 0.7, 0.85),
        4: (0.5, 0.7, 0.85),
        6: (0.6, 0.73, 0.8),
        10: (0.75, 0.82, 0.85),
        18: (0.9, 0.95, 0.97),
    },
)


class _Copy(NamedTuple):
    """The next token is guessed to be the token at `start`, which is −1 if nothing is guessed."""

    start: int
    match: int
    misses: int = 0


_NONE = _Copy(-1, 0)


@final
class NgramDraft:
    """Propose the tokens that followed the most recent earlier place with the same ending as the text.

    The longest ending of 4, 3, then 2 tokens that occurred before is used. If none occurred, a copy that has just
    guessed wrong continues. If the actual token is among the next tokens of its source, the copy continues after that
    token. Otherwise it skips the wrong token. The index has, for every n-gram, the place after its last occurrence
    before a known token. Appending a token is O(1).
    """

    def __init__(self, token_ids: list[int]) -> None:
        """Index the ids. `token_ids` is the caller's own list: the caller appends to it, then calls `follow`."""
        self._ids, self._length = token_ids, len(token_ids)
        self._end_by_ngram: dict[tuple[int, ...], int] = {}  # the place after its last occurrence
        for size in range(MIN_NGRAM, MAX_NGRAM + 1):
            ngrams = zip(*(token_ids[start:] for start in range(size)), strict=False)
            self._end_by_ngram.update(zip(ngrams, range(size, len(token_ids)), strict=False))
        self._endings = self._make_endings()
        self._guess = self._guessed(_NONE)

    @property
    def num_new(self) -> int:
        """Number of appended ids that were not followed yet."""
        return len(self._ids) - self._length

    def follow(self) -> Guess:
        """Read the next appended id, and return the guess for it."""
        ids, guess = self._ids, self._guess
        is_right = guess.match > 0 and ids[guess.start] == ids[self._length]
        for ngram in self._endings:
            self._end_by_ngram[ngram] = self._length
        self._length += 1
        self._endings = self._make_endings()
        self._guess = self._guessed(self._continued(guess, is_right=is_right))
        return Guess(guess.match, is_right)

    def propose(self, max_tokens: int) -> list[int]:
        """Return `max_tokens` guessed tokens, or none if the ending is new.

        A copy that reaches the end of the text continues with its own tokens, so a repetition is guessed to repeat.
        """
        if not self._guess.match:
            return []
        ids, start = self._ids, self._guess.start
        period = self._length - start
        return [ids[start + i % period] for i in range(max_tokens)]

    def match(self) -> int:
        """Return the number of equal tokens before the guess of `propose`, up to MAX_MATCH.

        A longer match is more often right. Returns 1 if the previous token was not as guessed, and 0 if there is no
        guess.
        """
        return self._guess.match

    def _make_endings(self) -> tuple[tuple[int, ...], ...]:
        """Return the endings of the text, the longest first."""
        ending = tuple(self._ids[max(0, self._length - MAX_NGRAM) : self._length])
        return tuple(ending[-size:] for size in range(len(ending), MIN_NGRAM - 1, -1))

    def _continued(self, guess: _Copy, *, is_right: bool) -> _Copy:
        """Return the guess after a guess, given the actual token."""
        start, match, misses = guess
        if not match:
            return _NONE
        if is_right:
            return _Copy(start + 1, min(max(match + 1, _BEHIND_A_MISS), MAX_MATCH), misses if match < MAX_NGRAM else 0)
        if misses == _MAX_MISSES:
            return _NONE
        last = self._length - 1
        skipped = self._ids[start + 1 : min(start + 1 + _MAX_SKIPPED, last)]
        if self._ids[last] in skipped:
            start += 1 + skipped.index(self._ids[last])
        return _Copy(start + 1, 1, misses + 1)

    def _guessed(self, continued: _Copy) -> _Copy:
        """Return a guess at the place of the longest ending, or `continued` if that agrees with more tokens."""
        for ngram in self._endings:
            start = self._end_by_ngram.get(ngram)
            if start is None:
                continue
            size = len(ngram)
            if start == continued.start or size < min(continued.match, MAX_NGRAM):
                break
            return _Copy(start, self._count(start, size))
        return continued

    def _count(self, start: int, known: int) -> int:
        """Return how many tokens before `start` agree with the last tokens. The first `known` are known to agree."""
        ids, last, most = self._ids, self._length - 1, min(MAX_MATCH, start)
        while known < most and ids[start - 1 - known] == ids[last - known]:
            known += 1
        return known


@final
class NgramDrafter(Drafter):
    """Looks up n-grams, which is a part of the step, so every token is guessed without a trial.

    The confidence is the number of equal tokens before the guess.
    """

    priors = PRIORS

    def __init__(self) -> None:
        self._drafts: dict[int, NgramDraft] = {}

    def begin(self, slot: int, token_ids: list[int], params: SamplingParams) -> None:
        self._drafts[slot] = NgramDraft(token_ids)

    def confidence(self, slot: int) -> int:
        return self._drafts[slot].match()

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        return {slot: self._drafts[slot].propose(count) for slot, count in counts.items()}

    def observe(self, slot: int) -> list[Guess | None]:
        draft = self._drafts[slot]
        return [draft.follow() for _ in range(draft.num_new)]

    def release(self, slot: int) -> None:
        self._drafts.pop(slot, None)
