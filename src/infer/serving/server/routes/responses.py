"""`/v1/responses`: answer a conversation with reasoning, a message and calls, whole or as named events."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from infer.serving.protocols.bodies import ResponseBody
from infer.serving.protocols.responses.response_history import complete_response
from infer.serving.protocols.responses.response_request import ask_response
from infer.serving.protocols.token_logprobs import Spelling
from infer.serving.server.answer_types import Answer, Count
from infer.serving.server.call import call_of
from infer.serving.server.choices import accept
from infer.serving.server.endpoint import post
from infer.serving.server.replies import json_response, make_head, reply
from infer.serving.server.response_events import ResponseAnswer, ResponseItems, ResponseShape
from infer.serving.server.routes.served_models import answer_any_model
from infer.serving.server.routes.tokens import count_prompt
from infer.serving.server.server_state import ServerState


class ResponseInputTokens(Answer, tag_field="object", tag="response.input_tokens"):
    input_tokens: Count


async def respond(request: Request, state: ServerState, body: ResponseBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    asked = ask_response(body, llm.sampling_defaults, llm.tokenizer.chat_template)
    choices = await accept(request, state, asked)
    head = make_head("resp_", request, state)
    items = ResponseItems(head, body, asked.params[0], Spelling.of(llm.tokenizer))
    return await reply(request, state, choices, ResponseShape(items, call_of(request)), is_streamed=body.stream)


async def count_input_tokens(request: Request, state: ServerState, body: ResponseBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    asked = ask_response(body, llm.sampling_defaults, llm.tokenizer.chat_template)
    count = await count_prompt(request, state, asked)
    return json_response(ResponseInputTokens(count), call_of(request))


_post = partial(post, complete=complete_response)
ROUTES = [
    _post("/v1/responses", respond, "Answer a conversation", ResponseBody, ResponseAnswer, "chat", streams=True),
    _post(
        "/v1/responses/input_tokens",
        count_input_tokens,
        "Count a conversation's tokens",
        ResponseBody,
        ResponseInputTokens,
    ),
]
