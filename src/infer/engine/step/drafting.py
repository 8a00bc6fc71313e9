"""The drafts of an engine's sequences: its drafter proposes them, and a policy per sequence limits them."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import final

from infer.engine.speculation.drafter import Drafter
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.speculation.policy import DraftPolicy, StepTimes
from infer.engine.step.sequence import Sequence


@final
class Drafting:
    """For the engine only. A fault of the drafter ends only the sequence for which it drafts."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self._drafter: Drafter = NgramDrafter() if drafter is None else drafter
        self._policies: dict[Sequence, DraftPolicy] = {}  # of active sequences
        self._begun = set[int]()  # slots for which the drafter has begun

    def enter(self, sequence: Sequence) -> None:
        """Begin to draft for a sequence that has got its slot, if its request wants drafts."""
        if not sequence.request.num_draft_tokens:
            return
        if sequence not in self._policies:
            self._policies[sequence] = DraftPolicy(sequence.request.num_draft_tokens, self._drafter.priors)
        self._begun.add(sequence.slot)
        sequence.attempt(partial(self._drafter.begin, sequence.slot, sequence.token_ids), None)

    def drafted(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that are drafted for."""
        return [each for each in sequences if each.slot in self._begun] if self._begun else []

    def steps_to_draft(self, active: Iterable[Sequence], times: StepTimes) -> list[int]:
        """Return the number of steps without drafts before the drafter is called again, per drafted sequence."""
        return [self._policies[each].tokens_between(times) for each in self.drafted(active)]

    def propose(self, active: Iterable[Sequence], most: int, times: StepTimes) -> None:
        """Give each sequence its drafts for the next step. Their number is the one that pays off at the measured times.

        Each sequence gets at most `most` drafts, and never more than its room.
        """
        counts: dict[Sequence, int] = {}
        for sequence in self.drafted(active):
            sequence.take_drafts(())
            if sequence.pieces and not sequence.must_end_prompt:
                limit = min(most, sequence.room - 1)
                counts[sequence] = sequence.attempt(partial(self._num_drafts, sequence, limit, times), 0)
        counts = {sequence: count for sequence, count in counts.items() if count > 0}
        for sequence, drafts in self._proposed(counts).items():
            sequence.attempt(partial(sequence.take_drafts, drafts), None)

    def _num_drafts(self, sequence: Sequence, limit: int, times: StepTimes) -> int:
        confidence = self._drafter.confidence(sequence.slot)
        if not confidence:
            return 0
        return min(self._policies[sequence].num_draft_tokens(times, confidence, sequence.num_pending), limit)

    def _proposed(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Items[int]]:
        """Return the drafts of all sequences, made in one batch. If that raises, draft for each sequence separately."""
        if not counts:
            return {}
        propose, found = self._drafter.propose, dict[int, Items[int]]()
        nothing: Mapping[int, Items[int]] = {}
        try:
            found |= propose({sequence.slot: count for sequence, count in counts.items()})
        except Exception:
            for sequence, count in counts.items():
                found |= sequence.attempt(partial(propose, {sequence.slot: count}), nothing)
        return {sequence: found.get(sequence.slot, ()) for sequence in counts}

    def observe(self, sequences: Iterable[Sequence]) -> None:
        """Show the drafter the tokens that sequences accepted. Policies learn from those that were not forced."""
        for sequence in self.drafted(sequences):
            if not sequence.is_finished:
                sequence.attempt(partial(self._observe, sequence), None)

    def _observe(self, sequence: Sequence) -> None:
        policy, guesses = self._policies[sequence], self._drafter.observe(sequence.slot)
        for guess, piece in zip(guesses, sequence.pieces[len(sequence.pieces) - len(guesses) :], strict=False):
            if piece.origin != "forced":
                policy.observe(*guess)

    def release(self, slot: int) -> None:
        """Free the drafter's state of a slot that a sequence loses."""
        if slot in self._begun:
            self._begun.remove(slot)
            self._drafter.release(slot)

    def forget(self, sequence: Sequence) -> None:
        """Drop the policy of a finished sequence."""
        self._policies.pop(sequence, None)

    def clear(self) -> None:
        """Forget all sequences."""
        for slot in tuple(self._begun):
            self.release(slot)
        self._policies.clear()
