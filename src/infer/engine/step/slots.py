"""The slots of the runner: the sequence or lease that owns each of them, their pages and their sampling parameters."""

import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count
from operator import neg, sub
from typing import final

from infer.compute.kvcache.paged import PagedCache
from infer.compute.sampling.columns import SamplingColumns, uses_history
from infer.compute.sampling.history import History
from infer.engine.runner.runner import Runner
from infer.engine.step.fairness import Queue, has_pages
from infer.engine.step.sequence import Lease, Sequence, common_length

_SHARED_TOKENS = 128  # shared tokens for which a prompt waits until another has computed them


@final
class SlotParams:
    """Columns and history, for the engine only. Both are created when a sequence first needs them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._columns: SamplingColumns | None = None
        self.history: History | None = None

    def write(self, sequence: Sequence) -> None:
        """Write the parameters of a sequence that has got its slot."""
        request, runner = sequence.request, self._runner
        if self._columns is None:
            sizes, end_ids = (runner.num_slots, request.vocab_size), request.tokenizer.eos_token_ids
            self._columns = SamplingColumns(*sizes, end_ids=end_ids, device=runner.model.device)
        self._columns.write(sequence.slot, sequence.params, sequence.num_prompt_tokens)
        if self.history is None and uses_history(sequence.params):
            self.history = runner.make_history(request.vocab_size)
        self.renew(sequence)

    def select(self, slots: abc.Sequence[int]) -> SamplingColumns:
        """Return the columns for a step of the sequences in these slots."""
        assert self._columns is not None
        self._columns.select(slots)
        return self._columns

    def extend(self, sequence: Sequence, token_ids: abc.Sequence[int]) -> None:
        """Append tokens that a sequence accepted without sampling."""
        if token_ids and self.history is not None and uses_history(sequence.params):
            self.history.extend(sequence.slot, token_ids)

    def renew(self, sequence: Sequence) -> None:
        """Begin the history of a sequence again, if it needs one, because sampled tokens were dropped."""
        if self.history is not None and uses_history(sequence.params):
            self.history.begin(sequence.slot, sequence.token_ids, sequence.num_prompt_tokens)


def keep_common(cache: PagedCache, lease: Lease, token_ids: abc.Sequence[int], slot: int) -> int:
    """Keep the prefix that a lease's slot shares with these ids, and return its length.

    The length is 0 if the cache has evicted tokens that the next token must attend to.
    """
    held = lease.token_ids[: common_length(lease.token_ids, token_ids)]
    lease.token_ids = []
    cache.truncate(slot, len(held))
    num_held = cache.lengths[slot]
    if num_held > len(held):
        raise RuntimeError(f"the cache has {num_held} tokens, expected {len(held)}")
    lease.token_ids = held[:num_held]
    return num_held


@final
class Slots:
    """The owners of slots, for the engine only.

    If slots or pages are short, `reclaim` and `preempt_one` take them in the order of `docs/reference/sharing.md`.
    """

    def __init__(self, runner: Runner, queue: Queue[Sequence], release: Callable[[int], None]) -> None:
        """Begin with free slots. `release` is called with each slot that a sequence loses."""
        self.runner, self.queue, self._release = runner, queue, release
        self.params, self._cache = SlotParams(runner), runner.cache
        self._pages_of = lru_cache(4096)(runner.cache.pages_of)
        self._lease_by_slot = weakref.WeakValueDictionary[int, Lease]()
        self._sequence_by_slot: dict[int, Sequence] = {}
        self.sequences = self._sequence_by_slot.values()
        self._uses = count(1)
        self._lacks_pages = False  # True if a sequence was preempted for pages and none has left since

    # Admission

    def admit(self, max_running: int) -> Iterator[Sequence]:
        """Give slots to waiting sequences, and yield each sequence that got one.

        If slots are short, a sequence enters only if another one loses its slot. If pages are short, only sequences
        enter that may pass the others. If another sequence is reading the beginning of a prompt, the prompt waits, and
        then finds that beginning in the cache.
        """
        if not self.queue.has_waiting:
            return
        running, blocked = [each for each in self.sequences if not each.is_paused], list[Sequence]()
        held_back, now = set[Sequence](), time.perf_counter()
        while len(held_back) <= max_running:  # comparing more sequences takes too long
            tenants = (each.tenant for each in running)
            is_full = len(running) >= max_running - self.queue.kept.count(tenants, now, max_running)
            sequence = self.queue.next(running, blocked, held_back, is_full=is_full)
            if sequence is None:
                return
            if self._is_being_read(sequence, running):
                held_back.add(sequence)
            elif (givers := self._givers(sequence, running, max_running)) is not None:
                for giver in givers:
                    self.queue.gave(giver, sequence)
                    self.preempt(giver)
                if not self.enter(sequence):
                    return
                self.queue.pass_by(sequence, blocked)
                yield sequence
                running = [each for each in running if each not in givers] + [sequence]
            elif is_full:
                return
            else:
                blocked.append(sequence)

    def _is_being_read(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> bool:
        """Return True if a running sequence is about to compute the next tokens with which this prompt begins."""
        if sequence.lease is not None or not self.runner.shares_prefixes:
            return False
        token_ids, salt = sequence.token_ids, sequence.request.salt
        for other in running:
            start = other.num_computed
            end = start + _SHARED_TOKENS
            if (
                other.request.salt == salt
                and end <= min(other.num_prompt_tokens, len(token_ids) - 1)
                and other.token_ids[start:end] == token_ids[start:end]
                and other.token_ids[:start] == token_ids[:start]
            ):
                return True
        return False

    def enter(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, with the stored part of its first tokens. Return False if no slot is free.

        `_givers` has checked that there are enough pages.
        """
        lease, runner, cache = sequence.lease, self.runner, self._cache
        slot = self._free_slot() if lease is None else self.hold(lease)
        if slot is None:
            return False
        num_computed = num_dropped = num_matched = 0
        if lease is not None:
            num_dropped = len(lease.token_ids) - common_length(lease.token_ids, sequence.token_ids)
            keep_common(cache, lease, sequence.token_ids[:-1], slot)
            lease.token_ids = []
            runner.choose_rope(slot, len(sequence.token_ids))
            num_computed = cache.lengths[slot]
        # With states, a stored checkpoint may have more tokens than the lease's row can be cut back to.
        if not num_computed and runner.shares_prefixes:
            num_computed = cache.adopt(slot, sequence.token_ids, sequence.request.salt)
            num_matched = cache.num_matched
        self._sequence_by_slot[slot] = sequence
        sequence.enter(slot, num_computed, num_dropped, num_matched)
        self.queue.enter(sequence)
        self.params.write(sequence)
        return True

    def _givers(self, sequence: Sequence, running: abc.Sequence[Sequence], max_running: int) -> list[Sequence] | None:
        """Return the sequences to preempt so that a sequence may enter, usually none. Return None if it must wait."""
        givers, size = list[Sequence](), partial(self.size, max_running=max_running)
        while len(running) >= max_running or not self._has_pages_for(sequence, givers):
            giver = self.queue.giver_for(sequence, running, size)
            if giver is None:
                return None
            givers.append(giver)
            running = [each for each in running if each is not giver]
        return givers

    def size(self, sequence: Sequence, max_running: int) -> float:
        """Return the share of the slots that a sequence uses, or of the pages if that is more."""
        needed = self._pages_of(sequence.num_tokens + self.queue.expected_room(sequence))
        shares = (pages / most for pages, most in zip(needed, self._cache.pool_pages, strict=True) if most)
        return max(1 / max_running, *shares)

    def _has_pages_for(self, sequence: Sequence, givers: abc.Sequence[Sequence]) -> bool:
        """Return True if there are enough pages for a sequence and all running ones, after the givers have lost theirs.

        The only sequence may always try.
        """
        if self._lacks_pages and not givers and any(not each.is_paused for each in self.sequences):
            return False
        if len(self._sequence_by_slot) <= len(givers):
            return True
        pages_of, growths = self._pages_of, list[abc.Sequence[int]]()
        for slot, length in enumerate(self._cache.lengths):
            other = self._sequence_by_slot.get(slot)
            if other is not None and other not in givers:
                expected = pages_of(other.num_tokens + self.queue.expected_room(other))
                growths.append(list(map(sub, expected, pages_of(length))))
            elif length:  # the row of an idle lease or a giver
                growths.append(list(map(neg, pages_of(length))))
        needed = pages_of(sequence.num_tokens + self.queue.expected_room(sequence))
        return has_pages(self._cache.free_pages, growths, needed)

    def leave(self, sequence: Sequence) -> None:
        """Free the slot of a finished sequence. Its lease keeps the computed tokens."""
        slot, lease = sequence.slot, sequence.lease
        if not sequence.has_slot:
            return
        self._release(slot)
        if sequence.has_fault:
            self._cache.forget(slot)
        if lease is None:
            self._cache.truncate(slot, 0)
        else:
            if sequence.finish_reason == "error":
                self._cache.truncate(slot, sequence.num_reused)
            self._cache.end_answer(slot)
            lease.token_ids = sequence.token_ids[: self._cache.lengths[slot]]
            lease.last_used = next(self._uses)
        self._sequence_by_slot.pop(slot, None)
        self._lacks_pages = False

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot away. It is computed again when it gets another slot."""
        sequence.stats.preemptions += 1
        self._release(sequence.slot)
        self._cache.truncate(sequence.slot, 0)
        del self._sequence_by_slot[sequence.slot]
        if (lease := sequence.lease) is not None:
            self._lease_by_slot.pop(sequence.slot, None)
            lease.lose()
        sequence.restart()
        if not sequence.is_paused:
            self.queue.wait(sequence)

    def preempt_one(self, *, spares_last: bool = False) -> bool:
        """Preempt a paused sequence, or one of several that run, or the only one unless it is spared.

        Return False if there is none.
        """
        size = partial(self.size, max_running=self.runner.num_slots)
        victim = self._last_paused() or self.queue.victim_of(self.sequences, size)
        if victim is None and not spares_last:
            victim = next(iter(self.sequences), None)
        if victim is not None:
            self._lacks_pages = True
            self.preempt(victim)
        return victim is not None

    def hold(self, lease: Lease) -> int | None:
        """Return the slot of a lease, or an empty one if it had none, or None if all slots are in use."""
        if lease.slot is None and (slot := self._free_slot()) is not None:
            lease.slot = slot
            self._lease_by_slot[slot] = lease
        lease.last_used = next(self._uses)
        return lease.slot

    def reclaim(self, but: Lease | None = None) -> bool:
        """Empty a slot that is not needed now: the slot of a lease, or of a paused sequence, which is preempted.

        Return False if there is no such slot.
        """
        if self._empty_idle(but):
            return True
        if (paused := self._last_paused()) is not None:
            self.preempt(paused)
        return paused is not None

    def _last_paused(self) -> Sequence | None:
        return next((each for each in reversed(list(self.sequences)) if each.is_paused), None)

    def _empty_idle(self, but: Lease | None = None) -> bool:
        """Empty a slot without a sequence. Return False if all such slots are empty."""
        used = {*self._sequence_by_slot, *self._lease_by_slot}
        for slot, length in enumerate(self._cache.lengths):
            if length and slot not in used:  # the lease was dropped
                self._cache.truncate(slot, 0)
                return True
        leases = list(self._lease_by_slot.items())
        idle = [(slot, lease) for slot, lease in leases if slot not in self._sequence_by_slot and lease is not but]
        if idle:
            slot, oldest = min(idle, key=lambda held: held[1].last_used)
            oldest.lose()
            self._lease_by_slot.pop(slot, None)
            self._cache.truncate(slot, 0)
        return bool(idle)

    def make_room(self, sequence: Sequence, shortage: Callable[[], str]) -> bool:
        """Free pages until `shortage()`, which says what a sequence lacks, returns an empty string.

        The pages come from slots that are not needed now, then from a running sequence. Return False if this sequence
        was preempted, or if it is the only one and still has too few pages.
        """
        while sequence.has_slot and (what := shortage()):
            if not (self._empty_idle() or self.preempt_one(spares_last=True)):
                if not sequence.is_finished:  # otherwise only its prompt cannot be compressed
                    sequence.fail("memory", what)
                return False
        return sequence.has_slot

    def reset(self) -> None:
        """Empty all slots, and take them from their owners."""
        self._cache.reset()
        for lease in list(self._lease_by_slot.values()):
            lease.lose()
        self._lease_by_slot.clear()
        for slot in self._sequence_by_slot:
            self._release(slot)
        self._sequence_by_slot.clear()
        self._lacks_pages = False
        self.params = SlotParams(self.runner)

    def _free_slot(self) -> int | None:
        """Return an empty slot: the first one without an owner, or the slot of the least recently used lease.

        Return None if all slots are in use.
        """
        while True:
            for slot in range(self.runner.num_slots):
                if slot not in self._sequence_by_slot and slot not in self._lease_by_slot:
                    self._cache.truncate(slot, 0)
                    return slot
            if not self.reclaim():
                return None
