"""One request, from its prompt to its reason to stop: tokens in, text out, nothing shown too early.

`Generation` knows what was said; it does not know where logits come from.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.params import SamplingParams
from infer.results import FinishReason, GenerationResult, GenerationTiming, Piece, TokenLogprob
from infer.sampling.history import History
from infer.sampling.rows import Rows
from infer.tokenizer import StopStrings, Tokenizer


@final
@dataclass
class Generation:
    """One request from its prompt to its reason to stop."""

    tokenizer: Tokenizer
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self._texts: list[str] = []
        eos_token_ids = frozenset() if self.params.ignore_eos else self.tokenizer.eos_token_ids
        self.stop_ids = eos_token_ids | frozenset(self.params.stop_token_ids or ())
        self._detokenizer = self.tokenizer.make_detokenizer()
        self._stop_strings = StopStrings(self.params.stop or (), self.params.include_stop_str_in_output)
        room = self.max_total_tokens - len(self.prompt_token_ids)
        asked = self.params.max_new_tokens
        self._limit, self._limit_name = (
            (room, "context") if asked is None or asked > room else (asked, "max_new_tokens")
        )
        num_prompt_tokens, vocab_size = len(self.prompt_token_ids), self.tokenizer.vocab_size
        self.rows = Rows.pack(
            [self.params],
            vocab_size,
            num_prompt_tokens=[num_prompt_tokens],
            end_ids=self.tokenizer.eos_token_ids,
            device=self.device,
        )
        self.history: History | None = None
        if self.rows.has_penalty:
            self.history = History(1, num_prompt_tokens + self._limit, vocab_size, self.device)
            self.history.begin(0, self.prompt_token_ids)

    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def chain_room(self) -> int:
        """How many tokens may follow of which nothing is asked but what they are."""
        return self._limit - len(self.token_ids) if self.params.logprobs is None else 0

    def sample(self, logits: Float[Tensor, "vocab"]) -> int:
        """The next token id, or the code of a failed row. Ids that the embedding has beyond the vocabulary are never
        chosen."""
        position = torch.tensor([len(self.prompt_token_ids) + len(self.token_ids)], device=self.device)
        sampled = ops.sample(logits[None, : self.rows.vocab_size], self.rows, self.history, position)
        token_id = int(sampled.token_ids[0])
        if token_id >= 0 and self.params.logprobs is not None:
            self.logprobs.append(sampled.logprob_of(0, self.params.logprobs))
        if token_id >= 0 and self.history is not None:
            self.history.append(torch.tensor([0], device=self.device), sampled.token_ids)
        return token_id

    def accept(self, token_id: int) -> Piece:
        """Append a token and decide, in this order: end of sequence, stop string, length."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish("eos", token_id)
            return self._show(token_id, self._detokenizer.flush(), last=True)
        text = self._detokenizer.push(token_id)
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
            self.finish("length", self._limit_name)
        self._texts.append(text)
        return Piece(token_id, text)

    def result(self, timing: GenerationTiming) -> GenerationResult:
        if self.finish_reason in ("abort", "error"):  # what was held back is said after all
            self._texts.append(self._stop_strings.flush() + self._detokenizer.flush())
        return GenerationResult(
            token_ids=self.token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason or "abort",
            error=self.error,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt_token_ids),
            generated_tokens=len(self.token_ids),
            seed=self.params.seed,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            timing=timing,
        )
