"""The answers of `/api/chat` and `/api/generate`, whole or as lines, and Ollama's errors."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Self, final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from infer.outputs import FinishReason, GenerationResult, ReasoningDelta, TokenLogprob, ToolCall
from infer.serving.protocols.chat_answers import FINISH_REASONS, call_values
from infer.serving.protocols.token_logprobs import Spelling, chat_entries, without_end
from infer.serving.server.answer_types import Answer, Count, Json, ScoredChoice, logprobs_of
from infer.serving.server.call import Call
from infer.serving.server.choices import ChoicePart
from infer.serving.server.endpoint import LINES
from infer.serving.server.http_errors import ApiError, api_error
from infer.serving.server.replies import Chunk, ReplyFormat
from infer.serving.server.sse import line


class OllamaFunction(Struct):
    name: str
    arguments: Json


class OllamaCall(Struct):
    function: OllamaFunction


class OllamaMessage(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(Answer, kw_only=True):
    """The fields of an answer and of each line of it. The last line has the counts, and times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    logprobs: list[ScoredChoice] | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    message: OllamaMessage


class OllamaGeneration(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(ApiError):
    """An error in Ollama's format, which is only a message. The code next to it is an addition of `infer`."""

    @classmethod
    def of(cls, error: ApiError) -> Self:
        return cls(error.status, error.message, error.type, error.param, error.code, error.headers)

    def to_json(self) -> dict[str, Any]:
        return {"error": self.message} | ({"code": self.code} if self.code else {})


def ollama_error(error: Exception) -> ApiError:
    """Return the error that a client of Ollama's routes receives."""
    return OllamaError.of(api_error(error))


def failure_line(error: ApiError) -> bytes:
    """Return the last line of a stream that fails."""
    return line(OllamaError.of(error).body)


def time_text(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


@final
class OllamaShape(ReplyFormat):
    """The answer as a message of a chat, or as the text of a generation.

    Every line except the last has a part of the text or of the reasoning. A call is whole, in a line of its own. With a
    `spelling`, the answer has log-probabilities.
    """

    last, media_type = b"", LINES

    def __init__(self, call: Call, spelling: Spelling | None, *, is_chat: bool) -> None:
        self._call, self._spelling, self._is_chat = call, spelling, is_chat

    def whole(self, results: Sequence[GenerationResult]) -> OllamaAnswer:
        (result,) = results
        scored = self._scored(result.logprobs or (), result.finish_reason)
        fields = self._end(result) | {"logprobs": scored}
        return self._answer(result.text, result.reasoning or "", result.tool_calls, **fields)

    def chunks(self, part: ChoicePart) -> list[OllamaAnswer]:
        thinking = "".join(delta.text for delta in part.deltas if isinstance(delta, ReasoningDelta))
        scored = self._scored(logprobs_of(part.pieces), part.pieces[-1].finish_reason) if part.pieces else UNSET
        found = list[OllamaAnswer]()
        if part.text or thinking or scored:
            found.append(self._answer(part.text, thinking, logprobs=scored))
        if (result := part.result) is not None:
            if result.tool_calls:
                found.append(self._answer("", "", result.tool_calls))
            found.append(self._answer(**self._end(result)))
        return found

    def event(self, chunk: Chunk) -> bytes:
        return line(msgspec.json.encode(chunk))

    def fail(self, error: ApiError) -> bytes:
        return failure_line(error)

    def without_prompt(self, *, is_unloaded: bool) -> OllamaAnswer:
        """Return the answer to a request that only loads or unloads the model."""
        return self._answer(done=True, done_reason="unload" if is_unloaded else "load")

    def _answer(
        self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = (), *, done: bool = False, **fields: Any
    ) -> OllamaAnswer:
        fields |= {"model": self._call.model, "created_at": time_text(float(self._call.created)), "done": done}
        if not self._is_chat:
            return OllamaGeneration(response=text, thinking=thinking or UNSET, **fields)
        called = [OllamaCall(OllamaFunction(call.name, call_values(call))) for call in calls]
        return OllamaChat(message=OllamaMessage("assistant", text, thinking or UNSET, called or UNSET), **fields)

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        timing = result.timing
        return {
            "done": True,
            "done_reason": FINISH_REASONS[result.finish_reason],
            "total_duration": nanoseconds(self._call.seconds),
            "load_duration": nanoseconds(self._call.load_seconds),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timing.ttft_s),
            "eval_count": result.generated_tokens,
            "eval_duration": nanoseconds(timing.decode_time_s + timing.sampling_time_s),
        }

    def _scored(self, logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> Any:
        if self._spelling is None:
            return UNSET
        return chat_entries(without_end(logprobs, finish_reason), self._spelling)  # dicts of the Struct's fields
