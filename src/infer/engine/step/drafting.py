"""The drafts of an engine's sequences: which drafter proposes, how many tokens, and the time that is saved or lost."""

import time
from collections import abc
from collections.abc import Iterable, Mapping
from functools import partial
from typing import final

from infer.compute.operands.step import Chunk
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.speculation.policy import Drafter, DraftPolicy, StepTimes
from infer.engine.step.sequence import Sequence


@final
class Drafting:
    """The drafts of an engine's sequences: drafters propose them, and a policy per slot and drafter limits them.

    Before each step, the drafter with the most expected tokens per second is chosen for each sequence. A fault of a
    drafter ends only the sequence for which it drafts.
    """

    def __init__(self, ngrams: Drafter | None = None, model: Drafter | None = None) -> None:
        """Begin without sequences. `model` computes its drafts; without one, only n-grams are looked up."""
        self._ngrams: Drafter = NgramDrafter() if ngrams is None else ngrams
        self.model = model
        self._policies: dict[int, list[tuple[Drafter, DraftPolicy]]] = {}  # by slot
        self._by_model = set[int]()  # slots whose drafts for the next step the model makes
        self._by_ngrams: dict[int, int] = {}  # by slot: the tokens of its answer that n-grams drafted rightly
        self._seconds = 0.0  # in which the model has drafted since the last `take_seconds`

    def enter(self, sequence: Sequence) -> None:
        """Begin to draft for a sequence that has got its slot, if its request wants drafts.

        A request that does not choose gets drafts if there is a model for them.
        """
        options, slot = sequence.request.options, sequence.slot
        drafters = [] if options.speculation in ("off", None) else [self._ngrams]
        if self.model is not None and options.speculation in ("draft", None):
            drafters = [self._ngrams, self.model]
        for drafter in drafters:
            policy = DraftPolicy(options.num_draft_tokens, drafter.priors)
            self._policies.setdefault(slot, []).append((drafter, policy))
            sequence.attempt(partial(drafter.begin, slot, sequence.token_ids, sequence.params), None)

    def drafted(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that are drafted for."""
        return [each for each in sequences if each.slot in self._policies] if self._policies else []

    def steps_to_draft(self, active: Iterable[Sequence], times: StepTimes) -> list[int]:
        """Return the number of steps without drafts before a drafter is called again, per drafted sequence."""
        drafted = self.drafted(active)
        return [min([policy.tokens_between(times) for _, policy in self._policies[each.slot]]) for each in drafted]

    def propose(self, active: Iterable[Sequence], most: int, times: StepTimes) -> None:
        """Give each sequence its drafts for the next step. Their number is the one that pays off at the measured times.

        Each sequence gets at most `most` drafts, and never more than its room.
        """
        counts: dict[Drafter, dict[Sequence, int]] = {}
        self._by_model.clear()
        for sequence in self.drafted(active):
            sequence.take_drafts(())
            if sequence.pieces and not sequence.must_end_prompt:
                limit = min(most, sequence.room - 1)
                drafter, count = sequence.attempt(partial(self._choice, sequence, times), (self._ngrams, 0))
                if min(count, limit) > 0:
                    counts.setdefault(drafter, {})[sequence] = min(count, limit)
        for drafter, own in counts.items():
            started = time.perf_counter()
            drafts = _proposed(drafter, own)
            if drafter is self.model:
                self._seconds += time.perf_counter() - started
                self._by_model |= {sequence.slot for sequence in own}
            for sequence, token_ids in drafts.items():
                sequence.attempt(partial(sequence.take_drafts, token_ids), None)

    def _choice(self, sequence: Sequence, times: StepTimes) -> tuple[Drafter, int]:
        """Return the drafter with the most expected tokens per second, and its number of drafts; 0 for a plain step."""
        slot, best, count = sequence.slot, self._ngrams, 0
        speed, horizon = 1 / times.seconds(sequence.num_pending), self._horizon(sequence)
        for drafter, policy in self._policies[slot]:
            if confidence := drafter.confidence(slot):
                cost = partial(drafter.seconds, slot)
                size = policy.num_draft_tokens(times, confidence, sequence.num_pending, cost)
                if not size or policy.speed <= speed:
                    continue
                if horizon * (1 / speed - 1 / policy.speed) >= drafter.reading_seconds(slot):
                    best, count, speed = drafter, size, policy.speed
        if not count and self.model is not None and times.is_known(1):
            for drafter, _ in self._policies[slot]:
                if drafter.confidence(slot) and (size := drafter.trial(slot, horizon * times.seconds(1))):
                    best, count = drafter, size
        return best, count

    def _horizon(self, sequence: Sequence) -> int:
        """Return the number of tokens that a drafter is expected to serve: as many as it could have served so far.

        An answer ends or repeats itself at an unknown place. So a drafter that has to read first waits until the answer
        has many tokens that n-grams did not draft.
        """
        return min(sequence.room, len(sequence.pieces) - self._by_ngrams.get(sequence.slot, 0))

    def observe(self, sequences: Iterable[Sequence]) -> None:
        """Show the drafters the tokens that sequences accepted. Policies learn from those that were not forced."""
        for sequence in self.drafted(sequences):
            if not sequence.is_finished:
                sequence.attempt(partial(self._observe, sequence), None)

    def _observe(self, sequence: Sequence) -> None:
        for drafter, policy in self._policies[sequence.slot]:
            guesses = drafter.observe(sequence.slot)
            for guess, piece in zip(guesses, sequence.pieces[len(sequence.pieces) - len(guesses) :], strict=False):
                if piece.origin != "forced" and guess is not None:
                    policy.observe(*guess)

    def take_seconds(self) -> float:
        """Return the seconds in which the model has drafted since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def account(
        self,
        drafted: abc.Sequence[tuple[Chunk, int]],
        num_sequences: int,
        seconds: float,
        draft_seconds: float,
        times: StepTimes | None,
    ) -> None:
        """Tell the model how much time its drafts saved in a step, or in all steps of a multi-step.

        `drafted` has the chunks with drafts, each with the number of accepted ones. `times` is None if the step also
        had other tokens than drafts. Then its drafts count as if they saved nothing.
        """
        if self.model is None:
            return
        for chunk, accepted in drafted:
            if chunk.row not in self._by_model:
                self._by_ngrams[chunk.row] = self._by_ngrams.get(chunk.row, 0) + accepted
        pace, gained = times.seconds(1) if times is not None and times.is_known(1) else 0.0, -draft_seconds
        if pace and (num_drafts := sum(chunk.num_drafts for chunk, _ in drafted)):
            own = [each for each in drafted if each[0].row in self._by_model]
            share = sum(chunk.num_drafts for chunk, _ in own) / num_drafts
            gained += sum(accepted for _, accepted in own) * pace / num_sequences - (seconds - pace) * share
        self.model.account(gained, seconds, pace)

    def trim(self) -> int:
        """Return unused memory of drafters to the system, and return the number of bytes."""
        return self._ngrams.trim() + (0 if self.model is None else self.model.trim())

    def release(self, slot: int) -> None:
        """Forget the sequence that loses this slot."""
        self._by_ngrams.pop(slot, None)
        for drafter, _ in self._policies.pop(slot, ()):
            drafter.release(slot)

    def clear(self) -> None:
        """Forget all sequences."""
        for slot in tuple(self._policies):
            self.release(slot)


def _proposed(drafter: Drafter, counts: Mapping[Sequence, int]) -> dict[Sequence, abc.Sequence[int]]:
    """Return the drafts of all sequences, made in one batch. If that raises, draft for each sequence separately."""
    drafts = dict[int, abc.Sequence[int]]()
    nothing: Mapping[int, abc.Sequence[int]] = {}
    try:
        drafts |= drafter.propose({sequence.slot: count for sequence, count in counts.items()})
    except Exception:
        for sequence, count in counts.items():
            drafts |= sequence.attempt(partial(drafter.propose, {sequence.slot: count}), nothing)
    return {sequence: drafts.get(sequence.slot, ()) for sequence in counts}
