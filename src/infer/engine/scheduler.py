"""What the next step computes of each sequence: a plan from integers, and `update`, which records what it took.

Sequences that decode come first, a token each; what is left of the step's tokens goes to their drafts, then to prompts.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, final

from infer.speculation.policy import StepTimes

FIRST_STEPS = 8  # without a return to Python, while it is not known how long they take
MAX_STEPS, MAX_SECONDS = 64, 0.1  # of them: tokens come and a cancel is seen between two returns
_SMOOTHING = 0.3


class Kind(NamedTuple):
    """What a step's time depends on, besides its number of tokens."""

    num_sequences: int
    num_constrained: int
    num_greedy: int


class Demand(NamedTuple):
    """What one sequence asks of the next step."""

    num_pending: int
    num_drafts: int  # that it proposes after its pending tokens
    max_steps: int  # without a return to Python


class Plan(NamedTuple):
    """For each demand how many pending tokens and drafts are computed, in `num_steps` steps without a return."""

    num_tokens: list[int]
    num_drafts: list[int]
    num_steps: int


@final
class Scheduler:
    def __init__(self, max_logits: int, max_steps: int | None = None) -> None:
        """`max_logits` are those of one step. `max_steps` None: as many as take a tenth of a second, 64 at most."""
        self._max_logits, self._max_steps = max_logits, max_steps
        self._seconds_per_step = 0.0  # of one token a sequence; 0: not known
        self.step_times = defaultdict[Kind, StepTimes](StepTimes)

    def max_drafts(self, num_sequences: int) -> int:
        """Of each sequence."""
        return self._max_logits // num_sequences - 1

    def plan(self, demands: Sequence[Demand], step_tokens: int) -> Plan:
        """At most `step_tokens` tokens in all (more if more sequences than that decode)."""
        num_tokens, num_drafts = [0] * len(demands), [0] * len(demands)
        decoding = [index for index, demand in enumerate(demands) if demand.num_pending == 1]
        prefilling = [index for index, demand in enumerate(demands) if demand.num_pending != 1]
        kept = min(1, len(prefilling))  # a token is left to a prompt
        budget = max(step_tokens - len(decoding) - kept, 0)
        for index in decoding:
            num_tokens[index], num_drafts[index] = 1, min(demands[index].num_drafts, budget)
            budget -= num_drafts[index]
        budget += kept
        for index in prefilling:
            num_tokens[index] = min(demands[index].num_pending, budget)
            budget -= num_tokens[index]
            if num_tokens[index] == demands[index].num_pending:
                num_drafts[index] = min(demands[index].num_drafts, budget)
                budget -= num_drafts[index]
        if prefilling or any(num_drafts):
            return Plan(num_tokens, num_drafts, 1)
        return Plan(num_tokens, num_drafts, min(self._longest(), *(demand.max_steps for demand in demands)))

    def update(self, plan: Plan, num_steps: int, seconds: float, times: StepTimes | None) -> None:
        """What a plan took: `num_steps` steps ran in so many seconds. `times` are those of its kind, where every token
        was sampled after, as drafts are.
        """
        sizes = {tokens + drafts for tokens, drafts in zip(plan.num_tokens, plan.num_drafts, strict=True)}
        if times is not None:
            for size in sizes:
                times.learn(size, seconds / num_steps)
        if sizes == {1}:
            before, now = self._seconds_per_step, seconds / num_steps
            is_less = before == 0 or now < before  # the first ones also build the table
            self._seconds_per_step = now if is_less else before + _SMOOTHING * (now - before)

    def _longest(self) -> int:
        if self._max_steps is not None:
            return self._max_steps
        if self._seconds_per_step == 0:
            return FIRST_STEPS
        return max(1, min(MAX_STEPS, int(MAX_SECONDS / self._seconds_per_step)))
