"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, with its events and its errors."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.engine.request_options import RequestOptions
from infer.errors import InvalidRequestError
from infer.protocols.asked import Asked
from infer.protocols.message_blocks import (
    ThinkingOff,
    budget_of,
    messages_of,
    tool_fields,
)
from infer.protocols.message_bodies import CountTokensBody, MessagesBody, PromptBody
from infer.protocols.message_history import complete_messages
from infer.protocols.params import make_params, refusal, seeds_of, stops_of
from infer.server.answer_types import Answer, Count
from infer.server.call import call_of
from infer.server.choices import accept
from infer.server.endpoint import post
from infer.server.http_errors import ApiError, api_error
from infer.server.message_events import AnthropicMessage, MessagesError, MessageShape
from infer.server.replies import json_response, make_head, reply
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import count_prompt
from infer.server.server_state import ServerState
from infer.toolcalls.template_formats import reasoning_of

_EFFORTS = {"max": "xhigh"}  # OpenAI's name, which templates know


class InputTokens(Answer):
    input_tokens: Count


def _its_error(error: Exception) -> ApiError:
    return MessagesError.of(api_error(error))


async def create_message(request: Request, state: ServerState, body: MessagesBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    params = make_params(sampling_of(body), llm.sampling_defaults, seeds_of(body.seed, 1), "messages")
    messages = messages_of(body.messages, body.system, state.settings.agent_prompts)
    template = llm.tokenizer.chat_template
    asked = Asked([messages], params, options_of(body, template), "messages", variables_of(body, messages, template))
    choices = await accept(request, state, asked)
    head, stops, warnings = (
        make_head("msg_", request, state),
        frozenset(body.stop_sequences or ()),
        call_of(request).warnings,
    )
    shape = MessageShape(head, stops, warnings, len(choices.prompt_ids[0]))
    return await reply(request, state, choices, shape, is_streamed=body.stream)


async def count_tokens(request: Request, state: ServerState, body: CountTokensBody) -> Response:
    answer_any_model(request, state, body.model)
    template = state.llm().host.tokenizer.chat_template
    messages = messages_of(body.messages, body.system, state.settings.agent_prompts)
    options, variables = options_of(body, template), variables_of(body, messages, template)
    count = await count_prompt(request, state, messages, options, variables, "messages")
    return json_response(InputTokens(count), call_of(request))


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
    if effort is not None and (reasoning := reasoning_of(template or "")) is not None:
        found["reasoning_effort"] = reasoning.nearest_effort(_EFFORTS.get(effort, effort))
    return found if body.thinking is None else found | {"enable_thinking": not isinstance(body.thinking, ThinkingOff)}


def sampling_of(body: MessagesBody) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
    values = {name: value for name, value in given.items() if value is not None} | {"max_tokens": body.max_tokens}
    if stops := stops_of(body.stop_sequences or ()):
        values["stop"] = stops
    if body.output_config is not None and body.output_config.format is not None:
        values["json_schema"] = body.output_config.format.schema
    return values


_post = partial(post, complete=complete_messages, shape=_its_error)
ROUTES = [
    _post(
        "/v1/messages",
        create_message,
        "Answer a conversation",
        MessagesBody,
        AnthropicMessage,
        "messages",
        streams=True,
    ),
    _post("/v1/messages/count_tokens", count_tokens, "Count its tokens", CountTokensBody, InputTokens),
]
