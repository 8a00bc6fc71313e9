"""The order of an engine's sequences: which one enters next, how much a tenant pays, and which one loses its slot."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import count
from math import ceil
from typing import final

from infer.engine.step.fair_queueing import (
    EXPECTED_ANSWER,
    AnswerLengths,
    Blocked,
    KeptSlots,
    Running,
    Tenants,
    Waiting,
    may_pass,
    rank_of,
    victim,
    work_of,
)
from infer.engine.step.place import Lease, Place
from infer.engine.step.sequence import Sequence


@final
class Queue:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Begin with the `weights` of tenants. Any other tenant has the weight 1."""
        self.tenants = Tenants(weights)
        self.lengths, self._kept = AnswerLengths(EXPECTED_ANSWER), KeptSlots()
        self._numbers, self._entries = count(1), count(1)
        self._num_ended_tokens = 0
        self._entered = set[Sequence]()
        self.num_preemptions, self.reused_tokens = 0, 0  # of finished sequences

    def join(self, sequence: Sequence, lease: Lease | None) -> None:
        """Count a submitted sequence."""
        sequence.join(Place(next(self._numbers), time.perf_counter(), lease))
        self.tenants.come(sequence.request.tenant)

    def leave(self, sequence: Sequence) -> None:
        """Remove a finished sequence, and refund its unused work to its tenant."""
        tenant = sequence.request.tenant
        if (paid := sequence.place.paid) is not None:
            self._entered.remove(sequence)
            num_read = max(0, sequence.num_prompt_tokens - sequence.num_reused)
            self.tenants.charge(tenant, work_of(num_read, len(sequence.pieces)) - paid)
            self.lengths.learn(tenant, len(sequence.pieces))
            self._num_ended_tokens += len(sequence.pieces)
        self._kept.left(tenant, sequence.place.number, time.perf_counter())
        self.tenants.go(tenant)
        self.num_preemptions += sequence.stats.preemptions
        self.reused_tokens += sequence.num_reused

    def next_of(self, waiting: Iterable[Sequence]) -> Sequence:
        """Return the sequence that enters next, from one or more."""
        by_number = {sequence.place.number: sequence for sequence in waiting}
        return by_number[self.tenants.first(map(self._waiting, waiting)).number]

    def passing(
        self, waiting: Collection[Sequence], running: Items[Sequence], blocked: Items[Sequence]
    ) -> Collection[Sequence]:
        """Return the sequences that may enter before the blocked ones, which wait for pages."""
        if not blocked:
            return waiting
        before = [self._blocked(each) for each in blocked]
        shorter = [each for each in waiting if may_pass(len(each.token_ids), self._waiting(each).work, before)]
        if shorter:
            return shorter
        idle, tenants = self.idle(waiting, running), {each.request.tenant for each in blocked}
        return [each for each in idle if each not in blocked and self.tenants.is_owed(each.request.tenant, tenants)]

    def pass_by(self, sequence: Sequence, blocked: Items[Sequence]) -> None:
        """Count a sequence that passes these blocked ones."""
        work = self._waiting(sequence).work
        for each in blocked:
            each.place.passed += work

    def idle(self, waiting: Iterable[Sequence], running: Items[Sequence]) -> Items[Sequence]:
        """Return the sequences whose tenants have nothing running."""
        tenants = {each.request.tenant for each in running}
        return (
            [each for each in waiting if each.request.tenant not in tenants] if self.tenants.has_idle(tenants) else []
        )

    def giver_for(
        self, sequence: Sequence, running: Items[Sequence], size: Callable[[Sequence], float]
    ) -> Sequence | None:
        """Return the sequence that gives its slot and pages to a waiting one, or None."""
        by_number = {each.place.number: each for each in running}
        found = self.tenants.giver(
            self._waiting(sequence),
            size(sequence),
            [self._running(each, size(each)) for each in running],
            self._num_given,
        )
        return None if found is None else by_number[found.number]

    def gave(self, sequence: Sequence, to: Sequence) -> None:
        """Count a sequence that gave its slot to a sequence of another tenant."""
        self.tenants.gave(self._running(sequence, 0.0), self._num_given)
        self._kept.got(to.place.number)

    def num_kept(self, running: Items[Sequence], num_slots: int) -> int:
        """Return the number of free slots that are kept for tenants without a running sequence."""
        return self._kept.count((each.request.tenant for each in running), time.perf_counter(), num_slots)

    @property
    def _num_given(self) -> int:
        """Number of tokens that all sequences generated since the engine began."""
        return self._num_ended_tokens + sum(len(each.pieces) for each in self._entered)

    def expected_room(self, sequence: Sequence) -> int:
        """Return the expected number of further tokens."""
        expected = self.lengths.expected(sequence.request.tenant, len(sequence.pieces))
        return min(sequence.room, ceil(expected))

    def entered(self, sequence: Sequence) -> None:
        """Count a sequence that has got a slot. Its tenant pays for it once."""
        place, tenant = sequence.place, sequence.request.tenant
        place.num_given = len(sequence.pieces)
        self._kept.entered(tenant, place.number)
        if place.paid is None:
            place.paid, place.entry = self._waiting(sequence).work, next(self._entries)
            self._entered.add(sequence)
            self.tenants.charge(tenant, place.paid)

    def victim_of(self, running: Items[Sequence], size: Callable[[Sequence], float]) -> Sequence | None:
        """Return the running sequence that loses its slot, or None if at most one runs."""
        by_number = {sequence.place.number: sequence for sequence in running}
        found = victim([self._running(sequence, size(sequence)) for sequence in running], self.tenants.weight)
        return None if found is None else by_number[found.number]

    def _waiting(self, sequence: Sequence) -> Waiting:
        request, place = sequence.request, sequence.place
        work = work_of(sequence.num_prompt_tokens, self.expected_room(sequence))
        rank = rank_of(place.submitted_at, request.priority)
        return Waiting(place.number, request.tenant, rank, work, place.paid is not None)

    def _running(self, sequence: Sequence, size: float) -> Running:
        request, place, num_tokens = sequence.request, sequence.place, len(sequence.token_ids)
        num_given, was_preempted = len(sequence.pieces) - place.num_given, sequence.stats.preemptions > 0
        return Running(place.number, num_given, was_preempted, request.tenant, request.priority, size, num_tokens)

    def _blocked(self, sequence: Sequence) -> Blocked:
        return Blocked(len(sequence.token_ids), self._waiting(sequence).work, sequence.place.passed)
