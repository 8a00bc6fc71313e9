"""Guesses of what comes next, from what was there before: n-gram lookup over prompt and output. Loads no torch.

A guess costs a look at a dictionary; whether it is worth verifying is `DraftPolicy`'s to say, from what it measured.
"""

from collections.abc import Iterable
from typing import final

MAX_NGRAM = 4
MIN_NGRAM = 2


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
        for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            ngram = self._ending(size)
            start = None if ngram is None else self._end_by_ngram.get(ngram)
            if start is not None:
                period = len(self._ids) - start
                return [self._ids[start + index % period] for index in range(max_tokens)]
        return []

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


_COUNTED = 0.9  # what a verified draft still weighs after the next one
_PRIOR_PROPOSED, _PRIOR_ACCEPTED = 4.0, 2.4
_COST_PER_TOKEN = 0.3  # of a step, until it is measured: a guess that is wrong soon corrects itself
_SMOOTHING = 0.2
_PROBE_EVERY = 16  # proposals passed over while drafting does not pay; doubles up to the most
_MAX_PROBE_EVERY = 256
_PLAIN_EVERY = 128  # steps, after which one without a draft is measured anew


@final
class DraftPolicy:
    """How many tokens to draft: those with which a step yields the most tokens per second.

    With acceptance a per token, k drafts give 1 + a + … + a^k tokens, in the time of a step of k + 1 tokens. Both are
    measured as it goes: a with recent drafts weighing most, times as running means per number of tokens, those between
    and beyond interpolated. Where no k beats 1 step at a time by `margin`, it drafts nothing; one short probe now and
    then finds out whether that has changed. Where times come from never changes which tokens are accepted.
    """

    def __init__(self, max_draft_tokens: int = 8, *, margin: float = 0.03) -> None:
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must be at least 0, got {max_draft_tokens}")
        self._most = max_draft_tokens
        self._margin = margin
        self._proposed, self._accepted = _PRIOR_PROPOSED, _PRIOR_ACCEPTED
        self._seconds_by_tokens: dict[int, float] = {}
        self._passed_over = 0
        self._probe_every = _PROBE_EVERY
        self._since_plain = 0

    @property
    def acceptance(self) -> float:
        """How often a drafted token that was reached was right, lately."""
        return self._accepted / self._proposed

    def num_draft_tokens(self) -> int:
        """What to ask `propose` for; call it once before each step that could be drafted."""
        self._since_plain += 1
        if 1 not in self._seconds_by_tokens or self._since_plain >= _PLAIN_EVERY:
            return 0  # what a draft is measured against
        best = max(range(self._most + 1), key=self._speed, default=0)
        if best and self._speed(best) > self._speed(0) * (1 + self._margin):
            self._probe_every = _PROBE_EVERY
            self._passed_over = 0
            return best
        self._passed_over += 1
        if self._most and self._passed_over >= self._probe_every:
            self._passed_over = 0
            self._probe_every = min(2 * self._probe_every, _MAX_PROBE_EVERY)
            return min(2, self._most)
        return 0

    def learn(self, proposed: int, accepted: int, seconds: float) -> None:
        """From a step that verified `proposed` tokens, of which the first `accepted` were right; 0, 0 for a plain step.

        `seconds` is the whole step of proposed + 1 tokens: forward, sampling and what waits for them; a chain's is
        divided by its length. 0 or less means that it was not measured.
        """
        if not 0 <= accepted <= proposed:
            raise ValueError(f"accepted must be from 0 to the {proposed} proposed, got {accepted}")
        if proposed:
            reached = accepted + (accepted < proposed)  # behind the first wrong one nothing was looked at
            self._proposed = self._proposed * _COUNTED + reached
            self._accepted = self._accepted * _COUNTED + accepted
        else:
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
        tokens = sum(self.acceptance**index for index in range(num_drafts + 1))
        return tokens / self.step_seconds(num_drafts + 1)
