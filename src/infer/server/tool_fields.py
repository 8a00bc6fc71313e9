"""Tools and reasoning: a body's fields as options of the library, and the fields of answers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from infer.engine.request_options import RequestOptions
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, ReasoningDelta, ToolCallDelta
from infer.server.answer_types import Json
from infer.server.asked import make_options, refusal, template_variables
from infer.server.refusals import refuse
from infer.server.schema import ConversationBody, ResponseBody
from infer.toolcalls.template_formats import reasoning_of

Delta = ReasoningDelta | ToolCallDelta


def conversation_options(body: ConversationBody) -> RequestOptions:
    """Return the options of a body. Raises ApiError."""
    try:
        return replace(make_options(body), **tool_options(body, body.reasoning_effort))
    except InvalidRequestError as error:
        raise refusal(error, "messages") from error


def conversation_variables(body: ConversationBody, template: str | None) -> dict[str, Any]:
    """Return the variables of the model's chat template. Raises ApiError."""
    given = template_variables(body.chat_template_kwargs, body.add_generation_prompt, body.continue_final_message)
    return effort_variables(body.reasoning_effort, template) | given


def tool_options(body: ConversationBody | ResponseBody, effort: str | None) -> dict[str, Any]:
    """Return the tools and the reasoning as fields of RequestOptions. Raises ApiError."""
    given = {
        "tools": plain(body.tools) or None,
        "tool_choice": plain(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_format": body.tool_format,
        "reasoning_format": body.reasoning_format,
        "reasoning_budget": budget_of(body.thinking_token_budget, effort),
    }
    return {name: value for name, value in given.items() if value is not None}


def budget_of(budget: int | None, effort: str | None) -> int | None:
    """Return the budget of reasoning: 0 for the effort "none". Raises ApiError if both are given and differ."""
    if effort != "none":
        return budget
    if budget:
        name = "thinking_token_budget"
        raise refuse(f"{name} is {budget} and the effort of reasoning none: give one", name)
    return 0


def effort_variables(effort: str | None, template: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort, which is a hint.

    A template without reasoning gets none, unless the effort is "none".
    """
    if effort is None or (effort != "none" and reasoning_of(template or "") is None):
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


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


def reasoning_and_calls(result: GenerationResult) -> Json:
    """Return the reasoning and the calls of the answer's message, if it has them."""
    message = result.to_message()
    return {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}


def plain(value: Any) -> Any:
    """Return the value as plain objects, without fields that are null."""
    return _without_nulls(msgspec.to_builtins(value))


def _without_nulls(value: Any) -> Any:
    """Return a tool without its null fields. Its schema stays unchanged."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: each if key == "parameters" else _without_nulls(each) for key, each in value.items() if each is not None
    }
