"""A sequence: a request that is being answered. It owns its token ids, and only it changes its state.

Text, grammar and drafts can be computed again from the ids. So a sequence that was preempted, interrupted or cut
continues as if nothing had happened.
"""

import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat, takewhile
from operator import eq
from typing import TypeVar, final

from infer.compute.operands.step import Chunk, Clock
from infer.compute.sampling.sampler import message_of
from infer.engine.step.answer_parts import SequenceGrammar, TextOutput, TokenTimer
from infer.engine.step.request import Request
from infer.engine.step.scheduler import MAX_STEPS
from infer.errors import ConstraintError, InvalidRequestError
from infer.outputs import FinishReason, GenerationResult, GenerationStats, Origin, Piece, TokenLogprob, assembled
from infer.text.grammar.constraint import Mask
from infer.text.toolcalls.parsing import Parsed

_STOP_STRING_STEPS = 8  # steps without a return to Python, if a stop string may end the answer
NO_SLOT = -1
Found = TypeVar("Found")


@final
class Lease:
    """A slot that a session keeps. `token_ids` are the ids in the slot; there are none while an answer uses it.

    If others need the slot, the engine takes it away. Then `slot` is None, and no tokens are stored.
    """

    def __init__(self) -> None:
        self.slot: int | None = None
        self.token_ids: list[int] = []
        self.last_used = 0

    def lose(self) -> None:
        self.token_ids = []
        self.slot = None


def common_length(left: abc.Sequence[int], right: abc.Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))


@final
class Sequence:
    """A request that is being answered.

    `token_ids` are the ids of the prompt, followed by those of the answer. There is no other list of them. The first
    `num_computed` are in the cache at `slot`; the others are pending. A token is accepted when its piece is in
    `pieces`.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.params = request, request.params
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed, self.slot = 0, NO_SLOT
        self.pieces: list[Piece] = []
        self.launched: tuple[Chunk, ...] = ()  # its shares of the steps that run, of which one may wait for another
        self.awaited: abc.Sequence[int] = ()  # ids for the next token, while a step is planned behind its own
        self.is_paused = False  # True while its reader is too far behind
        self.is_streamed = True  # True if its tokens are read while they are generated
        self.must_end_prompt = False  # its prompt must be compressed before a token is forced or drafted
        self.lease: Lease | None = None  # the slot that it passes on to the next sequence of its session
        # Its place among the others, which only the queue sets (`fairness.Candidate`).
        self.tenant, self.priority = request.options.tenant, request.options.priority
        self.number = self.entry = self.num_before = self.passed = 0
        self.paid: int | None = None
        self.submitted_at = 0.0  # by time.perf_counter
        self.has_ended = False  # it has left the engine; only `keep` still changes it
        self.has_fault = False  # its grammar, its text or its drafts raised an unexpected error
        self.stats = GenerationStats()
        self.timer = TokenTimer()
        self.num_reused, self.num_dropped = 0, 0
        self.num_in_memory: int | None = None  # tokens of the prompt in memory before pages were loaded from disk
        self.checkpoints = request.checkpoints
        self.error: str | None = None
        self._is_cancelled = False
        self._tail: Parsed | None = None  # the held text of an answer that was cut
        self._drafts: abc.Sequence[int] = ()  # drafts for the next step
        self._text = TextOutput(request)
        self.stop_ids = self._text.stop_ids
        self.grammar = None if request.make_constraint is None else SequenceGrammar(request.make_constraint)
        self._begin_with(request.options.answer_prefix)

    # Its state

    @property
    def has_slot(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_able(self) -> bool:
        """True if a step can compute it."""
        return self.slot != NO_SLOT and self._text.finish_reason is None

    @property
    def num_generated(self) -> int:
        return len(self.pieces)

    @property
    def num_preemptions(self) -> int:
        return self.stats.preemptions

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) + len(self.awaited) - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens : self.num_prompt_tokens + len(self.pieces)]

    @property
    def room(self) -> int:
        """Number of tokens that may follow, after the one that is awaited."""
        return self._text.limit - len(self.pieces) - len(self.awaited)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._text.finish_reason

    @property
    def is_finished(self) -> bool:
        return self._text.finish_reason is not None

    @property
    def num_schedulable(self) -> int:
        """Number of pending tokens that the next steps may compute: only the prompt's, until it is compressed."""
        num_tokens = self.num_prompt_tokens if self.must_end_prompt else len(self.token_ids) + len(self.awaited)
        return num_tokens - self.num_computed

    # Its end

    def cancel(self) -> None:
        """End the sequence before its next token. For any thread; the engine notices it at its next check."""
        self._is_cancelled = True

    def poll(self, now: float) -> bool:
        """End the sequence if it is cancelled or out of time. Return True if it is finished."""
        options = self.request.options
        if self._is_cancelled or (options.cancel is not None and options.cancel.is_set()):
            self.abort()
        elif options.timeout is not None and now - self.submitted_at >= options.timeout:
            self.abort("timeout")
        return self._text.finish_reason is not None

    def abort(self, reason: str = "cancelled") -> None:
        if self._text.finish_reason is None:
            self._text.finish("abort", reason)

    def fail(self, code: str, message: str) -> None:
        self._text.finish("error", code)
        self.error = message

    def attempt(self, call: Callable[[], Found], otherwise: Found) -> Found:
        """Return the result of the call. If it raises, end only this sequence and return `otherwise`."""
        try:
            return call()
        except Exception as error:  # an unknown fault: the other answers are still right
            self.blame(error)
            return otherwise

    def blame(self, error: Exception) -> None:
        """End with an unknown fault, which no other sequence has."""
        self.has_fault = True
        del self.token_ids[self.num_prompt_tokens + len(self.pieces) :]
        if self.error is None:
            place = f"{type(error).__name__}: {error}".splitlines()[0]
            self.fail("internal", f"a fault of infer, in this answer only: {place:.200}: send the request again")

    # Its place in the engine

    def enter(self, slot: int, num_computed: int, num_dropped: int = 0, num_matched: int = 0) -> None:
        """Take a slot. It has the first `num_computed` tokens in the cache, and lost `num_dropped` tokens of its lease.

        If `num_matched` tokens are equal to an earlier prompt's, and fewer could be reused, a state is kept after
        these.
        """
        self.slot, self.num_computed = slot, num_computed
        if self.timer.began is None:
            self.timer.began = time.perf_counter()
        self.checkpoints = self.request.checkpoints
        if num_matched > num_computed:
            self.checkpoints = tuple(sorted((*self.checkpoints, num_matched)))
        self.num_dropped = num_dropped
        if len(self.pieces) == len(self.request.options.answer_prefix):
            self.num_reused = min(num_computed, self.num_prompt_tokens)

    def leave(self) -> None:
        """Drop the state that only further tokens need, because the sequence has ended or waits for a slot."""
        self.slot, self._drafts = NO_SLOT, ()
        self.launched = self.awaited = ()

    def end(self) -> None:
        """Leave the engine for good. An unfinished sequence counts as cancelled."""
        self.abort()
        self.leave()
        self.has_ended = True

    def restart(self) -> None:
        """Make the state again from the ids. No token counts as computed: a step may have been interrupted."""
        self.leave()
        self.num_computed = 0
        if not self.has_fault and (not self.is_finished or self._text.num_tokens != len(self.pieces)):
            self.attempt(partial(self._replay, len(self.pieces)), None)

    def keep(self, num_tokens: int) -> None:
        """End as if the answer had been cut after `num_tokens` tokens, if it has more or is unfinished.

        An end that no token caused, such as a timeout or an error, stays the end.
        """
        if num_tokens < len(self.pieces):
            reason, detail = self.finish_reason, self._text.stop_reason
            self._replay(num_tokens)
            if reason in ("abort", "error"):
                self._text.finish(reason, detail)
        self.abort()

    def resume(self, token_ids: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprob]) -> None:
        """Take these tokens as sampled, before the sequence is submitted. They begin with the tokens of its prefix.

        `logprobs` are the log-probabilities of the first tokens, as far as they are known.
        """
        known = chain(logprobs[len(self.pieces) :], repeat(None))
        for token_id, logprob in zip(token_ids[len(self.pieces) :], known, strict=False):
            self.accept(token_id, logprob)

    def _begin_with(self, token_ids: abc.Sequence[int]) -> None:
        """Accept the given first tokens of the answer.

        Raises InvalidRequestError if the answer ends with one of them, or if the grammar does not allow it.
        """
        for index, token_id in enumerate(token_ids):
            self.accept(token_id, origin="given")
            if self.grammar is not None and self.grammar.constraint.num_accepted != index + 1:
                message = f"answer_prefix[{index}]: the grammar does not allow token {token_id} there"
                raise InvalidRequestError(message, param="answer_prefix")
            if self.is_finished:
                why = self.error or f"{self.finish_reason}, {self._text.stop_reason!r}"
                message = f"answer_prefix[{index}]: the answer ends with this token ({why})"
                raise InvalidRequestError(message, param="answer_prefix")

    def _replay(self, num_tokens: int) -> None:
        text, grammar = TextOutput(self.request), self.grammar
        del self.token_ids[self.num_prompt_tokens + num_tokens :]
        for index, token_id in enumerate(self.token_ids[self.num_prompt_tokens :], 1):
            text.push(token_id, is_complete=grammar is not None and grammar.complete_at == index)
        text.finish_reason = text.stop_reason = None
        self._text = text
        if grammar is not None:
            grammar.replay(self.token_ids[self.num_prompt_tokens :])
        del self.pieces[num_tokens:]
        self.timer.keep(num_tokens)

    # Before a step

    def force(self) -> list[int]:
        """Accept each token that is the only one that the grammar allows, and return these tokens.

        There are none if log-probabilities are requested, because these need the logits before each token.
        """
        num_before, grammar = len(self.token_ids), self.grammar
        if grammar is None or self.params.logprobs is not None or self.must_end_prompt:
            return []
        while not self.is_finished and (forced := grammar.constraint.forced()):
            for token_id in takewhile(lambda _: not self.is_finished, forced):
                self.stats.tokens_forced += 1
                self.accept(token_id, origin="forced")
        return self.token_ids[num_before:]

    def take_drafts(self, drafts: abc.Sequence[int]) -> None:
        """Set the drafts for the next step, up to the first one that the grammar forbids."""
        self._drafts = drafts if self.grammar is None or not drafts else self.grammar.allowed(drafts)

    @property
    def num_drafts(self) -> int:
        """Number of drafts for the next step."""
        return len(self._drafts)

    @property
    def useful_steps(self) -> int:
        """Number of steps without a return to Python, after which further tokens would be dropped."""
        return min(self.room, _STOP_STRING_STEPS if self.params.stop else MAX_STEPS)

    @property
    def max_steps(self) -> int:
        """Number of steps after which it needs a return to Python, once its prompt is computed."""
        return 1 if self.must_end_prompt else self.request.max_total_tokens - len(self.token_ids)

    def schedule(self, num_tokens: int, num_drafts: int) -> Chunk:
        """Return its part of a step: `num_tokens` pending tokens and, if no others are pending, `num_drafts` drafts."""
        if self.awaited:
            return Chunk(self.slot, self.awaited)
        taken = self.token_ids[self.num_computed : self.num_computed + num_tokens]
        if not num_tokens or self.num_computed + num_tokens < len(self.token_ids):
            return Chunk(self.slot, taken, has_logits=False)
        return Chunk(self.slot, [*taken, *self._drafts[:num_drafts]] if num_drafts else taken, num_drafts)

    def fill(self, masks: abc.Sequence[Mask], drafts: abc.Sequence[int]) -> None:
        """Fill a mask for the next token, and one after each draft that the grammar allows. For any thread."""
        assert self.grammar is not None
        self.stats.masks_filled += self.grammar.fill(masks, drafts)

    def computed(self, count: int, awaited: tuple[int, ...] = ()) -> None:
        """Record that the cache keeps the next `count` tokens. `awaited` stands for the token that follows them."""
        self.num_computed, self.awaited = self.num_computed + count, awaited

    # After a step

    def collect(
        self, chunk: Chunk, token_ids: list[int], logprobs: list[TokenLogprob], clock: Clock, *, is_multi_step: bool
    ) -> int:
        """End the first of its running steps: accept sampled tokens until it is finished.

        Return the number of its computed tokens that are right.
        """
        self.launched, self.awaited = self.launched[1:], ()
        num_right = len(chunk.token_ids) - chunk.num_drafts
        if chunk.has_logits:
            num_accepted = self._accept_all(token_ids, logprobs, 0 if is_multi_step else len(token_ids) - 1)
            num_right += max(0, num_accepted - 1)
            self.timer.stepped(num_accepted, clock)
            if is_multi_step:
                self.stats.multi_steps += 1
                self.stats.multi_step_tokens += num_accepted
            else:
                self.stats.single_steps += 1
                self.stats.drafts_proposed += chunk.num_drafts
                self.stats.drafts_accepted += min(len(token_ids) - 1, num_accepted)
        else:
            self.timer.waited(clock.ended - clock.started)
            self.stats.prefill_steps += num_right > 0
        return num_right

    def _accept_all(self, token_ids: list[int], logprobs: list[TokenLogprob], num_drafts: int) -> int:
        """Accept sampled tokens, the first `num_drafts` of which were drafted, and return their number."""
        num_before = len(self.pieces)
        try:
            for index, token_id in enumerate(token_ids):
                logprob = logprobs[index] if index < len(logprobs) else None
                self.accept(token_id, logprob, "draft" if index < num_drafts else "sampled")
                if self._text.finish_reason is not None:
                    break
        except Exception as error:  # an unknown fault: the other answers are still right
            self.blame(error)
        return len(self.pieces) - num_before

    def accept(self, token_id: int, logprob: TokenLogprob | None = None, origin: Origin = "sampled") -> Piece | None:
        """Append a token and return its piece. If the token is the code of a failed sample, end and return None."""
        if self.has_fault:
            return None
        if token_id < 0:
            if self.grammar is None or self.grammar.error is None:
                self.fail("logits", message_of(token_id))
            else:
                self.fail("grammar", self.grammar.error)
            return None
        is_complete = False
        if self.grammar is not None:
            try:
                is_complete = self.grammar.follow(token_id, len(self.pieces) + 1)
            except ConstraintError as error:
                self.fail("grammar", str(error))
                return None
        self.token_ids.append(token_id)
        piece = self._text.push(token_id, is_complete=is_complete, logprob=logprob)
        self.pieces.append(piece if origin == "sampled" else replace(piece, origin=origin))
        self.timer.arrivals.append(time.perf_counter())
        return self.pieces[-1]

    def result(self) -> GenerationResult:
        """Return the answer so far; its finish_reason is "abort" if it is unfinished."""
        if self._tail is None and self.finish_reason in ("abort", "error"):
            self._tail = self.attempt(self._text.flush, Parsed(""))
        tail, grammar = self._tail or Parsed(""), self.grammar
        reasoning, tool_calls = assembled(chain(*(piece.deltas for piece in self.pieces if piece.deltas), tail.deltas))
        logprobs = None if self.params.logprobs is None else [p.logprob for p in self.pieces if p.logprob is not None]
        return GenerationResult(
            token_ids=self.generated,
            text="".join(piece.text for piece in self.pieces) + tail.text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            reasoning_tokens=self._text.num_reasoning_tokens,
            finish_reason=self.finish_reason or "abort",
            error=self.error,
            stop_reason=self._text.stop_reason,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=len(self.pieces),
            seed=self.params.seed,
            grammar_complete=grammar.complete_at is not None if grammar and self.request.has_user_grammar else None,
            reused_tokens=self.num_reused,
            disk_tokens=0 if self.num_in_memory is None else max(0, self.num_reused - self.num_in_memory),
            dropped_tokens=self.num_dropped,
            truncated_tokens=self.request.num_truncated,
            warnings=self.request.warnings,
            stats=self.stats,
            logprobs=logprobs,
            timing=self.timer.result(),
        )
