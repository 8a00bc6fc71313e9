"""Admission: the order in which sequences enter, which of them lose their slot, and the longest wait.

All functions here are pure, over integers and seconds. Tenants share by computed work (start-time fair queueing,
doi:10.1145/248157.248171). Each tenant has an account: the work that its requests were admitted with, divided by its
weight. The tenant with the smallest account enters next. Work that a request did not use is refunded when it leaves. A
tenant that returns starts at the smallest account of the others, so no tenant can save up. Among one tenant's requests,
the oldest enters first. One level of priority counts like `HEAD_START` seconds of waiting, so later requests with a
higher priority cannot pass an old one forever. Preempted sequences enter before all others.

A tenant without a running sequence takes slots and pages from a tenant that has more (`Tenants.giver`). This happens
only so often that little work is lost by it. Such a slot stays free for a moment for the next request of the tenant
that took it (`KeptSlots`). Short sequences pass a long one that waits for pages, until they have taken as much work as
the long one needs (`may_pass`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

EXPECTED_ANSWER = 256  # tokens: the first estimate of an answer's length
HEAD_START = 10.0  # seconds per level of priority
ANSWER_WORK = 2  # work of an answer's token, in tokens of a prompt
FEWEST_KEPT = 16  # tokens that a sequence generates before it is preempted again
PASSING = 4  # a sequence may pass another one that has at least this many times its tokens
LEARNT = 0.1  # weight of the last answer in the mean length
KEPT_SECONDS = 5.0  # time for which a slot that was taken from another tenant waits for the next request
_MOST_KEPT = 8  # at most one in this many slots is kept
_MOST_LENGTHS = 1024  # tenants whose mean length is remembered
_NEARLY = 1 - 1e-9
_WORTH = 3  # all sequences generate this many times the wasted tokens before the next slot is taken


class Waiting(NamedTuple):
    """A sequence that waits for a slot."""

    number: int  # in the order of submission
    tenant: str
    rank: float  # seconds: its submission, minus its head start
    work: int  # expected work
    is_charged: bool = False  # True if it was preempted: its tenant has paid


class Running(NamedTuple):
    """A sequence that has a slot. `size` is its share of the engine: of the slots, or of the pages if that is more."""

    number: int
    num_given: int  # tokens that it generated since it got its slot
    was_preempted: bool
    tenant: str = ""
    priority: int = 0
    size: float = 0.0
    num_tokens: int = 0  # tokens to compute again if it is preempted


class Blocked(NamedTuple):
    """The next sequence, for which there are not enough pages. `passed` is the work of the sequences that passed it."""

    num_tokens: int
    work: int
    passed: int


def rank_of(asked_at: float, priority: int) -> float:
    return asked_at - HEAD_START * priority


def work_of(num_prompt_tokens: int, num_answer_tokens: int) -> int:
    return num_prompt_tokens + ANSWER_WORK * num_answer_tokens


@final
class AnswerLengths:
    """The mean length of finished answers, for all tenants together and for each."""

    def __init__(self, first: int = EXPECTED_ANSWER) -> None:
        self.mean = float(first)
        self._by_tenant: dict[str, float] = {}  # ordered by the last change

    def learn(self, tenant: str, num_tokens: int) -> None:
        own = self._by_tenant.pop(tenant, self.mean)
        self._by_tenant[tenant] = own + LEARNT * (num_tokens - own)
        self.mean += LEARNT * (num_tokens - self.mean)
        if len(self._by_tenant) > _MOST_LENGTHS:
            del self._by_tenant[next(iter(self._by_tenant))]

    def expected(self, tenant: str, num_given: int = 0) -> float:
        """Return how many tokens should follow the first `num_given` of an answer: at least a quarter of the mean."""
        mean = self._by_tenant.get(tenant, self.mean)
        return max(mean - num_given, mean / 4)


@final
class Tenants:
    """The accounts of tenants. The default weight is 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, float] = {}
        self._num_active: dict[str, int] = {}  # waiting and running sequences
        self._gives_after = 0  # tokens of all sequences before the next slot is taken

    @property
    def accounts(self) -> Mapping[str, float]:
        return self._accounts

    def come(self, tenant: str) -> None:
        """Add a sequence of a tenant."""
        if not self._num_active.get(tenant):
            least = self._least_active()
            self._accounts[tenant] = max(self._accounts.get(tenant, least), least)
        self._num_active[tenant] = self._num_active.get(tenant, 0) + 1

    def go(self, tenant: str) -> None:
        """Remove a sequence of a tenant. After its last one, an account below all others is forgotten."""
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
            least = self._least_active()
            self._accounts = {
                name: account for name, account in self._accounts.items() if name in self._num_active or account > least
            }

    def first(self, waiting: Iterable[Waiting]) -> Waiting:
        """Return the sequence that enters next, from one or more."""
        accounts = self._accounts
        return min(
            waiting, key=lambda each: (not each.is_charged, accounts[each.tenant], each.tenant, each.rank, each.number)
        )

    def charge(self, tenant: str, work: int) -> None:
        """Charge a tenant for `work`. A negative value refunds work that a sequence was charged for and did not use."""
        if tenant in self._accounts:
            self._accounts[tenant] += work / self.weight(tenant)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def giver(self, one: Waiting, size: float, running: Sequence[Running], num_given: int = 0) -> Running | None:
        """Return the sequence that gives its slot and pages to `one`, whose tenant has nothing running.

        The giver's tenant keeps at least the `size` that `one` takes. `num_given` is the number of tokens that all
        sequences generated so far: no slot is taken before they outweigh the loss of the last preemption.
        """
        if num_given < self._gives_after or any(each.tenant == one.tenant for each in running):
            return None
        held, least = holdings(running, self.weight), size / self.weight(one.tenant) * _NEARLY
        able = [
            each
            for each in running
            if held[each.tenant] - each.size / self.weight(each.tenant) >= least
            and not (each.was_preempted and each.num_given < FEWEST_KEPT)
        ]
        return max(able, key=lambda each: (-each.priority, held[each.tenant], each.number), default=None)

    def gave(self, giver: Running, num_given: int) -> None:
        """Count a slot that was taken from `giver` when all sequences had generated `num_given` tokens."""
        self._gives_after = num_given + _WORTH * giver.num_tokens

    def is_owed(self, tenant: str, others: Iterable[str]) -> bool:
        """Return True if the tenant has had at most as much work as each of the others."""
        return all(self._accounts[tenant] <= self._accounts[other] for other in others)

    def has_idle(self, running: Iterable[str]) -> bool:
        """Return True if a tenant has sequences, but none that run. `running` are the tenants of running sequences."""
        return not self._num_active.keys() <= set(running)

    def _least_active(self) -> float:
        return min((self._accounts[tenant] for tenant in self._num_active), default=0.0)


@final
class KeptSlots:
    """The slots that tenants took from others. Each stays free for a moment after its request has ended.

    So a tenant with many short questions takes a slot from a long answer only once, not for each question.
    """

    def __init__(self) -> None:
        self._numbers = set[int]()  # numbers of the sequences in such slots
        self._until: dict[str, float] = {}  # time until which a tenant's slot stays free

    def got(self, number: int) -> None:
        """Count a sequence that enters in a slot taken from another tenant."""
        self._numbers.add(number)

    def entered(self, tenant: str, number: int) -> None:
        if self._until.pop(tenant, None) is not None:
            self._numbers.add(number)

    def left(self, tenant: str, number: int, now: float) -> None:
        if number in self._numbers:
            self._numbers.remove(number)
            self._until[tenant] = now + KEPT_SECONDS

    def count(self, running: Iterable[str], now: float, num_slots: int) -> int:
        """Return the number of free slots that are kept for tenants without a running sequence."""
        self._until = {tenant: until for tenant, until in self._until.items() if until > now}
        return min(len(self._until.keys() - set(running)), num_slots // _MOST_KEPT) if self._until else 0


def has_pages(free: Sequence[int], growths: Iterable[Sequence[int]], needed: Sequence[int]) -> bool:
    """Return True if each pool has enough free pages for a new sequence and for the expected growth of the others."""
    return all(have >= sum(more) for have, *more in zip(free, needed, *growths, strict=True))


def holdings(running: Iterable[Running], weight: Callable[[str], float]) -> dict[str, float]:
    """Return each tenant's share of the engine, divided by its weight."""
    held: dict[str, float] = {}
    for each in running:
        held[each.tenant] = held.get(each.tenant, 0.0) + each.size / weight(each.tenant)
    return held


def victim(running: Sequence[Running], weight: Callable[[str], float] = lambda tenant: 1.0) -> Running | None:
    """Return the sequence that loses its slot and pages, or None if at most one is running.

    Tenants with less than their share are spared if possible. Among the others, it is the lowest priority, then the
    tenant with the most, then the youngest sequence. A sequence that was preempted before and has generated few tokens
    since is chosen only if there is no other. The oldest one of the highest priority is never chosen, so that at least
    one sequence progresses.
    """
    if len(running) < 2:
        return None
    kept, held = min(running, key=lambda each: (-each.priority, each.number)), holdings(running, weight)
    fair = sum(each.size for each in running) / sum(map(weight, held)) * _NEARLY

    def order(each: Running) -> tuple[bool, bool, int, float, int]:
        is_safe = each.was_preempted and each.num_given < FEWEST_KEPT
        return not is_safe, held[each.tenant] >= fair, -each.priority, held[each.tenant], each.number

    return max((each for each in running if each is not kept), key=order)


def may_pass(num_tokens: int, work: int, blocked: Iterable[Blocked]) -> bool:
    """Return True if a sequence may enter before others that wait for pages.

    It must be much shorter than each of them. And all sequences that pass one may take at most as much work as that
    one.
    """
    return all(num_tokens * PASSING <= each.num_tokens and each.passed + work <= each.work for each in blocked)
