"""Admission: the order in which sequences enter, which of them lose their slot, and what their tenants pay.

Nothing here has a clock, a model or a cache: the rules read sequences through `Candidate`, as integers and seconds.
Tenants share by computed work (start-time fair queueing, doi:10.1145/248157.248171). Each tenant has an account: the
work that its requests were admitted with. The tenant with the smallest account enters next. Work that a request did not
use is refunded when it leaves. A tenant that returns starts at the smallest account of the others, so no tenant can
save up. Among one tenant's requests, the oldest enters first. One level of priority counts
like `HEAD_START` seconds of waiting, so later requests with a higher priority cannot pass an old one forever. Preempted
sequences enter before all others.

A tenant without a running sequence takes slots and pages from a tenant that has more (`Queue.giver_for`). This happens
only so often that little work is lost by it. Such a slot stays free for a moment for the next request of the tenant
that took it (`KeptSlots`). Short sequences pass a long one that waits for pages, until they have taken as much work as
the long one needs (`Queue.next`).
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop
from itertools import chain, count
from math import ceil
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

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


@runtime_checkable
class Candidate(Protocol):
    """A sequence, as the rules see it. Only a `Queue` sets the first six attributes."""

    number: int  # in the order of submission
    submitted_at: float  # seconds
    entry: int  # in the order in which sequences first got a slot
    paid: int | None  # work that its tenant paid; None before it has entered
    num_before: int  # tokens that it had generated when it last got a slot
    passed: int  # work of the sequences that passed it while it waited for pages

    tenant: str
    priority: int
    num_prompt_tokens: int
    num_reused: int  # tokens of its prompt that were found in the cache

    @property
    def num_tokens(self) -> int: ...  # of prompt and answer: to compute again if it is preempted
    @property
    def num_generated(self) -> int: ...
    @property
    def room(self) -> int: ...  # further tokens that it may have
    @property
    def num_preemptions(self) -> int: ...


Candidate_ = TypeVar("Candidate_", bound=Candidate)
Size = Callable[[Candidate_], float]  # a sequence's share of the engine: of the slots, or of the pages if that is more


def work_of(num_prompt_tokens: int, num_answer_tokens: int) -> int:
    return num_prompt_tokens + ANSWER_WORK * num_answer_tokens


def _came_back_just_now(each: Candidate) -> bool:
    return each.num_preemptions > 0 and each.num_generated - each.num_before < FEWEST_KEPT


def has_pages(free: Sequence[int], growths: Iterable[Sequence[int]], needed: Sequence[int]) -> bool:
    """Return True if each pool has enough free pages for a new sequence and for the expected growth of the others."""
    return all(have >= sum(more) for have, *more in zip(free, needed, *growths, strict=True))


@final
class MeanLengths:
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
    """The accounts of tenants."""

    def __init__(self) -> None:
        self.accounts: dict[str, float] = {}
        self._num_active: dict[str, int] = {}  # waiting and running sequences

    def come(self, tenant: str) -> None:
        """Add a sequence of a tenant."""
        if not self._num_active.get(tenant):
            least = self._least_active()
            self.accounts[tenant] = max(self.accounts.get(tenant, least), least)
        self._num_active[tenant] = self._num_active.get(tenant, 0) + 1

    def go(self, tenant: str) -> None:
        """Remove a sequence of a tenant. After its last one, an account below all others is forgotten."""
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
            least = self._least_active()
            self.accounts = {
                name: account for name, account in self.accounts.items() if name in self._num_active or account > least
            }

    def charge(self, tenant: str, work: int) -> None:
        """Charge a tenant for `work`. A negative value refunds work that a sequence was charged for and did not use."""
        if tenant in self.accounts:
            self.accounts[tenant] += work

    def is_owed(self, tenant: str, others: Iterable[str]) -> bool:
        """Return True if the tenant has had at most as much work as each of the others."""
        return all(self.accounts[tenant] <= self.accounts[other] for other in others)

    def _least_active(self) -> float:
        return min(map(self.accounts.__getitem__, self._num_active), default=0.0)


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
        if not self._until:
            return 0
        self._until = {tenant: until for tenant, until in self._until.items() if until > now}
        return min(len(self._until.keys() - set(running)), num_slots // _MOST_KEPT)


@final
class Queue(Generic[Candidate_]):
    """The order of an engine's sequences. A sequence joins, waits for a slot, enters, may wait again, and leaves.

    Each tenant's waiting sequences are sorted, so the next one is found without a look at the others.
    """

    def __init__(self) -> None:
        self.tenants, self.lengths, self.kept = Tenants(), MeanLengths(EXPECTED_ANSWER), KeptSlots()
        self._numbers, self._entries = count(1), count(1)
        self._num_ended_tokens = 0
        self._entered = set[Candidate_]()
        self._gives_after = 0  # tokens of all sequences before the next slot is taken
        # The waiting sequences per tenant, after rank and number: those that were preempted, and new ones.
        self._lines: tuple[dict[str, list[tuple[float, int, Candidate_]]], ...] = {}, {}
        self.num_preemptions, self.reused_tokens = 0, 0  # of finished sequences

    def join(self, sequence: Candidate_, now: float) -> None:
        """Count a sequence that is submitted at the time `now`. It does not wait for a slot yet."""
        sequence.number, sequence.submitted_at = next(self._numbers), now
        self.tenants.come(sequence.tenant)

    def leave(self, sequence: Candidate_, now: float) -> None:
        """Remove a finished sequence, and refund its unused work to its tenant."""
        self.stop_waiting(sequence)
        if sequence.paid is not None:
            self._entered.remove(sequence)
            num_read = max(0, sequence.num_prompt_tokens - sequence.num_reused)
            self.tenants.charge(sequence.tenant, work_of(num_read, sequence.num_generated) - sequence.paid)
            self.lengths.learn(sequence.tenant, sequence.num_generated)
            self._num_ended_tokens += sequence.num_generated
        self.kept.left(sequence.tenant, sequence.number, now)
        self.tenants.go(sequence.tenant)
        self.num_preemptions += sequence.num_preemptions
        self.reused_tokens += sequence.num_reused

    # Waiting

    @property
    def has_waiting(self) -> bool:
        """True if a sequence waits for a slot."""
        return any(self._lines)

    def wait(self, sequence: Candidate_) -> None:
        """Let a sequence wait for a slot. It may wait already."""
        lines = self._lines[sequence.paid is None]
        line = lines.setdefault(sequence.tenant, [])
        rank = sequence.submitted_at - HEAD_START * sequence.priority, sequence.number
        index = bisect_left(line, rank)
        if line[index : index + 1] != [(*rank, sequence)]:
            line.insert(index, (*rank, sequence))

    def stop_waiting(self, sequence: Candidate_) -> None:
        """Let a sequence no longer wait, if it does."""
        lines = self._lines[sequence.paid is None]
        line = lines.get(sequence.tenant, [])
        rank = sequence.submitted_at - HEAD_START * sequence.priority, sequence.number
        index = bisect_left(line, rank)
        if line[index : index + 1] == [(*rank, sequence)]:
            del line[index]
            if not line:
                del lines[sequence.tenant]

    def clear(self) -> None:
        """Let no sequence wait."""
        for lines in self._lines:
            lines.clear()

    def next(
        self,
        running: Iterable[Candidate_],
        blocked: Collection[Candidate_] = (),
        held_back: Collection[Candidate_] = (),
        *,
        is_full: bool = False,
    ) -> Candidate_ | None:
        """Return the sequence that enters next, or None if none may. It is none of `held_back`.

        If the slots `is_full`, only a sequence of a tenant without a running one may enter. If sequences are `blocked`,
        because they wait for pages, others pass them that are much shorter than each of them; all that pass one take
        together at most as much work as that one. If there are none, a tenant passes that has nothing running, and has
        had at most as much work as the tenants of the blocked ones.
        """
        able = self._in_order()
        if is_full or blocked:
            idle = self._in_order({each.tenant for each in running})
            able = idle if is_full else chain(self._shorter(blocked), self._owed(idle, blocked))
        return next((each for each in able if each not in held_back), None)

    def _in_order(self, busy: Collection[str] = ()) -> Iterator[Candidate_]:
        """Yield the waiting sequences of the tenants that are not `busy`."""
        accounts = self.tenants.accounts
        for lines in self._lines:
            order = [(accounts[tenant], tenant) for tenant in lines if tenant not in busy]
            heapify(order)
            while order:
                _, tenant = heappop(order)
                for *_, sequence in lines[tenant]:
                    yield sequence

    def _shorter(self, blocked: Collection[Candidate_]) -> Iterator[Candidate_]:
        most_tokens = min(each.num_tokens for each in blocked) // PASSING
        most_work = min(self.work_of(each) - each.passed for each in blocked)
        for each in self._in_order():
            if each.num_tokens <= most_tokens and self.work_of(each) <= most_work:
                yield each

    def _owed(self, idle: Iterable[Candidate_], blocked: Collection[Candidate_]) -> Iterator[Candidate_]:
        tenants = {each.tenant for each in blocked}
        for each in idle:
            if each not in blocked and self.tenants.is_owed(each.tenant, tenants):
                yield each

    def pass_by(self, sequence: Candidate_, blocked: Iterable[Candidate_]) -> None:
        """Count a sequence that passes these blocked ones."""
        for each in blocked:
            each.passed += self.work_of(sequence)

    def expected_room(self, sequence: Candidate_) -> int:
        """Return the expected number of further tokens."""
        return min(sequence.room, ceil(self.lengths.expected(sequence.tenant, sequence.num_generated)))

    def work_of(self, sequence: Candidate_) -> int:
        """Return the expected work of a waiting sequence."""
        return work_of(sequence.num_prompt_tokens, self.expected_room(sequence))

    # Slots

    def enter(self, sequence: Candidate_) -> None:
        """Count a sequence that has got a slot. Its tenant pays for it once."""
        self.stop_waiting(sequence)
        sequence.num_before = sequence.num_generated
        self.kept.entered(sequence.tenant, sequence.number)
        if sequence.paid is None:
            sequence.paid, sequence.entry = self.work_of(sequence), next(self._entries)
            self._entered.add(sequence)
            self.tenants.charge(sequence.tenant, sequence.paid)

    def giver_for(
        self, sequence: Candidate_, running: Iterable[Candidate_], size: Size[Candidate_]
    ) -> Candidate_ | None:
        """Return the sequence that gives its slot and pages to a waiting one, or None.

        The waiting one's tenant has nothing running. The giver's tenant keeps at least the size that the other takes.
        No slot is taken before the tokens of all sequences outweigh the loss of the last preemption.
        """
        if self._num_given < self._gives_after:
            return None
        sizes = {each: size(each) for each in running}
        held, least = self._holdings(sizes), size(sequence) * _NEARLY
        if sequence.tenant in held:
            return None
        able = [each for each in sizes if held[each.tenant] - sizes[each] >= least and not _came_back_just_now(each)]
        return max(able, key=lambda each: (-each.priority, held[each.tenant], each.number), default=None)

    def gave(self, sequence: Candidate_, to: Candidate_) -> None:
        """Count a sequence that gave its slot to a sequence of another tenant."""
        self._gives_after = self._num_given + _WORTH * sequence.num_tokens
        self.kept.got(to.number)

    def victim_of(self, running: Collection[Candidate_], size: Size[Candidate_]) -> Candidate_ | None:
        """Return the running sequence that loses its slot and pages, or None if at most one runs.

        Tenants with less than their share are spared if possible. Among the others, it is the lowest priority, then the
        tenant with the most, then the youngest sequence. A sequence that was preempted before and has generated few
        tokens since is chosen only if there is no other. The oldest one of the highest priority is never chosen, so
        that at least one sequence progresses.
        """
        if len(running) < 2:
            return None
        sizes = {each: size(each) for each in running}
        kept, held = min(running, key=lambda each: (-each.priority, each.number)), self._holdings(sizes)
        fair = sum(sizes.values()) / len(held) * _NEARLY

        def order(each: Candidate_) -> tuple[bool, bool, int, float, int]:
            tenant_held = held[each.tenant]
            return not _came_back_just_now(each), tenant_held >= fair, -each.priority, tenant_held, each.number

        return max((each for each in running if each is not kept), key=order)

    def _holdings(self, sizes: Mapping[Candidate_, float]) -> dict[str, float]:
        """Return each tenant's share of the engine."""
        held: dict[str, float] = {}
        for each, size in sizes.items():
            held[each.tenant] = held.get(each.tenant, 0.0) + size
        return held

    @property
    def _num_given(self) -> int:
        """Number of tokens that all sequences generated since the engine began."""
        return self._num_ended_tokens + sum(each.num_generated for each in self._entered)
