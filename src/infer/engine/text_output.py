"""The text of an answer, token by token, and what ends it: an end id, a stop string, a complete grammar, its length."""

from typing import final

from infer.outputs import FinishReason, Piece, TokenLogprob
from infer.sampling_params import SamplingParams
from infer.tokenizer import StopStrings, Tokenizer


@final
class TextOutput:
    """A function of the tokens pushed: pushed again, they give the same pieces and the same end.

    `limit` tokens end the answer, by the context's length or by what was asked.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, room: int) -> None:
        """`room`: how many tokens the context holds after the prompt."""
        self._params = params
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        )
        self._detokenizer = tokenizer.make_detokenizer()
        self._stop_strings = StopStrings(params.stop or (), params.include_stop_str_in_output)
        asked = params.max_new_tokens
        is_cut = asked is None or asked > room
        self.limit = room if asked is None or asked > room else asked
        self._limit_reason: tuple[FinishReason, str] = ("length", "context" if is_cut else "max_new_tokens")
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, token_id: int, *, is_complete: bool = False, logprob: TokenLogprob | None = None) -> Piece:
        """What the token adds. Checked in this order: end id, stop string, complete grammar, length."""
        self.num_tokens += 1
        if token_id in self.stop_ids:
            self.finish("eos", token_id)
            return Piece(token_id, self._shown(self._detokenizer.flush(), is_last=True), logprob, self.finish_reason)
        text = self._detokenizer.push(token_id)
        if is_complete and self.finish_reason is None:
            self.limit, self._limit_reason = self.num_tokens, ("stop", "grammar")
        is_last = self.num_tokens >= self.limit
        text = self._shown(text + self._detokenizer.flush() if is_last else text, is_last=is_last)
        return Piece(token_id, text, logprob, self.finish_reason)

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def flush(self) -> str:
        """What was held back, of an answer that ended before its end."""
        return self._stop_strings.flush() + self._detokenizer.flush()

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
