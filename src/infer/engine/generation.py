"""One request, from its prompt to its reason to stop: tokens in, text out, nothing shown too early.

`Generation` knows what was said; it does not know where logits come from.
"""

from dataclasses import dataclass, field
from typing import final

from infer.outputs import FinishReason, GenerationResult, GenerationStats, GenerationTiming, Piece, TokenLogprob
from infer.sampling_params import SamplingParams
from infer.tokenizer import StopStrings, Tokenizer


@final
@dataclass
class Generation:
    """One request from its prompt to its reason to stop."""

    tokenizer: Tokenizer
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    vocab_size: int = 0  # ids from there on are never said; 0 is the tokenizer's own size
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    grammar_complete: bool | None = None
    reused_tokens: int = 0
    dropped_tokens: int = 0
    truncated_tokens: int = 0

    def __post_init__(self) -> None:
        self.vocab_size = self.vocab_size or self.tokenizer.vocab_size
        self._texts: list[str] = []
        eos_token_ids = frozenset() if self.params.ignore_eos else self.tokenizer.eos_token_ids
        self.stop_ids = eos_token_ids | frozenset(self.params.stop_token_ids or ())
        self._detokenizer = self.tokenizer.make_detokenizer()
        self._stop_strings = StopStrings(self.params.stop or (), self.params.include_stop_str_in_output)
        room = self.max_total_tokens - len(self.prompt_token_ids)
        asked = self.params.max_new_tokens
        is_cut = asked is None or asked > room
        self._limit = room if asked is None or asked > room else asked
        self._reason: tuple[FinishReason, str] = ("length", "context" if is_cut else "max_new_tokens")

    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """How many tokens may follow."""
        return self._limit - len(self.token_ids)

    @property
    def history(self) -> list[int]:
        return self.prompt_token_ids + self.token_ids

    @property
    def max_tokens(self) -> int:
        """Prompt and answer, at most."""
        return len(self.prompt_token_ids) + self._limit

    def accept(self, token_id: int, *, is_complete: bool = False) -> Piece:
        """Append a token and decide, in this order: end of sequence, stop string, complete grammar, length."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish("eos", token_id)
            return self._show(token_id, self._detokenizer.flush(), last=True)
        text = self._detokenizer.push(token_id)
        if is_complete and self.finish_reason is None:
            self._limit, self._reason = len(self.token_ids), ("stop", "grammar")
        is_last = len(self.token_ids) >= self._limit
        return self._show(token_id, text + self._detokenizer.flush() if is_last else text, last=is_last)

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def cancel(self) -> None:
        if self.finish_reason is None:
            self.finish("abort", "cancelled")

    def fail(self, code: str, message: str) -> None:
        self.finish("error", code)
        self.error = message

    def _show(self, token_id: int, text: str, *, last: bool) -> Piece:
        if len(self.token_ids) >= self.params.min_new_tokens:
            shown = self._stop_strings.push(text)
            text = shown.text
            if shown.matched is not None and self.finish_reason is None:
                self.finish("stop", shown.matched)
            elif last:
                text += self._stop_strings.flush()
        if last and self.finish_reason is None:
            self.finish(*self._reason)
        self._texts.append(text)
        return Piece(token_id, text)

    def flush(self) -> None:
        """Where the answer ended before its end, what was held back is part of the text after all."""
        if self.finish_reason in ("abort", "error"):
            self._texts.append(self._stop_strings.flush())
            self._texts.append(self._detokenizer.flush())

    def result(self, timing: GenerationTiming, stats: GenerationStats) -> GenerationResult:
        return GenerationResult(
            token_ids=self.token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason or "abort",
            error=self.error,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt_token_ids),
            generated_tokens=len(self.token_ids),
            seed=self.params.seed,
            grammar_complete=self.grammar_complete,
            reused_tokens=self.reused_tokens,
            dropped_tokens=self.dropped_tokens,
            truncated_tokens=self.truncated_tokens,
            stats=stats,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            timing=timing,
        )
