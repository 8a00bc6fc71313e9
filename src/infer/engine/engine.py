"""The engine of a loaded model: all sequences, whoever asked for them, go through its steps.

A step is planned (`Scheduler`), run (`Runner`), and each sequence accepts what was sampled for it; then the cache keeps
what was accepted. All of that is done when `step` returns. A step serves sequences at different places: chunks of
prompts, single tokens, drafts to verify, with a grammar or without.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple, TypeVar, final

from infer.engine.followers import Followers
from infer.engine.grammar_masks import MaskFiller
from infer.engine.lease import Lease
from infer.engine.queue import Queue
from infer.engine.scheduler import NO_PLAN, Kind, Plan, Scheduler
from infer.engine.sequence import Sequence
from infer.engine.slot_params import SlotParams
from infer.engine.slots import Slots
from infer.engine.snapshot import EngineSnapshot, take_snapshot
from infer.engine.step_shares import Part, StepShares
from infer.errors import InferError, OutOfPagesError
from infer.operands.limits import MAX_STEP_LOGITS
from infer.operands.step import Chunk, Clock, Interrupt, Masks, StepEnd
from infer.outputs import Piece
from infer.runner.closing import closed
from infer.runner.runner import Runner
from infer.runner.verify import SampledTokens
from infer.speculation.policy import StepTimes
from infer.system.locks import long_lock

_YIELD_SECONDS = 50e-6  # for a thread that waits to take the lock
_Found = TypeVar("_Found")


class Output(NamedTuple):
    """What a step gave a sequence."""

    sequence: Sequence
    pieces: Items[Piece]


class _Work(NamedTuple):
    """What a step computes of a sequence."""

    sequence: Sequence
    chunk: Chunk


@final
class Engine:
    """For any thread: whoever waits for tokens runs the next step, for all who do.

    An exception that comes from outside (a signal's) may leave a step midway. Then the next call begins with an empty
    cache, and sequences that go on are computed again.
    """

    def __init__(
        self, runner: Runner, *, max_steps: int | None = None, weights: Mapping[str, float] | None = None
    ) -> None:
        """`max_steps` without a return to Python; None: as many as take a tenth of a second. `weights` of tenants."""
        self._queue = Queue(weights)
        self._open_slots: Slots | None = Slots(runner, self._queue)
        self._lock = long_lock()
        self._is_sound = True  # no step is under way, and none was left midway
        self._sequences: list[Sequence] = []  # that go on, in the order in which they came
        self._waiting = set[Sequence]()  # those whose callers wait for the lock
        self.followers = Followers()  # callers who wait for the step of another thread
        self._num_waiting = 0  # of those whose callers wait, how many got no slot
        self.max_running = runner.num_slots  # at once
        self.scheduler = Scheduler(MAX_STEP_LOGITS, max_steps)
        self._shares = StepShares(self.scheduler.costs, self._queue.tenants.weight)
        self._resting: list[Sequence] = []  # that sit a step out
        self._slot_params = SlotParams(runner)
        self._filler = MaskFiller(runner.model.backend)
        self._interrupt = Interrupt()  # set by those who come while there are slots, and by those who leave

    @property
    def _slots(self) -> Slots:
        """Raises ClosedError after `close`."""
        if (slots := self._open_slots) is None:
            raise closed()
        return slots

    @property
    def runner(self) -> Runner:
        """Raises ClosedError after `close`."""
        return self._slots.runner

    @property
    def sequences(self) -> Items[Sequence]:
        """Those that go on."""
        return tuple(self._sequences)

    def snapshot(self) -> EngineSnapshot:
        """What goes on, after the step that is under way."""
        with self._lock:
            return take_snapshot(self.runner, self._sequences, self.max_running, self.scheduler, self._queue)

    def submit(self, sequence: Sequence, lease: Lease | None = None) -> Sequence:
        """It takes part in the steps until it is finished; with a lease, at its slot. A closed engine cancels it."""
        sequence.lease = lease
        self._queue.join(sequence)
        self._sequences.append(sequence)
        if len(self._sequences) <= self.max_running:
            self.interrupt()
        if self._open_slots is None:
            self.close()
        return sequence

    def interrupt(self) -> None:
        """Let several steps without a return to Python end after the one under way. For any thread."""
        self._interrupt.value = 1

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence: no later step is for it. Called inside a step, it takes effect after that."""
        sequence.cancel()
        self.interrupt()
        if not (sequence.has_ended or self.is_stepping_here):
            with self._lock:
                if self._open_slots is not None:
                    self._become_sound()
                    self._is_sound = False
                    self._drop_finished()
                    self._is_sound = True

    def advance(self, sequence: Sequence) -> None:
        """Run a step, or wait for that of another thread. The sequence may have nothing new afterwards."""
        num_pieces, sequence.is_asked = len(sequence.pieces), True
        if self.followers.wait():
            return
        self._waiting.add(sequence)
        try:
            with self._lock:
                self._waiting.discard(sequence)
                if not sequence.has_ended and len(sequence.pieces) == num_pieces:
                    self._lead_step()
        finally:
            self._waiting.discard(sequence)
        if self._waiting:
            time.sleep(_YIELD_SECONDS)

    def _lead_step(self) -> None:
        try:
            self.followers.lead()
            self._step()
        finally:
            self.followers.resign()

    def step(self) -> list[Output]:
        """One step, or several without a return to Python, of the sequences whose callers wait: what it gave each."""
        with self._lock:
            return self._step()

    def change(self, lease: Lease, change: Callable[[int], _Found]) -> _Found:
        """Return `change(slot)` of the lease's slot, called while no step runs. It must keep `lease.token_ids` correct.

        It is called again if it runs out of pages and others can give theirs up. An InferError that it raises is a
        refusal: nothing was changed. Raises ClosedError.
        """
        with self._lock:
            self._become_sound()
            while True:
                self._is_sound = False
                while (slot := self._slots.hold(lease)) is None:
                    self._slots.preempt_one()
                try:
                    found = change(slot)
                except InferError as error:
                    is_short = isinstance(error, OutOfPagesError)
                    has_helped = is_short and (self._slots.reclaim(lease) or self._slots.preempt_one())
                    self._is_sound = True
                    if not has_helped:
                        raise
                else:
                    self._is_sound = True
                    return found

    def trim(self) -> int:
        """Free the memory of caches for which nobody waits, those of idle sessions included. Returns the bytes.

        The next answer of such a session is computed from its beginning.
        """
        with self._lock:
            self._become_sound()
            self._is_sound = False
            while self._slots.reclaim():
                pass
            num_bytes = self.runner.give_back_free()
            self._is_sound = True
            return num_bytes

    def close(self) -> None:
        """Sequences that go on end as cancelled; the cache is given up."""
        for sequence in list(self._sequences):
            sequence.cancel()
        if self.is_stepping_here:
            self._open_slots = None
            return
        with self._lock:
            for sequence in list(self._sequences):
                sequence.abort()
                sequence.end()
            self._sequences.clear()
            self._open_slots = None
            self._slot_params.clear()
            self._filler.close()

    @property
    def is_stepping_here(self) -> bool:
        """Whether this thread is inside a step: true in a signal's handler or a finalizer that interrupted it."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks

    def _become_sound(self) -> None:
        slots = self._slots
        if self._is_sound:
            return
        self._filler.close()  # it may still fill a mask of a sequence
        slots.reset()
        self._queue.recover(self._sequences)
        for sequence in list(self._sequences):
            sequence.restart()
        self._slot_params = SlotParams(self.runner)
        self._filler = MaskFiller(self.runner.model.backend)
        self._is_sound = True

    # A step

    def _step(self) -> list[Output]:
        self._become_sound()
        self._is_sound = False
        self._interrupt.value = 0
        self._drop_finished()
        self._admit()
        active = self._take_turns([each for each in self._slots.sequences if each.wants_tokens])
        for sequence in active:
            sequence.num_before_step = len(sequence.pieces)
            if sequence.grammar is not None:
                self._force(sequence)
        self._compute([sequence for sequence in active if not sequence.is_finished])
        self._drop_finished()
        self._is_sound = True
        return [Output(sequence, sequence.pieces[sequence.num_before_step :]) for sequence in active]

    def _drop_finished(self) -> None:
        """Sequences that are finished or cancelled leave."""
        now = time.perf_counter()
        for sequence in list(self._sequences):
            sequence.poll_cancel(now)
            if sequence.is_finished:
                self._slots.leave(sequence)
                self._sequences.remove(sequence)
                self._queue.leave(sequence)
                sequence.end()

    def _admit(self) -> None:
        """Sequences that wait enter, as the queue has them, while there are slots and pages."""
        waiting = [each for each in self._sequences if not each.has_slot and each.wants_tokens]
        self._queue.notice(waiting)
        if waiting:
            for sequence in self._slots.admit(waiting, self.max_running):
                sequence.must_end_prompt = self.runner.compresses_prompts
                self._slot_params.write(sequence)
        self._num_waiting = sum(not each.has_slot and each.wants_tokens for each in self._sequences) if waiting else 0

    def _take_turns(self, wanting: list[Sequence]) -> list[Sequence]:
        """Return those of the sequences that the step is for."""
        is_shared = len({each.request.tenant for each in wanting}) > 1
        chosen = self._shares.choose(Part(each.request.tenant, 1, each.num_computed) for each in wanting if is_shared)
        if not is_shared:
            self._resting = []
            return wanting
        self._resting = [each for each in wanting if each.request.tenant not in chosen]
        return [each for each in wanting if each.request.tenant in chosen]

    def _force(self, sequence: Sequence) -> None:
        """Accept the tokens that the grammar leaves no choice about."""
        forced, forcing = list[int](), sequence.force()
        while (token_id := sequence.attempt(partial(next, forcing, None), None)) is not None:
            if sequence.attempt(partial(sequence.accept, token_id, origin="forced"), None) is None:
                break
            forced.append(token_id)
        self._slot_params.extend(sequence, forced)

    def _compute(self, active: list[Sequence]) -> None:
        started = time.perf_counter()
        plan, works = self._plan_what_fits(active)
        if not works:
            return
        masks = self._filler.start(works)
        sampled, ends, is_multi_step = self._sample(plan, works, masks)
        if masks is not None:
            masks.wait()
        clock = Clock(started, ends, time.perf_counter())
        num_steps, held_up = len(ends) if is_multi_step else 1, 0.0 if masks is None else self._filler.held_up(ends)
        self._learn(plan, works, num_steps, clock, held_up)
        is_shared, parts = self._shares.is_shared, list[Part]()
        if is_shared:
            parts = [Part(each.request.tenant, len(chunk.token_ids), each.num_computed) for each, chunk in works]
        each_held_up = held_up / max(1, sum(sequence.grammar is not None for sequence, _ in works))
        for index, (work, found) in enumerate(zip(works, sampled, strict=True)):
            settled = time.perf_counter() if is_shared else 0.0
            self._settle(work, found, clock, is_multi_step=is_multi_step)
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
        """Plan, without sequences that fail meanwhile or get no pages."""
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
        times, most = self._step_times(active), self.scheduler.max_drafts(len(active))
        demands = [sequence.demand(most, self._rope_room(sequence), times) for sequence in active]
        step_tokens = min([sequence.request.prefill_chunk for sequence in active])
        if (most_steps := self._shares.most_steps) is not None:
            demands = [demand._replace(max_steps=min(demand.max_steps, most_steps)) for demand in demands]
        num_waiting, others_stream = self._num_waiting + len(self._resting), any(map(_streams, self._resting))
        plan = self.scheduler.plan(demands, step_tokens, num_waiting, others_stream=others_stream)
        return plan, [
            _Work(sequence, sequence.schedule(num_tokens, num_drafts))
            for sequence, num_tokens, num_drafts in zip(active, plan.num_tokens, plan.num_drafts, strict=True)
        ]

    def _step_times(self, active: Items[Sequence]) -> StepTimes | None:
        """How long steps of such sequences take, which drafts must be worth; None where nobody drafts."""
        if not any(sequence.is_drafted for sequence in active):
            return None
        num_constrained = sum(sequence.grammar is not None for sequence in active)
        num_greedy = sum(sequence.params.temperature == 0 for sequence in active)
        return self.scheduler.step_times[Kind(len(active), num_constrained, num_greedy)]

    def _rope_room(self, sequence: Sequence) -> int:
        """How many tokens may follow with the same rope factors. If its length needs others, all is computed again."""
        length, runner = len(sequence.token_ids), self.runner
        if runner.choose_rope(sequence.slot, length):
            sequence.forget_computed()
        return runner.rope_room(length)

    def _sample(
        self, plan: Plan, works: Items[_Work], masks: Masks | None
    ) -> tuple[list[SampledTokens], list[StepEnd], bool]:
        """What was sampled after each chunk, when each round of sampling ended, and whether it was a multi-step."""
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
        """What a multi-step sampled of a sequence after its grammar was of no use there never was."""
        for row, count in self._filler.num_counted.items():
            if count < len(sampled[row].token_ids):
                del sampled[row].token_ids[count:], sampled[row].logprobs[count:]
                self._slot_params.mark_stale(works[row].sequence)

    def _learn(self, plan: Plan, works: Items[_Work], num_steps: int, clock: Clock, held_up: float) -> None:
        """Before the tokens are accepted."""
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

    def _end_prompt(self, sequence: Sequence) -> None:
        """Compress the prompt once all of it is computed and a token was sampled. The next token's time includes it."""
        if sequence.num_computed != sequence.num_prompt_tokens or not sequence.pieces:
            return
        started, runner, prompt = time.perf_counter(), self.runner, sequence.token_ids[: sequence.num_prompt_tokens]

        def compress() -> None:
            if runner.lengths[sequence.slot] < len(prompt):  # pages were short midway: it is read again
                runner.truncate(sequence.slot, 0)
                sequence.forget_computed()
            else:
                runner.after_prompt(sequence.slot, prompt)
                sequence.must_end_prompt = False

        self._slots.with_pages(sequence, compress)
        sequence.timer.waited(time.perf_counter() - started)


def _streams(sequence: Sequence) -> bool:
    return sequence.is_streamed and sequence.is_decoding
