"""Convert bodies of `/v1/messages` to messages, parameters and options of the library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infer.engine.requests.ask import Ask
from infer.engine.step.request_options import RequestOptions
from infer.errors import InvalidRequestError
from infer.serving.protocols.agent_prompts import TokenBudgets, is_billing
from infer.serving.protocols.anthropic.message_blocks import (
    AnyChoice,
    AutoChoice,
    Choice,
    MessagesTool,
    MessagesTools,
    MessageTurn,
    NoChoice,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolByName,
    ToolResultBlock,
    ToolUseBlock,
)
from infer.serving.protocols.anthropic.message_bodies import MessagesBody, PromptBody
from infer.serving.protocols.chat_messages import call_of_message, text_of
from infer.serving.protocols.params import make_params, refusal, seeds_of, stops_of
from infer.serving.server_settings import AgentPrompts
from infer.text.toolcalls.template_formats import reasoning_of

_EFFORTS = {"max": "xhigh"}  # templates use OpenAI's name


def ask_message(
    body: MessagesBody, defaults: Mapping[str, Any], template: str | None, agent_prompts: AgentPrompts
) -> Ask:
    """Return the request of a body, with the model's own `defaults`, for its chat template. Raises BodyError."""
    params = make_params(sampling_of(body), defaults, seeds_of(body.seed, 1), "messages")
    return replace(ask_prompt(body, template, agent_prompts), params=params)


def ask_prompt(body: PromptBody, template: str | None, agent_prompts: AgentPrompts) -> Ask:
    """Return the prompt of a body and its options, without parameters. Raises BodyError."""
    messages = messages_of(body.messages, body.system, agent_prompts)
    return Ask(
        [messages],
        options=options_of(body, template),
        variables=variables_of(body, messages, template),
        prompt_name="messages",
    )


def options_of(body: PromptBody, template: str | None) -> RequestOptions:
    """Return the options of a body. Raises BodyError.

    A thinking budget is an upper limit, so it is ignored if the template has no reasoning.
    """
    budget = budget_of(body.thinking) if reasoning_of(template or "") is not None else None
    try:
        return RequestOptions(**tool_fields(body.tools, body.tool_choice), reasoning_budget=budget)
    except InvalidRequestError as error:
        raise refusal(error, "messages") from error


def variables_of(body: PromptBody, messages: list[dict[str, Any]], template: str | None) -> dict[str, Any]:
    """Return the template's variables. If the assistant has the last turn, that turn is continued."""
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


def tool_fields(tools: MessagesTools | None, choice: Choice | None) -> dict[str, Any]:
    """Return the tools and the tool choice as fields of RequestOptions."""
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = [_tool(each) for each in tools]
    match choice:
        case AnyChoice():
            found["tool_choice"] = "required"
        case ToolByName(name=name):
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case NoChoice():
            found["tool_choice"] = "none"
    if isinstance(choice, AutoChoice | AnyChoice | ToolByName) and choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(given: MessagesTool) -> dict[str, Any]:
    found = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return found | ({"strict": True} if given.strict else {})


def budget_of(thinking: Thinking | None) -> int | None:
    """Return the maximum number of reasoning tokens, or None if there is no limit."""
    match thinking:
        case ThinkingOff():
            return 0
        case ThinkingOn(budget_tokens=budget):
            return budget
    return None


def messages_of(
    turns: Sequence[MessageTurn], system: str | list[TextBlock] | None, prompts: AgentPrompts = "adapt"
) -> list[dict[str, Any]]:
    """Return messages for chat templates: the system prompt first, each tool result as its own message.

    Consecutive texts of the user or the assistant become one message.
    """
    budgets = TokenBudgets(prompts)
    found = list[dict[str, Any]]()
    if system is not None:
        blocks = [TextBlock(text=system)] if isinstance(system, str) else system
        texts = [budgets.taken_from(each.text) for each in blocks if not is_billing(each.text, prompts)]
        found.append({"role": "system", "content": "".join(texts)})
    for turn in turns:
        for message in _messages_of_turn(turn, budgets):
            if message["role"] == "system" and not message["content"]:
                continue
            is_turn = message["role"] != "system" and set(message) == {"role", "content"}
            if is_turn and found and set(found[-1]) == set(message) and found[-1]["role"] == message["role"]:
                texts = [text for text in (found[-1]["content"], message["content"]) if text]
                found[-1] = {"role": message["role"], "content": "\n".join(texts)}
            else:
                found.append(message)
    found = found or [{"role": "user", "content": ""}]
    budgets.put_behind(found)
    return found


def _messages_of_turn(turn: MessageTurn, budgets: TokenBudgets) -> list[dict[str, Any]]:
    if turn.role == "assistant":
        return [_answer(turn)]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": budgets.taken_from(turn.content)}]
    found = [
        {"role": "tool", "tool_call_id": each.tool_use_id, "content": budgets.taken_from(text_of(each.content))}
        for each in turn.content
        if isinstance(each, ToolResultBlock)
    ]
    text = "".join(budgets.taken_from(each.text) for each in turn.content if isinstance(each, TextBlock))
    return found if found and not text else [*found, {"role": turn.role, "content": text}]


def _answer(turn: MessageTurn) -> dict[str, Any]:
    """Return an earlier answer of the assistant as a message."""
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts = [each for each in turn.content if isinstance(each, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    if thoughts := [each.thinking for each in turn.content if isinstance(each, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [each for each in turn.content if isinstance(each, ToolUseBlock)]:
        message["tool_calls"] = [call_of_message(each.id, each.name, each.input) for each in calls]
    return message
