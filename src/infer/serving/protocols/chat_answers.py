"""An answer in OpenAI's format: its message, its finish reason, the deltas of a stream, and its log-probabilities.

Log-probabilities are listed by the token's text and bytes, not by its id.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import infer
from infer.outputs import FinishReason, GenerationResult, ReasoningDelta, TokenLogprob, ToolCall, ToolCallDelta

Json = dict[str, Any]
Delta = ReasoningDelta | ToolCallDelta
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "length"}  # aborted: its timeout expired
LEAST_LOGPROB = -9999.0  # of an impossible token: JSON has no infinity
Entry = dict[str, Any]


def finish_reason_of(result: GenerationResult) -> str:
    """Return OpenAI's name of the finish reason."""
    reason = FINISH_REASONS[result.finish_reason]
    return "tool_calls" if reason == "stop" and result.tool_calls else reason


def message_of(result: GenerationResult) -> dict[str, Any]:
    """Return the answer as OpenAI's message. Its content is None if the answer has only calls."""
    message = result.to_message() | {"refusal": None}
    return message | {"content": None} if result.tool_calls and not result.text else message


def delta_fields(deltas: Iterable[Delta]) -> Json:
    """Return the fields of a chunk's delta, with one entry per call.

    A call has its id and name only in the chunk where it begins.
    """
    reasoning, calls = "", dict[int, Json]()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning += delta.text
            continue
        call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        call["function"]["arguments"] += delta.arguments
    fields: Json = {"reasoning_content": reasoning} if reasoning else {}
    return fields | ({"tool_calls": list(calls.values())} if calls else {})


def call_values(call: ToolCall) -> Json:
    """Return the arguments of a call as an object, or {} if the call was cut off."""
    try:
        return call.parsed()
    except json.JSONDecodeError:
        return {}


def reasoning_and_calls(result: GenerationResult) -> Json:
    """Return the reasoning and the calls of the answer's message, if it has them."""
    message = result.to_message()
    return {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}


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
