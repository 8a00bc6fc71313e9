"""Guesses of what comes next, from what was there before: n-gram lookup over prompt and output. Loads no torch.

A guess costs a look at a dictionary; whether it is worth verifying is `DraftPolicy`'s to say, from what it measured.
"""

from collections.abc import Iterable
from typing import final

NUM_DRAFT_TOKENS = 15  # in one step, unless asked otherwise
MAX_DRAFT_TOKENS = 32
MAX_NGRAM = 4
MIN_NGRAM = 2
MAX_MATCH = 32


@final
class NgramDraft:
    """Proposes what followed the most recent earlier place that ends as the text does now.

    The longest ending of 4, 3, then 2 tokens that was there before wins. The index holds, for every n-gram, where it
    last ended before a token that is known: appending and dropping a token are both O(1).
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._end_by_ngram: dict[tuple[int, ...], int] = {}  # the place behind its last occurrence
        self._replaced: list[tuple[int | None, ...]] = []  # per place, what each size's entry was before
        self.append(prompt_ids)

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return len(self._ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens that were accepted; drafts that were not are never appended."""
        for token_id in token_ids:
            self._replaced.append(tuple(self._enter(size) for size in range(MIN_NGRAM, MAX_NGRAM + 1)))
            self._ids.append(token_id)

    def drop(self, num_tokens: int) -> None:
        """Take back the last tokens, as if they had never been appended."""
        if not 0 <= num_tokens <= len(self._ids):
            raise ValueError(f"num_tokens must be from 0 to the {len(self._ids)} there are, got {num_tokens}")
        for _ in range(num_tokens):
            self._ids.pop()
            for size, replaced in enumerate(self._replaced.pop(), MIN_NGRAM):
                ngram = self._ending(size)
                if ngram is None:
                    continue
                if replaced is None:
                    del self._end_by_ngram[ngram]
                else:
                    self._end_by_ngram[ngram] = replaced

    def propose(self, max_tokens: int) -> list[int]:
        """At most that many tokens; none where the ending is new.

        A copy that reaches the end of the text goes on with itself: what repeats is guessed to repeat.
        """
        start, _ = self._found()
        if start is None:
            return []
        period = len(self._ids) - start
        return [self._ids[start + index % period] for index in range(max_tokens)]

    def match(self) -> int:
        """How many tokens agree before what `propose` would give, up to MAX_MATCH: the more, the likelier it is right.

        0 where nothing would be proposed.
        """
        start, count = self._found()
        if start is None:
            return 0
        ids, end = self._ids, len(self._ids)
        while count < min(MAX_MATCH, start) and ids[start - 1 - count] == ids[end - 1 - count]:
            count += 1
        return count

    def _found(self) -> tuple[int | None, int]:
        """The place behind the last occurrence of the longest ending that has one, and that ending's size."""
        for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            ngram = self._ending(size)
            start = None if ngram is None else self._end_by_ngram.get(ngram)
            if start is not None:
                return start, size
        return None, 0

    def _enter(self, size: int) -> int | None:
        """Note that the ending is about to be followed; returns where it was noted before."""
        ngram = self._ending(size)
        if ngram is None:
            return None
        before = self._end_by_ngram.get(ngram)
        self._end_by_ngram[ngram] = len(self._ids)
        return before

    def _ending(self, size: int) -> tuple[int, ...] | None:
        return tuple(self._ids[-size:]) if len(self._ids) >= size else None


# What a proposal was right with behind so many equal tokens or more, in chat, copying, code and JSON by SmolLM2.
_PRIOR_BY_MATCH = {2: 0.45, 3: 0.7, 4: 0.78, 6: 0.83, 10: 0.92, 18: 0.95}
_PRIOR_WEIGHT = 4.0
_COUNTED = 0.95  # what a verified draft still weighs after the next one
_COST_PER_TOKEN = 0.15  # of a step, until it is measured: a guess that is wrong soon corrects itself
_SMOOTHING = 0.2
_PROBE_EVERY = 16  # proposals passed over while drafting does not pay; doubles up to the most
_MAX_PROBE_EVERY = 256
_PLAIN_EVERY = 128  # steps, after which one without a draft is measured anew
_SHARE_COUNTED = 0.85  # what a token still weighs in the share of drafted ones after the next one
# The share of tokens that came from drafts, and how many plain ones may follow before the next look for a draft.
_TOKENS_BETWEEN = ((0.35, 1), (0.08, 3), (0.02, 8), (0.0, 16))


@final
class DraftPolicy:
    """How many tokens to draft: those with which a step yields the most tokens per second.

    A draft behind a match of m tokens is right with probability a(m), its next one with a(m + 1), and so on: k drafts
    give 1 + a(m) + a(m) a(m + 1) + … tokens, in the time of a step of k + 1. Both are measured as it goes: a(m) for
    ranges of m, recent drafts weighing most; times as running means per number of tokens, those between and beyond
    interpolated. k is 1, 3, 7, 15, … or the most: few sizes are soon measured, and kernels take tokens by eights.
    Where no k beats 1 step at a time by `margin`, it drafts nothing; one short probe now and then finds out whether
    that has changed. Where times come from never changes which tokens are accepted.
    """

    def __init__(self, max_draft_tokens: int = 15, *, margin: float = 0.05) -> None:
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must be at least 0, got {max_draft_tokens}")
        self._most = max_draft_tokens
        self._sizes = sorted({2**power - 1 for power in range(1, max_draft_tokens.bit_length() + 1)} | {self._most})
        self._sizes = [size for size in self._sizes if 0 < size <= self._most]
        self._margin = margin
        self._proposed = dict.fromkeys(_PRIOR_BY_MATCH, _PRIOR_WEIGHT)
        self._accepted = {match: _PRIOR_WEIGHT * prior for match, prior in _PRIOR_BY_MATCH.items()}
        self._seconds_by_tokens: dict[int, float] = {}
        self._passed_over = 0
        self._probe_every = _PROBE_EVERY
        self._since_plain = 0
        self._match = MAX_NGRAM
        self._share = 0.3

    def acceptance(self, match: int) -> float:
        """How often a drafted token behind so many equal ones was right, lately."""
        at_least = _range_of(match)
        return self._accepted[at_least] / self._proposed[at_least]

    @property
    def tokens_between(self) -> int:
        """How many tokens may follow without a draft before it is worth looking for one again."""
        if not self._seconds_by_tokens:
            return 1
        return next(count for share, count in _TOKENS_BETWEEN if self._share >= share)

    def num_draft_tokens(self, match: int = MAX_NGRAM) -> int:
        """What to ask `propose` for; call it once before each step that could be drafted."""
        self._match = match
        self._since_plain += 1
        if 1 not in self._seconds_by_tokens or self._since_plain >= _PLAIN_EVERY:
            return 0  # what a draft is measured against
        best = max(self._sizes, key=self._speed, default=0)
        if best and self._speed(best) > self._speed(0) * (1 + self._margin):
            self._probe_every = _PROBE_EVERY
            self._passed_over = 0
            return best
        self._passed_over += 1
        if self._most and self._passed_over >= self._probe_every:
            self._passed_over = 0
            self._probe_every = min(2 * self._probe_every, _MAX_PROBE_EVERY)
            return self._sizes[0]
        return 0

    def learn(self, proposed: int, accepted: int, seconds: float, num_plain: int = 1) -> None:
        """From a step that verified `proposed` tokens, of which the first `accepted` were right; 0, 0 for a plain step.

        `seconds` is the whole step of proposed + 1 tokens: forward, sampling and what waits for them; a chain's is
        divided by its length, which is `num_plain`. 0 or less means that it was not measured.
        """
        if not 0 <= accepted <= proposed:
            raise ValueError(f"accepted must be from 0 to the {proposed} proposed, got {accepted}")
        for index in range(accepted + (accepted < proposed)):  # behind the first wrong one nothing was looked at
            at_least = _range_of(self._match + index)
            self._proposed[at_least] = self._proposed[at_least] * _COUNTED + 1
            self._accepted[at_least] = self._accepted[at_least] * _COUNTED + (index < accepted)
        count = accepted + 1 if proposed else num_plain
        weight = _SHARE_COUNTED**count
        self._share = self._share * weight + (1 - weight) * accepted / count
        if not proposed:
            self._since_plain = 0
        if seconds > 0:
            before = self._seconds_by_tokens.get(proposed + 1)
            # A step that was held up by something else counts as at most twice what is usual.
            mean = seconds if before is None else before + _SMOOTHING * (min(seconds, 2 * before) - before)
            self._seconds_by_tokens[proposed + 1] = mean

    def step_seconds(self, num_tokens: int) -> float:
        """Of a step of that many tokens: measured, or between and beyond what was; in steps where nothing was."""
        known = sorted(self._seconds_by_tokens.items())
        if not known:
            return 1 + _COST_PER_TOKEN * (num_tokens - 1)
        below = [point for point in known if point[0] <= num_tokens]
        above = [point for point in known if point[0] > num_tokens]
        if below and below[-1][0] == num_tokens:
            return below[-1][1]
        if below and above:
            (left, least), (right, most) = below[-1], above[0]
            return least + (most - least) * (num_tokens - left) / (right - left)
        nearest, seconds = (below or above[:1])[-1]
        slope = seconds / (1 + _COST_PER_TOKEN * (nearest - 1)) * _COST_PER_TOKEN
        if len(below) > 1:
            slope = max(0.0, (seconds - below[0][1]) / (nearest - below[0][0]))
        return max(seconds + slope * (num_tokens - nearest), seconds * 0.1)

    def _speed(self, num_drafts: int) -> float:
        tokens, reached = 1.0, 1.0
        for index in range(num_drafts):
            reached *= self.acceptance(self._match + index)
            tokens += reached
        return tokens / self.step_seconds(num_drafts + 1)


def _range_of(match: int) -> int:
    return max((at_least for at_least in _PRIOR_BY_MATCH if at_least <= match), default=MIN_NGRAM)
