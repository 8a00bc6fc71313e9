"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, with its events and its errors."""

from typing import Annotated, Any, Literal, Self, final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.request_options import RequestOptions
from infer.errors import InvalidRequestError
from infer.server.asked import make_params, refusal, seeds_of, stops_of
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
    budget_of,
    messages_of,
    tool_fields,
)
from infer.server.message_events import Message, MessageEvents
from infer.server.message_history import complete_messages
from infer.server.replies import json_response, make_head
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import count_prompt
from infer.server.schema import MOST_TOKENS
from infer.server.server_state import ServerState
from infer.server.sse import EventStream, event
from infer.server.unknown_fields import Parameters
from infer.toolcalls.template_formats import reasoning_of

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
_EFFORTS = {"max": "xhigh"}  # OpenAI's name, which templates know
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # then clients send all messages


_FOREIGN = {
    "thread": Foreign("answers are not kept: send all messages"),
    "container": Foreign("no code is run here: leave it out"),
    "mcp_servers": Foreign("no tools are run here: leave it out", ([],)),
    "context_management": Foreign(is_hint=True),
    "speed": Foreign(is_hint=True),
    "inference_geo": Foreign(is_hint=True),
    "betas": Foreign(is_hint=True),
    "max_completion_tokens": Foreign("use max_tokens", same_as=("max_tokens",)),
    "output_format": Foreign("use output_config.format", becomes=lambda value: {"output_config": {"format": value}}),
    "reasoning_effort": Foreign("use output_config.effort", becomes=lambda value: {"output_config": {"effort": value}}),
    "response_format": Foreign("use output_config.format", ({"type": "text"},)),
    "stop": Foreign("use stop_sequences", same_as=("stop_sequences",)),
}
_FOREIGN_OUTPUT = {"task_budget": Foreign(is_hint=True)}
_MOST_STOPS = 64
_OF_ANSWERS = (
    *("max_tokens", "metadata", "service_tier", "stop_sequences", "stream"),
    *("temperature", "top_k", "top_p", "seed"),
)


class _Part(Parameters):
    pass


@final
class JsonOutput(_Part, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@final
class OutputConfig(_Part, kw_only=True):
    """The format of an answer. `effort` is a hint."""

    foreign = _FOREIGN_OUTPUT

    effort: str | None = None
    format: JsonOutput | None = None


class PromptBody(_Part, kw_only=True):
    """The fields of both routes."""

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
    """The prompt to count. The fields of an answer's request are accepted, because clients send them too."""

    foreign = _FOREIGN | dict.fromkeys(_OF_ANSWERS, Foreign(is_hint=True))


@final
class MessagesBody(PromptBody, kw_only=True):
    """A request for an answer. `seed` is not in Anthropic's API. The default of `max_tokens` is the rest of the
    context.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class MessagesError(ApiError):
    """An error in Anthropic's format, which contains OpenAI's error."""

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
    body, llm = await read_request(request, state, MessagesBody, complete_messages), state.llm().llm
    answer_any_model(request, state, body.model)
    params = make_params(sampling_of(body), llm.sampling_defaults, seeds_of(body.seed, 1), "messages")
    messages = messages_of(body.messages, body.system, state.settings.agent_prompts)
    template = llm.tokenizer.chat_template
    asked = Asked([messages], params, options_of(body, template), "messages", variables_of(body, messages, template))
    choices = await accept(request, state, asked)
    call = call_of(request)
    answer = Message(make_head("msg_", request, state), frozenset(body.stop_sequences or ()), call.warnings)
    if body.stream:
        seconds = state.settings.comment_seconds
        return EventStream(MessageEvents(answer).of(choices), comment_seconds=seconds, fail=failure_event)
    (result,) = await while_connected(request, choices.results())
    return json_response(answer.whole(result), call)


async def count_tokens(request: Request, state: ServerState) -> Response:
    body = await read_request(request, state, CountTokensBody, complete_messages)
    answer_any_model(request, state, body.model)
    template = state.llm().host.tokenizer.chat_template
    messages = messages_of(body.messages, body.system, state.settings.agent_prompts)
    options, variables = options_of(body, template), variables_of(body, messages, template)
    count = await count_prompt(request, state, messages, options, variables, "messages")
    return json_response({"input_tokens": count}, call_of(request))


def options_of(body: PromptBody, template: str | None) -> RequestOptions:
    """Return the options of a body. Raises ApiError.

    A thinking budget is a maximum, so it is left out for a template without reasoning.
    """
    budget = budget_of(body.thinking) if reasoning_of(template or "") is not None else None
    try:
        return RequestOptions(**tool_fields(body.tools, body.tool_choice), reasoning_budget=budget)
    except InvalidRequestError as error:
        raise refusal(error, "messages") from error


def variables_of(body: PromptBody, messages: list[dict[str, Any]], template: str | None) -> dict[str, Any]:
    """Return the template's variables. If the last turn is the assistant's, it is continued."""
    found: dict[str, Any] = {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and reasoning_of(template or "") is not None:
        found["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return found if body.thinking is None else found | {"enable_thinking": not isinstance(body.thinking, ThinkingOff)}


def sampling_of(body: MessagesBody) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
    values = {name: value for name, value in given.items() if value is not None} | {"max_tokens": body.max_tokens}
    if stops := stops_of(body.stop_sequences or ()):
        values["stop"] = stops
    if body.output_config is not None and body.output_config.format is not None:
        values["json_schema"] = body.output_config.format.schema
    return values


def failure_event(error: ApiError) -> bytes:
    return event(MessagesError.of(error).body, "error")


ROUTES = [
    ApiRoute("POST", "/v1/messages", create_message, operation="messages", shape=_its_error),
    ApiRoute("POST", "/v1/messages/count_tokens", count_tokens, shape=_its_error),
]
