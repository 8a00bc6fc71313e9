"""Planning of steps: their sequences, the tokens and drafts of each, and the pages that these need."""

from collections.abc import Collection
from collections.abc import Sequence as Items
from functools import partial
from typing import final

from infer.engine.runner.runner import Runner
from infer.engine.speculation.policy import StepTimes
from infer.engine.step.drafting import Drafting
from infer.engine.step.launched_step import Work
from infer.engine.step.scheduler import NO_PLAN, Plan, Scheduler
from infer.engine.step.sequence import Sequence
from infer.engine.step.slots import Slots
from infer.engine.step.step_costs import StepKind
from infer.engine.step.step_shares import StepPart, StepShares
from infer.errors import OutOfPagesError


@final
class StepPlanner:
    """Plans the steps of one engine."""

    def __init__(self, scheduler: Scheduler, shares: StepShares, drafting: Drafting) -> None:
        self._scheduler, self._shares, self._drafting = scheduler, shares, drafting
        self._resting: list[Sequence] = []  # sequences that do not take part in the current step

    def take_turns(self, wanting: list[Sequence], resting_tenants: Collection[str] = ()) -> list[Sequence]:
        """Return the sequences that take part in the next step. Those of some tenants rest if there are others."""
        wanting = [each for each in wanting if each.request.tenant not in resting_tenants] or wanting
        is_shared = len({each.request.tenant for each in wanting}) > 1
        chosen = self._shares.choose(
            StepPart(each.request.tenant, 1, each.num_computed) for each in wanting if is_shared
        )
        if not is_shared:
            self._resting = []
            return wanting
        self._resting = [each for each in wanting if each.request.tenant not in chosen]
        return [each for each in wanting if each.request.tenant in chosen]

    def plan(self, slots: Slots, active: list[Sequence]) -> tuple[Plan, list[Work]]:
        """Return a plan and its work, without sequences that failed meanwhile or got no pages."""
        while True:
            plan, works = self._plan(slots, active)
            for sequence, chunk in works:
                if not sequence.is_finished and sequence.has_slot:
                    num_tokens = max(plan.num_steps, len(chunk.token_ids))
                    slots.with_pages(sequence, partial(slots.runner.reserve, sequence.slot, num_tokens))
            able = [sequence for sequence in active if sequence.has_slot and not sequence.is_finished]
            if len(able) == len(active):
                return plan, works
            active = able

    def plan_behind(self, slots: Slots, active: list[Sequence]) -> tuple[Plan, list[Work]]:
        """Return a plan and its work for a step behind a running one, or nothing if it needs that one's tokens.

        The tokens are needed if a multi-step is due, if a sequence has a grammar or drafts, or if pages are short. For
        pages, because a preempted sequence accepts its token before it loses its pages.
        """
        if any(each.grammar is not None or self._drafting.is_drafted(each) for each in active):
            return NO_PLAN, []
        plan, works = self._plan(slots, active)
        if plan.num_steps > 1:
            return NO_PLAN, []
        try:
            for sequence, chunk in works:
                slots.runner.reserve(sequence.slot, len(chunk.token_ids))
        except OutOfPagesError:
            return NO_PLAN, []
        return plan, works

    def step_times(self, active: Items[Sequence]) -> StepTimes | None:
        """Return the step times with which drafts of these sequences must pay off, or None if no sequence drafts."""
        if not any(map(self._drafting.is_drafted, active)):
            return None
        num_constrained = sum(sequence.grammar is not None for sequence in active)
        num_greedy = sum(sequence.params.temperature == 0 for sequence in active)
        return self._scheduler.costs.by_kind[StepKind(len(active), num_constrained, num_greedy)]

    def _plan(self, slots: Slots, active: Items[Sequence]) -> tuple[Plan, list[Work]]:
        if not active:
            return NO_PLAN, []
        times, rooms = self.step_times(active), [_rope_room(slots.runner, sequence) for sequence in active]
        if times is not None:
            self._drafting.propose(active, rooms, self._scheduler.max_drafts(len(active)), times)
        demands = [
            sequence.demand(room, self._drafting.steps_to_draft(sequence, times))
            for sequence, room in zip(active, rooms, strict=True)
        ]
        step_tokens = self._scheduler.step_tokens(sequence.request.prefill_chunk for sequence in active)
        if (most_steps := self._shares.most_steps) is not None:
            demands = [demand._replace(max_steps=min(demand.max_steps, most_steps)) for demand in demands]
        num_waiting = len(slots.waiting) + len(self._resting)
        others_stream = any(each.is_streamed and each.is_decoding for each in self._resting)
        plan = self._scheduler.plan(demands, step_tokens, num_waiting, others_stream=others_stream)
        return plan, [
            Work(sequence, sequence.schedule(num_tokens, num_drafts))
            for sequence, num_tokens, num_drafts in zip(active, plan.num_tokens, plan.num_drafts, strict=True)
        ]


def _rope_room(runner: Runner, sequence: Sequence) -> int:
    """Return the number of tokens that may follow with the same rope factors.

    If the sequence now needs other factors, empty its slot.
    """
    length = len(sequence.token_ids)
    if runner.choose_rope(sequence.slot, length):
        sequence.forget_computed()
    return runner.rope_room(length)
