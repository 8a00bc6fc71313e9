"""`Drafter`, the interface of classes that guess the next tokens of sequences, and the number of tokens to draft.

The number follows from measured step times and the rate of right guesses. Loads no torch.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import NamedTuple, Protocol, final, runtime_checkable

from infer.sampling_params import SamplingParams

_COST_PER_TOKEN = 0.15  # assumed cost of a further token, relative to a step, until it is measured
_LEAST_PER_TOKEN = 0.04  # smallest cost of a further token on any machine
_TICK = 1e-9  # seconds: a clock does not measure less
_SURPRISE = 0.3  # largest contradiction of one step's time, as a logarithm, because the step may have been held up
_NUM_TRUSTED = 3  # with fewer measurements, the cost of a size is assumed to be lower
_HALVED_AFTER = 200  # steps, after which an old measurement has half its weight


class Guess(NamedTuple):
    """The drafter's guess for a token that is now known. `confidence` is 0 if the drafter did not guess."""

    confidence: int
    is_right: bool


@final
@dataclass(frozen=True)
class Priors:
    """Rates of right guesses by confidence, until rates are measured.

    There are three rates for each range of confidences. They apply if the share of right guesses among the last tokens
    is below the first of `shares`, below the second, or higher.
    """

    shares: tuple[float, float]
    rates: Mapping[int, tuple[float, float, float]]  # by the first confidence of each range, in increasing order
    share: float = 0.3  # expected share of right guesses
    is_steady: bool = False  # True if a drafter's confidence never changes


@runtime_checkable
class Drafter(Protocol):
    """Drafts for the sequences of one engine, which calls it on its own thread. A sequence is named by its slot.

    By default, drafts take no time and no memory.

    Before each step, the engine asks for the confidence of each sequence, and decides how many drafts pay off. Then it
    calls `propose` once for all sequences. So a drafter makes no token that is not verified, and can compute the drafts
    of all sequences in one batch.
    """

    @property
    def priors(self) -> Priors:
        """Expected rates of right guesses by this drafter's confidences."""

    def begin(self, slot: int, token_ids: list[int], params: SamplingParams) -> None:
        """Begin to draft for the sequence in a slot. `token_ids` is the sequence's own list, which grows."""

    def confidence(self, slot: int) -> int:
        """Return the confidence of the next guess, or 0 if there is none. For each further guess it is one higher."""

    def seconds(self, slot: int, count: int) -> float:
        """Return the time in which `count` drafts are made. It is infinite if the drafter may not spend it now."""
        return 0.0

    def reading_seconds(self, slot: int) -> float:
        """Return the time in which the drafter reads the tokens that it lacks, before its first draft."""
        return 0.0

    def trial(self, slot: int, horizon_seconds: float) -> int:
        """Return the number of drafts to make only to learn how often they are right, usually 0.

        Without drafts, the tokens that the drafter is expected to serve take `horizon_seconds`.
        """
        return 0

    def propose(self, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Return the drafts of each slot, at most `counts[slot]` tokens."""

    def observe(self, slot: int) -> list[Guess | None]:
        """Read the tokens that were appended to the sequence's ids, and return the guess for each.

        None stands for a token for which the drafter was not asked.
        """

    def account(self, gained: float, elapsed: float, pace: float) -> None:
        """Record a step of `elapsed` seconds, in which drafts saved `gained` seconds, or lost them if negative.

        `pace` is the time of a step without drafts, or 0 if it is unknown.
        """
        return

    def release(self, slot: int) -> None:
        """Free the state of a slot. A slot without a sequence is ignored."""

    def trim(self) -> int:
        """Return unused memory to the system, and return the number of bytes."""
        return 0


@final
class _Cost:
    """Cost of a step of several tokens, as a multiple of the cost of a step of one token."""

    def __init__(self, cost: float) -> None:
        self.cost, self.count, self.last = cost, 0, 0


@final
class StepTimes:
    """Times of steps of one token, two tokens, and so on. They depend on the machine and the model, not on the caller.

    Two values are learnt separately. The time of a step of one token is the machine's pace, which can change quickly.
    The relative cost of a step with more tokens is stable. So a slow moment that affects all sizes does not change the
    choice. A single time that contradicts a size's known cost needs others to confirm it, and loses weight over time.
    """

    def __init__(self) -> None:
        self._pace = 0.0  # seconds of a step of one token
        self._costs: dict[int, _Cost] = {}
        self._num_steps, self._last_plain = 0, 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a whole step: forward, sampling, and the waits for both.

        For a multi-step, the caller divides the time by the number of steps.
        """
        if seconds < _TICK:
            return
        self._num_steps += 1
        if num_tokens == 1:
            if not self._pace:
                self._pace = seconds
            error = log(seconds / self._pace)
            gain = max(0.3, min(0.8, (self._num_steps - self._last_plain) / 32)) if error > -_SURPRISE else 1.0
            self._pace *= exp(gain * min(error, _SURPRISE))
            self._last_plain = self._num_steps
        elif self._pace:
            self._learn_cost(num_tokens, seconds)

    def _learn_cost(self, num_tokens: int, seconds: float) -> None:
        known = self._costs.get(num_tokens)
        if known is None:
            known = self._costs[num_tokens] = _Cost(self._between(num_tokens))
        error = min(log(seconds / (self._pace * known.cost)), _SURPRISE if known.count else 2 * _SURPRISE)
        gain = max(1 / (known.count + 1), 0.1, min(0.5, (self._num_steps - known.last) / _HALVED_AFTER))
        if known.count >= _NUM_TRUSTED:
            self._pace *= exp(0.25 * max(error, -_SURPRISE))
        known.cost *= exp(gain * error)
        known.count, known.last = known.count + 1, self._num_steps

    def is_known(self, num_tokens: int) -> bool:
        return self._pace > 0 if num_tokens == 1 else num_tokens in self._costs

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step with `num_tokens` tokens, measured, interpolated or extrapolated.

        If nothing was measured, the unit is a step of one token.
        """
        known = self._costs.get(num_tokens)
        return (self._pace or 1.0) * (self._between(num_tokens) if known is None else known.cost)

    def promised(self, num_tokens: int) -> float:
        """Return an optimistic time of a step, in seconds.

        It is lower than `seconds` if this number of tokens was measured rarely or long ago.
        """
        known = self._costs.get(num_tokens)
        if known is None:
            return self.seconds(num_tokens)
        cost = known.cost / (1 + (self._num_steps - known.last) / _HALVED_AFTER)
        if known.count < _NUM_TRUSTED:
            cost = min(cost, 1 + _COST_PER_TOKEN * (num_tokens - 1))
        return (self._pace or 1.0) * max(cost, min(known.cost, 1 + _LEAST_PER_TOKEN * (num_tokens - 1)))

    def _between(self, num_tokens: int) -> float:
        if num_tokens == 1:
            return 1.0
        known = sorted([(1, 1.0), *((tokens, each.cost) for tokens, each in self._costs.items())])
        for (left, least), (right, most) in pairwise(known):
            if left < num_tokens < right:
                return least + (most - least) * (num_tokens - left) / (right - left)
        last, cost = known[-1]
        slope = _COST_PER_TOKEN if last == 1 else max(0.0, (cost - 1) / (last - 1))
        return cost + slope * (num_tokens - last)


_PRIOR_WEIGHT = 10.0
_MARGIN = 0.08  # by which drafts must be faster than none
_COUNTED = 0.95  # factor of a guess's weight after each later guess of its kind
_PLAIN_EVERY = 128  # steps, after which a step without a draft is measured again
_SHARE_COUNTED = 0.87  # factor of a token's weight in the share of right guesses after each later token
# The share of right guesses, and how many tokens without drafts may follow before the next search for a draft.
_MOST_BETWEEN = 64
_TOKENS_BETWEEN = ((0.6, 1), (0.35, 2), (0.2, 4), (0.05, 8), (0.02, 16), (0.0, 64))


@final
class DraftPolicy:
    """Choose the number of draft tokens with which a step yields the most tokens per second.

    A draft with confidence c is right with probability a(c), its next token with a(c + 1), and so on. So k drafts give
    1 + a(c) + a(c) a(c + 1) + … tokens, in the time of a step of k + 1 tokens.

    a(c) is counted for ranges of c, and separately for many, few or hardly any right guesses among the last tokens. The
    guess for each token is known even without a draft, so no verification is needed to find out that drafting would pay
    off.

    k is 1, 3, 7, 15, … or the maximum: few sizes are measured quickly, and kernels process tokens in groups of eight.
    If no k beats one token per step by 8 %, nothing is drafted. The policy never changes which tokens are
    accepted.
    """

    def __init__(self, max_draft_tokens: int, priors: Priors) -> None:
        sizes = {2**power - 1 for power in range(1, max_draft_tokens.bit_length() + 1)} | {max_draft_tokens}
        self._sizes = sorted(size for size in sizes if 0 < size <= max_draft_tokens)
        self._priors, self._starts = priors, tuple(priors.rates)
        by_share = zip(*priors.rates.values(), strict=True)  # then by range of confidences
        self._right: list[list[float]] = [[_PRIOR_WEIGHT * rate for rate in rates] for rates in by_share]
        self._guessed = [[_PRIOR_WEIGHT] * len(rates) for rates in self._right]
        self._since_plain = self._num_refused = 0
        self._share = priors.share
        self.speed = 0.0  # expected tokens per second of the last choice

    def acceptance(self, confidence: int) -> float:
        """Return the recent rate of right guesses with this confidence, at the current share of right guesses."""
        level, index = self._range_of(confidence)
        return self._right[level][index] / self._guessed[level][index]

    def observe(self, confidence: int, is_right: bool) -> None:
        """Record one token: the confidence of its guess, 0 without a guess, and whether the guess was right."""
        if confidence:
            level, index = self._range_of(confidence)
            guessed, right = self._guessed[level], self._right[level]
            guessed[index] = guessed[index] * _COUNTED + 1
            right[index] = right[index] * _COUNTED + is_right
        self._share = self._share * _SHARE_COUNTED + (1 - _SHARE_COUNTED) * (is_right and confidence > 1)

    def _range_of(self, confidence: int) -> tuple[int, int]:
        return bisect_right(self._priors.shares, self._share), max(0, bisect_right(self._starts, confidence) - 1)

    def tokens_between(self, times: StepTimes) -> int:
        """Return the number of tokens to decode without a draft before the next search for a draft."""
        if not times.is_known(1):
            return 1
        if self._priors.is_steady:
            return min(1 << self._num_refused, _MOST_BETWEEN)
        return next(count for share, count in _TOKENS_BETWEEN if self._share >= share)

    def num_draft_tokens(
        self,
        times: StepTimes,
        confidence: int,
        num_known: int = 1,
        seconds: Callable[[int], float] = lambda count: 0.0,
    ) -> int:
        """Return the number of drafts to request, for a step that has `num_known` tokens without drafts.

        The drafter makes `count` drafts in `seconds(count)`. Call it once before each step that could be drafted.
        """
        self._since_plain += 1
        if not self._sizes or not times.is_known(1) or self._since_plain >= _PLAIN_EVERY:
            self._since_plain, self.speed = 0, 0.0
            return 0  # drafts are compared with such a step
        tokens, reached, at = 1.0, 1.0, 0
        best, speed = 0, (1 + _MARGIN) / times.seconds(num_known)
        for size in self._sizes:
            for index in range(at, size):
                reached *= self.acceptance(confidence + index)
                tokens += reached
            at = size
            rate = tokens / (times.promised(num_known + size) + seconds(size))
            if rate > speed:
                best, speed = size, rate
        self.speed = speed
        self._num_refused = 0 if best else min(self._num_refused + 1, _MOST_BETWEEN)
        if not best:
            self._since_plain = 0
        return best


_FIRST_STEPS = 12.0  # plain steps that an engine may lose before drafts have saved any time
_MOST_STEPS = 4.0  # plain steps that drafts may lose after they saved many more
_TRIED_SHARE = 0.01  # of the time of all steps, which trials may lose later


@final
class Stake:
    """Seconds that a drafter may spend on reading and on drafts that may be wrong.

    Drafts earn the seconds that they save. Each step adds one percent of its time, so that a drafter which has lost is
    tried again later, with another text.
    """

    def __init__(self) -> None:
        self.balance, self.pace = 0.0, 0.0  # pace: seconds of a step without drafts

    def account(self, gained: float, elapsed: float, pace: float) -> None:
        """Record a step of `elapsed` seconds in which drafts saved `gained` seconds, or lost them if negative.

        `pace` is the time of a step without drafts, or 0 if it is unknown.
        """
        if pace and not self.pace:
            self.balance += _FIRST_STEPS * pace
        self.pace = pace or self.pace
        most = max(self.balance, _MOST_STEPS * self.pace)
        self.balance = min(self.balance + gained + _TRIED_SHARE * elapsed, most)

    def allows(self, seconds: float) -> bool:
        """Return True if these seconds may be spent. Nothing may be spent before the pace is known."""
        return self.pace > 0 and self.balance >= seconds
