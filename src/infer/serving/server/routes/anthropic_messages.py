"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, with its events and its errors."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from infer.serving.protocols.anthropic.message_bodies import CountTokensBody, MessagesBody
from infer.serving.protocols.anthropic.message_history import complete_messages
from infer.serving.protocols.anthropic.message_request import ask_message, ask_prompt
from infer.serving.server.answer_types import Answer, Count
from infer.serving.server.call import call_of
from infer.serving.server.choices import accept
from infer.serving.server.endpoint import post
from infer.serving.server.http_errors import ApiError, api_error
from infer.serving.server.message_events import AnthropicMessage, MessagesError, MessageShape
from infer.serving.server.replies import json_response, make_head, reply
from infer.serving.server.routes.served_models import answer_any_model
from infer.serving.server.routes.tokens import count_prompt
from infer.serving.server.server_state import ServerState


class InputTokens(Answer):
    input_tokens: Count


def _its_error(error: Exception) -> ApiError:
    return MessagesError.of(api_error(error))


async def create_message(request: Request, state: ServerState, body: MessagesBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    asked = ask_message(body, llm.sampling_defaults, llm.tokenizer.chat_template, state.settings.agent_prompts)
    choices = await accept(request, state, asked)
    head, stops = make_head("msg_", request, state), frozenset(body.stop_sequences or ())
    shape = MessageShape(head, stops, call_of(request).warnings, choices.first)
    return await reply(request, state, choices, shape, is_streamed=body.stream)


async def count_tokens(request: Request, state: ServerState, body: CountTokensBody) -> Response:
    answer_any_model(request, state, body.model)
    template = state.llm().host.tokenizer.chat_template
    count = await count_prompt(request, state, ask_prompt(body, template, state.settings.agent_prompts))
    return json_response(InputTokens(count), call_of(request))


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
    _post("/v1/messages/count_tokens", count_tokens, "Count a conversation's tokens", CountTokensBody, InputTokens),
]
