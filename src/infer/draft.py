"""Guesses of what comes next, from what was there before: n-gram lookup over prompt and output. Loads no torch.

A guess costs a look at a dictionary; whether it is worth verifying is `DraftPolicy`'s to say, from what it measured.
What each guess would have been worth is seen when its token is there, whether it was verified or not.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
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
        self._start, self._match = -1, 0  # of the guess at the last token
        self.append(prompt_ids)

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return len(self._ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens that were accepted; drafts that were not are never appended."""
        for token_id in token_ids:
            self._append(token_id)

    def follow(self, token_id: int) -> tuple[int, bool]:
        """Append a token: what `match` was before it, and whether `propose` would have begun with it."""
        starts = self._append(token_id)
        start = next((start for start in reversed(starts) if start is not None), None)
        if start is None:
            self._start, self._match = -1, 0
            return 0, False
        ids = self._ids
        # A guess that goes on where the last one was right agrees with one token more.
        match = min(self._match + 1, MAX_MATCH) if start == self._start + 1 and self._match else 0
        if not match:
            match = self._count(start, len(ids) - 1, MIN_NGRAM)
        is_right = ids[start] == token_id
        self._start, self._match = start, match if is_right else 0
        return match, is_right

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
        start, size = self._found()
        return 0 if start is None else self._count(start, len(self._ids), size)

    def _count(self, start: int, end: int, known: int) -> int:
        """How many tokens before `start` agree with those before `end`; the first `known` do."""
        ids, most = self._ids, min(MAX_MATCH, start)
        while known < most and ids[start - 1 - known] == ids[end - 1 - known]:
            known += 1
        return known

    def _found(self) -> tuple[int | None, int]:
        """The place behind the last occurrence of the longest ending that has one, and that ending's size."""
        for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            ngram = self._ending(size)
            start = None if ngram is None else self._end_by_ngram.get(ngram)
            if start is not None:
                return start, size
        return None, 0

    def _append(self, token_id: int) -> tuple[int | None, ...]:
        """Note that each ending is followed now; where each was noted before, the shortest first."""
        ids, end_by_ngram, end = self._ids, self._end_by_ngram, len(self._ids)
        before = list[int | None]()
        for size in range(MIN_NGRAM, MAX_NGRAM + 1):
            if end < size:
                before.append(None)
                continue
            ngram = tuple(ids[end - size :])
            before.append(end_by_ngram.get(ngram))
            end_by_ngram[ngram] = end
        self._replaced.append(tuple(before))
        ids.append(token_id)
        return self._replaced[-1]

    def _ending(self, size: int) -> tuple[int, ...] | None:
        return tuple(self._ids[-size:]) if len(self._ids) >= size else None


@final
class StepTimes:
    """How long steps of one token, two, … take: the machine's and the model's, whoever asks for them."""

    def __init__(self) -> None:
        self._seconds_by_tokens: dict[int, float] = {}

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Of the whole step: forward, sampling and what waits for them; a chain's is divided by its length."""
        if seconds > 0:
            before = self._seconds_by_tokens.get(num_tokens)
            # What held up a step once may be over, as is what only the first one does: less counts more.
            mean = seconds
            if before is not None and seconds < before:
                mean = before + _FALLING * (seconds - before)
            elif before is not None:
                mean = before + _RISING * (min(seconds, 2 * before) - before)
            self._seconds_by_tokens[num_tokens] = mean

    def is_known(self, num_tokens: int) -> bool:
        return num_tokens in self._seconds_by_tokens

    def seconds(self, num_tokens: int) -> float:
        """Of a step of that many tokens: measured, or between and beyond what was; in steps where nothing was."""
        measured = self._seconds_by_tokens.get(num_tokens)
        if measured is not None:
            return measured
        known = sorted(self._seconds_by_tokens.items())
        if not known:
            return 1 + _COST_PER_TOKEN * (num_tokens - 1)
        for (left, least), (right, most) in pairwise(known):
            if left < num_tokens < right:
                return least + (most - least) * (num_tokens - left) / (right - left)
        nearest, seconds = known[-1] if num_tokens > known[-1][0] else known[0]
        slope = seconds / (1 + _COST_PER_TOKEN * (nearest - 1)) * _COST_PER_TOKEN
        if len(known) > 1 and num_tokens > nearest:
            slope = max(0.0, (seconds - known[0][1]) / (nearest - known[0][0]))
        return max(seconds + slope * (num_tokens - nearest), seconds * 0.1)


# What a proposal was right with behind so many equal tokens or more, in chat, copying, code and JSON by SmolLM2.
_PRIOR_BY_MATCH = {2: 0.45, 3: 0.7, 4: 0.78, 6: 0.83, 10: 0.92, 18: 0.95}
_RANGES = tuple(_PRIOR_BY_MATCH)
_RANGE_BY_MATCH = tuple(max(0, bisect_right(_RANGES, match) - 1) for match in range(MAX_MATCH + 1))
_PRIOR_WEIGHT = 4.0
_COUNTED = 0.9  # what a guess still weighs after the next one behind as many equal tokens
_COST_PER_TOKEN = 0.15  # of a step, until it is measured: a guess that is wrong soon corrects itself
_RISING, _FALLING = 0.1, 0.4
_PROBE_EVERY = 16  # proposals passed over while their time is all that speaks against them; doubles up to the most
_MAX_PROBE_EVERY = 256
_PLAIN_EVERY = 128  # steps, after which one without a draft is measured anew
_SHARE_COUNTED = 0.87  # what a token still weighs in the share of guessed ones after the next one
# The share of tokens that were guessed right, and how many plain ones may follow before the next look for a draft.
_TOKENS_BETWEEN = ((0.6, 1), (0.35, 2), (0.2, 4), (0.05, 8), (0.02, 16), (0.0, 64))


@final
class DraftPolicy:
    """How many tokens to draft: those with which a step yields the most tokens per second.

    A draft behind a match of m tokens is right with probability a(m), its next one with a(m + 1), and so on: k drafts
    give 1 + a(m) + a(m) a(m + 1) + … tokens, in the time of a step of k + 1. a(m) is counted for ranges of m as tokens
    come, recent ones weighing most: what would have been guessed is known for each of them, so nothing need be verified
    to find out that it would pay. k is 1, 3, 7, 15, … or the most: few sizes are soon measured, and kernels take tokens
    by eights. Where no k beats 1 step at a time by `margin`, it drafts nothing; where only times that were measured
    speak against it, one draft now and then measures them anew. What it asks for never changes which tokens are
    accepted.
    """

    def __init__(self, max_draft_tokens: int = 15, *, margin: float = 0.05) -> None:
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must be at least 0, got {max_draft_tokens}")
        sizes = {2**power - 1 for power in range(1, max_draft_tokens.bit_length() + 1)} | {max_draft_tokens}
        self._sizes = sorted(size for size in sizes if 0 < size <= max_draft_tokens)
        self._margin = margin
        self._guessed = [_PRIOR_WEIGHT] * len(_RANGES)
        self._right = [_PRIOR_WEIGHT * prior for prior in _PRIOR_BY_MATCH.values()]
        self._passed_over, self._probe_every = 0, _PROBE_EVERY
        self._since_plain = 0
        self._share = 0.3

    def acceptance(self, match: int) -> float:
        """How often a guess behind so many equal tokens was right, lately."""
        index = _RANGE_BY_MATCH[min(match, MAX_MATCH)]
        return self._right[index] / self._guessed[index]

    def observe(self, match: int, is_right: bool) -> None:
        """Of each token: behind how many equal ones it would have been guessed (0: it would not), and how."""
        self._share = self._share * _SHARE_COUNTED + (1 - _SHARE_COUNTED) * is_right
        if match:
            index = _RANGE_BY_MATCH[match]
            self._guessed[index] = self._guessed[index] * _COUNTED + 1
            self._right[index] = self._right[index] * _COUNTED + is_right

    def tokens_between(self, times: StepTimes) -> int:
        """How many tokens may follow without a draft before it is worth looking for one again."""
        if not times.is_known(1):
            return 1
        return next(count for share, count in _TOKENS_BETWEEN if self._share >= share)

    def num_draft_tokens(self, times: StepTimes, match: int = MAX_NGRAM, num_known: int = 1) -> int:
        """What to ask `propose` for, behind so many tokens that the step has anyway; call it once before each step
        that could be drafted."""
        self._since_plain += 1
        if not self._sizes or not times.is_known(1) or self._since_plain >= _PLAIN_EVERY:
            return self._plain()  # what a draft is measured against
        tokens, reached, at = 1.0, 1.0, 0
        best, speed, promised = 0, (1 + self._margin) / times.seconds(num_known), 0
        for size in self._sizes:
            for index in range(at, size):
                reached *= self.acceptance(match + index)
                tokens += reached
            at = size
            found = tokens / times.seconds(num_known + size)
            if found > speed:
                best, speed = size, found
            if not promised and tokens > (1 + self._margin) * (1 + _COST_PER_TOKEN * size):
                promised = size
        if best:
            self._passed_over, self._probe_every = 0, _PROBE_EVERY
            return best
        self._passed_over += promised > 0
        if self._passed_over < self._probe_every:
            return self._plain()
        self._passed_over = 0
        self._probe_every = min(2 * self._probe_every, _MAX_PROBE_EVERY)
        return promised

    def _plain(self) -> int:
        self._since_plain = 0
        return 0
