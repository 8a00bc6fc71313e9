"""The parts of a sequence that follow its tokens: its text, its grammar and its times."""

from collections import abc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from infer.compute.operands.step import Clock
from infer.engine.step.request import Request
from infer.errors import ConstraintError
from infer.outputs import FinishReason, GenerationTiming, Piece, TokenLogprob, ToolCallDelta
from infer.text.grammar.constraint import Constraint, Mask
from infer.text.tokenizer import StopStrings
from infer.text.toolcalls.parser import make_parser
from infer.text.toolcalls.parsing import Delta, Parsed, Parser


@final
class TextOutput:
    """The text of the tokens that were pushed. The same tokens always give the same pieces and the same end.

    The answer ends after `limit` tokens: the limit of the context or of the request. A parser separates reasoning and
    tool calls from the text. Stop strings are searched in the text only.
    """

    def __init__(self, request: Request) -> None:
        """Begin the answer to a request."""
        self._params = params = request.params
        tokenizer, form, prompt_ids = request.tokenizer, request.answer_format, request.prompt_token_ids
        room = request.max_total_tokens - len(prompt_ids)
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        )
        self._detokenizer = tokenizer.make_detokenizer(prompt_ids=prompt_ids)
        self._parser: Parser | None = None
        if form is not None:
            self._parser = make_parser(form, partial(form.call_id, request.call_salt), is_held=request.has_user_grammar)
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        asked = room + 1 if params.max_new_tokens is None else params.max_new_tokens
        self.limit = min(asked, room)
        self._limit_reason: tuple[FinishReason, str] = ("length", "context" if asked > room else "max_new_tokens")
        self.num_tokens = self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, token_id: int, *, is_complete: bool = False, logprob: TokenLogprob | None = None) -> Piece:
        """Add a token and return its piece. Checks, in this order: end id, stop string, complete grammar, length."""
        self.num_tokens += 1
        parser, detokenizer, deltas = self._parser, self._detokenizer, tuple[Delta, ...]()
        is_end = token_id in self.stop_ids
        if is_end:
            text = detokenizer.flush()
            self.finish("eos", token_id)
        else:
            mark = None if parser is None else parser.mark_by_id.get(token_id)
            text = detokenizer.push(token_id) if mark is None else detokenizer.flush() + mark
            if is_complete and self.finish_reason is None:
                self.limit, self._limit_reason = self.num_tokens, ("stop", "grammar")
        is_last = is_end or self.num_tokens >= self.limit
        if is_last:
            text += detokenizer.flush()
        if parser is not None:
            was_reasoning = parser.is_reasoning
            text, deltas = self._parsed(parser, text, is_last=is_last)
            self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
        if (stop_strings := self._stop_strings) is not None and self.num_tokens >= self._params.min_new_tokens:
            text = self._shown(stop_strings, text, is_last=is_last)
        if is_last and self.finish_reason is None:
            self.finish(*self._limit_reason)
        if deltas and self.finish_reason == "stop" and stop_strings is not None and stop_strings.matched is not None:
            deltas = tuple(delta for delta in deltas if not isinstance(delta, ToolCallDelta))
        return Piece(token_id, text, logprob, self.finish_reason, deltas)

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def flush(self) -> Parsed:
        """Return the held text, if the answer stops before its end."""
        text, stop_strings = self._detokenizer.flush(), self._stop_strings
        rest = Parsed(text) if self._parser is None else self._parsed(self._parser, text, is_last=True)
        return rest if stop_strings is None else Parsed(self._shown(stop_strings, rest.text, is_last=True), rest.deltas)

    def _parsed(self, parser: Parser, text: str, *, is_last: bool) -> Parsed:
        parsed = parser.push(text)
        if not is_last:
            return parsed
        rest = parser.flush()
        return Parsed(parsed.text + rest.text, parsed.deltas + rest.deltas)

    def _shown(self, stop_strings: StopStrings, text: str, *, is_last: bool) -> str:
        text, matched = stop_strings.push(text)
        if matched is not None and self.finish_reason is None:
            self.finish("stop", matched)
        elif is_last:
            text += stop_strings.flush()
        return text


@final
class SequenceGrammar:
    """The grammar of a sequence.

    A step may move the constraint past tokens before the sequence accepts them. Tokens that are not accepted are
    undone.
    """

    def __init__(self, make_constraint: Callable[[], Constraint]) -> None:
        self._make = make_constraint
        self.constraint = make_constraint()
        self._num_followed = self.constraint.num_accepted  # accepted tokens that it has followed
        self.complete_at: int | None = None  # number of tokens after which the grammar was first complete
        self.error: str | None = None  # why the last masks must not be used

    def replay(self, token_ids: abc.Sequence[int]) -> None:
        """Go back to these tokens, which are the first ones that the grammar has seen."""
        self.constraint = self._make()
        self.constraint.accept(token_ids)
        self._num_followed = self.constraint.num_accepted
        if self.complete_at is not None and self.complete_at > len(token_ids):
            self.complete_at = None
        self.error = None

    def follow(self, token_id: int, num_tokens: int) -> bool:
        """Move past token number `num_tokens` of the answer, if that is not done.

        Return True if the grammar is complete there. Raises ConstraintError.
        """
        if self.constraint.num_accepted == self._num_followed:
            self._num_followed += self.constraint.accept([token_id])
        else:
            self._num_followed += 1
        is_complete = self.constraint.num_accepted == self._num_followed and self.constraint.done
        if is_complete and self.complete_at is None:
            self.complete_at = num_tokens
        return is_complete

    def allowed(self, drafts: abc.Sequence[int]) -> abc.Sequence[int]:
        """Return the drafts up to the first one that the grammar forbids, because a step need not run the others."""
        count = 0
        with suppress(ConstraintError):  # it is raised again when the masks are filled
            while count < len(drafts) and self.constraint.accept([drafts[count]]):
                count += 1
        try:
            self.constraint.rollback(count)
        except ConstraintError:  # as above
            return []
        return drafts[:count]

    def fill(self, masks: abc.Sequence[Mask], drafts: abc.Sequence[int]) -> int:
        """Fill a mask for the next token, and one after each allowed draft. Return the number of masks."""
        num_filled, num_accepted, self.error = 0, 0, None
        try:
            for index, mask in enumerate(masks):
                self.constraint.fill(mask)
                num_filled += 1
                if index == len(drafts) or self.constraint.accept([drafts[index]]) == 0:
                    break
                num_accepted += 1
        except ConstraintError as error:
            masks[num_accepted][:] = 0
            self.error = str(error)
        try:
            self.constraint.rollback(num_accepted)
        except ConstraintError as error:  # no further token is allowed
            masks[0][:] = 0
            self.error = str(error)
        return num_filled


@final
class TokenTimer:
    """Collects the times of one answer that `GenerationTiming` reports."""

    def __init__(self) -> None:
        self.began: float | None = None  # when it first got a slot, by time.perf_counter
        self.arrivals = list[float]()  # when each token arrived, forced or sampled, by the same clock
        self._waited = 0.0
        self._prefill_s: float | None = None
        self._decode_times_s, self._sampling_times_s = list[float](), list[float]()

    def waited(self, seconds: float) -> None:
        """Add time that gave no token. It counts as a part of the next forward."""
        self._waited += seconds

    def stepped(self, num_accepted: int, clock: Clock) -> None:
        """Add the times of a step or a multi-step, of whose sampled tokens the first `num_accepted` were accepted.

        The first token ends the prefill. Python's time before a forward and after the last sampling counts as a part of
        the next forward. Steps whose tokens were dropped are not counted.
        """
        before = clock.started
        for end in clock.ends[:num_accepted]:
            forward_s, sampling_s = self._waited + end.forward - before, end.sampling - end.forward
            if self._prefill_s is None:
                self._prefill_s = forward_s + sampling_s
            else:
                self._decode_times_s.append(forward_s)
                self._sampling_times_s.append(sampling_s)
            before, self._waited = end.sampling, 0.0
        self._waited += clock.ended - before

    def keep(self, num_tokens: int) -> None:
        """Forget the times after the first `num_tokens` tokens.

        Forced tokens have no step times, so some may be kept.
        """
        del self.arrivals[num_tokens:]
        del self._decode_times_s[max(0, num_tokens - 1) :]
        del self._sampling_times_s[max(0, num_tokens - 1) :]

    def result(self) -> GenerationTiming:
        arrivals = [at - (self.began or 0.0) for at in self.arrivals]
        return GenerationTiming(self._prefill_s or 0.0, self._decode_times_s, self._sampling_times_s, arrivals)
