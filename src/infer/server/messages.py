"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages, text alone, with its events and its errors."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.request_options import RequestOptions
from infer.outputs import GenerationResult
from infer.server.asked import make_params, seeds_of
from infer.server.asking import while_connected
from infer.server.choices import Asked, Choices, accept
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError, api_error
from infer.server.models import check_model
from infer.server.read_body import read_body
from infer.server.replies import json_response, make_head
from infer.server.shapes import Head
from infer.server.sse import EventStream, event
from infer.server.state import ServerState
from infer.server.tokens import prepared

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "abort": "max_tokens"}


class _Part(Struct, forbid_unknown_fields=True):
    pass


@final
class CacheControl(_Part, kw_only=True):
    """A hint that is not needed: what prompts begin with is kept anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


@final
class TextBlock(_Part, kw_only=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


@final
class Turn(_Part, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


@final
class Metadata(_Part, kw_only=True):
    user_id: str | None = None


@final
class ThinkingOff(_Part):
    type: Literal["disabled"]


@final
class JsonOutput(_Part, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@final
class OutputConfig(_Part, kw_only=True):
    format: JsonOutput | None = None


class PromptBody(_Part, kw_only=True):
    """What both routes take."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: ThinkingOff | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: Any = None
    tool_choice: Any = None


@final
class CountTokensBody(PromptBody, kw_only=True):
    pass


@final
class MessagesBody(PromptBody, kw_only=True):
    """`seed` is ours: Anthropic has none."""

    max_tokens: Annotated[int, Meta(ge=1)]
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class MessagesError(ApiError):
    """An error in Anthropic's shape, which has OpenAI's in it."""

    @classmethod
    def of(cls, error: ApiError) -> Self:
        type_ = _TYPE_BY_STATUS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return cls(error.status, error.message, type_, error.param, error.code, error.headers)

    def to_json(self) -> dict[str, Any]:
        return {"type": "error", **super().to_json()}


def _its_error(error: Exception) -> ApiError:
    return MessagesError.of(api_error(error))


async def create_message(request: Request, state: ServerState) -> Response:
    body = read_body(await request.body(), MessagesBody)
    check_model(request, state, body.model)
    params = make_params(sampling_of(body), state.llm().llm.sampling_defaults, seeds_of(body.seed, 1), "messages")
    messages = turns_of(body)
    asked = Asked([messages], params, RequestOptions(), "messages", variables_of(messages))
    choices = await accept(request, state, asked)
    answer = Message(make_head("msg_", request, state))
    if body.stream:
        seconds = state.settings.comment_seconds
        return EventStream(events_of(answer, choices), comment_seconds=seconds, fail=failure_event)
    (result,) = await while_connected(request, choices.results())
    return json_response(answer.whole(result))


async def count_tokens(request: Request, state: ServerState) -> Response:
    body, tokenizer = read_body(await request.body(), CountTokensBody), state.llm().host.tokenizer
    check_model(request, state, body.model)
    messages = turns_of(body)
    encode = tokenizer.encode_chat
    ids = await prepared(request, state, lambda: encode(messages, **variables_of(messages)), "messages")
    return json_response({"input_tokens": len(ids)})


def turns_of(body: PromptBody) -> list[dict[str, str]]:
    """As templates take them: the system first, turns of one role after another as one."""
    found = [] if body.system is None else [{"role": "system", "content": _text_of(body.system)}]
    for turn in body.messages:
        if found and found[-1]["role"] == turn.role:
            found[-1] = {"role": turn.role, "content": f"{found[-1]['content']}\n{_text_of(turn.content)}"}
        else:
            found.append({"role": turn.role, "content": _text_of(turn.content)})
    return found


def variables_of(messages: list[dict[str, str]]) -> dict[str, Any]:
    """Of the template: a last turn of the assistant is gone on with."""
    return {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}


def sampling_of(body: MessagesBody) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    values = {name: value for name, value in given.items() if value is not None}
    if body.stop_sequences:
        values["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        values["json_schema"] = body.output_config.format.schema
    return values


@final
@dataclass(frozen=True)
class Message:
    """The answer, whole or as the objects of its events."""

    head: Head

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        content = [{"type": "text", "text": result.text, "citations": None}]
        return self._object(content, _usage(result), _stop(result))

    def start(self, num_prompt_tokens: int) -> dict[str, Any]:
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": self._object([], usage, stop)}

    def end(self, result: GenerationResult) -> dict[str, Any]:
        return {"type": "message_delta", "delta": _stop(result), "usage": _usage(result)}

    def _object(self, content: list[Any], usage: Mapping[str, int], stop: Mapping[str, Any]) -> dict[str, Any]:
        named = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return {**named, "content": content, **stop, "usage": usage}


async def events_of(answer: Message, choices: Choices) -> AsyncGenerator[bytes, None]:
    yield _event(answer.start(len(choices.prompt_ids[0])))
    block = {"type": "text", "text": "", "citations": None}
    yield _event({"type": "content_block_start", "index": 0, "content_block": block}) + _event({"type": "ping"})
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            if part.text:
                delta = {"type": "text_delta", "text": part.text}
                yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
            if part.result is not None:
                yield _event({"type": "content_block_stop", "index": 0}) + _event(answer.end(part.result))
    yield _event({"type": "message_stop"})


def _stop(result: GenerationResult) -> dict[str, Any]:
    sequence = result.stop_reason if result.finish_reason == "stop" else None
    is_full = result.finish_reason == "length" and result.stop_reason == "context"
    reason = "model_context_window_exceeded" if is_full else _STOP_REASONS[result.finish_reason]
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(result: GenerationResult) -> dict[str, int]:
    """Tokens that were in the cache count apart from the other ones of the prompt."""
    return {
        "input_tokens": result.prompt_tokens - result.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": result.reused_tokens,
        "output_tokens": result.generated_tokens,
    }


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _event(found: dict[str, Any]) -> bytes:
    return event(msgspec.json.encode(found), found["type"])


def failure_event(error: ApiError) -> bytes:
    return event(MessagesError.of(error).body, "error")


ROUTES = [
    ApiRoute("POST", "/v1/messages", create_message, operation="messages", shape=_its_error),
    ApiRoute("POST", "/v1/messages/count_tokens", count_tokens, shape=_its_error),
]
