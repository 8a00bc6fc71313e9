"""The sequences of an engine as those see them who share it: who enters next, what a tenant pays, who gives way."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import count
from math import ceil
from typing import final

from infer.engine.fair_queueing import (
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
from infer.engine.lease import Lease
from infer.engine.sequence import Sequence


@final
class Queue:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants' shares; 1 for those that are not named."""
        self.tenants = Tenants(weights)
        self.lengths, self._kept = AnswerLengths(EXPECTED_ANSWER), KeptSlots()
        self._numbers, self._entries = count(1), count(1)
        self._num_ended_tokens = 0
        self._charged: dict[Sequence, int] = {}  # work, of those that have entered
        self._given: dict[Sequence, int] = {}  # tokens that they had given when they last entered
        self._passed: dict[Sequence, int] = {}  # work of those that entered before, while these waited for pages
        self.num_preemptions, self.reused_tokens = 0, 0  # of those that have ended

    def join(self, sequence: Sequence, lease: Lease | None) -> None:
        """Count a sequence that was submitted."""
        sequence.join(next(self._numbers), time.perf_counter(), lease)
        self.tenants.come(sequence.request.tenant)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, and refund the work that it did not use to its tenant."""
        tenant = sequence.request.tenant
        if (charged := self._charged.pop(sequence, None)) is not None:
            num_read = max(0, sequence.num_prompt_tokens - sequence.num_reused)
            self.tenants.charge(tenant, work_of(num_read, len(sequence.pieces)) - charged)
            self.lengths.learn(tenant, len(sequence.pieces))
            self._num_ended_tokens += len(sequence.pieces)
        self._kept.left(tenant, sequence.number, time.perf_counter())
        self._given.pop(sequence, None)
        self._passed.pop(sequence, None)
        self.tenants.go(tenant)
        self.num_preemptions += sequence.stats.preemptions
        self.reused_tokens += sequence.num_reused

    def next_of(self, waiting: Iterable[Sequence]) -> Sequence:
        """Return which of one or more sequences enters next."""
        by_number = {sequence.number: sequence for sequence in waiting}
        return by_number[self.tenants.first(map(self._waiting, waiting)).number]

    def passing(
        self, waiting: Collection[Sequence], running: Items[Sequence], blocked: Items[Sequence]
    ) -> Collection[Sequence]:
        """Return those that may enter before the blocked ones, which wait for pages."""
        if not blocked:
            return waiting
        before = [self._blocked(each) for each in blocked]
        shorter = [each for each in waiting if may_pass(len(each.token_ids), self._waiting(each).work, before)]
        if shorter:
            return shorter
        idle, tenants = self.idle(waiting, running), {each.request.tenant for each in blocked}
        return [each for each in idle if each not in blocked and self.tenants.is_owed(each.request.tenant, tenants)]

    def pass_by(self, sequence: Sequence, blocked: Items[Sequence]) -> None:
        """A sequence enters before these."""
        work = self._waiting(sequence).work
        for each in blocked:
            self._passed[each] = self._passed.get(each, 0) + work

    def idle(self, waiting: Iterable[Sequence], running: Items[Sequence]) -> Items[Sequence]:
        """Return the sequences whose tenants have nothing running."""
        tenants = {each.request.tenant for each in running}
        return (
            [each for each in waiting if each.request.tenant not in tenants] if self.tenants.has_idle(tenants) else []
        )

    def giver_for(
        self, sequence: Sequence, running: Items[Sequence], size: Callable[[Sequence], float]
    ) -> Sequence | None:
        """Return who gives its slot and pages to a sequence that waits, if anybody does."""
        by_number = {each.number: each for each in running}
        found = self.tenants.giver(
            self._waiting(sequence),
            size(sequence),
            [self._running(each, size(each)) for each in running],
            self._num_given,
        )
        return None if found is None else by_number[found.number]

    def gave(self, sequence: Sequence, to: Sequence) -> None:
        """Count a sequence that gave its slot to one of another tenant."""
        self.tenants.gave(self._running(sequence, 0.0), self._num_given)
        self._kept.got(to.number)

    def num_kept(self, running: Items[Sequence], num_slots: int) -> int:
        """Return how many free slots wait for a tenant that has nothing running."""
        return self._kept.count((each.request.tenant for each in running), time.perf_counter(), num_slots)

    @property
    def _num_given(self) -> int:
        """Tokens that all sequences gave since the engine began."""
        return self._num_ended_tokens + sum(len(each.pieces) for each in self._charged)

    def expected_room(self, sequence: Sequence) -> int:
        """Return how many tokens are expected to follow."""
        expected = self.lengths.expected(sequence.request.tenant, len(sequence.pieces))
        return min(sequence.room, ceil(expected))

    def entered(self, sequence: Sequence) -> None:
        self._given[sequence] = len(sequence.pieces)
        self._kept.entered(sequence.request.tenant, sequence.number)
        if sequence not in self._charged:
            self._charged[sequence] = self._waiting(sequence).work
            sequence.number_entry(next(self._entries))
            self.tenants.charge(sequence.request.tenant, self._charged[sequence])

    def victim_of(self, running: Items[Sequence], size: Callable[[Sequence], float]) -> Sequence | None:
        """Return who of those that run gives its slot up; None of one or none."""
        by_number = {sequence.number: sequence for sequence in running}
        found = victim([self._running(sequence, size(sequence)) for sequence in running], self.tenants.weight)
        return None if found is None else by_number[found.number]

    def _waiting(self, sequence: Sequence) -> Waiting:
        request = sequence.request
        work = work_of(sequence.num_prompt_tokens, self.expected_room(sequence))
        rank = rank_of(sequence.submitted_at, request.priority)
        return Waiting(sequence.number, request.tenant, rank, work, sequence in self._charged)

    def _running(self, sequence: Sequence, size: float) -> Running:
        request, num_given = sequence.request, len(sequence.pieces) - self._given.get(sequence, 0)
        was_preempted, num_tokens = sequence.stats.preemptions > 0, len(sequence.token_ids)
        return Running(sequence.number, num_given, was_preempted, request.tenant, request.priority, size, num_tokens)

    def _blocked(self, sequence: Sequence) -> Blocked:
        work = self._waiting(sequence).work
        return Blocked(len(sequence.token_ids), work, self._passed.get(sequence, 0))
