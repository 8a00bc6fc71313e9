"""The time that a step takes: learnt from every step, and predicted before the next one is planned.

    seconds = base + a · sequences + b · further tokens + c · Σ tokens × positions before them

Further tokens are those of prompts, and drafts. The four costs minimise the squares of relative errors, and none is
negative. Two sums are kept: over the last steps without further tokens, and over the last steps with some. A long
series of equal steps, for example during a long prompt, cannot separate the four costs, so the knowledge from earlier
steps must last. A momentary slowdown of all steps, for example by a busy neighbour, is a separate factor, the pace.

Drafts need more than this line: kernels process tokens in groups, so the time jumps between two exact sizes.
So `StepCosts.by_kind` has a table of exact sizes for each kind of step, `StepTimes`, which uses nothing else.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import exp, isfinite, log, sqrt
from operator import add
from typing import NamedTuple, Self, final

from infer.engine.speculation.policy import StepTimes
from infer.outputs import percentile

KEPT = 0.98  # factor of a step's weight after each later step of its kind
MAX_SURPRISE = 4.0  # times the prediction: a longer step was held up, unless the next one is longer, too
NUM_RATIOS = 256  # kept ratios of the last steps, for statistics
_ENOUGH_RATIOS, _USUAL_LOW_RATIO = 64, 0.8
# Weight of the known cost, relative to a step's. If steps do not separate two costs, the lighter one changes.
_PRIORS = (1e-3, 1e-2, 1e-3, 1e-1)
_PACE_GAIN, _MAX_CHANGE = 0.2, 0.7  # change of the pace by one step, as a logarithm
_SOLVED_EVERY, _OFF = 8, 0.2  # solve after this many steps, or immediately after a step with this relative error
_CONTEXT = 1024  # positions: the unit of context


class StepWork(NamedTuple):
    """Size of a step."""

    num_sequences: int
    num_tokens: int
    context: int  # sum over its tokens of the positions before each

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> Self:
        """Return the work of a step with these chunks: pairs of a number of tokens and the positions before them."""
        num_sequences = num_tokens = context = 0
        for count, start in chunks:
            num_sequences += count > 0
            num_tokens += count
            context += start if count == 1 else context_of(count, start)
        return cls(num_sequences, num_tokens, context)

    @property
    def features(self) -> tuple[float, ...]:
        num_further = self.num_tokens - self.num_sequences
        return 1.0, float(self.num_sequences), float(num_further), self.context / _CONTEXT


def context_of(num_tokens: int, start: int) -> int:
    """Return the sum of the positions before each token of a chunk that starts at `start`."""
    return num_tokens * start + num_tokens * (num_tokens - 1) // 2


class Costs(NamedTuple):
    """The four costs, in seconds."""

    base: float
    per_sequence: float
    per_token: float
    per_context: float  # of a token, per 1,024 positions before it


@final
class StepCosts:
    def __init__(self) -> None:
        # Over the last steps without further tokens, and over those with some: for each of the four features, the sums
        # of its products with all four, then its own sum.
        self._sums = [[0.0] * 20, [0.0] * 20]
        self.costs = Costs(0.0, 0.0, 0.0, 0.0)
        self._pace = 0.0  # logarithm of a factor
        self._was_held_up = False
        self.num_steps = 0
        self.ratios = deque[float](maxlen=NUM_RATIOS)  # predicted time divided by measured time, of the last steps
        # Times of exact sizes, for drafts. Besides the size they depend on the kind of the step: the numbers of its
        # sequences, of those with a grammar, and of greedy ones.
        self.by_kind = defaultdict[tuple[int, int, int], StepTimes](StepTimes)

    @property
    def low_ratio(self) -> float:
        """Ratio r, at most 1: 98 of the last 100 steps took at most their predicted time divided by r."""
        return min(1.0, percentile(self.ratios, 2.0)) if len(self.ratios) >= _ENOUGH_RATIOS else _USUAL_LOW_RATIO

    def predict(self, work: StepWork) -> float:
        """Return the seconds of a step with this work. They are 0 before the first step."""
        return exp(self._pace) * _sum(self.costs, work.features)

    def predict_further(self, num_tokens: int, start: int) -> float:
        """Return the seconds that further tokens from position `start` on add. They are 0 if that is unknown."""
        context = context_of(num_tokens, start)
        return exp(self._pace) * (self.costs.per_token * num_tokens + self.costs.per_context * context / _CONTEXT)

    def tokens_in(self, seconds: float, start: int) -> int:
        """Return how many further tokens of a chunk that begins after `start` positions fit into these seconds."""
        scale = exp(-self._pace) if self.num_steps else 0.0
        once, more = self.costs.per_token + self.costs.per_context * start / _CONTEXT, self.costs.per_context / _CONTEXT
        budget = seconds * scale
        if budget <= 0 or once + more <= 0:
            return 0
        # once · t + more · t² / 2 = budget, in the form without cancellation
        return int(2 * budget / (once + sqrt(once * once + 2 * more * budget)))

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took these seconds. For a multi-step, this is the mean of its steps."""
        if not (seconds > 0 and isfinite(seconds)):
            return
        predicted, features = self.predict(work), work.features
        if predicted > 0:
            self.ratios.append(predicted / seconds)
            self._was_held_up = seconds > MAX_SURPRISE * predicted and not self._was_held_up
            if self._was_held_up:
                return
        self.num_steps += 1
        kind, relative = work.num_tokens > work.num_sequences, [feature / seconds for feature in features]
        products = [left * right for left in relative for right in (*relative, 1.0)]
        self._sums[kind] = [KEPT * before + now for before, now in zip(self._sums[kind], products, strict=True)]
        is_off = abs(seconds - predicted) > _OFF * seconds
        if is_off or self.num_steps % _SOLVED_EVERY == 0:
            self.costs = self._solve()
        if (steady := _sum(self.costs, features)) > 0:
            error = log(seconds / steady) - self._pace
            self._pace += _PACE_GAIN * max(-_MAX_CHANGE, min(error, _MAX_CHANGE))

    def _solve(self) -> Costs:
        """Return the least squares without negative costs. The most negative cost is set to 0 until none is left."""
        used, sums = [0, 1, 2, 3], list(map(add, *self._sums))
        while True:
            rows = [[sums[5 * i + j] for j in (*used, 4)] for i in used]
            for place, index in enumerate(used):
                weight = _PRIORS[index] * (rows[place][place] or 1.0)
                rows[place][place] += weight
                rows[place][-1] += weight * self.costs[index]
            solved = _solved(rows)
            if min(solved) >= 0:
                costs = dict(zip(used, solved, strict=True))
                return Costs(*(costs.get(index, 0.0) for index in range(4)))
            del used[solved.index(min(solved))]


def _sum(costs: Sequence[float], features: Sequence[float]) -> float:
    (base, per_sequence, per_token, per_context), (one, sequences, tokens, context) = costs, features
    return base * one + per_sequence * sequences + per_token * tokens + per_context * context


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve a symmetric positive definite system. Each row ends with its right side. The rows are overwritten."""
    size = len(rows)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[row][column] -= factor * rows[pivot][column]
    solved = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (rows[row][size] - rest) / rows[row][row]
    return solved
