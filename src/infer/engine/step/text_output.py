"""The text of an answer, token by token. It ends with an end id, a stop string, a complete grammar or its length."""

from collections.abc import Sequence
from typing import final

from infer.outputs import FinishReason, Piece, TokenLogprob, ToolCallDelta
from infer.sampling_params import SamplingParams
from infer.text.tokenizer import StopStrings, Tokenizer
from infer.text.toolcalls.parsed import Delta, Parsed, Parser


@final
class TextOutput:
    """The text of the tokens that were pushed. The same tokens always give the same pieces and the same end.

    The answer ends after `limit` tokens: the limit of the context or of the request. A parser separates reasoning and
    tool calls from the text. Stop strings are searched in the text only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        room: int,
        parser: Parser | None = None,
    ) -> None:
        """Begin an answer to a prompt. The context has room for `room` tokens after the prompt."""
        self._params = params
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        )
        self._detokenizer = tokenizer.make_detokenizer(prompt_ids=prompt_ids)
        self._parser = parser
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        asked = params.max_new_tokens
        is_cut = asked is None or asked > room
        self.limit = room if asked is None or asked > room else asked
        self._limit_reason: tuple[FinishReason, str] = ("length", "context" if is_cut else "max_new_tokens")
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
        found = parser.push(text)
        if not is_last:
            return found
        rest = parser.flush()
        return Parsed(found.text + rest.text, found.deltas + rest.deltas)

    def _shown(self, stop_strings: StopStrings, text: str, *, is_last: bool) -> str:
        text, matched = stop_strings.push(text)
        if matched is not None and self.finish_reason is None:
            self.finish("stop", matched)
        elif is_last:
            text += stop_strings.flush()
        return text
