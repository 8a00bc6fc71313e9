"""The engine of a loaded model. Its steps compute all sequences of all callers.

`launch` chooses the sequences of a step, which `Steps` plans and the `Runner` runs. Then `collect` lets each sequence
accept its sampled tokens, and the cache keeps these. One step may serve chunks of prompts, single tokens and drafts,
with a grammar or without.

A device such as a GPU runs steps without the host. On such a device the next step is launched before the tokens of this
one are collected, if these tokens can change it only by ending a sequence. Its results for an ended sequence are
dropped. The cache keeps a chunk as soon as all its tokens are accepted. So between two calls of `step`, the state of a
sequence does not depend on whether a step with it is running.
"""

import time
from collections import abc
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar, final

from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.step import Interrupt
from infer.engine.prefixes.prefix_disk import PrefixDisk
from infer.engine.prefixes.prefix_ends import LEAST_TOKENS, PrefixEnds
from infer.engine.runner.runner import Runner
from infer.engine.speculation.policy import Drafter
from infer.engine.step.drafting import Drafting
from infer.engine.step.fairness import Queue
from infer.engine.step.faults import Faults, make_probe
from infer.engine.step.scheduler import Scheduler
from infer.engine.step.sequence import Lease, Sequence
from infer.engine.step.slots import Slots
from infer.engine.step.snapshot import EngineSnapshot, PoolState, SequenceState
from infer.engine.step.steps import LaunchedStep, Steps
from infer.errors import InferError, OutOfPagesError
from infer.outputs import percentile

_LOOK_SECONDS = 0.05  # between two checks of the sequences that wait or pause, for cancels and timeouts
_Result = TypeVar("_Result")


@final
class Engine:
    """The engine. Only the loop's thread uses it (`requests.loop`).

    A step that raises leaves the engine in an incomplete state. Then `recover` empties the cache, and all sequences are
    computed again. If a step raises again, they are computed one by one (`Faults`).
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_steps: int | None = None,
        drafter: Drafter | None = None,
        draft_model: Drafter | None = None,
        prefixes: PrefixDisk | None = None,
    ) -> None:
        """Make an engine without sequences.

        At most `max_steps` run without a return to Python; None allows as many as take a tenth of a second.
        Without a `drafter`, n-grams are looked up. `draft_model` drafts, too, unless a request forbids it. `prefixes`
        keeps beginnings of prompts on disk.
        """
        self.prefixes, self._prefix_ends = prefixes, PrefixEnds()
        self._queue, self._drafting = Queue[Sequence](), Drafting(drafter, draft_model)
        self.runner, self._slots = runner, Slots(runner, self._queue, self._drafting.release)
        sequences: dict[Sequence, None] = {}  # being answered, in the order in which they were submitted
        self._sequences = sequences
        self._loading: dict[Sequence, None] = {}  # sequences that wait for pages from disk
        self._watched: dict[Sequence, None] = {}  # sequences that may time out, or have an event that cancels them
        self._leaving: dict[Sequence, None] = {}  # sequences that may be finished
        self._taking_part: dict[Sequence, None] = {}  # sequences of the step, and those that have just ended
        self._looked_at = 0.0  # time of the last check of watched sequences that wait
        self.max_running = runner.num_slots  # sequences that run at the same time
        page_tokens = runner.checkpoint_tokens or STATE_TOKENS
        self.scheduler = Scheduler(runner.model.step_limits, max_steps, page_tokens=page_tokens)
        if prefixes is not None:
            prefixes.is_busy = lambda: bool(sequences)
            prefixes.seconds_to_compute = self.scheduler.costs.predict_further
        self.resting_tenants: Collection[str] = ()  # they owe the next steps to the others
        self.interrupt = Interrupt()  # set by threads that send a message to the loop: a multi-step ends early
        self._steps = Steps(self._slots, self.scheduler, self._drafting, self.interrupt)
        self._pending: LaunchedStep | None = None  # launched behind the last step that was collected
        self._faults = Faults()

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """The sequences that are being answered. For any thread."""
        return tuple(self._sequences)

    def limit(self, max_running: int, gap_seconds: float) -> None:
        """Set how many sequences run at the same time, and how long a step may keep a stream waiting."""
        self.max_running, self.scheduler.gap_seconds = min(max_running, self.runner.num_slots), gap_seconds

    def snapshot(self) -> EngineSnapshot:
        """Return the state between two steps."""
        now, queue, costs, cache = time.perf_counter(), self._queue, self.scheduler.costs, self.runner.cache
        low, middle, high = (percentile(costs.ratios, percent) for percent in (10.0, 50.0, 90.0))
        states = tuple(SequenceState.of(sequence, now) for sequence in self._sequences)
        return EngineSnapshot(
            sequences=states,
            num_slots=self.runner.num_slots,
            max_running=self.max_running,
            pools=tuple(map(PoolState, cache.pool_pages, cache.free_pages)),
            num_steps=costs.num_steps,
            num_preemptions=queue.num_preemptions + sum(state.num_preemptions for state in states),
            reused_tokens=queue.reused_tokens + sum(state.num_reused for state in states),
            costs=costs.costs,
            predicted_over_measured=(low, middle, high) if costs.ratios else None,
            work_by_tenant=dict(queue.tenants.accounts),
            expected_answer=round(queue.lengths.mean),
        )

    def submit(self, sequence: Sequence, lease: Lease | None = None) -> Sequence:
        """Let a sequence take part in the steps until it is finished. With a lease it uses the slot of the lease."""
        if self._faults.suspects is not None and not self._sequences:
            self._faults = Faults()  # whom it suspected has ended
        sequence.lease = lease
        self._queue.join(sequence, time.perf_counter())
        self._sequences[sequence] = None
        if self.prefixes is not None and not (lease is not None and lease.token_ids):
            ids, on_end = sequence.token_ids, partial(self._prefix_loaded, sequence)
            if self.prefixes.begin(ids, sequence.request.salt, lambda: not sequence.is_finished, on_end):
                self._loading[sequence] = None
        self._want_slot(sequence)
        self._leaving[sequence] = None  # it may have been cancelled before
        options = sequence.request.options
        if options.timeout is not None or options.cancel is not None:
            self._watched[sequence] = None
        return sequence

    def _prefix_loaded(self, sequence: Sequence, num_in_memory: int | None) -> None:
        sequence.num_in_memory = num_in_memory
        self._loading.pop(sequence, None)
        self._want_slot(sequence)

    def _want_slot(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot, unless it has one, is paused, loads pages, or another one runs alone."""
        is_held_up = sequence.is_paused or sequence in self._loading or self._faults.alone not in (None, sequence)
        if sequence in self._sequences and not (sequence.has_slot or is_held_up):
            self._queue.wait(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence. No later step computes it."""
        sequence.cancel()
        self._leaving[sequence] = None

    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of all steps until `proceed`. Other sequences may get its slot."""
        sequence.is_paused = True
        self._queue.stop_waiting(sequence)

    def proceed(self, sequence: Sequence) -> None:
        """Compute a paused sequence again."""
        sequence.is_paused = False
        self._want_slot(sequence)

    def change(self, lease: Lease, change: Callable[[int], _Result]) -> _Result:
        """Return `change(slot)` of the lease's slot. It must keep `lease.token_ids` correct.

        `change` is called again if it runs out of pages and other sequences can free pages. It may raise InferError to
        refuse, if it has changed nothing.
        """
        while True:
            while (slot := self._slots.hold(lease)) is None:
                self._slots.preempt_one()
            try:
                return change(slot)
            except OutOfPagesError:
                if not (self._slots.reclaim(lease) or self._slots.preempt_one()):
                    raise
            except InferError:
                raise
            except Exception:
                self.recover()
                raise

    def trim(self) -> int:
        """Free the cache memory that no active sequence needs, also that of idle sessions. Return the number of bytes.

        The next answer of such a session is computed from its beginning.
        """
        while self._slots.reclaim():
            pass
        return self.runner.cache.give_back_free() + self._drafting.trim()

    def close(self) -> None:
        """End all sequences as cancelled, and the threads. Who drops the engine frees the cache."""
        self.abandon()
        if self.prefixes is not None:
            self.prefixes.close()
        self._steps.close()

    def abandon(self) -> None:
        """End all sequences without a further step."""
        self._pending = None
        for sequence in self._sequences:
            sequence.end()
        self._drafting.clear()
        self._queue.clear()
        self._faults = Faults()
        for group in (self._sequences, self._loading, self._watched, self._leaving, self._taking_part):
            group.clear()

    def recover_from(self, error: Exception) -> None:
        """Continue after a step that raised. Raises the error if the engine has failed."""
        self._faults.add(error, [each for each in self._sequences if not each.is_paused and each not in self._loading])
        self.recover()

    def recover(self) -> None:
        """Empty the cache after a step that raised. All sequences are computed again from their ids."""
        self._empty()
        self._rejoin()

    def _empty(self) -> None:
        """Empty the cache and all slots."""
        self._pending = None
        self._steps.close()  # its thread may still fill a mask of a sequence
        self._slots.reset()
        for sequence in self._sequences:
            sequence.restart()

    # A step

    def step(self) -> list[Sequence]:
        """Run one step or a multi-step.

        Return the sequences that took part or ended; their new `pieces` are the last.
        """
        launched, self._pending = self._pending or self.launch(), None
        # The next step runs behind this one if the host does not need this one's tokens for it.
        if launched is not None and launched.may_be_followed and self._steps.grow_evenly:
            self._steps.keep_early(launched)
            self._pending = self.launch(launched)
        self.collect(launched)
        if self._faults.suspects is not None:
            self._try_suspects()  # if it raises, the next step returns them
        sequences = list(self._taking_part)
        self._taking_part.clear()
        return sequences

    def _try_suspects(self) -> None:
        """After a step that succeeded, let another sequence run if they run alone, or all again after the last one."""
        before = self._faults.alone
        self._faults.passed()
        if self._faults.alone is not before:
            if before is not None and before.has_slot:
                self._slots.preempt(before)
            self._rejoin()

    def _rejoin(self) -> None:
        """Let the sequences that may run wait for slots, and end the culprits of faults.

        Raises an error if the engine has failed, and not only the steps of the culprits.
        """
        self._queue.clear()
        works = self._faults.has_progress
        for culprit, error in self._faults.take_culprits().items():
            works = works or self._gets_token(make_probe(culprit)) or self._gets_token(make_probe(culprit))
            if not works:
                raise error
            culprit.blame(error)
        self._leaving.update(self._sequences)
        for sequence in self._sequences:
            self._want_slot(sequence)

    def _gets_token(self, probe: Sequence) -> bool:
        """Return True if a step computes the token of a probe, while no other sequence runs or waits."""
        self._queue.join(probe, time.perf_counter())
        self._sequences[probe] = None
        self._queue.wait(probe)
        try:
            self.collect(self.launch())
        except Exception:  # the caller tries once more, then raises the error of the culprit
            self._empty()
        self.cancel(probe)
        self._drop_finished()
        self._taking_part.pop(probe, None)
        return bool(probe.pieces)

    def launch(self, behind: LaunchedStep | None = None) -> LaunchedStep | None:
        """Choose the sequences of a step, plan it, and run the forward. Return None if there is nothing to compute.

        Sequences that wait get slots in the queue's order, while there are slots and pages.

        A step `behind` another one is planned before the tokens of the other one are known. Return None if the plan
        needs these tokens.
        """
        self._drop_finished()
        for sequence in self._slots.admit(self.max_running):
            sequence.must_end_prompt = self.runner.compresses_prompts
            self._drafting.enter(sequence)
            if self.runner.shares_prefixes and sequence.num_prompt_tokens >= LEAST_TOKENS:
                self._prefix_ends.look(sequence)
        wanting = [each for each in self._slots.sequences if not each.is_paused and (not each.awaited or each.room > 0)]
        active = self._steps.take_turns(wanting, self.resting_tenants)
        if behind is None:
            self._taking_part.update(dict.fromkeys(active))
            self._leaving.update(dict.fromkeys(active))
            active = self._steps.force(active)
        return self._steps.launch(active, behind)

    def collect(self, launched: LaunchedStep | None) -> None:
        """End a step: each sequence accepts its sampled tokens, and the cache keeps these."""
        if launched is not None:
            self._steps.settle(launched)
            took_part = dict.fromkeys([sequence for sequence, _ in launched.works if not sequence.has_ended])
            self._taking_part.update(took_part)
            self._leaving.update(took_part)
        self._drop_finished()
        if self._pending is not None and not self._pending.counts:
            self._pending = None
        if self.prefixes is not None:
            self.prefixes.notify()

    def _drop_finished(self) -> None:
        """Remove sequences that are finished or cancelled. The next `collect` returns them."""
        now, watched = time.perf_counter(), dict[Sequence, None]()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at, watched = now, self._watched
        for sequence in (*self._leaving, *watched):
            if sequence.poll(now) and sequence in self._sequences:
                self._slots.leave(sequence)
                del self._sequences[sequence]
                self._watched.pop(sequence, None)
                self._queue.leave(sequence, now)
                sequence.end()
                self._taking_part[sequence] = None
        self._leaving.clear()
