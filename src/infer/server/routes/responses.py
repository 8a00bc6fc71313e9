"""`/v1/responses`: answer a conversation with reasoning, a message and calls, whole or as named events."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infer.protocols.asked import Asked
from infer.protocols.bodies import ResponseBody
from infer.protocols.chat_messages import call_of_message, text_of
from infer.protocols.params import constraint_of, make_params, sampling_values, seeds_of
from infer.protocols.refusals import refuse
from infer.protocols.response_history import complete_response
from infer.protocols.response_items import CallItem, InputItem, InputMessage, ReasoningItem, ResultItem
from infer.protocols.token_logprobs import Spelling
from infer.protocols.tool_options import conversation_options, effort_variables
from infer.server.answer_types import Answer, Count
from infer.server.call import call_of
from infer.server.choices import accept
from infer.server.endpoint import post
from infer.server.replies import json_response, make_head, reply
from infer.server.response_events import ResponseAnswer, ResponseItems, ResponseShape
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import count_prompt
from infer.server.server_state import ServerState

_LOGPROBS = "message.output_text.logprobs"


class ResponseInputTokens(Answer, tag_field="object", tag="response.input_tokens"):
    input_tokens: Count


async def respond(request: Request, state: ServerState, body: ResponseBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    asked = ask(body, llm.sampling_defaults, llm.tokenizer.chat_template)
    choices = await accept(request, state, asked)
    head = make_head("resp_", request, state)
    items = ResponseItems(head, body, asked.params[0], Spelling.of(llm.tokenizer))
    return await reply(request, state, choices, ResponseShape(items, call_of(request)), is_streamed=body.stream)


async def count_input_tokens(request: Request, state: ServerState, body: ResponseBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    asked = ask(body, llm.sampling_defaults, llm.tokenizer.chat_template)
    count = await count_prompt(request, state, asked.prompts[0], asked.options, dict(asked.variables), "input")
    return json_response(ResponseInputTokens(count), call_of(request))


def ask(body: ResponseBody, defaults: Mapping[str, Any], template: str | None) -> Asked:
    """Return what the body asks for, over the model's own `defaults` and for its chat template. Raises ApiError."""
    values, has_logprobs = sampling_values(body), _LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise refuse(f'top_logprobs needs include: ["{_LOGPROBS}"]', "top_logprobs")
    if body.max_output_tokens is None and "max_new_tokens" not in defaults:
        values["max_new_tokens"] = None  # OpenAI's default; to Codex a cut answer is a failed turn
    if has_logprobs:
        values["logprobs"] = body.top_logprobs or 0
    if body.text is not None:
        values |= constraint_of(body.text.format)
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = effort_variables(effort, template)
    params = make_params(values, defaults, seeds_of(body.seed, 1), "input")
    options = conversation_options(body, effort, "input")
    if body.truncation == "auto":
        options = replace(options, overflow="truncate_left")
    return Asked([messages_of(body)], params, options, "input", variables)


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Return messages for chat templates: the instructions first, then one message per turn.

    Clients send several consecutive items for one turn of the user or the assistant, or for the system prompt. Many
    templates require turns that alternate.
    """
    given: Sequence[InputItem] = (
        [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    found = list[dict[str, Any]]()
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    for item in given:
        if isinstance(item, ResultItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            _add_text(found, "system" if item.role == "developer" else item.role, text_of(item.content))
        else:
            _add_answer(found, item)
    return found


def _add_text(found: list[dict[str, Any]], role: str, text: str) -> None:
    if found and found[-1]["role"] == role:
        found[-1]["content"] += f"\n\n{text}"
    else:
        found.append({"role": role, "content": text})


def _add_answer(found: list[dict[str, Any]], item: InputItem) -> None:
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if last is None or (isinstance(item, InputMessage) and last["content"]):
        last = {"role": "assistant", "content": ""}
        found.append(last)
    match item:
        case InputMessage():
            last["content"] = text_of(item.content)
        case CallItem():
            call = call_of_message(item.call_id, item.name, item.arguments)
            last.setdefault("tool_calls", []).append(call)
        case ReasoningItem(content=[_, *_] as parts):
            last["reasoning_content"] = "".join(part.text for part in parts)


_post = partial(post, complete=complete_response)
ROUTES = [
    _post("/v1/responses", respond, "Answer a conversation", ResponseBody, ResponseAnswer, "chat", streams=True),
    _post("/v1/responses/input_tokens", count_input_tokens, "Count its tokens", ResponseBody, ResponseInputTokens),
]
