"""The text of an answer, token by token. It ends with an end id, a stop string, a complete grammar or its length."""

from collections.abc import Sequence
from typing import final

from infer.outputs import FinishReason, Piece, TokenLogprob, ToolCallDelta
from infer.sampling_params import SamplingParams
from infer.text.tokenizer import StopStrings, Tokenizer
from infer.text.toolcalls.parsed import Parsed, Parser


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
        self._stop_strings = StopStrings(params.stop or (), params.include_stop_str_in_output)
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
        is_end = token_id in self.stop_ids
        text = self._detokenizer.flush() if is_end else self._text_of(token_id)
        if is_end:
            self.finish("eos", token_id)
        elif is_complete and self.finish_reason is None:
            self.limit, self._limit_reason = self.num_tokens, ("stop", "grammar")
        is_last = is_end or self.num_tokens >= self.limit
        was_reasoning = self._is_reasoning
        found = self._parsed(text + self._detokenizer.flush() if is_last else text, is_last=is_last)
        self.num_reasoning_tokens += was_reasoning or self._is_reasoning
        shown = self._shown(found.text, is_last=is_last)
        deltas = found.deltas
        if deltas and self.finish_reason == "stop" and self._stop_strings.matched is not None:
            deltas = tuple(delta for delta in deltas if not isinstance(delta, ToolCallDelta))
        return Piece(token_id, shown, logprob, self.finish_reason, deltas)

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def flush(self) -> Parsed:
        """Return the held text, if the answer stops before its end."""
        rest = self._parsed(self._detokenizer.flush(), is_last=True)
        return Parsed(self._stop_strings.push(rest.text).text + self._stop_strings.flush(), rest.deltas)

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    def _text_of(self, token_id: int) -> str:
        mark = None if self._parser is None else self._parser.mark_by_id.get(token_id)
        return self._detokenizer.push(token_id) if mark is None else self._detokenizer.flush() + mark

    def _parsed(self, text: str, *, is_last: bool) -> Parsed:
        if (parser := self._parser) is None:
            return Parsed(text)
        found = parser.push(text)
        if not is_last:
            return found
        rest = parser.flush()
        return Parsed(found.text + rest.text, found.deltas + rest.deltas)

    def _shown(self, text: str, *, is_last: bool) -> str:
        if self.num_tokens >= self._params.min_new_tokens:
            shown = self._stop_strings.push(text)
            text = shown.text
            if shown.matched is not None and self.finish_reason is None:
                self.finish("stop", shown.matched)
            elif is_last:
                text += self._stop_strings.flush()
        if is_last and self.finish_reason is None:
            self.finish(*self._limit_reason)
        return text
