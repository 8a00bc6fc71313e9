"""The plan of a step, from integers and costs: which tenants take part, and the tokens and drafts of each sequence.

Sequences that decode are planned first, with one token each. The rest of the step is for their drafts, then for
prompts: three quarters for the prompt with the fewest remaining tokens, and a quarter for the oldest. So a short
prompt passes a long one, and none waits forever. While an answer is streamed, 98 of 100 steps with prompts take at
most `gap_seconds`.

A step with many sequences takes longer than a step with few. One tenant with many sequences, or with long prompts,
would slow down the answers of all others. So `StepShares` chooses the tenants of each step.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from operator import add
from typing import NamedTuple, Protocol, final, runtime_checkable

from infer.compute.operands.limits import RECENT_PAGES, STATE_TOKENS, StepLimits
from infer.engine.speculation.policy import StepTimes
from infer.engine.step.step_costs import StepCosts, StepWork

FIRST_STEPS = 8  # steps without a return to Python, while their time is unknown
MAX_STEPS, MAX_SECONDS = 64, 0.1  # limits of a multi-step, because tokens and cancels pass only between two multi-steps
STREAM_SECONDS = 0.03  # limit of a multi-step while others stream
GAP_SECONDS, LEAST_GAP_SECONDS = 0.038, 0.03  # limit for 98 of 100 steps with prompts while others stream
LEAST_PROMPT_TOKENS = 16  # in a step with prompts, for a good rate, unless they take over half of STREAM_SECONDS
FIRST_PROMPT_TOKENS = 64  # in a step, while their time is unknown
PLAIN_STEPS = 8  # steps between two steps with drafts, if most sequences have no drafts
MAX_TAKEN = 2048
_RETURN = 0.2  # time of a return to Python, in steps
# Part of its share that the costliest tenant gives to the others, for time that the cost model does not know.
MARGIN = 0.3
MOST_OWED = 1.0  # seconds: a tenant that waited long may not delay the others for as long


@runtime_checkable
class Demand(Protocol):
    """The work that a sequence requests for the next step: the attributes of a sequence that a plan depends on."""

    num_computed: int
    is_streamed: bool
    entry: int  # in the order of entry
    checkpoints: tuple[int, ...]  # ascending positions; a chunk keeps a state at the page border before each

    @property
    def num_schedulable(self) -> int: ...  # pending tokens that may be computed
    @property
    def num_drafts(self) -> int: ...  # drafts after its pending tokens
    @property
    def useful_steps(self) -> int: ...  # tokens of later steps are dropped


class Plan(NamedTuple):
    """The number of pending tokens and drafts to compute for each demand, in `num_steps` steps without a return."""

    num_tokens: list[int]
    num_drafts: list[int]
    num_steps: int
    work: StepWork  # work of one step


class StepTaken(NamedTuple):
    """A step that ran, or all steps of a multi-step."""

    kind: str  # "decode", "prompt", "mixed" (both) or "chain" (several steps)
    num_sequences: int
    num_tokens: int
    seconds: float


NO_PLAN = Plan([], [], 1, StepWork(0, 0, 0))


@final
class Scheduler:
    def __init__(
        self,
        limits: StepLimits,
        max_steps: int | None = None,
        page_tokens: int = STATE_TOKENS,
    ) -> None:
        """Begin without known costs.

        `limits` are those of the device. A multi-step has at most `max_steps` steps; if that is None, at most
        `MAX_STEPS` that take at most `MAX_SECONDS`. A step with prompts takes at most `gap_seconds` if an answer is
        streamed. Checkpoints are at the borders of pages of `page_tokens` tokens.
        """
        self._page_tokens = page_tokens
        self._limits, self._max_steps = limits, max_steps
        self._prompt_seconds, self.gap_seconds = inf, GAP_SECONDS
        self._num_plain = PLAIN_STEPS  # steps since the last one with drafts
        self._has_decoded = False  # True if the time of decoding steps is known
        self.costs = StepCosts()
        self.taken = deque[StepTaken](maxlen=MAX_TAKEN)  # the last steps, for metrics

    def max_drafts(self, num_sequences: int) -> int:
        """Return the largest number of drafts per sequence."""
        return self._limits.logits // num_sequences - 1

    def limit_prompts(self, seconds: float) -> None:
        """Set the seconds that a step with prompts may take if no answer is streamed."""
        self._prompt_seconds = seconds

    def plan(
        self,
        demands: Sequence[Demand],
        step_tokens: int,
        max_steps: int = 1,
        *,
        steps_to_draft: Sequence[int] = (),
        others_wait: bool = False,
        others_stream: bool = False,
    ) -> Plan:
        """Plan a step of at most `step_tokens` tokens, or more if more sequences than that decode.

        After `max_steps`, a sequence needs a return to Python; after `steps_to_draft`, some look for drafts.
        `others_wait` is True if this step does not compute all sequences, `others_stream` if one of these is streamed.
        """
        num_tokens, num_drafts = [0] * len(demands), [0] * len(demands)
        decoding, prefilling = list[int](), list[int]()
        for index, demand in enumerate(demands):
            num_tokens[index] = int(demand.num_schedulable == 1)
            (decoding if num_tokens[index] else prefilling).append(index)
        budget = max(step_tokens - len(decoding) - min(1, len(prefilling)), 0)  # one token is kept for a prompt
        if prefilling or self._drafts_pay(demands):
            for index in decoding:
                num_drafts[index] = min(demands[index].num_drafts, budget)
                budget -= num_drafts[index]
        work, longest = _work(demands, num_tokens, num_drafts), 1
        if not prefilling:
            if not any(num_drafts):
                longest = min(max_steps, self._longest(demands, work, steps_to_draft, others_wait=others_wait))
            return Plan(num_tokens, num_drafts, _num_steps(demands, longest), work)
        is_streamed = others_stream or any(demands[index].is_streamed for index in decoding)
        budget += 1
        for index, share in self._shares(demands, prefilling, budget, self._seconds_beside(work, is_streamed)):
            num_tokens[index] = share
            budget -= share
        for index in prefilling:
            if num_tokens[index] == demands[index].num_schedulable:
                num_drafts[index] = min(demands[index].num_drafts, budget)
                budget -= num_drafts[index]
        return Plan(num_tokens, num_drafts, 1, _work(demands, num_tokens, num_drafts))

    def update(self, plan: Plan, num_steps: int, seconds: float, times: StepTimes | None, held_up: float = 0.0) -> None:
        """Learn from a plan of which `num_steps` steps ran in `seconds`.

        `times` is the table of its kind, if every token was sampled, as drafts are. For `held_up` of the seconds, the
        steps waited for a grammar.
        """
        work, num_decoding = plan.work, plan.num_tokens.count(1)
        kind = "decode" if num_decoding == work.num_sequences else "mixed" if num_decoding else "prompt"
        kind = "chain" if num_steps > 1 else kind
        self.taken.append(StepTaken(kind, work.num_sequences, work.num_tokens * num_steps, seconds))
        self._num_plain = 0 if any(plan.num_drafts) else self._num_plain + num_steps
        self._has_decoded |= work.num_tokens == work.num_sequences
        self.costs.learn(work, (seconds - held_up) / num_steps)
        if times is not None:
            times.learn(work.num_tokens - work.num_sequences + 1, seconds / num_steps)

    def _drafts_pay(self, demands: Sequence[Demand]) -> bool:
        """Return True if a step should verify drafts.

        If few sequences have drafts, the others run multi-steps first.
        """
        drafting = sum([demand.num_drafts > 0 for demand in demands])
        return drafting > 0 and (2 * drafting >= len(demands) or self._num_plain >= PLAIN_STEPS)

    def _longest(
        self, demands: Sequence[Demand], work: StepWork, steps_to_draft: Sequence[int], *, others_wait: bool
    ) -> int:
        """Return the largest number of steps without a return to Python."""
        if self._max_steps is not None:
            longest = self._max_steps
        elif not self._has_decoded:
            longest = FIRST_STEPS
        else:
            others_wait = others_wait or (len(demands) > 1 and any(demand.is_streamed for demand in demands))
            seconds = min(STREAM_SECONDS, self.gap_seconds) if others_wait else MAX_SECONDS
            longest = max(1, min(MAX_STEPS, int(seconds / max(self.costs.predict(work), seconds / MAX_STEPS))))
        to_draft = [count for count in steps_to_draft if count < MAX_STEPS]
        if 2 * len(to_draft) >= len(demands):
            return min(longest, *to_draft)
        return min(longest, PLAIN_STEPS) if to_draft else longest

    # Prompts

    def _seconds_beside(self, others: StepWork, is_streamed: bool) -> float:
        """Return the seconds for tokens of prompts in a step that also computes `others`."""
        seconds, gap = self._prompt_seconds, self.gap_seconds
        if is_streamed:
            seconds = min(seconds, max(min(LEAST_GAP_SECONDS, gap), gap * self.costs.low_ratio))
        return seconds - self.costs.predict(others)

    def _shares(
        self, demands: Sequence[Demand], prefilling: Sequence[int], num_tokens: int, seconds: float
    ) -> Iterable[tuple[int, int]]:
        """Return pairs (demand, tokens) that fill this many tokens and seconds."""
        if seconds < inf and not self.costs.predict_further(1, 1):  # unknown
            num_tokens, seconds = min(num_tokens, FIRST_PROMPT_TOKENS), inf
        shortest = sorted(prefilling, key=lambda index: (demands[index].num_schedulable, demands[index].entry))
        oldest = min(prefilling, key=lambda index: demands[index].entry)
        shares, parts = dict.fromkeys(shortest, 0), [4, *[1] * len(shortest)]
        for part, index in zip(parts, (oldest, *shortest), strict=True):
            start, num_pending = demands[index].num_computed, demands[index].num_schedulable
            start, num_pending = start + shares[index], num_pending - shares[index]
            count = self._fitting(start, num_pending, num_tokens // part, seconds / part)
            if part == 1 and index == shortest[0]:
                least = self._fitting(start, num_pending, LEAST_PROMPT_TOKENS, STREAM_SECONDS / 2)
                count = min(num_tokens, max(least, count))
            shares[index] += count
            num_tokens -= count
            seconds -= self.costs.predict_further(count, start)
        if not any(shares.values()):
            shares[shortest[0]] = min(num_tokens, 1)
        return [(index, self._up_to_checkpoint(demands[index], count)) for index, count in shares.items()]

    def _up_to_checkpoint(self, demand: Demand, num_tokens: int) -> int:
        """Return how many of a prompt's next tokens to read, so that every checkpoint among them gets its state.

        A step keeps the states of its last `RECENT_PAGES` pages, so few checkpoints need a step that ends there.
        """
        start, page_tokens = demand.num_computed, self._page_tokens
        end = start + num_tokens
        for position in reversed(demand.checkpoints):
            border = position - position % page_tokens
            if border > start and end > border + (RECENT_PAGES - 1) * page_tokens:
                end = border
        return end - start

    def _fitting(self, start: int, num_pending: int, num_tokens: int, seconds: float) -> int:
        """Return how many tokens of a prompt, from position `start`, fit into this many tokens and seconds."""
        most = min(num_pending, num_tokens)
        return most if seconds == inf else min(most, self.costs.tokens_in(seconds, start))


def _num_steps(demands: Sequence[Demand], longest: int) -> int:
    """Return the number of steps with the most tokens per second, among those at which a sequence ends."""
    if longest == 1:
        return 1
    useful = [min(demand.useful_steps, longest) for demand in demands]
    return max(set(useful), key=lambda count: (sum(min(count, own) for own in useful) / (_RETURN + count), count))


def _work(demands: Sequence[Demand], num_tokens: Sequence[int], num_drafts: Sequence[int]) -> StepWork:
    return StepWork.of(zip(map(add, num_tokens, num_drafts), [each.num_computed for each in demands], strict=True))


class StepPart(NamedTuple):
    """The tokens of one sequence in a step."""

    tenant: str
    num_tokens: int
    start: int  # positions before the tokens
    delay: float = 0.0  # seconds that all waited for its grammar


@final
class StepShares:
    """Chooses the tenants of the next step: all, or only those that have had less than their share of the time.

    Each tenant earns its share of the time of all steps, and pays for each step the time that its own part would have
    taken alone. If all tenants have about the same number of sequences, a step for all pays each one enough, so every
    step is for all. When some tenants are owed a whole step, the others skip it.

    The shares add up to the whole time. If they added up to more, and batching gained nothing, all tenants would fall
    behind. Then every step would be for all again, and the small tenants would lose.

    All tenants wait while a grammar's masks are filled. That delay is measured exactly, so a tenant may pay it in later
    steps.
    """

    def __init__(self, costs: StepCosts) -> None:
        """Begin without debts."""
        self._costs = costs
        self._owed: dict[str, float] = {}  # seconds, per tenant with work
        self._last: dict[str, float] = {}  # seconds of the last step in which each took part
        # Number of steps that the chosen tenants may run before the others run again. None means no limit.
        self.most_steps: int | None = None

    @property
    def is_shared(self) -> bool:
        """True if the last choice was among several tenants."""
        return bool(self._owed)

    def choose(self, parts: Iterable[StepPart]) -> Collection[str]:
        """Return the tenants of the next step.

        `parts` are the smallest possible parts of all sequences. A prompt is assumed to take as long as in its last
        step.
        """
        costs = {tenant: max(cost, self._last.get(tenant, 0.0)) for tenant, cost in self._costs_alone(parts).items()}
        self._last = {tenant: self._last.get(tenant, 0.0) for tenant in costs}
        self._owed = {tenant: self._owed.get(tenant, 0.0) for tenant in costs} if len(costs) > 1 else {}
        behind = {tenant: owed / costs[tenant] for tenant, owed in self._owed.items() if 0 < costs[tenant] <= owed}
        self.most_steps = None
        if 0 < len(behind) < len(costs):  # a step earns only a part of its cost
            rates = self._rates(costs)
            self.most_steps = min(1 + int((behind[tenant] - 1) / (1 - rates[tenant])) for tenant in behind)
        return behind.keys() or costs.keys()

    def computed(self, parts: Collection[StepPart], num_steps: int, seconds: float) -> None:
        """Count steps that took `seconds` in total, without the delays of their parts.

        A thread that fills masks for a long time also takes a core and memory bandwidth from the steps. So the tenants
        of those grammars pay the time above the prediction, up to the length of the delays. Other debt that a tenant
        cannot pay is forgiven, because a step for many takes less time than its parts. A delay is never forgiven.
        """
        if not (predicted := self._costs.predict(_work_of(parts))):
            return
        delay = sum(part.delay for part in parts)
        slowed = min(max(0.0, seconds - num_steps * predicted), delay)
        costs, pace = self._costs_alone(parts), (seconds - slowed) / predicted
        paid, waits = {tenant: cost * pace for tenant, cost in costs.items()}, dict.fromkeys(costs, 0.0)
        for part in parts:
            waits[part.tenant] += part.delay * (1 + slowed / delay) if delay else 0.0
        self._last |= {tenant: (cost + waits[tenant]) / num_steps for tenant, cost in paid.items()}
        seconds += delay
        for tenant, rate in self._rates(self._last).items():
            before = self._owed[tenant]
            owed = max(before + rate * seconds - paid.get(tenant, 0.0), min(before, 0.0)) - waits.get(tenant, 0.0)
            self._owed[tenant] = min(max(owed, -MOST_OWED), MOST_OWED)

    def _rates(self, costs: Mapping[str, float]) -> dict[str, float]:
        """Return the part of all time that each tenant earns. The tenant that is costliest for its share earns less."""
        share, costliest = 1 / max(1, len(self._owed)), max(self._owed, key=costs.__getitem__, default="")
        others = share * (1 + MARGIN * share)
        return {each: share * (1 - MARGIN * (1 - share)) if each == costliest else others for each in self._owed}

    def _costs_alone(self, parts: Iterable[StepPart]) -> dict[str, float]:
        """Return for each tenant the seconds that a step with only its parts would take."""
        own: dict[str, list[StepPart]] = {}
        for part in parts:
            own.setdefault(part.tenant, []).append(part)
        return {tenant: self._costs.predict(_work_of(each)) for tenant, each in own.items()}


def _work_of(parts: Iterable[StepPart]) -> StepWork:
    return StepWork.of((part.num_tokens, part.start) for part in parts)
