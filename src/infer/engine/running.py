"""A generation in the loop: which row is its, what that row's cache lacks, what it guesses and what holds it.

The loop asks for a part of the next step and tells what it gave; everything that differs between greedy, sampled,
speculative and constrained generations is a value in here.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar, final

import numpy as np

from infer.engine.generation import Generation
from infer.errors import ConstraintError
from infer.grammar import Constraint
from infer.operands.step import Clock, Part
from infer.outputs import GenerationResult, GenerationStats, GenerationTiming, Piece
from infer.runner.verify import SampledTokens
from infer.sampling.sampler import message_of
from infer.sampling_params import SamplingParams
from infer.speculation.ngram import NgramDraft
from infer.speculation.policy import DraftPolicy, StepTimes

_STOPPED_CHAIN = 8  # tokens, where a stop string may be found in them
Mask = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Found = TypeVar("Found")


@final
class Running:
    """`pending` are tokens that were said, or are the prompt, and that the row's cache has not: one after each step."""

    def __init__(
        self,
        generation: Generation,
        *,
        row: int = 0,
        constraint: Constraint | None = None,
        num_draft_tokens: int = 0,
        cancel: threading.Event | None = None,
    ) -> None:
        self.generation, self.row, self.constraint = generation, row, constraint
        self.pending = generation.prompt_token_ids[generation.reused_tokens :]
        self.stats = GenerationStats()
        self.must_end_prompt = False  # before anything is forced, guessed or chained
        self.has_fault = False  # its grammar, its text or its drafts raised what they should not
        self._cancel, self._is_cancelled = cancel, False
        self._num_draft_tokens = num_draft_tokens
        self._draft: NgramDraft | None = None  # while a batch has it: it knows all of the prompt
        if num_draft_tokens:
            self._policy = DraftPolicy(num_draft_tokens)
        self.step_times = StepTimes()  # of the context that the row is in
        self._is_forcing = False
        self._grammar_error: str | None = None
        self._num_moved = 0  # tokens that the grammar has taken, but those of a chain that are yet to be accepted
        self._waited = 0.0
        self._prefill_s: float | None = None
        self._began, self._arrivals = 0.0, list[float]()  # by time.perf_counter
        self._decode_times_s, self._sampling_times_s = list[float](), list[float]()
        if constraint is not None:
            generation.grammar_complete = False
            self._num_moved = constraint.num_accepted

    def reuse(self, count: int) -> None:
        """Before the first step: the row's cache holds the first `count` tokens of the prompt, not all of them."""
        self.generation.reused_tokens = count
        self.pending = self.generation.prompt_token_ids[count:]

    def leave(self) -> None:
        """It has ended: what only further tokens would need is dropped."""
        self._draft = None

    @property
    def params(self) -> SamplingParams:
        return self.generation.params

    @property
    def is_decoding(self) -> bool:
        """Whether the cache lacks just the last token."""
        return len(self.pending) == 1

    @property
    def can_chain(self) -> bool:
        """Whether nothing is asked of the next tokens but what they are."""
        return self.is_decoding and self.params.logprobs is None and not self.must_end_prompt

    @property
    def chain_limit(self) -> int:
        """The longest chain that passes over no draft worth trying, and runs not far beyond a stop string."""
        limit = _STOPPED_CHAIN if self.params.stop else self.generation.room
        return limit if self._draft is None else min(limit, self._policy.tokens_between(self.step_times))

    def is_finished(self) -> bool:
        """Looks at `cancel` first."""
        if self._is_cancelled or (self._cancel is not None and self._cancel.is_set()):
            self.generation.cancel()
        return self.generation.is_finished()

    def cancel(self) -> None:
        """End it before its next token. For any thread: the loop sees it when it next looks."""
        self._is_cancelled = True

    def attempt(self, call: Callable[[], Found], otherwise: Found) -> Found:
        """What the call gives, or `otherwise`: what it raises ends this row, not its neighbours. For any thread.

        What the user's own callbacks raise must not come through here.
        """
        try:
            return call()
        except Exception as error:  # a fault that is not known yet: the other rows' answers are right all the same
            self.has_fault = True
            if self.generation.error is None:
                place = f"{type(error).__name__}: {error}".splitlines()[0]
                self.generation.fail("internal", f"a fault of infer in this answer alone: {place:.200}: ask again")
            return otherwise

    # Before a step

    def begin(self) -> None:
        """It is in a batch now: from here on the caller waits for its tokens."""
        self._began = time.perf_counter()
        if self._num_draft_tokens and self._draft is None:
            self._draft = self.attempt(partial(NgramDraft, self.generation.prompt_token_ids), None)

    def force(self) -> Iterator[int]:
        """The tokens that the grammar leaves no choice about; each must be accepted before the next is asked for.

        None where log-probabilities are asked for: they want the logits before each token.
        """
        if self.params.logprobs is not None or self.must_end_prompt:
            return
        while self.constraint is not None and not self.generation.is_finished():
            forced = self.constraint.forced()
            if not forced:
                return
            for token_id in forced:
                if self.generation.is_finished():
                    return
                self.stats.tokens_forced += 1
                self.pending.append(token_id)
                self._is_forcing = True
                try:
                    yield token_id
                finally:
                    self._is_forcing = False

    def plan(self, budget: int, max_drafts: int) -> Part:
        """What to run of this row: up to `budget` tokens, of what is pending and, once it answers, drafts behind it."""
        taken = self.pending[: max(budget, 0)]
        drafts: Sequence[int] = ()
        num_known = len(taken)
        is_wanted = 0 < num_known == len(self.pending)
        if is_wanted and self._draft is not None and self.generation.token_ids and not self.must_end_prompt:
            match, most = self._draft.match(), min(max_drafts, self.generation.room - 1, budget - num_known)
            asked = min(self._policy.num_draft_tokens(self.step_times, match, num_known) if match else 0, most)
            drafts = self._allowed(self._draft.propose(asked)) if asked > 0 else ()
        return Part(self.row, [*taken, *drafts], num_drafts=len(drafts), is_wanted=is_wanted)

    def _allowed(self, drafts: Sequence[int]) -> Sequence[int]:
        """As many as the grammar allows: a step need not run the others."""
        if self.constraint is None:
            return drafts
        count = 0
        with suppress(ConstraintError):  # which it raises again when the masks are filled
            while count < len(drafts) and self.constraint.accept([drafts[count]]):
                count += 1
        try:
            self.constraint.rollback(count)
        except ConstraintError:  # likewise
            return ()
        return drafts[:count]

    def fill(self, masks: Sequence[Mask], drafts: Sequence[int]) -> None:
        """A line for what follows now and one behind each draft, as far as the grammar allows them. For any thread."""
        assert self.constraint is not None
        num_accepted, self._grammar_error = 0, None
        try:
            for index, mask in enumerate(masks):
                self.constraint.fill(mask)
                self.stats.masks_filled += 1
                if index == len(drafts) or self.constraint.accept([drafts[index]]) == 0:
                    break
                num_accepted += 1
        except ConstraintError as error:
            masks[num_accepted][:] = 0
            self._grammar_error = str(error)
        try:
            self.constraint.rollback(num_accepted)
        except ConstraintError as error:  # nothing may follow what is known
            masks[0][:] = 0
            self._grammar_error = str(error)

    # After it

    def prefilled(self, count: int, seconds: float) -> None:
        """A step that took the first `count` pending tokens and gave nothing."""
        del self.pending[:count]
        self._waited += seconds
        self.stats.prefill_steps += count > 0

    def waited(self, seconds: float) -> None:
        """Time between two steps, which counts with the next forward."""
        self._waited += seconds

    def chained(self, num_said: int, clock: Clock) -> None:
        """A chain, of whose tokens the first `num_said` were accepted."""
        self.stats.chains += 1
        self.stats.chain_tokens += num_said
        self._said(num_said, clock)

    def stepped(self, part: Part, sampled: SampledTokens, num_said: int, clock: Clock) -> None:
        """A step, of whose tokens the first `num_said` were accepted."""
        self.generation.logprobs += sampled.logprobs[:num_said]
        self.stats.single_steps += 1
        num_right = len(sampled.token_ids) - 1
        self.stats.drafts_proposed += part.num_drafts
        self.stats.drafts_accepted += min(num_right, num_said)
        self._said(num_said, clock)

    def accept(self, token_id: int) -> Piece | None:
        """What a token adds to the text; None for the code of a failed row, which ends the generation."""
        if self.has_fault:
            return None
        if token_id < 0:
            if self._grammar_error is None:
                self.generation.fail("logits", message_of(token_id))
            else:
                self.generation.fail("grammar", self._grammar_error)
            return None
        is_complete = False
        if self.constraint is not None:
            try:
                is_complete = self._move(token_id)
            except ConstraintError as error:
                self.generation.fail("grammar", str(error))
                return None
            self.generation.grammar_complete = is_complete
        if self._draft is not None:
            guess = self._draft.follow(token_id)
            if not self._is_forcing:
                self._policy.observe(*guess)
        piece = self.generation.accept(token_id, is_complete=is_complete)
        self._arrivals.append(time.perf_counter())
        return piece

    def _move(self, token_id: int) -> bool:
        """The grammar past a token, unless it has followed already; whether it is done there."""
        assert self.constraint is not None
        if self.constraint.num_accepted == self._num_moved:
            self._num_moved += self.constraint.accept([token_id])
        else:
            self._num_moved += 1
        return self.constraint.num_accepted == self._num_moved and self.constraint.done

    def result(self) -> GenerationResult:
        self.attempt(self.generation.flush, None)
        arrivals = [at - self._began for at in self._arrivals]
        timing = GenerationTiming(self._prefill_s or 0.0, self._decode_times_s, self._sampling_times_s, arrivals)
        return self.generation.result(timing, self.stats)

    def _said(self, count: int, clock: Clock) -> None:
        """The first of all tokens ends the prefill. What Python did before a forward and after the last sampling
        counts with the next forward; steps whose tokens were dropped count nowhere."""
        before = clock.started
        for end in clock.ends[:count]:
            forward_s, sampling_s = self._waited + end.forward - before, end.sampling - end.forward
            if self._prefill_s is None:
                self._prefill_s = forward_s + sampling_s
            else:
                self._decode_times_s.append(forward_s)
                self._sampling_times_s.append(sampling_s)
            before, self._waited = end.sampling, 0.0
        self._waited += clock.ended - before
