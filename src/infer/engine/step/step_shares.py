"""Choose the tenants of the next step: all, or only those that have had less than their share of the time.

A step with many sequences takes longer than a step with few. One tenant with many sequences, or with long prompts,
would slow down the answers of all others. So each tenant earns its share of the time of all steps, and pays for each
step the time that its own part would have taken alone. If all tenants have about the same number of sequences, a
step for all pays each one enough, so every step is for all. When some tenants are owed a whole step, the others
skip it.

The shares add up to the whole time. If they added up to more, and batching gained nothing, all tenants would fall
behind. Then every step would be for all again, and the small tenants would lose.

All tenants wait while a grammar's masks are filled. That delay is measured exactly, so a tenant may pay it in later
steps.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, final

from infer.engine.step.step_costs import StepCosts, StepWork

# Part of its share that the costliest tenant gives to the others, for time that the cost model does not know.
MARGIN = 0.3
MOST_OWED = 1.0  # seconds: a tenant that waited long may not delay the others for as long


class StepPart(NamedTuple):
    """The tokens of one sequence in a step."""

    tenant: str
    num_tokens: int
    start: int  # positions before the tokens
    delay: float = 0.0  # seconds that all waited for its grammar


@final
class StepShares:
    def __init__(self, costs: StepCosts, weight: Callable[[str], float]) -> None:
        """Begin without debts. `weight` returns the weight of a tenant."""
        self._costs, self._weight = costs, weight
        self._owed: dict[str, float] = {}  # seconds, per tenant with work
        self._last: dict[str, float] = {}  # seconds of the last step in which each took part
        self._most_steps: int | None = None

    @property
    def most_steps(self) -> int | None:
        """Number of steps that the chosen tenants may run before the others run again. None means no limit."""
        return self._most_steps

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
        behind = {tenant: owed / costs[tenant] for tenant, owed in self._owed.items() if costs[tenant] > 0}
        behind = {tenant: num_steps for tenant, num_steps in behind.items() if num_steps >= 1}
        self._most_steps = None
        if 0 < len(behind) < len(costs):  # a step earns only a part of its cost
            rates = self._rates(costs)
            self._most_steps = min(1 + int((behind[tenant] - 1) / (1 - rates[tenant])) for tenant in behind)
        return behind.keys() or costs.keys()

    def computed(self, parts: Collection[StepPart], num_steps: int, seconds: float) -> None:
        """Count steps that took `seconds` in total, without the delays of their parts.

        A thread that fills masks for a long time also takes a core and memory bandwidth from the steps. So the tenants
        of those grammars pay the time above the prediction, up to the length of the delays. Other debt that a tenant
        cannot pay is forgiven, because a step for many takes less time than its parts. A delay is never forgiven.
        """
        if not (predicted := self._costs.predict(_work(parts))):
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
        total = sum(map(self._weight, self._owed))
        shares = {tenant: self._weight(tenant) / total for tenant in self._owed}
        costliest = max(shares, key=lambda tenant: costs[tenant] / shares[tenant], default="")
        return {
            tenant: share * (1 + (-MARGIN * (1 - share) if tenant == costliest else MARGIN * shares[costliest]))
            for tenant, share in shares.items()
        }

    def _costs_alone(self, parts: Iterable[StepPart]) -> dict[str, float]:
        """Return for each tenant the seconds that a step with only its parts would take."""
        own: dict[str, list[StepPart]] = {}
        for part in parts:
            own.setdefault(part.tenant, []).append(part)
        return {tenant: self._costs.predict(_work(each)) for tenant, each in own.items()}


def _work(parts: Iterable[StepPart]) -> StepWork:
    return StepWork.of([(part.num_tokens, part.start) for part in parts])
