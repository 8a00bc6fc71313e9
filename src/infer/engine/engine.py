"""The engine of a loaded model. All sequences go through its steps, whoever asked for them.

`launch` plans a step (`Scheduler`) and runs it (`Runner`). Then `collect` lets each sequence accept its sampled tokens,
and the cache keeps these. One step may serve chunks of prompts, single tokens and drafts, with a grammar or without.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple, TypeVar, final

from infer.engine.drafting import Drafting
from infer.engine.grammar_masks import MaskFiller
from infer.engine.place import Lease
from infer.engine.prefix_disk import PrefixDisk
from infer.engine.prefix_ends import PrefixEnds
from infer.engine.queue import Queue
from infer.engine.scheduler import NO_PLAN, Plan, Scheduler
from infer.engine.sequence import Sequence
from infer.engine.slot_params import SlotParams
from infer.engine.slots import Slots
from infer.engine.snapshot import EngineSnapshot, take_snapshot
from infer.engine.step_costs import StepKind, context_of
from infer.engine.step_shares import StepPart, StepShares
from infer.errors import InferError, OutOfPagesError, closed
from infer.operands.limits import STATE_TOKENS
from infer.operands.step import Chunk, Clock, Interrupt, Masks, StepEnd
from infer.runner.runner import Runner
from infer.runner.sample_loop import SampledTokens
from infer.speculation.drafter import Drafter
from infer.speculation.policy import StepTimes

_LOOK_SECONDS = 0.05  # between two looks at sequences that wait or pause, and may be cancelled or time out
_Found = TypeVar("_Found")


class _Work(NamedTuple):
    """One sequence's share of a step."""

    sequence: Sequence
    chunk: Chunk


class _Launched(NamedTuple):
    """A step that runs, or has run."""

    plan: Plan
    works: list[_Work]
    sampled: list[SampledTokens]
    ends: list[StepEnd]
    is_multi_step: bool
    started: float  # by time.perf_counter
    held_up: float  # seconds, for which it waited for grammars


@final
class Engine:
    """The engine, for the loop's thread alone (`engine.loop`).

    A step that raises leaves the engine midway. Then `recover` empties the cache, and all sequences are computed again.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_steps: int | None = None,
        weights: Mapping[str, float] | None = None,
        drafter: Drafter | None = None,
        prefixes: PrefixDisk | None = None,
    ) -> None:
        """Make an engine without sequences.

        At most `max_steps` run without a return to Python; None allows as many as take a tenth of a second. `weights`
        are those of tenants. Without a `drafter`, n-grams are looked up. `prefixes` keeps beginnings of prompts on
        disk.
        """
        self.prefixes, self._prefix_ends = prefixes, PrefixEnds()
        self._queue, self._drafting = Queue(weights), Drafting(drafter)
        self._open_slots: Slots | None = Slots(runner, self._queue, self._drafting.release)
        self._sequences: dict[Sequence, None] = {}  # being answered, in the order in which they were submitted
        self._loading: dict[Sequence, None] = {}  # those that wait for pages from disk
        self._watched: dict[Sequence, None] = {}  # those that may time out, or are cancelled by an event
        self._leaving: dict[Sequence, None] = {}  # those that may be finished
        self._taking_part: dict[Sequence, None] = {}  # in the step, and those that have just ended
        self._looked_at = 0.0  # when the watched ones that wait were last looked at
        self.max_running = runner.num_slots  # at the same time
        page_tokens = runner.checkpoint_tokens or STATE_TOKENS
        self.scheduler = Scheduler(runner.model.backend.step_limits, max_steps, page_tokens=page_tokens)
        self._shares = StepShares(self.scheduler.costs, self._queue.tenants.weight)
        if prefixes is not None:
            prefixes.is_busy = lambda: bool(self._sequences)
            prefixes.seconds_to_compute = self._seconds_to_compute
        self._resting: list[Sequence] = []  # that sit a step out
        self._slot_params = SlotParams(runner)
        self._filler = MaskFiller(runner.model.backend)
        self._interrupt = Interrupt()  # set by those who have a message for the loop

    @property
    def _slots(self) -> Slots:
        """The owners of slots. Raises ClosedError after `close`."""
        if (slots := self._open_slots) is None:
            raise closed()
        return slots

    @property
    def runner(self) -> Runner:
        """The runner. Raises ClosedError after `close`."""
        return self._slots.runner

    @property
    def sequences(self) -> Items[Sequence]:
        """The sequences that are being answered. For any thread."""
        return tuple(self._sequences)

    def limit(self, max_running: int, gap_seconds: float) -> None:
        """Set how many sequences run at the same time, and how long a step may keep a stream waiting."""
        self.max_running, self.scheduler.gap_seconds = max_running, gap_seconds

    def snapshot(self) -> EngineSnapshot:
        return take_snapshot(self.runner, self._sequences, self.max_running, self.scheduler, self._queue)

    def submit(self, sequence: Sequence, lease: Lease | None = None) -> Sequence:
        """Let a sequence take part in the steps until it is finished. With a lease it uses the slot of the lease."""
        self._queue.join(sequence, lease)
        self._sequences[sequence] = None
        if self._loads_prefix(sequence):
            self._loading[sequence] = None
        self._want_slot(sequence)
        self._leaving[sequence] = None  # it may have been cancelled before
        if sequence.request.timeout is not None or sequence.request.cancel is not None:
            self._watched[sequence] = None
        return sequence

    def _seconds_to_compute(self, num_tokens: int, start: int) -> float | None:
        """Return how long so many tokens of a prompt take after `start` others, or None before that is known."""
        costs = self.scheduler.costs
        is_known = costs.costs.per_token or costs.costs.per_context
        return costs.predict_further(num_tokens, context_of(num_tokens, start)) if is_known else None

    def _loads_prefix(self, sequence: Sequence) -> bool:
        """Return True if a sequence first waits for pages from disk."""
        lease = sequence.place.lease
        if self.prefixes is None or (lease is not None and lease.token_ids):
            return False
        return self.prefixes.begin(
            sequence.token_ids,
            sequence.request.salt,
            is_wanted=lambda: not sequence.is_finished,
            on_end=partial(self._prefix_loaded, sequence),
        )

    def _prefix_loaded(self, sequence: Sequence, num_in_memory: int | None) -> None:
        sequence.num_in_memory = num_in_memory
        self._loading.pop(sequence, None)
        self._want_slot(sequence)

    def _want_slot(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot, unless it has one, pauses, or waits for pages from disk first."""
        is_held_up = sequence.is_paused or sequence in self._loading
        if sequence in self._sequences and not (sequence.has_slot or is_held_up):
            self._slots.waiting[sequence] = None

    def listen(self) -> None:
        """Forget earlier interrupts, because the messages behind them are about to be read."""
        self._interrupt.value = 0

    def interrupt(self) -> None:
        """Let a multi-step end after the current step. For any thread."""
        self._interrupt.value = 1

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence. No later step computes it."""
        sequence.cancel()
        self._leaving[sequence] = None

    def pause(self, sequence: Sequence) -> None:
        """Compute nothing of a sequence until `proceed`. Others may get its slot."""
        sequence.set_paused(is_paused=True)
        self._slots.waiting.pop(sequence, None)

    def proceed(self, sequence: Sequence) -> None:
        """Compute a paused sequence again."""
        sequence.set_paused(is_paused=False)
        self._want_slot(sequence)

    def change(self, lease: Lease, change: Callable[[int], _Found]) -> _Found:
        """Return `change(slot)` of the lease's slot. It must keep `lease.token_ids` correct.

        `change` is called again if it runs out of pages and others can free theirs. It may raise InferError to refuse:
        then it must not have changed anything.
        """
        while True:
            while (slot := self._slots.hold(lease)) is None:
                self._slots.preempt_one()
            try:
                return change(slot)
            except InferError as error:
                is_short = isinstance(error, OutOfPagesError)
                if not (is_short and (self._slots.reclaim(lease) or self._slots.preempt_one())):
                    raise
            except Exception:
                self.recover()
                raise

    def trim(self) -> int:
        """Free the cache memory for which nobody waits, also that of idle sessions. Return the number of bytes.

        The next answer of such a session is computed from its beginning.
        """
        while self._slots.reclaim():
            pass
        return self.runner.give_back_free()

    def close(self) -> None:
        """End all sequences as cancelled, and free the cache. A second call does nothing."""
        if self._open_slots is not None:
            self.abandon()
            self._open_slots = None
            if self.prefixes is not None:
                self.prefixes.close()
            self._slot_params.clear()
            self._filler.close()

    def abandon(self) -> None:
        """End all sequences without a further step."""
        for sequence in self._sequences:
            sequence.end()
        self._drafting.clear()
        waiting = self._slots.waiting, self._loading
        for group in (self._sequences, *waiting, self._watched, self._leaving, self._taking_part):
            group.clear()

    def recover(self) -> None:
        """Empty the cache after a step that raised. All sequences are computed again from their ids."""
        self._filler.close()  # it may still fill a mask of a sequence
        self._slots.reset()
        for sequence in self._sequences:
            sequence.restart()
            self._want_slot(sequence)
        self._slot_params = SlotParams(self.runner)
        self._filler = MaskFiller(self.runner.model.backend)

    # A step

    def step(self) -> list[Sequence]:
        """Run one step or a multi-step.

        Return the sequences that took part or ended; their new `pieces` are the last.
        """
        return self.collect(self.launch())

    def launch(self) -> _Launched | None:
        """Choose who takes part in a step, plan it, and run the forward. Return None if nobody wants anything."""
        self._drop_finished()
        self._admit()
        active = self._take_turns([each for each in self._slots.sequences if not each.is_paused])
        self._taking_part.update(dict.fromkeys(active))
        self._leaving.update(dict.fromkeys(active))
        for sequence in active:
            if sequence.grammar is not None:
                self._force(sequence)
        return self._run([sequence for sequence in active if not sequence.is_finished])

    def collect(self, launched: _Launched | None) -> list[Sequence]:
        """End a step: each sequence accepts its sampled tokens, and the cache keeps these."""
        if launched is not None:
            self._settle_all(launched)
        self._drop_finished()
        if self.prefixes is not None:
            self.prefixes.notify()
        found = list(self._taking_part)
        self._taking_part.clear()
        return found

    def _drop_finished(self) -> None:
        """Remove sequences that are finished or cancelled. The next `collect` returns them."""
        now, watched = time.perf_counter(), dict[Sequence, None]()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at, watched = now, self._watched
        for sequence in (*self._leaving, *watched):
            sequence.poll_cancel(now)
            if sequence.is_finished and sequence in self._sequences:
                self._slots.leave(sequence)
                del self._sequences[sequence]
                self._watched.pop(sequence, None)
                self._queue.leave(sequence)
                self._drafting.forget(sequence)
                sequence.end()
                self._taking_part[sequence] = None
        self._leaving.clear()

    def _admit(self) -> None:
        """Let waiting sequences enter in the queue's order, while there are slots and pages."""
        for sequence in self._slots.admit(self.max_running):
            sequence.compress_prompt(must=self.runner.compresses_prompts)
            self._slot_params.write(sequence)
            self._drafting.enter(sequence)
            if self.runner.shares_prefixes:
                self._prefix_ends.look(sequence)

    def _take_turns(self, wanting: list[Sequence]) -> list[Sequence]:
        """Return the sequences that take part in the next step."""
        is_shared = len({each.request.tenant for each in wanting}) > 1
        chosen = self._shares.choose(
            StepPart(each.request.tenant, 1, each.num_computed) for each in wanting if is_shared
        )
        if not is_shared:
            self._resting = []
            return wanting
        self._resting = [each for each in wanting if each.request.tenant not in chosen]
        return [each for each in wanting if each.request.tenant in chosen]

    def _force(self, sequence: Sequence) -> None:
        """Accept the tokens that are the only ones that the grammar allows."""
        forced, forcing = list[int](), sequence.force()
        while (token_id := sequence.attempt(partial(next, forcing, None), None)) is not None:
            if sequence.attempt(partial(sequence.accept, token_id, origin="forced"), None) is None:
                break
            forced.append(token_id)
        self._slot_params.extend(sequence, forced)
        self._drafting.observe(sequence)

    def _run(self, active: list[Sequence]) -> _Launched | None:
        """Plan a step of these sequences and run it."""
        started = time.perf_counter()
        plan, works = self._plan_what_fits(active)
        if not works:
            return None
        masks = self._filler.start(works)
        sampled, ends, is_multi_step = self._sample(plan, works, masks)
        if masks is not None:
            masks.wait()
        held_up = 0.0 if masks is None else self._filler.held_up(ends)
        return _Launched(plan, works, sampled, ends, is_multi_step, started, held_up)

    def _settle_all(self, launched: _Launched) -> None:
        works = launched.works
        clock = Clock(launched.started, launched.ends, time.perf_counter())
        num_steps, held_up = len(clock.ends) if launched.is_multi_step else 1, launched.held_up
        self._learn(launched.plan, works, num_steps, clock, held_up)
        is_shared, parts = self._shares.is_shared, list[StepPart]()
        if is_shared:
            parts = [StepPart(each.request.tenant, len(chunk.token_ids), each.num_computed) for each, chunk in works]
        each_held_up = held_up / max(1, sum(sequence.grammar is not None for sequence, _ in works))
        for index, (work, found) in enumerate(zip(works, launched.sampled, strict=True)):
            settled = time.perf_counter() if is_shared else 0.0
            self._settle(work, found, clock, is_multi_step=launched.is_multi_step)
            if is_shared and work.sequence.grammar is not None:
                parts[index] = parts[index]._replace(delay=each_held_up + time.perf_counter() - settled)
        if is_shared:
            self._shares.computed(parts, num_steps, clock.ended - clock.started - held_up)
        self._slot_params.renew()
        shares = self.runner.shares_prefixes
        for sequence, _ in works:
            if shares and not sequence.has_fault:
                self.runner.remember(sequence.slot, sequence.token_ids, sequence.request.salt)
            if sequence.must_end_prompt:
                self._end_prompt(sequence)

    def _plan_what_fits(self, active: list[Sequence]) -> tuple[Plan, list[_Work]]:
        """Return a plan and its work, without sequences that failed meanwhile or got no pages."""
        slots, reserve = self._slots, self.runner.reserve
        while True:
            plan, works = self._plan(active)
            for sequence, chunk in works:
                if not sequence.is_finished and sequence.has_slot:
                    num_tokens = max(plan.num_steps, len(chunk.token_ids))
                    slots.with_pages(sequence, partial(reserve, sequence.slot, num_tokens))
            able = [sequence for sequence in active if sequence.has_slot and not sequence.is_finished]
            if len(able) == len(active):
                return plan, works
            active = able

    def _plan(self, active: Items[Sequence]) -> tuple[Plan, list[_Work]]:
        if not active:
            return NO_PLAN, []
        times, rooms = self._step_times(active), [self._rope_room(sequence) for sequence in active]
        if times is not None:
            self._drafting.propose(active, rooms, self.scheduler.max_drafts(len(active)), times)
        demands = [
            sequence.demand(room, self._drafting.steps_to_draft(sequence, times))
            for sequence, room in zip(active, rooms, strict=True)
        ]
        step_tokens = self.scheduler.step_tokens(sequence.request.prefill_chunk for sequence in active)
        if (most_steps := self._shares.most_steps) is not None:
            demands = [demand._replace(max_steps=min(demand.max_steps, most_steps)) for demand in demands]
        num_waiting = len(self._slots.waiting) + len(self._resting)
        others_stream = any(each.is_streamed and each.is_decoding for each in self._resting)
        plan = self.scheduler.plan(demands, step_tokens, num_waiting, others_stream=others_stream)
        return plan, [
            _Work(sequence, sequence.schedule(num_tokens, num_drafts))
            for sequence, num_tokens, num_drafts in zip(active, plan.num_tokens, plan.num_drafts, strict=True)
        ]

    def _step_times(self, active: Items[Sequence]) -> StepTimes | None:
        """Return the step times that drafts of these sequences have to save, or None if nobody drafts."""
        if not any(map(self._drafting.is_drafted, active)):
            return None
        num_constrained = sum(sequence.grammar is not None for sequence in active)
        num_greedy = sum(sequence.params.temperature == 0 for sequence in active)
        return self.scheduler.costs.by_kind[StepKind(len(active), num_constrained, num_greedy)]

    def _rope_room(self, sequence: Sequence) -> int:
        """Return how many tokens may follow with the same rope factors.

        If a longer text needs others, empty the slot.
        """
        length, runner = len(sequence.token_ids), self.runner
        if runner.choose_rope(sequence.slot, length):
            sequence.forget_computed()
        return runner.rope_room(length)

    def _sample(
        self, plan: Plan, works: Items[_Work], masks: Masks | None
    ) -> tuple[list[SampledTokens], list[StepEnd], bool]:
        """Return the tokens sampled after each chunk, the time at which each round ended, and whether it was a
        multi-step.
        """
        params = self._slot_params
        chunks, columns = [work.chunk for work in works], params.select([work.sequence for work in works])
        if plan.num_steps > 1:
            stop_ids = frozenset[int]().union(*(work.sequence.stop_ids for work in works))
            count, history, interrupt = plan.num_steps, params.history, self._interrupt
            sampled, ends = self.runner.multi_step(chunks, count, columns, history, stop_ids, masks, interrupt)
            if ends:
                if masks is not None:
                    self._cut(works, sampled)
                return sampled, ends, True
        return *self.runner.sample(chunks, columns, params.history, masks), False

    def _cut(self, works: Items[_Work], sampled: list[SampledTokens]) -> None:
        """Discard tokens that a multi-step sampled after a sequence's grammar ended, forced a token, or failed."""
        for row, count in self._filler.num_counted.items():
            if count < len(sampled[row].token_ids):
                del sampled[row].token_ids[count:], sampled[row].logprobs[count:]
                self._slot_params.mark_stale(works[row].sequence)

    def _learn(self, plan: Plan, works: Items[_Work], num_steps: int, clock: Clock, held_up: float) -> None:
        """Learn the costs of a step from its time, before its tokens are accepted."""
        times = self._step_times([work.sequence for work in works])
        if not all(sequence.pieces and len(chunk.token_ids) == chunk.num_logits for sequence, chunk in works):
            times = None
        self.scheduler.update(plan, num_steps, clock.ended - clock.started, times, held_up)

    def _settle(self, work: _Work, sampled: SampledTokens, clock: Clock, *, is_multi_step: bool) -> None:
        sequence, chunk = work
        if not chunk.has_logits:
            self.runner.commit(chunk.slot, len(chunk.token_ids))
            sequence.prefilled(len(chunk.token_ids), clock.ended - clock.started)
            return
        num_before = len(sequence.pieces)
        num_drafts = 0 if is_multi_step else len(sampled.token_ids) - 1  # right ones
        sequence.attempt(partial(sequence.accept_all, sampled, num_drafts), None)
        num_accepted = len(sequence.pieces) - num_before
        self.runner.commit(chunk.slot, len(chunk.token_ids) - chunk.num_drafts + max(0, num_accepted - 1))
        sequence.stepped(chunk, sampled, num_accepted, clock, is_multi_step=is_multi_step)
        self._drafting.observe(sequence)

    def _end_prompt(self, sequence: Sequence) -> None:
        """Compress the prompt once it is computed and a token was sampled. The time counts with the next token."""
        if sequence.num_computed != sequence.num_prompt_tokens or not sequence.pieces:
            return
        started, runner, prompt = time.perf_counter(), self.runner, sequence.token_ids[: sequence.num_prompt_tokens]

        def compress() -> None:
            if runner.lengths[sequence.slot] < len(prompt):  # pages were short midway: it is read again
                runner.truncate(sequence.slot, 0)
                sequence.forget_computed()
            else:
                runner.after_prompt(sequence.slot, prompt)
                sequence.compress_prompt(must=False)

        self._slots.with_pages(sequence, compress)
        sequence.timer.waited(time.perf_counter() - started)
