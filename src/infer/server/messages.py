"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages, with its events and its errors."""

from typing import Annotated, Any, Literal, Self, final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.request_options import RequestOptions
from infer.errors import InvalidRequestError
from infer.server.asked import make_params, refusal, seeds_of
from infer.server.asking import read_request, while_connected
from infer.server.call import call_of
from infer.server.choices import Asked, accept
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError, api_error
from infer.server.foreign import Foreign
from infer.server.message_blocks import (
    CacheControl,
    Choice,
    MessagesTools,
    TextBlock,
    Thinking,
    ThinkingOff,
    Turn,
    messages_of,
    tool_fields,
)
from infer.server.message_events import Message, MessageEvents
from infer.server.models import answer_any_model
from infer.server.replies import json_response, make_head
from infer.server.sse import EventStream, event
from infer.server.state import ServerState
from infer.server.tokens import prepared
from infer.server.unknown_fields import Parameters

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
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # then clients send all messages


_FOREIGN = {
    "thread": Foreign("answers are not kept: send all messages"),
    "container": Foreign("no code is run here: leave it out"),
    "mcp_servers": Foreign("no tools are run here: leave it out", ([],)),
    "context_management": Foreign(is_hint=True),
    "speed": Foreign(is_hint=True),
    "inference_geo": Foreign(is_hint=True),
}


class _Part(Parameters):
    pass


@final
class Metadata(_Part, kw_only=True):
    user_id: str | None = None


@final
class JsonOutput(_Part, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@final
class OutputConfig(_Part, kw_only=True):
    format: JsonOutput | None = None


class PromptBody(_Part, kw_only=True):
    """What both routes take."""

    foreign = _FOREIGN

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: MessagesTools | None = None
    tool_choice: Choice | None = None


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
        message = error.message.replace("thinking_token_budget", _ITS_NAMES["thinking_token_budget"])
        param = _ITS_NAMES.get(error.param or "", error.param)
        return cls(error.status, message, type_, param, error.code, error.headers)

    def to_json(self) -> dict[str, Any]:
        error: dict[str, Any] = dict(super().to_json()["error"])
        return {"type": "error", "error": error | ({"details": _NO_THREADS} if self.param == "thread" else {})}


def _its_error(error: Exception) -> ApiError:
    return MessagesError.of(api_error(error))


async def create_message(request: Request, state: ServerState) -> Response:
    body = await read_request(request, state, MessagesBody)
    answer_any_model(request, state, body.model)
    params = make_params(sampling_of(body), state.llm().llm.sampling_defaults, seeds_of(body.seed, 1), "messages")
    messages = messages_of(body.messages, body.system)
    asked = Asked([messages], params, options_of(body), "messages", variables_of(body, messages))
    choices = await accept(request, state, asked)
    answer = Message(make_head("msg_", request, state), frozenset(body.stop_sequences or ()))
    if body.stream:
        seconds = state.settings.comment_seconds
        return EventStream(MessageEvents(answer).of(choices), comment_seconds=seconds, fail=failure_event)
    (result,) = await while_connected(request, choices.results())
    return json_response(answer.whole(result), call_of(request))


async def count_tokens(request: Request, state: ServerState) -> Response:
    body, host = await read_request(request, state, CountTokensBody), state.llm().host
    answer_any_model(request, state, body.model)
    messages, options = messages_of(body.messages, body.system), options_of(body)

    def encode() -> list[int]:
        conversation = host.conversation(messages, options, variables_of(body, messages))
        assert conversation is not None
        return conversation.encode(messages)

    ids = await prepared(request, state, encode, "messages")
    return json_response({"input_tokens": len(ids)}, call_of(request))


def options_of(body: PromptBody) -> RequestOptions:
    """Raises ApiError."""
    try:
        return RequestOptions(**tool_fields(body.tools, body.tool_choice, body.thinking))
    except InvalidRequestError as error:
        raise refusal(error, "messages") from error


def variables_of(body: PromptBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the template: a last turn of the assistant is gone on with."""
    found: dict[str, Any] = {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}
    return found if body.thinking is None else found | {"enable_thinking": not isinstance(body.thinking, ThinkingOff)}


def sampling_of(body: MessagesBody) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    values = {name: value for name, value in given.items() if value is not None}
    if body.stop_sequences:
        values["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        values["json_schema"] = body.output_config.format.schema
    return values


def failure_event(error: ApiError) -> bytes:
    return event(MessagesError.of(error).body, "error")


ROUTES = [
    ApiRoute("POST", "/v1/messages", create_message, operation="messages", shape=_its_error),
    ApiRoute("POST", "/v1/messages/count_tokens", count_tokens, shape=_its_error),
]
