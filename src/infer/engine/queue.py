"""The sequences of an engine as those see them who share it: who enters next, what a tenant pays, who gives way."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import count
from typing import final

from infer.engine.admission import EXPECTED_ANSWER, Running, Tenants, Waiting, rank_of, victim, work_of
from infer.engine.sequence import Sequence


@final
class Queue:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of tenants' shares; 1 for those that are not named."""
        self.tenants = Tenants(weights)
        self._numbers, self._entries = count(1), count(1)
        self._present = set[Sequence]()  # that count as their tenants'
        self._charged: dict[Sequence, int] = {}  # work, of those that have entered
        self._given: dict[Sequence, int] = {}  # tokens that they had given when they last entered
        self.num_preemptions, self.reused_tokens = 0, 0  # of those that have ended

    def join(self, sequence: Sequence) -> None:
        """For any thread; the other methods are for the one that steps."""
        sequence.number, sequence.submitted_at = next(self._numbers), time.perf_counter()

    def leave(self, sequence: Sequence) -> None:
        """It has ended: what it did not use of the work that it entered with, its tenant gets back."""
        tenant = sequence.request.tenant
        if (charged := self._charged.pop(sequence, None)) is not None:
            num_read = max(0, sequence.num_prompt_tokens - sequence.num_reused)
            self.tenants.charge(tenant, work_of(num_read, len(sequence.pieces)) - charged)
        self._given.pop(sequence, None)
        if sequence in self._present:
            self._present.remove(sequence)
            self.tenants.go(tenant)
        self.num_preemptions += sequence.stats.preemptions
        self.reused_tokens += sequence.num_reused

    def notice(self, waiting: Items[Sequence]) -> None:
        """They count as their tenants' from now on."""
        for sequence in waiting:
            if sequence not in self._present:
                self._present.add(sequence)
                self.tenants.come(sequence.request.tenant)

    def recover(self, sequences: Items[Sequence]) -> None:
        """After an exception at any place: all but these have ended, and their tenants are counted anew."""
        self.tenants.recount([sequence.request.tenant for sequence in self._present])
        for sequence in self._present.difference(sequences):
            self.leave(sequence)

    def next_of(self, waiting: Items[Sequence]) -> Sequence:
        """Of one or more that were noticed, who enters next."""
        by_number = {sequence.number: sequence for sequence in waiting}
        return by_number[self.tenants.first(map(self._waiting, waiting)).number]

    def entered(self, sequence: Sequence) -> None:
        self._given[sequence] = len(sequence.pieces)
        if sequence not in self._charged:
            self._charged[sequence], sequence.entry = self._waiting(sequence).work, next(self._entries)
            self.tenants.charge(sequence.request.tenant, self._charged[sequence])

    def victim_of(self, running: Items[Sequence]) -> Sequence | None:
        """Of those that run, who gives its slot up; None of one or none."""
        by_number = {sequence.number: sequence for sequence in running}
        found = victim([self._running(sequence) for sequence in running])
        return None if found is None else by_number[found.number]

    def _waiting(self, sequence: Sequence) -> Waiting:
        request = sequence.request
        work = work_of(sequence.num_prompt_tokens, expected_room(sequence))
        rank = rank_of(sequence.submitted_at, request.priority)
        return Waiting(sequence.number, request.tenant, rank, work, sequence in self._charged)

    def _running(self, sequence: Sequence) -> Running:
        num_given = len(sequence.pieces) - self._given.get(sequence, 0)
        return Running(sequence.number, num_given, sequence.stats.preemptions > 0)


def expected_room(sequence: Sequence) -> int:
    """How many tokens are expected to follow."""
    return min(sequence.room, EXPECTED_ANSWER)
