"""Number of threads for the next run: all, or one while other processes use the cores.

Waits raise a suspicion, and times decide. A trial runs once with the other number, and compares the cost with that of
the same kind of run just before. Failed trials become ever rarer, and never cost more than a fiftieth of the time.
Results never depend on any of this.
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
        self.num_threads = num_threads
        self.is_alone = False
        self._is_suspicious = False
        self._cost_by_kind: dict[Kind, float] = {}  # with the present number of threads
        self._next_trial, self._pause = 0.0, _FIRST_PAUSE

    def choose(self, now: float) -> Choice:
        if self.num_threads == 1:
            return Choice(1)
        is_judged = now < self._next_trial  # the present number was the better one a moment ago
        if self.is_alone:
            return Choice(1) if is_judged else Choice(self.num_threads, _TRIAL_PATIENCE, is_trial=True)
        if self._is_suspicious and not is_judged:
            return Choice(1, is_trial=True)
        return Choice(self.num_threads, 0.0 if is_judged else _PATIENCE)

    def learn(self, kind: Kind, choice: Choice, outcome: Outcome) -> None:
        cost = self._cost_by_kind.get(kind)
        lost = outcome.lost_seconds
        is_bad = outcome.was_dismissed or (
            lost > _BAD_SECONDS and lost > _BAD_SHARE * outcome.seconds * choice.num_threads
        )
        if choice.is_trial:
            self._judge(kind, cost, outcome, is_bad)
            return
        if not self.is_alone:
            self._is_suspicious = is_bad
            if is_bad and cost is not None and outcome.cost > _CHANGE * cost:
                self._next_trial = outcome.ended
            if not is_bad:
                self._pause = max(_FIRST_PAUSE, self._pause - outcome.seconds / 2)
        self._keep(kind, outcome.cost if cost is None else cost + _WEIGHT * (outcome.cost - cost))

    def _judge(self, kind: Kind, cost: float | None, outcome: Outcome, is_bad: bool) -> None:
        """Decide a trial. Without a cost to compare with, the waits decide."""
        self._is_suspicious = False
        excess = 0.0
        if outcome.cost < _GAIN * cost if cost is not None else not is_bad:
            self.is_alone = not self.is_alone
            self._cost_by_kind.clear()
            self._keep(kind, outcome.cost)
            if not self.is_alone:
                return
        elif cost is not None:
            excess = outcome.seconds * (1 - cost / outcome.cost)
        else:
            excess = outcome.lost_seconds
        self._next_trial = outcome.ended + max(self._pause, excess / _BUDGET)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _keep(self, kind: Kind, cost: float) -> None:
        if len(self._cost_by_kind) >= _MOST_KINDS:
            self._cost_by_kind.clear()
        self._cost_by_kind[kind] = cost
