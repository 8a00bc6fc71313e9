"""Answers of `/v1/messages` with Anthropic's blocks, events and errors."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self, final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace as replace_fields

from infer.outputs import GenerationResult
from infer.serving.protocols.anthropic.ask import MessagesBody
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import FINISH_REASONS, Accepted, Count, Delta, Json, Output, Shape, call_values

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ITS_NAMES = {
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}
# A client that receives this sends all messages.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
EndReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
_END_REASONS: dict[str, EndReason] = {"stop": "end_turn", "length": "max_tokens"}  # by OpenAI's finish reason


class MessageText(Struct, tag_field="type", tag="text"):
    text: str


class MessageThinking(Struct, tag_field="type", tag="thinking"):
    """A block of reasoning. It has no signature: a block that a client sends back is accepted as it is."""

    thinking: str
    signature: str


class MessageToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Json


MessageBlock = MessageText | MessageThinking | MessageToolUse


class MessagesUsage(Struct, kw_only=True):
    """The numbers of tokens. Cached prompt tokens are counted separately from the prompt's other tokens."""

    input_tokens: Count
    cache_creation_input_tokens: Count | UnsetType = UNSET
    cache_read_input_tokens: Count | UnsetType = UNSET
    output_tokens: Count


class Stop(NamedTuple):
    """Why and where the answer ended. Both are null before its end."""

    stop_reason: EndReason | None = None
    stop_sequence: str | None = None


class AnthropicMessage(Output, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: EndReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesError(ApiError):
    """An error in Anthropic's format, which contains OpenAI's error."""

    @classmethod
    def of(cls, error: ApiError, **changes: Any) -> Self:
        type_ = _TYPE_BY_STATUS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message, param = error.message, error.param
        if param in _ITS_NAMES:
            given, param = param, _ITS_NAMES[param]
            message = param + message[len(given) :] if message.startswith(given) else message
        return super().of(error, message=message, type=type_, param=param, **changes)

    def to_json(self) -> dict[str, Any]:
        error: dict[str, Any] = dict(super().to_json()["error"])
        return {"type": "error", "error": error | ({"details": _NO_THREADS} if self.param == "thread" else {})}


@final
class MessageShape(Shape):
    """The answer, whole or as events. At most one block of a stream is open at a time.

    The first event has the number of cached tokens, so it is sent when the prompt has been read.
    """

    body, answer, error_type, last = MessagesBody, AnthropicMessage, MessagesError, b""

    def __init__(self, accepted: Accepted, body: MessagesBody) -> None:
        self._head, self._stops = accepted.head("msg_"), frozenset(body.stop_sequences or ())
        self._warnings, self._sequence = accepted.served.reading.warnings, accepted.firsts[0]
        self._is_shown = body.max_tokens != 0  # False: only the cache is filled
        self._usage: MessagesUsage | None = None  # of the first event
        self._index = -1  # index of the open block
        self._open: str | None = None  # kind of the open block

    def whole(self, results: Sequence[GenerationResult]) -> AnthropicMessage:
        (result,) = results
        blocks = list[MessageBlock]()
        if result.reasoning is not None:
            blocks.append(MessageThinking(result.reasoning, ""))
        if result.text or not (result.reasoning or result.tool_calls):
            blocks.append(MessageText(result.text))
        blocks += [MessageToolUse(call.id, call.name, call_values(call)) for call in result.tool_calls]
        usage = _usage(result.prompt_tokens, result.reused_tokens, result.generated_tokens * self._is_shown)
        return self._message(blocks if self._is_shown else [], self._stop(result), usage)

    def chunks(self, part: Delta) -> list[Json]:
        found = list[Json]()
        if self._usage is None:
            self._usage = _usage(self._sequence.num_prompt_tokens, self._sequence.num_reused, 0)
            found.append({"type": "message_start", "message": self._message([], Stop(), self._usage)})
        found += self._deltas(part) if self._is_shown else []
        if (result := part.result) is not None:
            if self._index < 0 and self._is_shown:
                found += self._begin("text", MessageText(""))
            usage = replace_fields(self._usage, output_tokens=result.generated_tokens * self._is_shown)
            end: Json = {"type": "message_delta", "delta": self._stop(result)._asdict(), "usage": usage}
            if self._warnings:
                end["infer"] = {"warnings": self._warnings}
            found += [*self._close(), end]
        return found

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        return [{"type": "message_stop"}]

    def _message(self, content: list[MessageBlock], stop: Stop, usage: MessagesUsage) -> AnthropicMessage:
        return AnthropicMessage(self._head.id, "assistant", self._head.model, content, *stop, usage)

    def _stop(self, result: GenerationResult) -> Stop:
        reason = _END_REASONS[FINISH_REASONS[result.finish_reason]]
        if not self._is_shown:
            return Stop("max_tokens", None)
        if result.finish_reason == "stop" and result.stop_reason in self._stops:
            return Stop("stop_sequence", str(result.stop_reason))
        if result.finish_reason == "length" and result.stop_reason == "context":
            reason = "model_context_window_exceeded"
        elif reason == "end_turn" and result.tool_calls:
            reason = "tool_use"
        return Stop(reason, None)

    def _deltas(self, part: Delta) -> list[Json]:
        """Return the events of a part: reasoning first, then text, then calls."""
        found = list[Json]()
        if part.reasoning:
            found += self._begin("thinking", MessageThinking("", ""))
            found.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.text:
            found += self._begin("text", MessageText(""))
            found.append(self._delta({"type": "text_delta", "text": part.text}))
        for call in part.calls:
            if call.id is not None:
                found += self._begin(call.id, MessageToolUse(call.id, call.name or "", {}))
            if call.arguments:
                found.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return found

    def _begin(self, what: str, block: MessageBlock) -> list[Json]:
        """Return the events that close the open block and begin another, or none if it is already open."""
        if self._open == what:
            return []
        ping: list[Json] = [{"type": "ping"}] if self._index < 0 else []
        closed = self._close()
        self._index += 1
        self._open = what
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}, *ping]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _usage(num_prompt_tokens: int, num_reused: int, num_answer_tokens: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=num_prompt_tokens - num_reused,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=num_reused,
        output_tokens=num_answer_tokens,
    )


class InputTokens(Output):
    input_tokens: Count
