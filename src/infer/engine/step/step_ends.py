"""The end of a step: each sequence accepts its tokens, the cache keeps the right ones, and costs are learnt."""

import time
from collections.abc import Sequence as Items
from functools import partial
from typing import final

from infer.compute.operands.step import Clock, StepEnd, sampled_after
from infer.compute.ops import Generated
from infer.engine.runner.runner import Runner
from infer.engine.runner.sample_loop import SampledTokens
from infer.engine.step.drafting import Drafting
from infer.engine.step.grammar_masks import MaskFiller
from infer.engine.step.launched_step import LaunchedStep, Work
from infer.engine.step.scheduler import Plan, Scheduler
from infer.engine.step.sequence import Sequence
from infer.engine.step.slot_params import SlotParams
from infer.engine.step.slots import Slots
from infer.engine.step.step_plans import StepPlanner
from infer.engine.step.step_shares import StepShares


@final
class StepEnds:
    """Ends the steps of one engine."""

    def __init__(self, planner: StepPlanner, scheduler: Scheduler, shares: StepShares, drafting: Drafting) -> None:
        self._planner, self._scheduler, self._shares, self._drafting = planner, scheduler, shares, drafting
        self._last_ended = 0.0  # when the last step ended, by time.perf_counter

    def keep_early(self, launched: LaunchedStep, runner: Runner) -> None:
        """Let the cache keep the chunks of a running step, so that a step can be planned behind it."""
        launched.is_kept = True
        for index, work in enumerate(launched.works):
            if work.counts:
                awaited = (sampled_after(index),) if work.chunk.has_logits else ()
                _keep(runner, work, len(work.chunk.token_ids), awaited)
                _remember(runner, work.sequence)

    def settle(self, launched: LaunchedStep, slots: Slots, params: SlotParams, filler: MaskFiller) -> None:
        """Wait for a step, and let its sequences accept their tokens."""
        works, parts, counted = launched.works, launched.parts, [work for work in launched.works if work.counts]
        found, held_up = _wait(launched, params, filler)
        clock = self._clock_of(launched, found.ends)
        num_steps = len(clock.ends) if launched.is_multi_step else 1
        self._learn(launched.plan, works, num_steps, clock, held_up)
        each_held_up = held_up / max(1, sum(sequence.grammar is not None for sequence, _ in works))
        sampled = map(SampledTokens, found.token_ids, found.logprobs)
        for index, (work, tokens) in enumerate(zip(works, sampled, strict=True)):
            settled = time.perf_counter() if parts else 0.0
            if work.counts:
                self._accept(slots.runner, work, tokens, clock, launched)
            if parts and work.sequence.grammar is not None:
                parts[index] = parts[index]._replace(delay=each_held_up + time.perf_counter() - settled)
        if parts:
            self._shares.computed(parts, num_steps, clock.ended - clock.started - held_up)
        params.renew()
        if not launched.is_kept:
            for sequence, _ in counted:
                _remember(slots.runner, sequence)
                if sequence.must_end_prompt:
                    _end_prompt(slots, sequence)

    def _clock_of(self, launched: LaunchedStep, ends: Items[StepEnd]) -> Clock:
        """Return the times of a step. A step behind another one begins when the other one ends.

        If another step was planned while this one ran, the device reports the time at which this one ended.
        """
        started, ended = launched.started, time.perf_counter()
        if launched.is_kept or launched.is_behind:
            started, ended = max(started, self._last_ended if launched.is_behind else 0.0), ends[-1].sampling
        self._last_ended = ended
        return Clock(started, ends, ended)

    def _learn(self, plan: Plan, works: Items[Work], num_steps: int, clock: Clock, held_up: float) -> None:
        """Learn the costs of a step from its time, before its tokens are accepted."""
        times = self._planner.step_times([work.sequence for work in works])
        if not all(sequence.pieces and len(chunk.token_ids) == chunk.num_logits for sequence, chunk in works):
            times = None
        self._scheduler.update(plan, num_steps, clock.ended - clock.started, times, held_up)

    def _accept(self, runner: Runner, work: Work, sampled: SampledTokens, clock: Clock, launched: LaunchedStep) -> None:
        sequence, chunk = work
        sequence.collect()
        num_accepted = num_drafts = 0
        if chunk.has_logits:
            num_before = len(sequence.pieces)
            num_drafts = 0 if launched.is_multi_step else len(sampled.token_ids) - 1  # right drafts
            sequence.attempt(partial(sequence.accept_all, sampled, num_drafts), None)
            num_accepted = len(sequence.pieces) - num_before
        if not launched.is_kept:
            _keep(runner, work, len(chunk.token_ids) - chunk.num_drafts + max(0, num_accepted - 1))
        sequence.stepped(chunk, sampled, num_accepted, clock, is_multi_step=launched.is_multi_step)
        if chunk.has_logits:
            self._drafting.observe(sequence)


def _wait(launched: LaunchedStep, params: SlotParams, filler: MaskFiller) -> tuple[Generated, float]:
    """Wait for a step, and return its tokens and the seconds for which it waited for grammars."""
    found, masks = launched.pending.wait(), launched.masks
    if masks is None:
        return found, 0.0
    masks.wait()
    if launched.is_multi_step:
        _cut(launched, found, params, filler)
    return found, filler.held_up(found.ends)


def _cut(launched: LaunchedStep, found: Generated, params: SlotParams, filler: MaskFiller) -> None:
    """Discard tokens that a multi-step sampled after a sequence's grammar ended, forced a token, or failed."""
    for row, count in filler.num_counted.items():
        if count < len(found.token_ids[row]):
            del found.token_ids[row][count:], found.logprobs[row][count:]
            params.mark_stale(launched.works[row].sequence)


def _keep(runner: Runner, work: Work, count: int, awaited: Items[int] = ()) -> None:
    """Let the cache keep the first tokens of a chunk."""
    runner.commit(work.chunk.slot, count)
    work.sequence.computed(count, awaited)


def _remember(runner: Runner, sequence: Sequence) -> None:
    """Make the computed tokens available to other sequences."""
    if runner.shares_prefixes and not sequence.has_fault:
        runner.remember(sequence.slot, sequence.token_ids, sequence.request.salt)


def _end_prompt(slots: Slots, sequence: Sequence) -> None:
    """Compress the prompt once it is computed and a token was sampled. The time counts with the next token."""
    if sequence.num_computed != sequence.num_prompt_tokens or not sequence.pieces:
        return
    started, runner, prompt = time.perf_counter(), slots.runner, sequence.token_ids[: sequence.num_prompt_tokens]

    def compress() -> None:
        if runner.lengths[sequence.slot] < len(prompt):  # pages were short, and the prompt is computed again
            runner.truncate(sequence.slot, 0)
            sequence.forget_computed()
        else:
            runner.after_prompt(sequence.slot, prompt)
            sequence.compress_prompt(must=False)

    slots.with_pages(sequence, compress)
    sequence.timer.waited(time.perf_counter() - started)
