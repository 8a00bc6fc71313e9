"""Steps of one engine: the sequences of each, its drafts, its plan and its pages, and its end.

At the end of a step each sequence accepts its tokens, the cache keeps the right ones, and costs are learnt.
"""

import time
from collections import abc
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import final

from infer.compute.operands.step import Chunk, Clock, Interrupt, StepEnd, sampled_after
from infer.compute.ops import Generated, PendingStep, SampledStep
from infer.engine.runner.runner import Runner
from infer.engine.speculation.policy import StepTimes
from infer.engine.step.drafting import Drafting
from infer.engine.step.grammar_masks import Filling, MaskFiller
from infer.engine.step.scheduler import NO_PLAN, Plan, Scheduler, StepPart, StepShares
from infer.engine.step.sequence import Sequence
from infer.engine.step.slots import Slots
from infer.errors import OutOfPagesError

Work = tuple[Sequence, Chunk]  # one sequence's share of a step
_MANY = 1 << 30  # tokens
_NEW, _FORGET = 0.2, 0.9  # weight of the host's last time, and the factor of its mean after each multi-step


@final
@dataclass
class LaunchedStep:
    """A step that runs or has ended."""

    plan: Plan
    works: list[Work]
    pending: PendingStep
    filling: Filling | None  # of the masks of grammars
    parts: list[StepPart]  # parts of several tenants
    started: float  # time.perf_counter before the step was planned
    draft_seconds: float  # in which drafts were computed, before the step
    is_multi_step: bool
    is_behind: bool  # it was planned while another one ran
    is_kept: bool = False  # the cache has already kept its chunks, because a step is planned while it runs

    @property
    def counts(self) -> bool:
        """True if any sequence still takes part."""
        return any(_is_current(work) for work in self.works)

    @property
    def may_be_followed(self) -> bool:
        """True if the number of tokens that the cache will keep is known before the step's tokens are."""
        is_single = not self.is_multi_step and not any(self.plan.num_drafts)
        return self.pending.is_running and is_single and self.filling is None


@final
class Steps:
    """Plans, launches and ends the steps of one engine."""

    def __init__(self, slots: Slots, scheduler: Scheduler, drafting: Drafting, interrupt: Interrupt) -> None:
        """Begin without steps. Any thread may set `interrupt`, which ends a multi-step after the current step."""
        self._slots, self._runner, self._scheduler, self._drafting = slots, slots.runner, scheduler, drafting
        self._shares = StepShares(scheduler.costs)
        self._filler, self._interrupt = MaskFiller(slots.runner.model.backend), interrupt
        self._resting: list[Sequence] = []  # sequences that do not take part in the current step
        self._last_ended = 0.0  # when the last step ended, by time.perf_counter
        # True if a row's length after a step is known before the step's tokens are sampled.
        self.grow_evenly = not self._runner.compresses_prompts and self._runner.model.rope_border is None
        self._run_alone = False  # the device runs single steps without the host
        self._host_seconds = 0.0  # between two waits for steps that follow each other, smoothed
        self._last_waited = 0.0  # when the last wait for a step returned, by time.perf_counter

    def close(self) -> None:
        """End the thread of masks. The next step may begin another one."""
        self._filler.close()

    # Plans

    def take_turns(self, wanting: list[Sequence], resting_tenants: Collection[str] = ()) -> list[Sequence]:
        """Return the sequences that take part in the next step.

        The sequences of `resting_tenants` take part only if no other tenant has sequences.
        """
        if resting_tenants:
            wanting = [each for each in wanting if each.tenant not in resting_tenants] or wanting
        self._resting = []
        if len({each.tenant for each in wanting}) <= 1:
            if self._shares.is_shared:
                self._shares.choose(())
            return wanting
        chosen = self._shares.choose([StepPart(each.tenant, 1, each.num_computed) for each in wanting])
        self._resting = [each for each in wanting if each.tenant not in chosen]
        return [each for each in wanting if each.tenant in chosen]

    def force(self, active: list[Sequence]) -> list[Sequence]:
        """Accept forced tokens: a grammar may allow exactly one token. Return the sequences that have not ended."""
        if not (constrained := [sequence for sequence in active if sequence.grammar is not None]):
            return active
        for sequence in constrained:
            self._slots.params.extend(sequence, sequence.attempt(sequence.force, []))
        self._drafting.observe(constrained)
        return [sequence for sequence in active if not sequence.is_finished]

    def launch(self, active: list[Sequence], behind: LaunchedStep | None) -> LaunchedStep | None:
        """Plan a step of these sequences and launch it, or run a multi-step.

        Return None if there is nothing to compute, or if a step `behind` another one needs that one's tokens.
        """
        started, runner, params, pending = time.perf_counter(), self._runner, self._slots.params, None
        plan, works = self._planned(active) if behind is None else self._planned_behind(active)
        if not works:
            return None
        chunks = [chunk for _, chunk in works]
        columns = params.select([chunk.row for chunk in chunks])
        step = SampledStep(chunks, runner.starts(chunks), columns, params.history)
        if behind is not None and runner.captured_for(step) is None:
            return None
        parts = list[StepPart]()
        if self._shares.is_shared:
            parts = [StepPart(each.tenant, len(chunk.token_ids), each.num_computed) for each, chunk in works]
        has_grammar = any(sequence.grammar is not None for sequence, _ in works)
        filling = self._filler.start(works) if has_grammar else None
        if filling is not None:
            step = step._replace(masks=filling.masks)
        if plan.num_steps > 1:
            stop_ids = frozenset[int]().union(*(sequence.stop_ids for sequence, _ in works))
            generated = runner.multi_step(step, plan.num_steps, stop_ids, self._interrupt)
            pending = PendingStep(generated) if generated.ends else None
        is_multi_step = pending is not None
        if pending is None:
            pending = runner.launch(step, None if behind is None else behind.pending)
            self._run_alone = pending.is_running
        else:
            self._host_seconds *= _FORGET  # a host with less work is found by a single step
        for sequence, chunk in works:
            sequence.launched = (*sequence.launched, chunk)
        spent = 0.0 if self._drafting.model is None else self._drafting.take_seconds()
        return LaunchedStep(plan, works, pending, filling, parts, started, spent, is_multi_step, behind is not None)

    def _planned(self, active: list[Sequence]) -> tuple[Plan, list[Work]]:
        """Return a plan and its work, without sequences that failed meanwhile or got no pages."""
        try_reserve = self._runner.cache.try_reserve
        while True:
            plan, works = self._plan(active)
            for sequence, chunk in works:
                num_tokens = max(plan.num_steps, len(chunk.token_ids))
                if sequence.is_able and try_reserve(sequence.slot, num_tokens):
                    self._slots.make_room(sequence, partial(try_reserve, sequence.slot, num_tokens))
            able = [sequence for sequence in active if sequence.is_able]
            if len(able) == len(active):
                return plan, works
            active = able

    def _planned_behind(self, active: list[Sequence]) -> tuple[Plan, list[Work]]:
        """Return a plan and its work for a step behind a running one, or nothing if it needs that one's tokens.

        The tokens are needed if a multi-step is due, if a sequence has a grammar or drafts, or if pages are short. For
        pages, because a preempted sequence accepts its token before it loses its pages.
        """
        if self._drafting.drafted(active) or any(each.grammar is not None for each in active):
            return NO_PLAN, []
        (plan, works), try_reserve = self._plan(active), self._runner.cache.try_reserve
        if plan.num_steps > 1 or any(try_reserve(sequence.slot, len(chunk.token_ids)) for sequence, chunk in works):
            return NO_PLAN, []
        return plan, works

    def step_times(self, active: abc.Sequence[Sequence]) -> StepTimes | None:
        """Return the step times with which drafts of these sequences must pay off, or None if no sequence drafts."""
        if not self._drafting.drafted(active):
            return None
        num_constrained = sum(sequence.grammar is not None for sequence in active)
        num_greedy = sum(sequence.params.temperature == 0 for sequence in active)
        return self._scheduler.costs.by_kind[len(active), num_constrained, num_greedy]

    def _plan(self, active: abc.Sequence[Sequence]) -> tuple[Plan, list[Work]]:
        if not active:
            return NO_PLAN, []
        times, room = self.step_times(active), rope_room(self._runner, active)
        if times is not None:
            self._drafting.propose(active, min(room, self._scheduler.max_drafts(len(active))), times)
        max_steps = min([1 + room, *[sequence.max_steps for sequence in active]])
        limit = self._runner.model.step_limits.tokens
        if (most_steps := self._shares.most_steps) is not None:
            max_steps = min(max_steps, most_steps)
        plan = self._scheduler.plan(
            active,
            min([limit, *[sequence.request.options.prefill_chunk or limit for sequence in active]]),
            max_steps,
            steps_to_draft=[] if times is None else self._drafting.steps_to_draft(active, times),
            others_wait=self._slots.queue.has_waiting or bool(self._resting),
            others_stream=any(each.is_streamed and each.num_pending == 1 for each in self._resting),
        )
        if times is None and self._single_steps_pay(active, plan):
            plan = plan._replace(num_steps=1)
        return plan, [
            (sequence, sequence.schedule(num_tokens, num_drafts))
            for sequence, num_tokens, num_drafts in zip(active, plan.num_tokens, plan.num_drafts, strict=True)
        ]

    def _single_steps_pay(self, active: abc.Sequence[Sequence], plan: Plan) -> bool:
        """Return True if single steps, each launched behind the one before, keep the device busy all the time.

        Between two multi-steps, the device waits for the host. It does not if a step takes longer than the host's work
        for the next one, and each step may be followed.
        """
        is_followed = self._run_alone and self.grow_evenly and all(each.grammar is None for each in active)
        return is_followed and self._host_seconds <= self._scheduler.costs.predict(plan.work)

    # Ends

    def keep_early(self, launched: LaunchedStep) -> None:
        """Let the cache keep the chunks of a running step, so that a step can be planned behind it."""
        launched.is_kept = True
        for index, (sequence, chunk) in enumerate(launched.works):
            if _is_current((sequence, chunk)):
                self._keep(sequence, len(chunk.token_ids), (sampled_after(index),) if chunk.has_logits else ())

    def _keep(self, sequence: Sequence, count: int, awaited: tuple[int, ...] = ()) -> None:
        """Let the cache keep the next `count` tokens of a sequence, and make them available to others."""
        self._runner.commit(sequence.slot, count)
        sequence.computed(count, awaited)
        if self._runner.shares_prefixes and not sequence.has_fault:
            self._runner.cache.remember(sequence.slot, sequence.token_ids, sequence.request.salt)

    def settle(self, launched: LaunchedStep) -> None:
        """Wait for a step, and let its sequences accept their tokens."""
        works, parts, counted = launched.works, launched.parts, list(map(_is_current, launched.works))
        generated, held_up, cut = self._wait(launched)
        clock = self._clock_of(launched, generated.ends)
        num_steps = len(clock.ends) if launched.is_multi_step else 1
        times = self.step_times([sequence for sequence, _ in works])
        if times and not all(each.pieces and len(chunk.token_ids) == chunk.num_logits for each, chunk in works):
            times = None  # the table is of steps whose tokens are all sampled, as drafts are
        seconds, drafted = clock.ended - clock.started - launched.draft_seconds, list[tuple[Chunk, int]]()
        self._scheduler.update(launched.plan, num_steps, seconds, times, held_up)
        each_held_up = held_up / max(1, sum([sequence.grammar is not None for sequence, _ in works]))
        for index, (sequence, chunk) in enumerate(works):
            settled = time.perf_counter() if parts else 0.0
            if counted[index]:
                sampled = generated.token_ids[index], generated.logprobs[index]
                num_right = sequence.collect(chunk, *sampled, clock, is_multi_step=launched.is_multi_step)
                if chunk.num_drafts:
                    drafted.append((chunk, num_right - len(chunk.token_ids) + chunk.num_drafts))
                if not launched.is_kept:
                    self._keep(sequence, num_right)
            if parts and sequence.grammar is not None:
                parts[index] = parts[index]._replace(delay=each_held_up + time.perf_counter() - settled)
        if parts:
            self._shares.computed(parts, num_steps, clock.ended - clock.started - held_up)
        if self._drafting.model is not None:
            self._drafting.account(drafted, len(works), seconds - held_up, launched.draft_seconds, times)
        for row in cut:
            self._slots.params.renew(works[row][0])
        self._drafting.observe([sequence for sequence, chunk in compress(works, counted) if chunk.has_logits])
        if self._runner.compresses_prompts and not launched.is_kept:
            for sequence, _ in compress(works, counted):
                _end_prompt(self._slots, sequence)

    def _wait(self, launched: LaunchedStep) -> tuple[Generated, float, abc.Sequence[int]]:
        """Return `_waited(launched)`, and learn how long the host worked between two waits."""
        if launched.is_kept and launched.is_behind:
            self._host_seconds += _NEW * (time.perf_counter() - self._last_waited - self._host_seconds)
        ended, self._last_waited = _waited(launched), time.perf_counter()
        return ended

    def _clock_of(self, launched: LaunchedStep, ends: abc.Sequence[StepEnd]) -> Clock:
        """Return the times of a step. A step behind another one begins when the other one ends.

        If another step was planned while this one ran, the device reports the time at which this one ended.
        """
        started, ended = launched.started, time.perf_counter()
        if launched.is_kept or launched.is_behind:
            started, ended = max(started, self._last_ended if launched.is_behind else 0.0), ends[-1].sampling
        self._last_ended = ended
        return Clock(started, ends, ended)


def _is_current(work: Work) -> bool:
    """Return True if the step's results count. False if the sequence ended or lost its slot after the launch."""
    sequence, chunk = work
    return bool(running := sequence.launched) and (running[0] is chunk or running[-1] is chunk)


def _waited(launched: LaunchedStep) -> tuple[Generated, float, abc.Sequence[int]]:
    """Wait for a step. Return its tokens, the seconds for which it waited for grammars, and the rows that were cut.

    A row of a multi-step is cut if its grammar ended, forced a token, or failed before the last step.
    """
    generated, filling = launched.pending.wait(), launched.filling
    if filling is None:
        return generated, 0.0, ()
    filling.masks.wait()
    counted = filling.num_counted if launched.is_multi_step else {}
    cut = [row for row, count in counted.items() if count < len(generated.token_ids[row])]
    for row in cut:
        del generated.token_ids[row][counted[row] :], generated.logprobs[row][counted[row] :]
    return generated, filling.held_up(generated.ends), cut


def _end_prompt(slots: Slots, sequence: Sequence) -> None:
    """Compress the prompt once it is computed and a token was sampled. The time counts with the next token."""
    is_computed = sequence.num_computed == sequence.num_prompt_tokens
    if not (sequence.must_end_prompt and is_computed and sequence.pieces):
        return
    started, runner, slot = time.perf_counter(), slots.runner, sequence.slot
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    if slots.make_room(sequence, partial(runner.prompt_shortage, slot)):
        try:
            runner.after_prompt(slot, prompt)
            sequence.must_end_prompt = False
        except OutOfPagesError:  # a loaded row lost tokens, and has no pages to compute them again
            runner.cache.truncate(slot, 0)
            sequence.num_computed = 0
    sequence.timer.waited(time.perf_counter() - started)


def rope_room(runner: Runner, active: abc.Sequence[Sequence]) -> int:
    """Return the number of tokens that may follow each sequence with the same rope factors.

    The slot of a sequence that now needs other factors is emptied.
    """
    if (border := runner.model.rope_border) is None:
        return _MANY
    for sequence in active:
        if runner.choose_rope(sequence.slot, len(sequence.token_ids)):
            sequence.num_computed = 0
    lengths = [len(sequence.token_ids) for sequence in active]
    return min(border - length if length <= border else _MANY for length in lengths)
