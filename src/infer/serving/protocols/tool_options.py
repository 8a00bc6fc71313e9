"""Tools and reasoning: the fields of a body as options of the library and as variables of a chat template."""

from collections.abc import Mapping
from typing import Any

import msgspec

from infer.engine.step.request_options import OPTIONS, RequestOptions
from infer.errors import InvalidRequestError
from infer.serving.protocols.bodies import ConversationBody, ResponseBody
from infer.serving.protocols.declared_fields import values_of
from infer.serving.protocols.params import refusal, template_variables
from infer.serving.protocols.refusals import refuse
from infer.text.toolcalls.template_formats import reasoning_of


def conversation_options(
    body: ConversationBody | ResponseBody, effort: str | None, prompt_name: str = "messages", **others: Any
) -> RequestOptions:
    """Return the options of a body, with its tools and the budget of its reasoning. Raises BodyError."""
    try:
        return RequestOptions(**option_values(body, effort), **others)
    except InvalidRequestError as error:
        raise refusal(error, prompt_name) from error


def option_values(body: ConversationBody | ResponseBody, effort: str | None) -> dict[str, Any]:
    """Return the fields of RequestOptions that a body sets. Raises BodyError."""
    given = {
        "tools": plain(body.tools) or None,
        "tool_choice": plain(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_budget": budget_of(body.thinking_token_budget, effort),
    }
    return values_of(body, OPTIONS) | {name: value for name, value in given.items() if value is not None}


def conversation_variables(body: ConversationBody, template: str | None) -> dict[str, Any]:
    """Return the variables of the model's chat template. Raises BodyError."""
    given = template_variables(body.chat_template_kwargs, body.add_generation_prompt, body.continue_final_message)
    return effort_variables(body.reasoning_effort, template) | given


def budget_of(budget: int | None, effort: str | None) -> int | None:
    """Return the budget of reasoning: 0 for the effort "none". Raises BodyError if both are given and differ."""
    if effort != "none":
        return budget
    if budget:
        name = "thinking_token_budget"
        raise refuse(f"{name} is {budget}, but the effort of reasoning is none: give only one", name)
    return 0


def effort_variables(effort: str | None, template: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort, which is a hint.

    A template without reasoning has no such variable, unless the effort is "none".
    """
    reasoning = reasoning_of(template or "")
    if effort is None or (effort != "none" and reasoning is None):
        return {}
    known = effort if reasoning is None else reasoning.nearest_effort(effort)
    return {"enable_thinking": effort != "none", "reasoning_effort": known}


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
