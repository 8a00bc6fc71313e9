"""Number of threads for the next run: all, or half, a quarter or one while other processes use the cores.

Waits raise a suspicion, and times decide. A trial runs once with the next number above or, if waits are suspicious,
with a number below: each in turn, because the slowest of too many threads decides for all. It compares the cost with
that of the same kind of run just before. Failed trials become ever rarer, and never cost more than a fiftieth of the
time. Results never depend on any of this.
"""

from dataclasses import dataclass
from typing import final

_BAD_SHARE = 0.25  # of the threads' time lost in waits
_BAD_SECONDS = 0.0005  # in one run; less does not matter
_GAIN = 0.95  # of the present cost, or less: what makes a trial a success
_CHANGE = 1.5  # times the present cost, or more: the machine is another now
_WEIGHT = 0.5  # of the newest run in the present cost
_PATIENCE, _TRIAL_PATIENCE = 0.005, 0.001  # seconds that a run may lose before thread 0 continues alone
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds from a trial to the next
_BUDGET = 0.02  # of the time may go into trials
_MOST_KINDS = 64

Kind = tuple[int, int]  # a table's serial number and the class of its number of tokens


@final
@dataclass(frozen=True)
class Choice:
    num_threads: int
    patience_seconds: float = 0.0  # 0: for ever
    is_trial: bool = False


@final
@dataclass(frozen=True)
class Outcome:
    """Times of one run. `lost_seconds` is the sum of all threads' waits."""

    ended: float
    seconds: float
    lost_seconds: float
    cost: float  # seconds of one unit of its kind
    was_dismissed: bool = False


@final
class AdaptiveThreads:
    """Chooser of the number of threads: call `choose` before a run, `learn` after it.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, num_threads: int) -> None:
        self._numbers = sorted({1, max(1, num_threads // 4), max(1, num_threads // 2), num_threads})
        self._present = len(self._numbers) - 1  # index of the present number
        self._num_lower = 1  # how far below the present number the next trial is
        self._is_suspicious = False
        self._cost_by_kind: dict[Kind, float] = {}  # with the present number of threads
        self._next_trial, self._pause = 0.0, _FIRST_PAUSE

    @property
    def num_threads(self) -> int:
        """The number of threads of runs that are no trials."""
        return self._numbers[self._present]

    def choose(self, now: float) -> Choice:
        is_judged, number = now < self._next_trial, self._numbers[self._present]  # was it the better one a moment ago?
        if not is_judged and self._is_suspicious:
            return Choice(self._numbers[self._present - self._num_lower], _TRIAL_PATIENCE, is_trial=True)
        if not is_judged and number != self._numbers[-1]:
            return Choice(self._numbers[self._present + 1], _TRIAL_PATIENCE, is_trial=True)
        return Choice(number, 0.0 if is_judged else _PATIENCE)

    def learn(self, kind: Kind, choice: Choice, outcome: Outcome) -> None:
        cost = self._cost_by_kind.get(kind)
        lost = outcome.lost_seconds
        is_bad = outcome.was_dismissed or (
            lost > _BAD_SECONDS and lost > _BAD_SHARE * outcome.seconds * choice.num_threads
        )
        if choice.is_trial:
            self._judge(kind, choice.num_threads, outcome, is_bad)
            return
        if choice.num_threads > 1:
            self._is_suspicious = is_bad
            if is_bad and cost is not None and outcome.cost > _CHANGE * cost:
                self._next_trial = outcome.ended
            if not is_bad:
                self._pause = max(_FIRST_PAUSE, self._pause - outcome.seconds / 2)
        self._keep(kind, outcome.cost if cost is None else cost + _WEIGHT * (outcome.cost - cost))

    def _judge(self, kind: Kind, num_threads: int, outcome: Outcome, is_bad: bool) -> None:
        """Decide a trial with this number of threads. Without a cost to compare with, the waits decide."""
        self._is_suspicious = False
        cost, excess = self._cost_by_kind.get(kind), 0.0
        if outcome.cost < _GAIN * cost if cost is not None else not is_bad:
            is_raised = num_threads > self.num_threads
            self._present, self._num_lower = self._numbers.index(num_threads), 1
            self._cost_by_kind.clear()
            self._keep(kind, outcome.cost)
            if is_raised:
                return
        else:
            if num_threads < self.num_threads:
                self._num_lower = self._num_lower % self._present + 1
            excess = outcome.lost_seconds if cost is None else outcome.seconds * (1 - cost / outcome.cost)
        self._next_trial = outcome.ended + max(self._pause, excess / _BUDGET)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _keep(self, kind: Kind, cost: float) -> None:
        if len(self._cost_by_kind) >= _MOST_KINDS:
            self._cost_by_kind.clear()
        self._cost_by_kind[kind] = cost
