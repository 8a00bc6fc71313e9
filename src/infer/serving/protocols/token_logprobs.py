"""Log-probabilities in the format of OpenAI's answers: by the token's text and bytes, not by its id."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import infer
from infer.outputs import FinishReason, TokenLogprob

LEAST_LOGPROB = -9999.0  # of an impossible token: JSON has no infinity
Entry = dict[str, Any]


class Spelling(NamedTuple):
    """The texts of a vocabulary's tokens. Control tokens are not part of an answer's text."""

    token_bytes: Sequence[bytes]
    control_ids: Collection[int]

    @classmethod
    def of(cls, tokenizer: "infer.Tokenizer") -> Self:
        return cls(tokenizer.token_bytes, tokenizer.special_token_ids)

    def text(self, token_id: int) -> str:
        """Return a token's text. Incomplete characters are shown as bytes, as OpenAI does."""
        spelt = self.token_bytes[token_id]
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def entry(self, token_id: int, logprob: float) -> Entry:
        """Return a token's entry. The `bytes` of an answer's tokens, joined, are its text; a control token has none."""
        spelt = None if token_id in self.control_ids else list(self.token_bytes[token_id])
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelt}


def without_end(logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> Sequence[TokenLogprob]:
    """Return the log-probabilities without the token that ends the answer, which is not a part of its text."""
    return logprobs[:-1] if finish_reason == "eos" else logprobs


def chat_entries(logprobs: Iterable[TokenLogprob], spelling: Spelling) -> list[Entry]:
    """Return `logprobs.content` of a chat completion."""
    return [
        spelling.entry(each.token_id, each.logprob) | {"top_logprobs": [spelling.entry(*top) for top in each.top]}
        for each in logprobs
    ]


def completion_columns(logprobs: Iterable[TokenLogprob | None], spelling: Spelling) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion, without `text_offset`.

    None means a token that is not scored; its text is None as well.
    """
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for each in logprobs:
        columns["tokens"].append(None if each is None else spelling.text(each.token_id))
        columns["token_logprobs"].append(None if each is None else max(each.logprob, LEAST_LOGPROB))
        columns["top_logprobs"].append(None if each is None else _by_text(each, spelling))
    return columns


def _by_text(each: TokenLogprob, spelling: Spelling) -> dict[str, float]:
    """Return the log-probabilities of the alternatives and the token itself, by text.

    If several tokens have the same text, the likeliest one is returned.
    """
    found = dict[str, float]()
    for token_id, logprob in sorted({*each.top, (each.token_id, each.logprob)}, key=lambda pair: -pair[1]):
        found.setdefault(spelling.text(token_id), max(logprob, LEAST_LOGPROB))
    return found
