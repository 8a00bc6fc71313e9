"""Admission: the order in which sequences enter, who gives way, and the longest wait. Pure functions of integers and
seconds.

Tenants share by computed work (start-time fair queueing, doi:10.1145/248157.248171). Each tenant has an account: the
work that its requests were admitted with, divided by its weight. The tenant with the smallest account enters next. Work
that a request did not use is refunded when it leaves. A tenant that returns starts at the smallest account of the
others, so nobody saves up. Among one tenant's requests, the oldest enters first. One level of priority counts like
`HEAD_START` seconds of waiting, so the others catch up with it. Preempted sequences enter before all others.

A tenant that has nothing running takes slots and pages from one that has more (`Tenants.giver`). Slots change hands
only as often as the work that is lost by it stays small. A slot stays free for a moment for the next request of the
tenant that got it (`KeptSlots`). Short sequences pass a long one that waits for pages, until they have taken as much
work as the long one needs (`may_pass`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

EXPECTED_ANSWER = 256  # tokens, of an answer that may have more
HEAD_START = 10.0  # seconds, for each level of priority
ANSWER_WORK = 2  # of a token of an answer, in tokens of a prompt
FEWEST_KEPT = 16  # tokens that a sequence gives before it is preempted again
PASSING = 4  # times fewer tokens than those that it passes has a sequence that enters before its turn
LEARNT = 0.1  # weight of an answer that ends, in the mean length
KEPT_SECONDS = 5.0  # for which a slot that a tenant got from another waits for its next request
_MOST_KEPT = 8  # one of so many slots
_MOST_LENGTHS = 1024  # tenants whose lengths are kept
_NEARLY = 1 - 1e-9
_WORTH = 3  # times the tokens that a preemption wastes, all sequences give before a slot changes hands again


class Waiting(NamedTuple):
    """A sequence that waits for a slot."""

    number: int  # in the order in which they came
    tenant: str
    rank: float  # seconds: when it came, less its head start
    work: int  # that it is expected to take
    is_charged: bool = False  # it was preempted: its tenant has paid


class Running(NamedTuple):
    """A sequence that has a slot. `size` is its share of the engine: of the slots, or of the pages if that is more."""

    number: int
    num_given: int  # tokens since it got its slot
    was_preempted: bool
    tenant: str = ""
    priority: int = 0
    size: float = 0.0
    num_tokens: int = 0  # to compute again if it is preempted


class Blocked(NamedTuple):
    """A sequence that is next, but for which there are no pages. `passed` is the work of those that entered before."""

    num_tokens: int
    work: int
    passed: int


def rank_of(asked_at: float, priority: int) -> float:
    return asked_at - HEAD_START * priority


def work_of(num_prompt_tokens: int, num_answer_tokens: int) -> int:
    return num_prompt_tokens + ANSWER_WORK * num_answer_tokens


@final
class AnswerLengths:
    """The mean length of the answers that ended, of all tenants and of each."""

    def __init__(self, first: int = EXPECTED_ANSWER) -> None:
        self.mean = float(first)
        self._by_tenant: dict[str, float] = {}  # the last to change is the last

    def learn(self, tenant: str, num_tokens: int) -> None:
        own = self._by_tenant.pop(tenant, self.mean)
        self._by_tenant[tenant] = own + LEARNT * (num_tokens - own)
        self.mean += LEARNT * (num_tokens - self.mean)
        if len(self._by_tenant) > _MOST_LENGTHS:
            del self._by_tenant[next(iter(self._by_tenant))]

    def expected(self, tenant: str, num_given: int = 0) -> float:
        """Return how many tokens are expected to follow the first `num_given` of an answer: a quarter of the mean at
        least."""
        mean = self._by_tenant.get(tenant, self.mean)
        return max(mean - num_given, mean / 4)


@final
class Tenants:
    """The accounts. A tenant without a weight has 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, float] = {}
        self._num_active: dict[str, int] = {}  # sequences that wait or run
        self._gives_after = 0  # tokens, before a slot changes hands again

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
        """Remove a sequence of a tenant. If it was the last, an account below all others is forgotten."""
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
            least = self._least_active()
            self._accounts = {
                name: account for name, account in self._accounts.items() if name in self._num_active or account > least
            }

    def first(self, waiting: Iterable[Waiting]) -> Waiting:
        """Return the sequence that enters next, out of one or more."""
        accounts = self._accounts
        return min(
            waiting, key=lambda each: (not each.is_charged, accounts[each.tenant], each.tenant, each.rank, each.number)
        )

    def charge(self, tenant: str, work: int) -> None:
        """Charge a tenant for `work`. Below 0 it is a refund, for work that a sequence entered with and did not use."""
        if tenant in self._accounts:
            self._accounts[tenant] += work / self.weight(tenant)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def giver(self, one: Waiting, size: float, running: Sequence[Running], num_given: int = 0) -> Running | None:
        """Return the sequence that gives its slot and pages to one whose tenant has nothing running.

        Its tenant keeps at least the `size` that the one takes. `num_given` are the tokens that all sequences gave so
        far: nobody gives before they are worth what the last preemption wasted.
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
        """Count a slot that changed hands when all sequences together had given `num_given` tokens."""
        self._gives_after = num_given + _WORTH * giver.num_tokens

    def is_owed(self, tenant: str, others: Iterable[str]) -> bool:
        """Return True if a tenant has had no more work than any of these."""
        return all(self._accounts[tenant] <= self._accounts[other] for other in others)

    def has_idle(self, running: Iterable[str]) -> bool:
        """Return whether some tenant has sequences, but none of those that run, whose tenants are given."""
        return not self._num_active.keys() <= set(running)

    def _least_active(self) -> float:
        return min((self._accounts[tenant] for tenant in self._num_active), default=0.0)


@final
class KeptSlots:
    """The slots that tenants got from others. Each stays free for a moment after a request.

    So a tenant with many short questions takes a slot from a long answer once, and not for each question.
    """

    def __init__(self) -> None:
        self._numbers = set[int]()  # of the sequences that run in such slots
        self._until: dict[str, float] = {}  # by tenant, whose slot is free

    def got(self, number: int) -> None:
        """Count a sequence that enters because another gave its slot."""
        self._numbers.add(number)

    def entered(self, tenant: str, number: int) -> None:
        if self._until.pop(tenant, None) is not None:
            self._numbers.add(number)

    def left(self, tenant: str, number: int, now: float) -> None:
        if number in self._numbers:
            self._numbers.remove(number)
            self._until[tenant] = now + KEPT_SECONDS

    def count(self, running: Iterable[str], now: float, num_slots: int) -> int:
        """Return how many slots are free that only a tenant without a running sequence may take."""
        self._until = {tenant: until for tenant, until in self._until.items() if until > now}
        return min(len(self._until.keys() - set(running)), num_slots // _MOST_KEPT) if self._until else 0


def has_pages(free: Sequence[int], growths: Iterable[Sequence[int]], needed: Sequence[int]) -> bool:
    """Return True if each pool has enough free pages for a new sequence and for the expected growth of the others."""
    return all(have >= sum(more) for have, *more in zip(free, needed, *growths, strict=True))


def holdings(running: Iterable[Running], weight: Callable[[str], float]) -> dict[str, float]:
    """Return the share of the engine that each tenant has, over its weight."""
    held: dict[str, float] = {}
    for each in running:
        held[each.tenant] = held.get(each.tenant, 0.0) + each.size / weight(each.tenant)
    return held


def victim(running: Sequence[Running], weight: Callable[[str], float] = lambda tenant: 1.0) -> Running | None:
    """Return the sequence that gives its slot and pages up, or None if there is at most one.

    Only tenants that have their share or more give, if there are any: first the lowest priority, then the tenant that
    has the most, then the youngest. One that came back and has given few tokens gives only if there is no other. The
    oldest of the highest priority never gives, so that somebody gets on.
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
    """Return whether a sequence may enter before others that wait for pages: it is much shorter than each of them, and
    all that passed one take no more work than the one itself."""
    return all(num_tokens * PASSING <= each.num_tokens and each.passed + work <= each.work for each in blocked)
