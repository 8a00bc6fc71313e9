"""Convert bodies of `/v1/responses` to messages, parameters and options of the library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infer.engine.requests.ask import Ask
from infer.serving.protocols.bodies import ResponseBody
from infer.serving.protocols.chat_messages import call_of_message, text_of
from infer.serving.protocols.params import constraint_of, make_params, sampling_values, seeds_of
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.response_items import CallItem, InputItem, InputMessage, ReasoningItem, ResultItem
from infer.serving.protocols.tool_options import conversation_options, effort_variables

_LOGPROBS = "message.output_text.logprobs"


def ask_response(body: ResponseBody, defaults: Mapping[str, Any], template: str | None) -> Ask:
    """Return the request of a body, with the model's own `defaults`, for its chat template. Raises BodyError."""
    values, has_logprobs = sampling_values(body), _LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise refuse(f'top_logprobs needs include: ["{_LOGPROBS}"]', "top_logprobs")
    if body.max_output_tokens is None and "max_new_tokens" not in defaults:
        values["max_new_tokens"] = None  # OpenAI's default; Codex treats a cut answer as a failed turn
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
    return Ask([messages_of(body)], params, options, variables=variables, prompt_name="input")


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Return messages for chat templates: the instructions first, then one message per turn.

    Clients send several consecutive items for one turn of the user or the assistant. But many templates require turns
    that alternate.
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
    if role != "system" and found and found[-1]["role"] == role:
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
